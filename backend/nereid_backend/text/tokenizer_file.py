# SPDX-License-Identifier: Apache-2.0
"""Checks whether a loaded tokenizer divides texts into words as tokenizer.json requires.

Some tokenizer classes of transformers, such as GPT2Tokenizer, read only the vocabulary and the
merges from tokenizer.json, and have a normalizer and a pre-tokenizer of their own. If these differ
from tokenizer.json, the model receives other tokens than in its training. Examples: the
tokenizer.json of SmolLM2 divides each number into digits, but GPT2Tokenizer does not. The
tokenizer.json of Llama 2 adds a space after a special token, but LlamaTokenizer does not.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RULES = ("normalizer", "pre_tokenizer")
# These settings are not compared. trim_offsets changes only the positions of tokens in a text.
# add_prefix_space can also be set in tokenizer_config.json, which has priority.
_IGNORED_SETTINGS = ("trim_offsets", "add_prefix_space")


def ignores_tokenizer_file(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> bool:
    """Return whether a tokenizer ignores rules in tokenizer.json that divide texts into words.

    Example: tokenizer.json divides a number into digits, but the class of the loaded tokenizer has
    rules of its own, which keep the number whole.

    Args:
        tokenizer: the loaded tokenizer.
        folder: the folder of the checkpoint, which may contain a tokenizer.json.
    """
    from transformers import TokenizersBackend

    file = folder / "tokenizer.json"
    if not isinstance(tokenizer, TokenizersBackend) or not file.is_file():
        return False
    reads_whole_file = type(tokenizer) is TokenizersBackend  # Only its subclasses have own rules.
    if reads_whole_file:
        return False
    expected = _rules_of_file(file)
    actual = _rules_of_tokenizer(tokenizer.backend_tokenizer)
    if actual == expected:
        return False
    # If tokenizer_config.json contains the setting add_prefix_space, a class without byte-level
    # rules, such as LlamaTokenizer, creates its rules according to this setting. These rules are
    # right, although they differ from tokenizer.json.
    has_setting = tokenizer.init_kwargs.get("add_prefix_space") is not None
    is_byte_level = _is_byte_level(actual) or _is_byte_level(expected)
    return not has_setting or is_byte_level


def _is_byte_level(rules: dict[str, Any]) -> bool:
    """Return whether the rules contain a byte-level pre-tokenizer."""
    return '"ByteLevel"' in json.dumps(rules["pre_tokenizer"])


def _rules_of_file(file: Path) -> dict[str, Any]:
    """Return the rules in a tokenizer.json. Fields that the file omits get default values."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    content = json.loads(file.read_text(encoding="utf-8"))
    # Create a tokenizer without a vocabulary, because this is fast. The library adds the default
    # values of omitted fields.
    without_vocabulary = json.loads(Tokenizer(BPE()).to_str())
    without_vocabulary |= {name: content.get(name) for name in _RULES}
    without_vocabulary["model"]["ignore_merges"] = bool(content["model"].get("ignore_merges"))
    return _rules(Tokenizer.from_str(json.dumps(without_vocabulary)))


def _rules_of_tokenizer(tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401 - a `tokenizers.Tokenizer`
    """Return the rules of a loaded tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    # Copy the rules to a new tokenizer that has no vocabulary, because converting a vocabulary to
    # JSON takes long.
    ignore_merges = getattr(tokenizer.model, "ignore_merges", False)
    without_vocabulary = Tokenizer(BPE(ignore_merges=ignore_merges))
    for name in _RULES:
        if getattr(tokenizer, name) is not None:
            setattr(without_vocabulary, name, getattr(tokenizer, name))
    return _rules(without_vocabulary)


def _rules(tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401 - a `tokenizers.Tokenizer`
    """Convert a tokenizer to the format of tokenizer.json. Leave out `_IGNORED_SETTINGS`."""

    def without_ignored(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name not in _IGNORED_SETTINGS}

    content: dict[str, Any] = json.loads(tokenizer.to_str(), object_hook=without_ignored)
    return content
