# SPDX-License-Identifier: Apache-2.0
"""Reads LoRA adapters in the layout of the library PEFT.

The folder of an adapter contains two files:

    adapter_config.json          the type of the adapter, lora_alpha, and other settings
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
                                 base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight ...

An adapter that changes more than the outputs of linear layers is refused, because its answers would
be wrong.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from nereid_backend.core.adapter import Adapter
from nereid_backend.errors import ModelError
from nereid_backend.linear.native_adapters import AdapterWeights, LayerPair

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
# The settings that adapter_config.json may contain. Settings that describe only the training are
# ignored.
_HARMLESS_SETTINGS = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "target_modules", "exclude_modules", "lora_dropout", "eva_config"),
        *("fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core"),
        *("qalora_group_size", "ensure_weight_tying", "runtime_config", "runtime_ephemeral_gpu"),
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
        *("modules_to_save", "init_lora_weights"),
    }
)
# The largest accepted ratio between the size of an adapter in its file and its size in memory.
# Example: the file contains float32 numbers, and the memory contains bfloat16 numbers.
_FILE_TO_MEMORY_RATIO = 2
# PEFT can initialise an adapter with these methods, which also change the weights of the model.
# Such an adapter does not fit the original weights.
_CHANGED_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The number of inputs and the number of outputs of a linear layer."""

    in_features: int
    out_features: int


def read_adapter(
    name: str,
    folder: str,
    layers: Mapping[str, LayerSizes],
    max_bytes: int,
    like: Tensor,
) -> tuple[Adapter, AdapterWeights]:
    """Read a LoRA adapter from disk, and check that the adapter fits the model.

    Return the adapter's name, folder and hash as an `Adapter`, and the adapter's weights. The hash
    of the files shows later whether the files have changed.

    Args:
        name: the name with which requests select the adapter.
        folder: the adapter's folder.
        layers: the linear layers of the model that an adapter can change.
        max_bytes: the largest size of the adapter in memory.
        like: a tensor with the dtype and the device of the model. The weights get the same dtype
            and device.

    Raises:
        ModelError: if the files are missing or broken, or if the adapter does not fit the model.
    """
    root = Path(folder).absolute()
    config_file = root / _CONFIG_FILE
    weights_file = root / _WEIGHTS_FILE
    config_bytes = _read(config_file, max_bytes)
    # The file may be larger than the weights in memory, because the numbers in the file can have a
    # wider type (such as float32 instead of bfloat16).
    weights_bytes = _read(weights_file, max_bytes, file_to_memory_ratio=_FILE_TO_MEMORY_RATIO)
    config = _parse_config(config_file, config_bytes)
    try:
        tensors = safetensors.torch.load(weights_bytes)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{weights_file}: the file is broken ({error}).") from error
    # `weights` contains two matrices for each linear layer that the adapter changes.
    weights = _convert_weights(weights_file, config, tensors, layers, like)
    adapter = Adapter(name, str(root), _digest(config_bytes, weights_bytes))
    return adapter, weights


def _digest(*contents: bytes) -> bytes:
    """Return one hash for the contents of several files.

    The length of each file is hashed, too. Example: the two files "ab" and "c" have another hash
    than the two files "a" and "bc".
    """
    digest = hashlib.blake2b(digest_size=16)
    for content in contents:
        digest.update(len(content).to_bytes(8) + content)
    return digest.digest()


def _read(file: Path, max_bytes: int, *, file_to_memory_ratio: int = 1) -> bytes:
    """Return the content of one of an adapter's files.

    Args:
        file: the file.
        max_bytes: the setting lora_memory, which limits the memory of all adapters together. A
            single adapter must fit into this memory, too.
        file_to_memory_ratio: the file may have this number times `max_bytes` bytes. A file with
            weights may be larger than the weights in memory, because its numbers can have a wider
            data type.

    Raises:
        ModelError: if the file cannot be read or is too large.
    """
    try:
        size = file.stat().st_size
        if size > file_to_memory_ratio * max_bytes:
            raise ModelError(
                f"{file}: the file has {size} bytes, but all adapters together may have "
                f"{max_bytes} bytes (lora_memory). Raise lora_memory."
            )
        return file.read_bytes()
    except OSError as error:
        hint = _pickle_hint(file)  # a sentence if the folder contains the weights as a pickle file
        raise ModelError(f"{file}: the file cannot be read ({error.strerror}).{hint}") from error


