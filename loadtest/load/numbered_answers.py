"""Numbered tokens: answers in which a lost, repeated, foreign or swapped token can be recognised.

The scripted engine (NEREID_ENGINE=scripted) returns one of several series of tokens. The prompt
selects the series. Each token of each series is one token of the vocabulary, and its text contains
the numbers of both. Example: `03.017,` is token 17 of series 3.
"""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

NUM_SERIES = 12
LENGTH = 300
TOKEN = re.compile(r"\d\d\.\d\d\d,")

# Tokens per step and milliseconds per step. The first series imitates an engine that generates 200
# tokens/s for each sequence, the second series is slower, and the third series returns 6 tokens in
# each step.
_PACES = ((1, 5.0), (1, 25.0), (6, 20.0))
_DEMO = Path(__file__).resolve().parents[2] / "demo" / "chat"


def tokens(series: int) -> tuple[str, ...]:
    """Return the texts of the tokens of a series, in order."""
    return tuple(f"{series:02d}.{number:03d}," for number in range(LENGTH))


def prompt(series: int) -> str:
    """Return the prompt that makes the scripted engine return a series."""
    return f"Recite series {series:02d}."


def make_checkpoint(folder: Path) -> Path:
    """Create a checkpoint without weights: the demo's tokenizer and template, and the tokens."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(_DEMO / name, folder)
    # The scripted engine reads no weights, but the server checks that a weights file exists. This
    # file contains no tensors.
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    tokenizer = json.loads((_DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    first = _first_free_id(tokenizer)
    texts = [text for series in range(NUM_SERIES) for text in tokens(series)]
    tokenizer["added_tokens"] += [
        {"id": token_id, "content": text, "special": False, **kind}
        for token_id, text in enumerate(texts, first)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def make_script(path: Path) -> Path:
    """Write the script of the scripted engine (see nereid_backend/serving/scripted_engine.py)."""
    rules: list[dict[str, Any]] = []
    for series in range(NUM_SERIES):
        per_step, delay_ms = _PACES[series % len(_PACES)]
        rules.append(
            {
                "when": prompt(series),
                "text": "".join(tokens(series)),
                "tokens_per_step": per_step,
                "delay_ms": delay_ms,
            }
        )
    # `nereid serve` sends a test request with another prompt before it reports that it is ready.
    rules.append({"when": "", "text": "ready"})
    path.write_text(json.dumps(rules), encoding="utf-8")
    return path


def _first_free_id(tokenizer: dict[str, Any]) -> int:
    taken = [token["id"] for token in tokenizer["added_tokens"]]
    return max(taken + list(tokenizer["model"]["vocab"].values())) + 1
