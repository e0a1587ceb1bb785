# SPDX-License-Identifier: Apache-2.0
"""Derives the config of a transformers model from the metadata of a GGUF file.

If a file contains an unsupported metadata value, this module raises an error. Without the error,
the model would be loaded, but its output could be slightly wrong.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from nereid_backend.checkpoints.gguf.gguf_file import GgufFile
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
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describes how llama.cpp stores the models of a GGUF architecture.

    Attributes:
        model_type: The model type in transformers.
        class_name: The name of the model's class in transformers.
        more_fields: Maps additional metadata keys to fields of the config.
        has_rotated_pairs: Whether the two numbers of a rotated pair are adjacent in the file; see
            `gguf_weights._row_order`.
        has_sandwich_norms: Whether each layer has norms before and after attention, and before and
            after the MLP. In the file, 1 is added to each weight of a norm.
        num_layers_with_other_scale: The file does not contain the attention scale, which is usually
            1 / sqrt(head_dim). The model with this number of layers has the scale 1 /
            sqrt(hidden_size / heads) instead. 0 if the architecture has no such model.
        has_local_rope: Whether layers with a sliding window use other rotary embeddings than layers
            with full attention.
    """

    model_type: str
    class_name: str
    more_fields: Mapping[str, str]
    has_rotated_pairs: bool = False
    has_sandwich_norms: bool = False
    num_layers_with_other_scale: int = 0
    has_local_rope: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether the models have several experts in place of one MLP."""
        return self.more_fields is _EXPERTS

    @property
    def has_attention_scale(self) -> bool:
        """Whether every config contains a number s that gives the attention scale 1 / sqrt(s)."""
        return self.num_layers_with_other_scale > 0


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", {}, has_rotated_pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {}),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _WINDOW | _SOFTCAPS,
        has_sandwich_norms=True,
        num_layers_with_other_scale=46,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _WINDOW | _SOFTCAPS,
        has_sandwich_norms=True,
        num_layers_with_other_scale=62,
        has_local_rope=True,
    ),
}
"""The supported GGUF architectures."""

# Additional metadata keys that a file may contain. `_rope_parameters` and `_check_head_size` read
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
_ROPE_FACTORS = "rope_freqs.weight"
# The number of the pooling method "last token" in llama.cpp. Causal models use this method.
_LAST_TOKEN = 3
_DEFAULT_ROPE_THETA = 10000.0
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
        "rope_parameters": _rope_parameters(file, values, rope_factors),
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
                "rope_theta": values.get("rope.freq_base_swa", _DEFAULT_ROPE_THETA),
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


def _rope_parameters(
    file: GgufFile, values: Mapping[str, Any], factors: Sequence[float] | None
) -> dict[str, Any]:
    """Return the parameters of the rotary position embeddings, as transformers names them.

    Scaling extends the context of a model. Example: a file with the rope.freq_base 10000, the
    rope.scaling.type "linear" and the rope.scaling.factor 4 gives {"rope_type": "linear",
    "rope_theta": 10000, "factor": 4}.

    Args:
        file: the GGUF file.
        values: the metadata of the file, without the name of the architecture in the keys.
        factors: the numbers in the tensor rope_freqs.weight; None if the tensor does not exist.
            Only files of Llama 3 models contain this tensor, which describes the scaling.

    Raises:
        UnsupportedModelError: if the scaling is not supported.
    """
    theta = values.get("rope.freq_base", _DEFAULT_ROPE_THETA)
    if factors is not None:
        return _llama3_rope(file, theta, factors)
    # As in llama.cpp, a factor without a type means linear scaling, and the factor 0 means 1.
    factor = values.get("rope.scaling.factor") or 1.0
    scaling = values.get("rope.scaling.type", "none" if factor == 1 else "linear")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    parameters = {"rope_type": scaling, "rope_theta": theta, "factor": factor}
    if scaling == "linear":
        return parameters
    if scaling == "yarn":
        # The context length before YaRN extended it. If the file does not contain this length, or
        # contains 0, use the context length of the model.
        original_length = values.get("rope.scaling.original_context_length")
        length = original_length or values.get("context_length")
        return {**parameters, "original_max_position_embeddings": length}
    raise UnsupportedModelError(
        f"{file.path}: rope.scaling.type {scaling!r} is not supported. Use the model's "
        "safetensors files."
    )


def _llama3_rope(file: GgufFile, theta: float, factors: Sequence[float]) -> dict[str, Any]:
    """Return the rope parameters of a Llama 3 model. `factors` has one number per frequency.

    The file contains only these factors, but not the parameters from which they were computed. This
    function assumes the parameters of the published Llama 3 models, computes the factors from these
    parameters, and compares the result with the factors in the file. `theta` is the base of the
    rotary frequencies.

    Raises:
        UnsupportedModelError: if the factors were computed from other parameters.
    """
    if not factors or not all(factor > 0 for factor in factors):
        raise _unsupported_factors(file)
    # The rope parameters of the Llama 3 models. Only `factor` differs between these models. It is
    # the largest number in `factors`, because the lowest frequency is divided by `factor`.
    common_parameters = {
        "rope_theta": theta,
        "rope_type": "llama3",
        "factor": float(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_divisors(common_parameters, len(factors))
    # The file contains float32 numbers, so there are small rounding errors.
    is_equal = all(
        math.isclose(computed, stored, rel_tol=1e-4)
        for computed, stored in zip(expected, factors, strict=True)
    )
    if not is_equal:
        raise _unsupported_factors(file)
    return common_parameters


def _unsupported_factors(file: GgufFile) -> UnsupportedModelError:
    """Return the error for a file whose tensor rope_freqs.weight contains unknown factors."""
    return UnsupportedModelError(
        f"{file.path}: the factors in {_ROPE_FACTORS} are not supported. Use the model's "
        "safetensors files."
    )


def _llama3_divisors(parameters: Mapping[str, Any], count: int) -> list[float]:
    """Return one divisor for each of the `count` rotary frequencies of a Llama 3 model.

    Dividing the low frequencies extends the context of the model. The divisor of a frequency
    depends on its number of rotations in the original context. If the number is at most
    `low_freq_factor`, the divisor is `factor`. If the number is at least `high_freq_factor`, the
    divisor is 1. Between these limits, the reciprocal of the divisor is interpolated linearly.

    Source: _compute_llama3_parameters in transformers 5.23, modeling_rope_utils.py.
    """
    factor = parameters["factor"]
    original_context = parameters["original_max_position_embeddings"]
    min_rotations = parameters["low_freq_factor"]
    max_rotations = parameters["high_freq_factor"]
    divisors = []
    for index in range(count):
        # The number of positions in one rotation.
        wavelength = 2 * math.pi * parameters["rope_theta"] ** (index / count)
        num_rotations = original_context / wavelength
        # The position between the limits: 0 at `min_rotations`, and 1 at `max_rotations`.
        position = (num_rotations - min_rotations) / (max_rotations - min_rotations)
        clamped = min(1.0, max(0.0, position))
        reciprocal = (1 - clamped) / factor + clamped
        divisors.append(1 / reciprocal)
    return divisors
