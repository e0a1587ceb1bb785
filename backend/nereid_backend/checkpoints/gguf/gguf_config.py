# SPDX-License-Identifier: Apache-2.0
"""Derives the config of a transformers model from the metadata of a GGUF file.

If a file contains an unsupported metadata value, this module raises an error. Without the error,
the model would be loaded, but its output could be slightly wrong.
"""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from nereid_backend.checkpoints.gguf.gguf_architectures import ARCHITECTURES, Architecture
from nereid_backend.checkpoints.gguf.gguf_file import GgufFile
from nereid_backend.checkpoints.gguf.gguf_rope import DEFAULT_ROPE_THETA, rope_parameters
from nereid_backend.errors import ModelError, UnsupportedModelError

# Maps a metadata key of a GGUF file to a field of the config. In the file, the name of the
# architecture is put before each key. Example: "llama.context_length".
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}


"""The supported GGUF architectures."""

# Additional metadata keys that a file may contain. `rope_parameters` and `_check_head_size` read
# some of these keys, and the other keys are not needed. A file with an unknown key is refused.
_KEYS_WITHOUT_FIELD = (
    "vocab_size",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "attention.value_length",
    "tensor_data_layout",
    "pooling_type",
)
# The metadata keys whose values must be positive integers.
_INTEGERS = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
)
# The metadata keys whose values must be positive numbers.
_NUMBERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa")
# The metadata keys that every file must contain.
_REQUIRED = ("embedding_length", "block_count", "attention.head_count")
_EMBEDDINGS = "token_embd.weight"
# The number of the pooling method "last token" in llama.cpp. Causal models use this method.
_LAST_TOKEN = 3
# llama.cpp ends an answer after a token with one of these texts. Many files declare only one of
# these tokens as an end token. Example: files of Gemma declare "<eos>", but a turn of a chat ends
# with "<end_of_turn>".
_END_TEXTS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>"),
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    "<｜end▁of▁sentence｜>",
}


