# SPDX-License-Identifier: Apache-2.0
"""Gives a loaded tokenizer the rules of tokenizer.json.

Some tokenizer classes of transformers, such as GPT2Tokenizer, read only the vocabulary and the
merges from tokenizer.json, and have rules of their own for everything else. Examples:

- tokenizer.json of SmolLM2 divides a number into digits before the text is divided into words.
  GPT2Tokenizer ignores this rule, so the model would receive other tokens than in its training.
- tokenizer.json of Llama 2 adds a space after a special token. LlamaTokenizer adds none.
- tokenizer.json of DeBERTa v3 replaces a no-break space by a space. DebertaV2Tokenizer keeps the
  no-break space, which is in no token of the model.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The rules that normalise a text and divide the text into words.
_WORD_RULES = ("normalizer", "pre_tokenizer")
_RULES = (*_WORD_RULES, "decoder", "post_processor")
# When two rules are compared, these settings of the rules are ignored. For add_prefix_space and the
# settings of BERT's normalizer, tokenizer_config.json and the default of the tokenizer's class have
# priority over tokenizer.json. The setting trim_offsets changes only the positions of tokens in a
# text.
_IGNORED = (
    *("add_prefix_space", "trim_offsets"),
    *("lowercase", "strip_accents", "handle_chinese_chars"),
)
# If tokenizer_config.json has one of these settings, transformers creates the post-processor from
# the setting. The post-processor adds special tokens to a text.
_POST_PROCESSOR_SETTINGS = ("add_bos_token", "add_eos_token")
# The settings of a BPE or WordPiece model that change how a word is divided into tokens.
_MODEL_SETTINGS = (
    *("unk_token", "fuse_unk", "byte_fallback", "ignore_merges"),
    *("continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word"),
)


def settings_for_tekken(folder: Path) -> dict[str, Any]:
    """Return the settings that a tokenizer with tekken.json needs, but its files do not contain.

    Some checkpoints of Mistral have only tekken.json, the vocabulary. The library mistral_common,
    which defines this format, adds a BOS token to each text. Other checkpoints of Mistral also have
    a tokenizer.json that divides texts into words by a wrong pattern. With the setting
    fix_mistral_regex, transformers corrects this pattern.
    """
    if not (folder / "tekken.json").is_file():
        return {}
    other_files = ("tokenizer.json", "tokenizer_config.json")
    has_only_vocabulary = not any((folder / name).is_file() for name in other_files)
    if has_only_vocabulary:
        return {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return {"fix_mistral_regex": True}


def apply_tokenizer_file(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Replace the rules of a loaded tokenizer by the rules of tokenizer.json where they differ.

    Example: tokenizer.json divides a number into digits, but the class of the tokenizer keeps the
    number whole. Afterwards, the tokenizer divides the number into digits.

    Args:
        tokenizer: the loaded tokenizer, which is changed.
        folder: the folder of the checkpoint, which may contain a tokenizer.json.
    """
    from transformers import TokenizersBackend

    path = folder / "tokenizer.json"
    if not isinstance(tokenizer, TokenizersBackend) or not path.is_file():
        return
    reads_whole_file = type(tokenizer) is TokenizersBackend  # Only its subclasses have own rules.
    if reads_whole_file:
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    backend = tokenizer.backend_tokenizer
    _apply_model_settings(backend, content["model"], path)
    file = _tokenizer_without_vocabulary(content)
    for name in _rules_to_replace(backend, file, _settings_of_checkpoint(folder)):
        setattr(backend, name, getattr(file, name))


