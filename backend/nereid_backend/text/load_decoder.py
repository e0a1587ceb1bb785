# SPDX-License-Identifier: Apache-2.0
"""Token ids to text for the offline door; the Triton server's doors have their own detokenizer."""

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from nereid_backend.errors import ModelError

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def load_decoder(path: str) -> Callable[[list[int]], str]:
    """The checkpoint's decoder; one that answers "" when the checkpoint brings no tokenizer.

    Raises:
        ModelError: it brings one that cannot be loaded.
    """
    if not any((Path(path) / name).is_file() for name in _FILES):
        return lambda token_ids: ""  # noqa: ARG005 - there is nothing to decode with
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ModelError(f"{path}: its tokenizer cannot be loaded: {error}") from error

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode
