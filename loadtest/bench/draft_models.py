"""Checkpoints for `bench_speculation`: the target with more layers, and draft models.

A draft model consists of the first layers of the demo model. `demo/train.py` can train the draft
model on new dialogues. The trained checkpoint is stored in the folder `.cache`, so that later calls
return at once.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_ROOT = Path(__file__).parents[2]
_OPTIONS = {
    "seed": 3,
    "steps": 200,
    "groups-per-step": 8,
    "warmup-steps": 10,
    "decay-steps": 150,
    "workers": 1,
}


@torch.inference_mode()
def save_with_layers(source: Path, folder: Path, count: int, *, is_addition: bool) -> None:
    """Save a model with `count` additional layers, or with only its first `count` layers.

    An additional layer adds zeros to the hidden states, so it does not change the answers.
    """
    old = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    total = old.config.num_hidden_layers + count if is_addition else count
    sizes = {"num_hidden_layers": total, "layer_types": None, "max_window_layers": total}
    entries = json.loads((source / "config.json").read_text())
    config = type(old.config)(**{**entries, **sizes})
    new = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    old_weights = old.state_dict()
    for name, tensor in new.state_dict().items():
        if name in old_weights:
            tensor.copy_(old_weights[name])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    new.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def trained_draft(model: Path, num_layers: int, folder: Path) -> Path:
    """Return the folder of a draft model with `num_layers` layers, trained from the demo model.

    The first call trains the draft model, which takes minutes. `folder` is an empty folder for the
    files of the training.
    """
    options = {**_OPTIONS, "num-layers": num_layers}
    # The name changes if the demo model or an option of the training changes.
    description = (model / "training.json").read_text() + json.dumps(options)
    name = hashlib.blake2b(description.encode(), digest_size=8).hexdigest()
    output = _ROOT / ".cache" / "draft-models" / name
    if not (output / "model.safetensors").is_file():
        start = folder / "first-layers"
        save_with_layers(model, start, num_layers, is_addition=False)
        shutil.copy(model / "training.json", start)
        folders = {"start-from": start, "output": output, "work": folder / "work"}
        command = [sys.executable, str(_ROOT / "demo" / "train.py")]
        for option, value in {**options, **folders}.items():
            command += [f"--{option}", str(value)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return output
