"""Measure the peak memory of loading a model, divided by the memory of the loaded model.

    python -m loadtest.bench.bench_loading --shapes 0.1b wide --kinds bfloat16 int4

The shape "wide" has 0.6 GiB of bfloat16 weights in four layers. With "int4" and "int8", the weights
are rounded while they are read, as if the unrounded weights did not fit into the memory.

A child process loads the model, and this process reads the anonymous memory of the child every
millisecond. The memory before loading, which the imports need, is subtracted.
"""

import os
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM

from loadtest import command_line
from loadtest.bench.bench import SHAPES, make_checkpoint
from loadtest.bench.markdown_table import table

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
_MIB = 2**20


def main() -> None:
    """Measure all models, and print a table."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--shapes", nargs="*", default=["0.1b"], choices=[*SHAPES, "wide"], help="models")
    add("--kinds", nargs="*", default=["bfloat16", "int4"], choices=["bfloat16", "int8", "int4"])
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="nereid-loading-") as temporary:
        for shape in args.shapes:
            folder = Path(temporary) / shape
            if shape == "wide":
                make_wide_checkpoint(folder)
            else:
                make_checkpoint(folder, shape, "bfloat16")
            for kind in args.kinds:
                peak, final = measure(folder, kind)
                sizes = [f"{peak / _MIB:.0f}", f"{final / _MIB:.0f}"]
                rows.append([shape, kind, *sizes, f"{peak / final:.2f}"])
                print(rows[-1], file=sys.stderr, flush=True)
    print(table(["model", "weights", "peak, MiB", "loaded, MiB", "ratio"], rows))


def make_wide_checkpoint(folder: Path) -> None:
    """Save a Qwen3 model with four wide layers and a small vocabulary."""
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=3072,
        intermediate_size=12288,
        num_hidden_layers=2,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


def measure(folder: Path, kind: str) -> tuple[int, int]:
    """Load a model in a child process. Return the child's peak and final memory in bytes."""
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
        child.stdout.readline()
        before = peak = anonymous_bytes(child.pid)
        print("load", file=child.stdin, flush=True)
        while not select.select([child.stdout], [], [], 0.001)[0]:
            peak = max(peak, anonymous_bytes(child.pid))
        if "loaded" not in child.stdout.readline():
            raise RuntimeError(f"the model {folder.name} could not be loaded")
        final = anonymous_bytes(child.pid)
        print("end", file=child.stdin, flush=True)
        child.wait(60)
    finally:
        child.kill()
    return peak - before, final - before


def anonymous_bytes(pid: int) -> int:
    """Return the resident anonymous memory of a process in bytes."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
