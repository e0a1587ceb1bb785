"""Numbered tokens: answers in which a lost, repeated, foreign or swapped token can be recognised.

The scripted engine (NEREID_ENGINE=scripted) returns one of several series of tokens. The prompt
selects the series. Each token of each series is one token of the vocabulary, and its text contains
the number of the series and the number of the token. Example: `03.017,` is token 17 of series 3.
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

# The series use these paces in turn: 200 tokens/s for each sequence, a slower pace, and several
# tokens in each step.
_PACES = (
    {"tokens_per_step": 1, "delay_ms": 5.0},
    {"tokens_per_step": 1, "delay_ms": 25.0},
    {"tokens_per_step": 6, "delay_ms": 20.0},
)
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
    known_ids = {token["id"] for token in tokenizer["added_tokens"]}
    known_ids |= set(tokenizer["model"]["vocab"].values())
    texts = [text for series in range(NUM_SERIES) for text in tokens(series)]
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": token_id, "content": text, **flags}
        for token_id, text in enumerate(texts, start=max(known_ids) + 1)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def script() -> list[dict[str, Any]]:
    """Return the script of the scripted engine (see scripted_engine.py)."""
    rules = [
        {"when": prompt(series), "text": "".join(tokens(series)), **_PACES[series % len(_PACES)]}
        for series in range(NUM_SERIES)
    ]
    # `nereid serve` sends a test request with another prompt before it reports that it is ready.
    return [*rules, {"when": "", "text": "ready"}]