def gguf_config(file: GgufFile, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """Return the content of config.json for a GGUF file.

    The metadata of the file contains most fields under other names. Example: the metadata value
    llama.block_count becomes the field num_hidden_layers.

    Args:
        file: the header of the file.
        rope_factors: the numbers in the tensor rope_freqs.weight; None if the tensor does not
            exist.

    Raises:
        UnsupportedModelError: if the architecture or a value is not supported.
        ModelError: if a value is missing.
    """
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise UnsupportedModelError(
            f"{file.path}: the GGUF architecture {file.architecture!r} is not supported. The "
            f"supported architectures are {', '.join(ARCHITECTURES)}. Use the model's "
            "safetensors files."
        )
    fields = {**_FIELDS, **architecture.more_fields}  # maps metadata keys to fields of the config
    values = _architecture_values(file)
    # Check that the metadata contains every required key, for example the number of attention
    # heads, and no unknown key. The keys in `_KEYS_WITHOUT_FIELD` are allowed, but not copied to
    # the config.
    _check_metadata_keys(file, values, allowed={*fields, *_KEYS_WITHOUT_FIELD})
    _check_numbers(file, values)
    config = {field: values[name] for name, field in fields.items() if name in values}
    # A file may leave out the following two fields, for which llama.cpp has default values.
    num_heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", num_heads)
    config.setdefault("head_dim", config["hidden_size"] // num_heads)
    _check_head_size(file, values, config["head_dim"])
    if values.get("pooling_type", _LAST_TOKEN) != _LAST_TOKEN:
        raise UnsupportedModelError(
            f"{file.path}: {file.architecture}.pooling_type must be {_LAST_TOKEN} (the vector of "
            f"the last token), but it is {values['pooling_type']}. Use the model's safetensors "
            "files."
        )
    # The following fields are not simple copies of metadata values.
    config |= {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "vocab_size": file.tensors[_EMBEDDINGS].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": "bfloat16" if _has_bfloat16(file) else "float32",
        "rope_parameters": rope_parameters(file, values, rope_factors),
        **_special_token_ids(file),
    }
    config |= _fields_of_architecture(architecture, config, values)
    return config


def _fields_of_architecture(
    architecture: Architecture, config: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of config.json that only some architectures have.

    Example: an architecture whose models have experts gives {"norm_topk_prob": True}.

    Args:
        architecture: describes the architecture of the file.
        config: the other fields of the config.
        values: the metadata of the architecture, such as {"rope.freq_base_swa": 10000}.
    """
    fields: dict[str, Any] = {}
    if architecture.has_attention_scale:
        fields["query_pre_attn_scalar"] = _query_pre_attn_scalar(architecture, config)
    if architecture.has_local_rope:
        # Layers with a sliding window and layers with full attention use different rotary
        # embeddings.
        fields["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": values.get("rope.freq_base_swa", DEFAULT_ROPE_THETA),
            },
        }
        if "sliding_window" not in config:
            # If no layer has a sliding window, the file contains no window. transformers would then
            # use the default window of its config class.
            fields["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    if architecture.has_experts:
        # llama.cpp always divides the router's weights of the chosen experts by the sum of these
        # weights.
        fields["norm_topk_prob"] = True
    return fields


def _query_pre_attn_scalar(architecture: Architecture, config: Mapping[str, Any]) -> int:
    """Return the number s for which the attention scale is 1 / sqrt(s).

    The file does not contain s. One model of the architecture, which is recognised by its number of
    layers, has s = hidden_size / heads. In the other models, s is head_dim.
    """
    if config["num_hidden_layers"] == architecture.num_layers_with_other_scale:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _architecture_values(file: GgufFile) -> dict[str, Any]:
    """Return the metadata of the architecture. Remove the architecture's name from each key.

    Example: {"llama.block_count": 16, "general.name": "x"} gives {"block_count": 16}.
    """
    prefix = f"{file.architecture}."
    return {
        name.removeprefix(prefix): value
        for name, value in file.metadata.items()
        if name.startswith(prefix)
    }


def _check_metadata_keys(file: GgufFile, values: Mapping[str, Any], allowed: Set[str]) -> None:
    """Check that a file contains all required values, and only metadata keys that are supported.

    Args:
        file: the header of the file.
        values: the metadata of the architecture; see `_architecture_values`.
        allowed: the allowed keys of `values`.

    Raises:
        UnsupportedModelError: if a key is not in `allowed`.
        ModelError: if a required value or the tensor of the embeddings is missing.
    """
    prefix = f"{file.architecture}."  # `values` lacks this prefix, which the keys have in the file
    unknown = sorted(values.keys() - allowed)
    if unknown:
        raise UnsupportedModelError(
            f"{file.path}: the metadata value {prefix}{unknown[0]} is not supported. Use the "
            "model's safetensors files."
        )
    missing = [prefix + name for name in sorted(_REQUIRED) if name not in values]
    if _EMBEDDINGS not in file.tensors:
        missing.append(_EMBEDDINGS)
    if missing:
        raise ModelError(f"{file.path} lacks {missing[0]}. Download the file again.")


def _check_numbers(file: GgufFile, values: Mapping[str, Any]) -> None:
    """Raise a ModelError if a value that must be a positive number is something else.

    Also raise a ModelError if the number of layers is larger than the number of tensors.

    `values` is the metadata of the architecture; see `_architecture_values`.
    """
    for name, value in values.items():
        if name in _INTEGERS:
            requirement = "a positive integer"
            is_valid = type(value) is int and value > 0
        elif name in _NUMBERS:
            requirement = "a positive number"
            is_valid = type(value) in (int, float) and 0 < value < math.inf
        else:
            continue
        if not is_valid:
            raise ModelError(
                f"{file.path}: {file.architecture}.{name} must be {requirement}, but it is "
                f"{value!r}. Download the file again."
            )
    if values["block_count"] > len(file.tensors):
        raise ModelError(
            f"{file.path}: {file.architecture}.block_count is {values['block_count']}, but the "
            f"file has only {len(file.tensors)} tensors. Download the file again."
        )


def _check_head_size(file: GgufFile, values: Mapping[str, Any], head_dim: int) -> None:
    """Raise an UnsupportedModelError if the heads of a model have an unsupported size.

    Rotary embeddings must rotate the whole head, so rope.dimension_count must be `head_dim`. Values
    must have the same size as keys, so attention.value_length must be `head_dim`. A missing field
    means that the size is `head_dim`.
    """
    for name in ("rope.dimension_count", "attention.value_length"):
        if values.get(name, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {name} must equal the head size {head_dim}, but it is "
                f"{values[name]}. Use the model's safetensors files."
            )


def _has_bfloat16(file: GgufFile) -> bool:
    """Return whether at least one tensor of a file contains bfloat16 numbers."""
    return any(tensor.kind.name == "BF16" for tensor in file.tensors.values())


def _special_token_ids(file: GgufFile) -> dict[str, Any]:
    """Return the ids of the special tokens, as fields of config.json.

    The tokens that end a text (eos), a turn (eot) or a message (eom) all become EOS tokens, and so
    do the tokens whose texts are in `_END_TEXTS`. Example: {"tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 5} gives the field "eos_token_id": [2, 5]. Ids outside the
    vocabulary are ignored.

    Raises:
        ModelError: if an id is not an integer.
    """
    vocab_size = file.tensors[_EMBEDDINGS].shape[0]

    def read_id(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = file.metadata.get(key)
        if token_id is not None and type(token_id) is not int:
            raise ModelError(
                f"{file.path}: {key} must be an integer, but it is {token_id!r}. Download the file "
                "again."
            )
        # Some files use 2**32 - 1 if the model has no such token.
        is_in_vocabulary = token_id is not None and token_id < vocab_size
        return token_id if is_in_vocabulary else None

    ids = (read_id("eos"), read_id("eot"), read_id("eom"))
    end_ids = {token_id for token_id in ids if token_id is not None}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        texts = enumerate(tokens[:vocab_size])
        end_ids |= {token_id for token_id, text in texts if text in _END_TEXTS}
    return {
        "bos_token_id": read_id("bos"),
        "eos_token_id": sorted(end_ids) or None,
        "pad_token_id": read_id("padding"),
    }
