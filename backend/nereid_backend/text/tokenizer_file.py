# SPDX-License-Identifier: Apache-2.0
"""Checks whether a loaded tokenizer divides texts into words as tokenizer.json says.

Some tokenizer classes of transformers, such as GPT2Tokenizer, read only the vocabulary and the
merges from tokenizer.json, and have a normalizer and a pre-tokenizer of their own. Example:
tokenizer.json of SmolLM2 divides a number into digits before the text is divided into words.
GPT2Tokenizer ignores this rule, so the model would receive other tokens than in its training.
LlamaTokenizer adds no space after a special token, but the tokenizer.json of Llama 2 adds one.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RULES = ("normalizer", "pre_tokenizer")
# The first setting changes only the positions of tokens in a text. tokenizer_config.json has
# priority for the second setting.
_IGNORED = ("trim_offsets", "add_prefix_space")


def ignores_tokenizer_file(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> bool:
    """Return whether a tokenizer divides texts into words otherwise than tokenizer.json requires.

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
    # For the setting add_prefix_space, a class without byte-level rules, such as that of Llama 2,
    # creates other rules than the file. These rules are right.
    has_setting = tokenizer.init_kwargs.get("add_prefix_space") is not None
    is_byte_level = _is_byte_level(actual) or _is_byte_level(expected)
    return not has_setting or is_byte_level


def _is_byte_level(rules: dict[str, Any]) -> bool:
    """Return whether the pre-tokenizer of the content of a tokenizer.json divides bytes."""
    return '"ByteLevel"' in json.dumps(rules["pre_tokenizer"])


def _rules_of_file(file: Path) -> dict[str, Any]:
    """Return the rules of a tokenizer.json, with the default values that the file omits."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    content = json.loads(file.read_text(encoding="utf-8"))
    # A tokenizer without a vocabulary is created quickly. The library adds the omitted values.
    without_words = json.loads(Tokenizer(BPE()).to_str())
    without_words |= {name: content.get(name) for name in _RULES}
    without_words["model"]["ignore_merges"] = bool(content["model"].get("ignore_merges"))
    return _rules(Tokenizer.from_str(json.dumps(without_words)))


def _rules_of_tokenizer(tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401 - a `tokenizers.Tokenizer`
    """Return the rules of a tokenizer that has been loaded."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    # A tokenizer without a vocabulary is converted to JSON quickly.
    ignore_merges = getattr(tokenizer.model, "ignore_merges", False)
    without_words = Tokenizer(BPE(ignore_merges=ignore_merges))
    for name in _RULES:
        if getattr(tokenizer, name) is not None:
            setattr(without_words, name, getattr(tokenizer, name))
    return _rules(without_words)


def _rules(tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401 - a `tokenizers.Tokenizer`
    """Return the content of tokenizer.json for a tokenizer, without the ignored settings."""

    def without_ignored(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name not in _IGNORED}

    content: dict[str, Any] = json.loads(tokenizer.to_str(), object_hook=without_ignored)
    return content
