# SPDX-License-Identifier: Apache-2.0
"""Checks that two checkpoints have the same tokenizer and the same chat template.

The server loads the tokenizer only once. If the weights are replaced by weights with another
tokenizer, the model would therefore receive wrong token ids.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from nereid_backend.errors import ModelError

TokenizerFiles = dict[str, str]
"""Maps the name of each tokenizer file in a checkpoint to a hash of the file's content."""

VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "tiktoken.model"),
)
"""The names of the files that can contain the vocabulary of a tokenizer."""
_OTHER_FILES = (
    *("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_FOLDER_OF_TEMPLATES = "additional_chat_templates"
# When two tokenizers are compared, these fields are ignored, because some programs change them when
# they save an unchanged tokenizer. Padding and truncation can be ignored, too, because each call of
# the tokenizer sets them.
_IGNORED_FIELDS = {
    *("name_or_path", "transformers_version", "_commit_hash", "tokenizer_file", "is_local"),
    *("padding", "truncation"),
}
_REMEDY = "Restart the server with the new checkpoint."


def hash_tokenizer_files(folder: str) -> TokenizerFiles:
    """Hash the tokenizer files in a folder. Return a dictionary that maps file names to hashes.

    The hashes show whether two checkpoints have the same tokenizer. Example:
    {"tokenizer.json": "5f0c...", "chat_template.jinja": "91d2..."}. The result is {} if the folder
    does not exist.

    Raises:
        ModelError: if a file cannot be read.
    """
    digests = {}
    templates = sorted(Path(folder, _FOLDER_OF_TEMPLATES).glob("*.jinja"))
    template_names = [f"{_FOLDER_OF_TEMPLATES}/{template.name}" for template in templates]
    for name in (*VOCABULARIES, *_OTHER_FILES, *template_names):
        file = Path(folder, name)
        try:
            content = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ModelError(f"{file} cannot be read ({error}).") from error
        if file.suffix == ".json":
            # Ignore the formatting and the fields that have no effect on the tokenizer, because
            # some programs change these when they save an unchanged tokenizer.
            content = _canonical(content)
        digests[name] = hashlib.sha256(content).hexdigest()
    return digests


def check_same_tokenizer(old: TokenizerFiles, new: TokenizerFiles) -> None:
    """Raise a ModelError if two checkpoints have different tokenizers or chat templates.

    Only files that both checkpoints contain are compared. A new checkpoint without tokenizer files
    is accepted, because some training programs save only weights. `_check_common_vocabulary`
    refuses checkpoints whose vocabularies cannot be compared.

    Args:
        old: maps the tokenizer files of the served checkpoint to their hashes.
        new: maps the tokenizer files of the new checkpoint to their hashes.
    """
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise ModelError(
                f"the file {name} of the new checkpoint differs from the file that the server has "
                f"loaded, but the tokenizer and the chat template cannot be replaced. {_REMEDY}"
            )
    _check_common_vocabulary(old, new)


def _check_common_vocabulary(old: TokenizerFiles, new: TokenizerFiles) -> None:
    """Raise a ModelError if the old checkpoint has none of the new checkpoint's vocabulary files.

    The tokenizers of such checkpoints cannot be compared. Example: the old checkpoint has only
    tokenizer.json, and the new checkpoint has only vocab.txt. A new checkpoint without vocabulary
    files is accepted.
    """
    new_vocabularies = [name for name in VOCABULARIES if name in new]
    has_common_vocabulary = any(name in old for name in new_vocabularies)
    if new_vocabularies and not has_common_vocabulary:
        raise ModelError(
            f"the new checkpoint has the tokenizer file {new_vocabularies[0]}, which the served "
            f"checkpoint does not have, so the tokenizers cannot be compared. {_REMEDY}"
        )


def _canonical(content: bytes) -> bytes:
    """Convert a JSON file to a canonical form, which is the same for the files of equal tokenizers.

    The fields in `_IGNORED_FIELDS` are removed, and the other fields are sorted. Example:
    b'{"b": 2, "a": 1, "name_or_path": "x"}' becomes b'{"a": 1, "b": 2}'. If the content is not
    valid JSON, or is nested too deeply, return it unchanged.
    """
    try:
        value: Any = json.loads(content)
        if isinstance(value, dict):
            value = {name: field for name, field in value.items() if name not in _IGNORED_FIELDS}
        return json.dumps(value, sort_keys=True).encode()
    except (ValueError, RecursionError):
        return content