def _pickle_hint(missing_file: Path) -> str:
    """Return advice for an adapter whose weights are in PyTorch's format (.bin); otherwise ""."""
    is_pickled = missing_file.name == _WEIGHTS_FILE and missing_file.with_suffix(".bin").exists()
    if not is_pickled:
        return ""
    return (
        " Load the adapter with the library PEFT, and write it again with"
        " save_pretrained(folder, safe_serialization=True)."
    )


def _parse_config(file: Path, text: bytes) -> dict[str, Any]:
    """Parse the content of adapter_config.json, and check that it describes a plain LoRA adapter.

    Args:
        file: the path of the file, for error messages.
        text: the content of the file.

    Returns:
        The settings of the adapter.

    Raises:
        ModelError: if the settings describe something other than a plain LoRA adapter.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{file}: the file is not valid JSON ({error}).") from error
    settings: dict[str, Any] = config if isinstance(config, dict) else {}
    peft_type = settings.get("peft_type")
    if peft_type != "LORA":
        raise ModelError(f"{file}: peft_type must be LORA, but the file has {peft_type!r}.")
    _check_settings(file, settings)
    return settings


def _check_settings(file: Path, config: dict[str, Any]) -> None:
    """Raise a ModelError if an adapter changes anything other than the outputs of linear layers.

    An adapter is refused if it replaces modules, biases or the weights of the model, or if it has a
    setting whose effect this module does not know.

    Args:
        file: the path of adapter_config.json, for error messages.
        config: the content of adapter_config.json.
    """
    saved_modules = config.get("modules_to_save")
    if saved_modules:
        names = ", ".join(saved_modules)
        raise ModelError(
            f"{file}: modules_to_save: the adapter replaces whole modules ({names}), "
            "which is not supported. Merge the adapter into the model, or train it without "
            "modules_to_save."
        )
    if config.get("bias", "none") != "none":
        raise ModelError(f"{file}: bias must be 'none', but the file has {config['bias']!r}.")
    # Some methods that initialise an adapter also change the weights of the model.
    initialisation = config.get("init_lora_weights")
    if isinstance(initialisation, str) and initialisation.lower().startswith(_CHANGED_WEIGHTS):
        raise ModelError(
            f"{file}: init_lora_weights is {initialisation!r}, so the adapter also changes the "
            "weights of the model. Convert the adapter to a plain LoRA adapter with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    for setting, value in config.items():
        is_unknown = setting not in _HARMLESS_SETTINGS
        if is_unknown and value:
            raise ModelError(
                f"{file}: the setting {setting} has the value {value!r}, and this server does not "
                "support such adapters. Merge the adapter into the model."
            )


def _convert_weights(
    file: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    layers: Mapping[str, LayerSizes],
    like: Tensor,
) -> AdapterWeights:
    """For each linear layer that an adapter changes, return the two matrices of the adapter.

    The matrix lora_A (down), [rank, in_features], reduces the inputs of a layer to `rank` numbers.
    The matrix lora_B (up), [out_features, rank], converts these numbers into a change of the
    outputs. The scale of the adapter is multiplied into lora_B.

    Args:
        file: the path of the weights, for error messages.
        config: the content of adapter_config.json.
        tensors: the tensors of the file by name.
        layers: the linear layers of the model that an adapter can change.
        like: a tensor with the dtype and the device of the model.

    Raises:
        ModelError: if a tensor does not fit the model.
    """
    config_file = file.with_name(_CONFIG_FILE)
    weights: dict[str, LayerPair] = {}
    for layer_name, matrices in _matrices_by_layer(file, tensors).items():
        problem = _describe_misfit(matrices, layers.get(layer_name))
        if problem is not None:
            raise ModelError(f"{file}: {layer_name}: {problem}")
        down = matrices["A"].to(like)
        rank = len(down)
        _check_rank(file, config, layer_name, rank)
        scale = _scale(config_file, config, layer_name, rank)
        scaled_up = matrices["B"].float() * scale
        weights[layer_name] = LayerPair(down, scaled_up.to(like))
    return weights


def _check_rank(file: Path, config: dict[str, Any], layer_name: str, rank: int) -> None:
    """Raise a ModelError if the rank of a layer's weights differs from adapter_config.json.

    In this case, the two files do not belong to the same adapter.

    Args:
        file: the path of the weights.
        config: the content of adapter_config.json.
        layer_name: the name of the layer.
        rank: the number of rows of the layer's matrix lora_A.
    """
    config_file = file.with_name(_CONFIG_FILE)
    config_rank = _layer_setting(config_file, config, "rank_pattern", layer_name, config.get("r"))
    if config_rank is not None and config_rank != rank:
        raise ModelError(
            f"{file}: {layer_name}: the matrix lora_A has the rank {rank}, but {config_file} "
            f"gives this layer the rank {config_rank!r} (r or rank_pattern). The two files do "
            "not belong to the same adapter."
        )


def _matrices_by_layer(file: Path, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the matrices lora_A and lora_B of each linear layer.

    The result maps the name of a layer to its matrices by letter. Example: the tensors
    `base_model.model.layers.0.q_proj.lora_A.weight` and
    `base_model.model.layers.0.q_proj.lora_B.weight` give {"layers.0.q_proj": {"A": ..., "B": ...}}.

    Args:
        file: the path of the weights, for error messages.
        tensors: the tensors of the file by name.

    Raises:
        ModelError: if a tensor is not such a matrix, or contains NaN, infinity or integers.
    """
    matrices: dict[str, dict[str, Tensor]] = {}
    for tensor_name, tensor in tensors.items():
        match = _MATRIX.fullmatch(tensor_name)
        if match is None:
            raise ModelError(
                f"{file}: the tensor {tensor_name} is not a matrix lora_A or lora_B of a linear "
                "layer."
            )
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ModelError(
                f"{file}: the tensor {tensor_name} must contain finite floating point numbers."
            )
        layer_name, letter = match.groups()
        matrices.setdefault(layer_name, {})[letter] = tensor
    if not matrices:
        raise ModelError(f"{file}: the file contains no matrices.")
    return matrices


