"""Prints docs/exactness.md: python tests/backend/exactness_table.py > docs/exactness.md"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from backend.exactness import MAX_TOKENS, PROMPTS, SITUATIONS, reference
from backend.tiny_models import FAMILIES, WINDOW, Family
from transformers.utils import logging

_HEAD = f"""\
# Exactness

Greedy tokens of the engine equal those of `transformers.generate` in float32, architecture by
architecture. Made by `python tests/backend/exactness_table.py` with transformers
{transformers.__version__} and torch {torch.__version__}; `make test` checks every cell.

Each architecture is a tiny random checkpoint (hidden size 64, 2 layers), saved and loaded through
safetensors. {len(PROMPTS)} prompts of {min(map(len, PROMPTS))} to {max(map(len, PROMPTS))} tokens
get {MAX_TOKENS} tokens each; windows are {WINDOW} tokens, so that contexts exceed them. A cell
counts the tokens that are equal.

- **alone**: one prompt at a time
- **mixed**: all prompts in one batch, which they join while others are being answered
- **chunked**: the same, with at most 9 tokens a step, so that prompts are cut into chunks
- **preempted**: the same, with a cache of 72 tokens, so that requests have to give their blocks
  back and start again

The self-check at load compares every checkpoint in this way with the model alone, and refuses by
name what differs: state outside attention (Mamba, LFM2, Qwen3-Next and their kind), and models with
attention of their own (Bloom, GPT-J).
"""


def row(family: Family) -> str:
    """One line of the table."""
    cells = []
    with tempfile.TemporaryDirectory() as name:
        folder = family.save(Path(name))
        expected = [token for answer in reference(folder) for token in answer]
        for run in SITUATIONS.values():
            got = [token for answer in run(folder) for token in answer]
            equal = sum(a == b for a, b in zip(expected, got, strict=True))
            cells.append(f"{equal}/{len(expected)}")
    return f"| {family.name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the page."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    lines = [_HEAD, f"| Architecture | {' | '.join(SITUATIONS)} |"]
    lines.append("|---" * (len(SITUATIONS) + 1) + "|")
    lines += [row(family) for family in FAMILIES]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
