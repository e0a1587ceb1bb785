# SPDX-License-Identifier: Apache-2.0
"""Checks that a checkpoint contains the file with the vocabulary of its tokenizer.

If the file is missing, many tokenizer classes of transformers raise no error. They create a
tokenizer with a few tokens, so that the model would receive meaningless token ids.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from nereid_backend.errors import ModelError, one_line

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


def describe_tokenizer_error(folder: Path, error: Exception) -> str:
    """Return the reason why transformers cannot load the tokenizer in `folder`, and a remedy.

    `error` is the exception of `from_pretrained`, which must have been called with
    trust_remote_code=False.
    """
    reason = one_line(error).removesuffix(".")
    # This error of transformers has no class of its own, but its message names the argument.
    needs_code_of_checkpoint = "trust_remote_code" in reason
    if needs_code_of_checkpoint:
        reason = (
            "tokenizer_config.json names a class in a Python file of the checkpoint, which is not "
            "run"
        )
    return f"{reason}. {_remedy(folder, needs_code_of_checkpoint=needs_code_of_checkpoint)}"


def _remedy(folder: Path, *, needs_code_of_checkpoint: bool) -> str:
    """Return how an operator can make the tokenizer in `folder` usable, as one or more sentences.

    `needs_code_of_checkpoint` is whether tokenizer_config.json names a class in a Python file of
    the checkpoint.
    """
    if not (folder / "tokenizer.json").is_file():
        # Other vocabulary files, such as tokenizer.model, can be read only with further packages.
        return (
            f"{folder} has no tokenizer.json. Download this file, or create it with this "
            "command, which needs the packages transformers, sentencepiece, tiktoken and protobuf: "
            f'python -c "{_CONVERSION_CODE}" {shlex.quote(str(folder))}'
        )
    if needs_code_of_checkpoint:
        # "The file" is tokenizer_config.json, because `describe_tokenizer_error` puts this text
        # after a sentence about tokenizer_config.json.
        return (
            "Remove auto_map from the file, and set tokenizer_class to TokenizersBackend, which "
            "reads tokenizer.json."
        )
    return "Download the tokenizer's files again."