def _describe_misfit(matrices: dict[str, Tensor], sizes: LayerSizes | None) -> str | None:
    """Return the reason why the matrices of an adapter do not fit a layer; None if they fit.

    Args:
        matrices: the matrices lora_A (key "A") and lora_B (key "B") of the layer.
        sizes: the sizes of the model's layer; None if an adapter cannot change this layer.
    """
    if sizes is None:
        return (
            "the model has no such linear layer, or the layer cannot have an adapter. Only layers "
            "that compute every token of a step can have one."
        )
    for letter in ("A", "B"):
        if letter not in matrices:
            return f"the matrix lora_{letter} is missing."
    shape_a = tuple(matrices["A"].shape)
    shape_b = tuple(matrices["B"].shape)
    rank = shape_a[0] if shape_a else 0  # a damaged file may contain a tensor without dimensions
    expected_a = (rank, sizes.in_features)
    expected_b = (sizes.out_features, rank)
    has_expected_shapes = shape_a == expected_a and shape_b == expected_b
    if not has_expected_shapes or rank == 0:
        return (
            f"the matrices lora_A and lora_B have the shapes {shape_a} and {shape_b}, but the "
            f"layer needs {expected_a} and {expected_b}."
        )
    return None


def _scale(file: Path, config: dict[str, Any], layer_name: str, rank: int) -> float:
    """Return the factor by which the product of lora_B and lora_A is multiplied in a layer.

    The factor is lora_alpha / rank, or lora_alpha / sqrt(rank) with use_rslora. Example:
    lora_alpha=16 and rank 4 give 4.0, or 8.0 with use_rslora.

    Args:
        file: the path of adapter_config.json, for error messages.
        config: the content of adapter_config.json.
        layer_name: the name of the layer. Some layers may have their own lora_alpha.
        rank: the rank of the layer's matrices.

    Raises:
        ModelError: if lora_alpha is not a number.
    """
    alpha = _layer_setting(file, config, "alpha_pattern", layer_name, config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"{file}: lora_alpha must be a number, but the file has {alpha!r}.")
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return float(alpha / divisor)


def _layer_setting(
    file: Path, config: dict[str, Any], setting: str, layer_name: str, default: object
) -> object:
    """Return the value of a setting for one layer. Patterns assign special values to some layers.

    Example: with rank_pattern={"q_proj": 2} and the default 8, the layer "layers.0.q_proj" has the
    rank 2, and the layer "layers.0.k_proj" has the rank 8.

    Args:
        file: the path of adapter_config.json.
        config: the content of adapter_config.json.
        setting: the name of the setting that contains the patterns and their values.
        layer_name: the name of the layer.
        default: the value for layers that match no pattern.

    Raises:
        ModelError: if the setting is not an object, or a pattern is not a regular expression.
    """
    patterns = config.get(setting) or {}
    try:
        for pattern, value in patterns.items():
            # A pattern must match the whole layer name, or everything after one of the dots in the
            # name. Example: "q_proj" matches "layers.0.q_proj".
            if re.fullmatch(rf"(.*\.)?({pattern})", layer_name):
                return value
    except (AttributeError, re.error) as error:
        raise ModelError(
            f"{file}: {setting} must be an object whose keys are regular expressions, but the file "
            f"has {patterns!r}."
        ) from error
    return default
