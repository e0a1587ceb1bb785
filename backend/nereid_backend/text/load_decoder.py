# SPDX-License-Identifier: Apache-2.0
"""Loads the tokenizer for the offline API. The server uses detokenizer.py instead."""

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from nereid_backend.checkpoints.same_tokenizer import VOCABULARIES
from nereid_backend.errors import ModelError
from nereid_backend.text.vocabulary_files import (
    check_vocabulary_file,
    describe_tokenizer_error,
)
from nereid_backend.tokenizer_file import apply_tokenizer_file

_FILES = (*VOCABULARIES, "tokenizer_config.json")


def load_decoder(path: str) -> Callable[[list[int]], str]:
    """Load a checkpoint's tokenizer, and return a function that converts token ids to text.

    If the checkpoint has no tokenizer, the function returns "" for all ids.

    Args:
        path: the folder of the checkpoint.

    Raises:
        ModelError: the checkpoint has a tokenizer that cannot be loaded.
    """
    folder = Path(path)
    if not any((folder / name).is_file() for name in _FILES):
        return lambda token_ids: ""  # noqa: ARG005 - no tokenizer can decode the ids
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        apply_tokenizer_file(tokenizer, folder)
    except Exception as error:
        # A broken file can cause any exception in transformers.
        raise ModelError(
            f"{path}: the checkpoint's tokenizer cannot be loaded: "
            f"{describe_tokenizer_error(folder, error)}"
        ) from error
    check_vocabulary_file(folder, tokenizer)

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode
