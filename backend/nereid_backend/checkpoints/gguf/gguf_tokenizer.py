# SPDX-License-Identifier: Apache-2.0
"""Creates the tokenizer files and the chat template of the model in a GGUF file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereid_backend.checkpoints.gguf.gguf_file import GgufFile
from nereid_backend.checkpoints.gguf.pre_tokenizers import (
    NFC_PRE_TOKENIZERS,
    TIKTOKEN_PRE_TOKENIZERS,
)
from nereid_backend.errors import ModelError, UnsupportedModelError

# The keys of a tokenizer in the metadata of GGUF files start with this text.
TOKENIZER_KEY_PREFIX = "tokenizer.ggml."
# Maps the name of a special token in transformers to a metadata key of GGUF files.
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# GGUF files represent the type of a token by a number. Control tokens (3) and user-defined tokens
# (4) are found in a text before the text is divided into words.
_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Create the tokenizer files and the chat template of a GGUF file's model in a folder.

    The tokenizer is converted to the format of transformers.

    Raises:
        UnsupportedModelError: if transformers cannot build an equivalent tokenizer.
        ModelError: if the vocabulary is damaged.
    """
    # transformers is imported here and in the functions below, because the import takes a second
    # and only GGUF files need the modules.
    from transformers import PreTrainedTokenizerFast

    chat_template = _chat_template(file)
    values = _tokenizer_values(file)
    _check_pre_tokenizer(file, values)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_create_fast_tokenizer(file, values),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        **_bos_and_eos_settings(file, values),
        **_special_tokens(file, values["tokens"]),
    )
    tokenizer.save_pretrained(folder)


def _chat_template(file: GgufFile) -> str | dict[str, str] | None:
    """Return the chat template of a GGUF file; None if the file has no chat template.

    If the file has further templates, such as tokenizer.chat_template.tool_use, the result maps the
    names of all templates to their texts: {"default": "...", "tool_use": "..."}.

    Raises:
        ModelError: if a template is not a text.
    """
    key = "tokenizer.chat_template"
    templates = {}
    for field, template in file.metadata.items():
        if field == key:
            name = "default"
        elif field.startswith(f"{key}."):
            name = field.removeprefix(f"{key}.")
        else:
            continue
        if not isinstance(template, str):
            raise ModelError(
                f"{file.path}: the template {name!r} ({key}) must be a text, but it is "
                f"{template!r}. Download the file again."
            )
        templates[name] = template
    if "default" not in templates:
        return None
    return templates if len(templates) > 1 else templates["default"]


def _bos_and_eos_settings(file: GgufFile, values: Mapping[str, Any]) -> dict[str, bool]:
    """Return the settings add_bos_token and add_eos_token of transformers' tokenizers.

    The settings determine whether a tokenizer adds a BOS token and an EOS token to each text.

    `values` is the metadata of the tokenizer; see `_tokenizer_values`.
    """
    # By default, llama.cpp adds a BOS token for two kinds of vocabularies: sentencepiece
    # vocabularies, which have the type "llama", and vocabularies in tiktoken's format, such as
    # Llama 3's vocabulary.
    adds_bos_by_default = values["tokenizer_type"] == "llama" or _is_tiktoken(values)
    return {
        "add_bos_token": bool(
            file.metadata.get(f"{TOKENIZER_KEY_PREFIX}add_bos_token", adds_bos_by_default)
        ),
        "add_eos_token": bool(file.metadata.get(f"{TOKENIZER_KEY_PREFIX}add_eos_token", False)),
    }


def _tokenizer_values(file: GgufFile) -> dict[str, Any]:
    """Return the metadata of the tokenizer. The keys are the names that transformers uses.

    Example: {"tokenizer.ggml.model": "gpt2"} gives {"tokenizer_type": "gpt2"}.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

    values: dict[str, Any] = {}
    # `GGUF_TOKENIZER_MAPPING["tokenizer"]` contains items such as "ggml.model": "tokenizer_type".
    for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items():
        metadata_key = f"tokenizer.{key}"
        if metadata_key in file.metadata:
            values[name] = file.metadata[metadata_key]
    return values


def _is_tiktoken(values: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer's vocabulary has the format of tiktoken.

    `values` is the metadata of the tokenizer; see `_tokenizer_values`.
    """
    return (
        values["tokenizer_type"] == "gpt2"
        and values.get("pre_tokenizer_type") in TIKTOKEN_PRE_TOKENIZERS
    )


def _check_pre_tokenizer(file: GgufFile, values: dict[str, Any]) -> None:
    """Raise an UnsupportedModelError if transformers does not support the file's pre-tokenizer.

    A pre-tokenizer divides a text into words before the words are divided into tokens. With another
    pre-tokenizer, the tokens of a text would differ. `values` is the metadata of the tokenizer; see
    `_tokenizer_values`.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre_tokenizer = values.get("pre_tokenizer_type")
    # The pre-tokenizer of gpt-2 is the default of transformers, so `GGUF_PRE_TOKENIZER_SPLITS` does
    # not contain it.
    known_pre_tokenizers = (*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2")
    # Only byte-level BPE tokenizers, such as the tokenizer of gpt2, have a pre-tokenizer.
    if values["tokenizer_type"] == "gpt2" and pre_tokenizer not in known_pre_tokenizers:
        raise UnsupportedModelError(
            f"{file.path}: the pre-tokenizer {pre_tokenizer!r} (tokenizer.ggml.pre) is not "
            "supported. Use the model's safetensors files."
        )


def _create_fast_tokenizer(file: GgufFile, values: dict[str, Any]) -> object:
    """Create a `tokenizers.Tokenizer` from the metadata of a GGUF file.

    Raises:
        ModelError: if the vocabulary is damaged.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    try:
        # `convert_gguf_tokenizer` returns a pair. For the tokenizers that this package supports,
        # the second item of the pair is an empty dict.
        tokenizer, _no_settings = convert_gguf_tokenizer(file.architecture, values)
    except Exception as error:
        # The package `tokenizers` raises plain `Exception` objects, so no subclass can be caught.
        raise ModelError(
            f"{file.path}: the tokenizer in the metadata cannot be read ({error})."
        ) from error
    tokenizer = _with_rules_of_file(tokenizer, values)
    if values.get("add_prefix_space") is False:
        _remove_prefix_space(tokenizer)
    return tokenizer


def _with_rules_of_file(tokenizer: Any, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as below
    """Return a copy of a tokenizer, with exactly the added tokens and the rules of the GGUF file.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        values: the metadata of the tokenizer; see `_tokenizer_values`.
    """
    from tokenizers import Tokenizer

    content = json.loads(tokenizer.to_str())  # the content of tokenizer.json
    _remove_unknown_tokens(content, len(values["tokens"]))
    is_byte_level = values["tokenizer_type"] == "gpt2"
    if is_byte_level:
        _add_missing_tokens(content, values)
        _set_pre_tokenizer_rules(content, values)
    return Tokenizer.from_str(json.dumps(content))


def _remove_unknown_tokens(content: dict[str, Any], num_tokens: int) -> None:
    """Remove the added tokens whose ids are outside the vocabulary of the GGUF file.

    transformers adds the default special tokens of its tokenizer class to the vocabulary. Example:
    the largest token id in a file of Llama 3 is 128255, but transformers adds "<|endoftext|>" with
    the id 128256. The model has no such token, so the server would refuse each prompt that contains
    this text. `num_tokens` is the number of tokens in the file.

    Mutates: `content`, the content of tokenizer.json.
    """
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] < num_tokens]


def _set_pre_tokenizer_rules(content: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set two rules that depend on the pre-tokenizer: ignore_merges and the normalizer.

    The GGUF file contains only the name of the pre-tokenizer. The rules are those of llama.cpp; see
    `TIKTOKEN_PRE_TOKENIZERS` and `NFC_PRE_TOKENIZERS`.

    Args:
        content: the content of tokenizer.json. Mutated.
        values: the metadata of the tokenizer; see `_tokenizer_values`.
    """
    # If ignore_merges is true, a word that is in the vocabulary becomes one token, even if the
    # merges do not produce this token.
    content["model"]["ignore_merges"] = _is_tiktoken(values)
    if values.get("pre_tokenizer_type") in NFC_PRE_TOKENIZERS:
        content["normalizer"] = {"type": "NFC"}  # composes characters


def _add_missing_tokens(content: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Add the special tokens that transformers leaves out of a byte-level tokenizer.

    In a byte-level vocabulary, each character represents one byte. transformers leaves out a
    special token whose text contains any other character. Example: the text of DeepSeek's token
    "<｜User｜>" contains the character "｜", so this text would be divided into several tokens.

    Args:
        content: the content of tokenizer.json. Mutated.
        values: the metadata of the tokenizer; see `_tokenizer_values`.
    """
    # The vocabulary contains each of these tokens in the spelling of byte-level tokens: each
    # character of the spelling represents one byte of the token's text.
    vocabulary = content["model"]["vocab"]
    spellings = {token_id: spelling for spelling, token_id in vocabulary.items()}
    added = {token["id"]: token for token in content["added_tokens"]}
    kinds = values.get("token_type") or ()
    for token_id, (text, kind) in enumerate(zip(values["tokens"], kinds, strict=False)):
        is_missing = token_id in spellings and token_id not in added
        if is_missing and kind in (_CONTROL, _USER_DEFINED):
            del vocabulary[spellings[token_id]]
            vocabulary[text] = token_id
            added[token_id] = _added_token(token_id, text, kind == _CONTROL)
    content["added_tokens"] = [added[token_id] for token_id in sorted(added)]


def _added_token(token_id: int, text: str, is_special: bool) -> dict[str, Any]:
    """Return an added token in the format of tokenizer.json."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": is_special, **flags}


def _remove_prefix_space(tokenizer: Any) -> None:  # noqa: ANN401 - a `tokenizers.Tokenizer`
    """Change a sentencepiece tokenizer so that it adds no space before the first word of a text.

    transformers ignores the setting add_space_prefix of GGUF files. Tokenizers that never add a
    space, such as those of Gemma, stay unchanged.

    Mutates: `tokenizer`.
    """
    from tokenizers import decoders, pre_tokenizers

    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        # transformers' decoder for GGUF files consists of these steps and a last step that removes
        # the added space. The last step is left out, because no space is added.
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps)


def _special_tokens(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    """Return a dict that maps transformers' name of each special token to the token's text.

    Token ids that are not in the vocabulary are ignored. Example: BOS has the token id 2, and the
    vocabulary is ["<pad>", "</s>", "<s>"]. The result is {"bos_token": "<s>"}.
    """
    special_tokens: dict[str, str] = {}
    for name, key in _SPECIAL_TOKENS.items():
        token_id = file.metadata.get(TOKENIZER_KEY_PREFIX + key)
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special_tokens[name] = tokens[token_id]
    return special_tokens
