"""Train a draft model for the demo chat model.

The draft model begins as the first layers of the demo model and is then trained on new dialogues by
`demo/train.py`. The trained checkpoint is stored in the folder `.cache`, so that the next call
returns at once.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from loadtest.bench.created_models.grown_models import save_with_layers

_ROOT = Path(__file__).parents[3]
_FLAGS = {
    "seed": 3,
    "steps": 200,
    "groups-per-step": 8,
    "warmup-steps": 10,
    "decay-steps": 150,
    "workers": 1,
}


def trained_draft(model: Path, num_layers: int, folder: Path) -> Path:
    """Return the folder of a trained draft model. The first call trains the model for minutes."""
    recipe = {**_FLAGS, "num-layers": num_layers}
    record = (model / "training.json").read_text() + json.dumps(recipe)
    name = hashlib.blake2b(record.encode(), digest_size=8).hexdigest()
    output = _ROOT / ".cache" / "draft-models" / name
    if (output / "model.safetensors").is_file():
        return output
    start = folder / "first-layers"
    save_with_layers(model, start, num_layers, is_addition=False)
    shutil.copy(model / "training.json", start)
    flags = [text for name, value in recipe.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, str(_ROOT / "demo" / "train.py"), *flags]
    places = ["--start-from", str(start), "--output", str(output), "--work", str(folder / "work")]
    subprocess.run([*command, *places], check=True, stdout=sys.stderr)
    return output