def _apply_model_settings(backend: Any, settings: dict[str, Any], path: Path) -> None:  # noqa: ANN401 - see Args
    """Copy the settings of the BPE or WordPiece model from tokenizer.json to a loaded tokenizer.

    The model is the part of a tokenizer that divides a word into tokens. If the loaded model has
    another type than the model in the file, replace the whole model.

    Args:
        backend: the `tokenizers.Tokenizer`, which is changed.
        settings: the object `model` in tokenizer.json, with the settings and the vocabulary.
        path: the path of tokenizer.json.
    """
    from tokenizers import Tokenizer

    actual_type = type(backend.model).__name__
    expected_type = settings.get("type", actual_type)  # Files of older versions have no type.
    if expected_type != actual_type or expected_type == "Unigram":
        # The settings of a Unigram model cannot be changed.
        backend.model = Tokenizer.from_file(str(path)).model
        return
    for name in _MODEL_SETTINGS:
        if name in settings and hasattr(backend.model, name):
            setattr(backend.model, name, settings[name])


def _tokenizer_without_vocabulary(content: dict[str, Any]) -> Any:  # noqa: ANN401 - a `tokenizers.Tokenizer`
    """Return a tokenizer that has the rules of a tokenizer.json, but an empty vocabulary.

    Without the vocabulary, which can have 250,000 tokens, the tokenizer is created quickly.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    rules = {name: content.get(name) for name in _RULES}
    return Tokenizer.from_str(json.dumps(json.loads(Tokenizer(BPE()).to_str()) | rules))


def _settings_of_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; {} if the folder has no such file."""
    path = folder / "tokenizer_config.json"
    content: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return content


def _rules_to_replace(backend: Any, file: Any, settings: dict[str, Any]) -> list[str]:  # noqa: ANN401 - see Args
    """Return the names of the rules that a tokenizer must take from tokenizer.json.

    If the file has no decoder or no post-processor, the tokenizer keeps that of its class.

    Args:
        backend: the `tokenizers.Tokenizer` that a class of transformers has created.
        file: a `tokenizers.Tokenizer` with the rules of tokenizer.json.
        settings: the content of tokenizer_config.json.
    """
    from tokenizers.pre_tokenizers import PreTokenizer

    # The pre-tokenizer of RoFormer is Python code, for which tokenizer.json contains a substitute.
    if type(backend.pre_tokenizer) is PreTokenizer:
        return []
    word_rules = _word_rules_to_replace(backend, file, settings)
    # The decoder reverses the word rules when tokens are joined to a text. If a word rule is
    # replaced, the decoder of the class no longer matches.
    decoder = ["decoder"] if word_rules and file.decoder is not None else []
    has_special_token_setting = any(name in settings for name in _POST_PROCESSOR_SETTINGS)
    replaces_post_processor = file.post_processor is not None and not has_special_token_setting
    post_processor = ["post_processor"] if replaces_post_processor else []
    return word_rules + decoder + post_processor


def _word_rules_to_replace(backend: Any, file: Any, settings: dict[str, Any]) -> list[str]:  # noqa: ANN401 - see `_rules_to_replace`
    """Return the names in `_WORD_RULES` whose rules differ between `backend` and tokenizer.json."""
    # If tokenizer_config.json contains add_prefix_space, a class without byte-level rules, such as
    # the class of Llama 2, creates its word rules from this setting. tokenizer.json can contain
    # different word rules. The model needs the rules of the class, so no rule is replaced.
    is_byte_level = any(_is_byte_level(rules.pre_tokenizer) for rules in (backend, file))
    if settings.get("add_prefix_space") is not None and not is_byte_level:
        return []
    return [
        name
        for name in _WORD_RULES
        if _content_of_rule(getattr(backend, name)) != _content_of_rule(getattr(file, name))
    ]


def _content_of_rule(rule: Any) -> Any:  # noqa: ANN401 - a rule of a `tokenizers.Tokenizer`
    """Return the part of tokenizer.json that describes a rule, without the ignored settings.

    Return None if there is no rule.
    """

    def without_ignored(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name not in _IGNORED}

    if rule is None:
        return None
    # The library tokenizers has no other method that converts a single rule to JSON.
    return json.loads(rule.__getstate__(), object_hook=without_ignored)


def _is_byte_level(rule: Any) -> bool:  # noqa: ANN401 - a rule of a `tokenizers.Tokenizer`
    """Return whether a pre-tokenizer divides the bytes of a text."""
    return '"ByteLevel"' in json.dumps(_content_of_rule(rule))
