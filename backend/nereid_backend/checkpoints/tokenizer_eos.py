# SPDX-License-Identifier: Apache-2.0
"""Reads the id of the tokenizer's end-of-sequence token from the files of a checkpoint."""

import json
from pathlib import Path
from typing import Any


def read_tokenizer_eos_id(folder: Path) -> int | None:
    """Return the id of the tokenizer's end-of-sequence token; None if the files have no such token.

    Example: the eos_token "<|im_end|>" in tokenizer_config.json and the token {"id": 7, "content":
    "<|im_end|>"} in tokenizer.json return 7.
    """
    config = _read_object(folder / "tokenizer_config.json")
    token = config.get("eos_token")
    if not token:
        token = _read_object(folder / "special_tokens_map.json").get("eos_token")
    text = _text_of(token)
    if not text:
        return None
    # Older versions of transformers list the added tokens in tokenizer_config.json, too. This file
    # is much smaller than tokenizer.json.
    token_id = _id_in_decoder(config.get("added_tokens_decoder"), text)
    if token_id is not None:
        return token_id
    return _id_in_list(_read_object(folder / "tokenizer.json").get("added_tokens"), text)


def _id_in_decoder(decoder: object, text: object) -> int | None:
    """Return the id of the token `text` in an object such as {"7": {"content": "<|im_end|>"}}."""
    if not isinstance(decoder, dict):
        return None
    ids = [token_id for token_id, added in decoder.items() if _text_of(added) == text]
    return int(ids[0]) if ids and ids[0].isdecimal() else None


def _id_in_list(added_tokens: object, text: object) -> int | None:
    """Return the id of the token `text` in a list such as [{"id": 7, "content": "<|im_end|>"}]."""
    if not isinstance(added_tokens, list):
        return None
    for added in added_tokens:
        if _text_of(added) == text and isinstance(added.get("id"), int):
            return int(added["id"])
    return None


def _text_of(token: object) -> object:
    """Return the text of a token.

    `token` is the text itself, or a JSON object whose field `content` contains the text.
    """
    return token.get("content") if isinstance(token, dict) else token


def _read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or damaged.

    The tokenizer's process reports a damaged file.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
