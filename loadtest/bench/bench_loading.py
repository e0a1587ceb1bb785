"""Measure the peak memory while a model is loaded, divided by the memory of the loaded model.

    python -m loadtest.bench.bench_loading --shapes 0.1b wide --kinds bfloat16 int4

The shape "wide" has 0.6 GiB of bfloat16 weights in two layers. With "int4" and "int8", the engine
rounds the weights while it reads them, as it does if the unrounded weights do not fit into memory.

A child process loads the model, and this process reads the anonymous memory of the child every
millisecond. The memory before loading, which the imports need, is subtracted.
"""

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from loadtest.bench.markdown_table import print_table
from loadtest.bench.process_memory import status_bytes
from loadtest.bench.random_models import SHAPES, make_checkpoint
from loadtest.command_line import Option, parse_command_line

# The seconds between two readings of the child's memory.
_INTERVAL_S = 0.001
# The child waits for a line on its standard input before it loads the model, and before it ends.
_CHILD = """
import sys
import torch
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.config import EngineConfig
from nereid_backend.model import load_weights
from nereid_backend.model.memory.weight_memory import WeightForm
folder, kind = sys.argv[1:]
config = EngineConfig(folder, dtype="bfloat16", weight_dtype="auto" if kind == "bfloat16" else kind)
form = WeightForm.UNROUNDED if kind == "bfloat16" else WeightForm.ROUNDED
load_weights.form_that_fits = lambda config, device: form
torch.ones(2**20).sum()
print("ready", flush=True)
input()
hook = AttentionHook()
checkpoint = load_weights.load_weights(config, torch.device("cpu"), hook, lambda line: None)
print("loaded", flush=True)
input()
"""

_OPTIONS = {
    "--shapes": Option(["0.1b"], "shapes of the models", SHAPES),
    "--kinds": Option(["bfloat16", "int4"], "weights", ["bfloat16", "int8", "int4"]),
}


class LoadedMemory(NamedTuple):
    """The peak memory while a model is loaded, and the memory afterwards.

    The memory that the process used before loading is subtracted from both numbers.
    """

    peak_bytes: int
    final_bytes: int


def main() -> None:
    """Measure all models, and print a table."""
    args = parse_command_line(__doc__, _OPTIONS)
    with tempfile.TemporaryDirectory(prefix="nereid-loading-") as temporary:
        rows = measured_rows(args.shapes, args.kinds, Path(temporary))
        print_table(["model", "weights", "peak, MiB", "loaded, MiB", "ratio"], rows)


def measured_rows(shapes: list[str], kinds: list[str], folder: Path) -> Iterator[list[str]]:
    """Yield the row of the table for each shape of the model and each kind of weights."""
    for shape in shapes:
        make_checkpoint(folder / shape, shape, "bfloat16")
        for kind in kinds:
            memory = measure(folder / shape, kind)
            sizes = [f"{num_bytes / 2**20:.0f}" for num_bytes in memory]
            yield [shape, kind, *sizes, f"{memory.peak_bytes / memory.final_bytes:.2f}"]


def measure(folder: Path, kind: str) -> LoadedMemory:
    """Load a model in a child process, and return the memory of the child."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(folder), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdout.readline()  # "ready"
        before = peak = status_bytes(child.pid, "RssAnon")
        print("load", file=child.stdin, flush=True)
        while not select.select([child.stdout], [], [], _INTERVAL_S)[0]:
            peak = max(peak, status_bytes(child.pid, "RssAnon"))
        if "loaded" not in child.stdout.readline():
            raise RuntimeError(f"the model {folder.name} could not be loaded")
        final = status_bytes(child.pid, "RssAnon")
        print("end", file=child.stdin, flush=True)
        child.wait(60)
    finally:
        child.kill()
    return LoadedMemory(peak - before, final - before)


if __name__ == "__main__":
    main()
