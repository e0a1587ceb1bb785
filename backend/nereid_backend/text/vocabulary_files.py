# SPDX-License-Identifier: Apache-2.0
"""Checks that a checkpoint contains the file with the vocabulary of its tokenizer.

If the file is missing, many tokenizer classes of transformers raise no error. They create a
tokenizer with a few tokens, so that the model would receive meaningless token ids.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from nereid_backend.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# transformers reads these files for every class of tokenizers. A class can also read further files,
# such as vocab.txt.
_COMMON_FILES = ("tokenizer.*json", "tokenizer.model*", "tekken.json", "tiktoken.model")
_CONVERSION_CODE = (
    "import sys; from transformers import AutoTokenizer as T; p = sys.argv[1]; "
    "T.from_pretrained(p).save_pretrained(p)"
)


def check_vocabulary_file(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise a ModelError if `folder` has no file with the vocabulary of the loaded tokenizer.

    Some tokenizers, such as those for single bytes, need no such file.
    """
    names = tuple(tokenizer.vocab_files_names.values())  # such as ("vocab.json", "merges.txt")
    has_file = any(
        path.is_file() for pattern in (*_COMMON_FILES, *names) for path in folder.glob(pattern)
    )
    if names and not has_file:
        raise ModelError(
            f"{folder} has no tokenizer.json and no other file with the vocabulary of "
            f"{type(tokenizer).__name__}. Download the checkpoint's tokenizer.json."
        )


def describe_conversion(folder: Path) -> str:
    """Return a sentence that explains how to create tokenizer.json; "" if the file exists.

    Other vocabulary files, such as tokenizer.model, can be read only with further packages.
    """
    if (folder / "tokenizer.json").is_file():
        return ""
    return (
        f" {folder} has no tokenizer.json. Download this file, or create it with this command, "
        "which needs the packages transformers, sentencepiece, tiktoken and protobuf: python -c "
        f'"{_CONVERSION_CODE}" {shlex.quote(str(folder))}'
    )
