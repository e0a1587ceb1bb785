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
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from nereid_backend.core.adapter import Adapter
from nereid_backend.errors import ModelError
from nereid_backend.linear.native_adapters import AdapterWeights, LayerPair
from nereid_backend.lora.peft_config import PeftConfig, parse_config

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
# Matches the part of a layer's name that all versions of transformers have in common. Example:
# ".layers.0.mlp.up_proj" in "model.language_model.layers.0.mlp.up_proj".
_DECODER_LAYER = re.compile(r"\.layers\.\d+\..+")
_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
# The largest accepted ratio between the size of an adapter in its file and its size in memory.
# Example: the file contains float32 numbers, and the memory contains bfloat16 numbers.
_FILE_TO_MEMORY_RATIO = 2


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
    model_weight: Tensor,
) -> tuple[Adapter, AdapterWeights]:
    """Read a LoRA adapter from disk, and check that the adapter fits the model.

    Return the adapter's name, folder and hash as an `Adapter`, and the adapter's weights. The hash
    of the files shows later whether the files have changed.

    Args:
        name: the name with which requests select the adapter.
        folder: the adapter's folder.
        layers: the linear layers of the model that an adapter can change.
        max_bytes: the largest size of the adapter in memory.
        model_weight: any weight of the model. The adapter's weights get its dtype and its device.

    Raises:
        ModelError: if the files are missing or broken, or if the adapter does not fit the model.
    """
    root = Path(folder).absolute()
    config_file = root / _CONFIG_FILE
    weights_file = root / _WEIGHTS_FILE
    config_bytes = _read(config_file, max_bytes, lora_memory=max_bytes)
    # The file may be larger than the weights in memory, because the numbers in the file can have a
    # wider type (such as float32 instead of bfloat16).
    max_file_bytes = _FILE_TO_MEMORY_RATIO * max_bytes
    weights_bytes = _read(weights_file, max_file_bytes, lora_memory=max_bytes)
    config = parse_config(config_file, config_bytes)
    tensors = _parse_weights(weights_file, weights_bytes)
    weights = _convert_weights(weights_file, config, tensors, layers, model_weight)
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


def _read(file: Path, max_file_bytes: int, *, lora_memory: int) -> bytes:
    """Return the content of one of an adapter's files.

    Args:
        file: the file.
        max_file_bytes: the largest size of the file.
        lora_memory: the setting from which `max_file_bytes` is computed, for the error message. The
            setting limits the memory of all adapters together.

    Raises:
        ModelError: if the file cannot be read or is too large.
    """
    try:
        size = file.stat().st_size
        if size <= max_file_bytes:
            return file.read_bytes()
    except OSError as error:
        # For other errors, such as a lack of permission, there is no hint: the search for one would
        # access the same folder, and pathlib would raise the same error again.
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        hint = _missing_file_hint(file) if is_missing else ""
        raise ModelError(f"{file}: the file cannot be read ({error.strerror}).{hint}") from error
    except ValueError as error:  # for example, the path contains a NUL character
        raise ModelError(f"{str(file)!r} is not a valid path ({error}).") from error
    raise ModelError(
        f"{file}: the file has {size} bytes, but all adapters together may have {lora_memory} "
        "bytes (lora_memory). Raise lora_memory."
    )


def _missing_file_hint(file: Path) -> str:
    """Return a sentence that tells how to remedy the lack of a file."""
    if file.name == _WEIGHTS_FILE and file.with_suffix(".bin").exists():
        return (
            " Load the adapter with the library PEFT, and write it again with"
            " save_pretrained(folder, safe_serialization=True)."
        )
    # If the name of an adapter is not "default", PEFT writes the adapter into a subfolder. The name
    # of the subfolder is the name of the adapter.
    configs = sorted(file.parent.glob(f"*/{_CONFIG_FILE}"))
    if file.name == _CONFIG_FILE and configs:
        return f" Give the folder of one adapter, such as {configs[0].parent}."
    return " Give a folder that the library PEFT wrote."


def _parse_weights(file: Path, content: bytes) -> dict[str, Tensor]:
    """Parse the content of adapter_model.safetensors. Return a dict from tensor names to tensors.

    Raise a ModelError with the name of the file if the content is not in the format safetensors.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{file}: the file is broken ({error}).") from error
    return tensors


def _convert_weights(
    file: Path,
    config: PeftConfig,
    tensors: dict[str, Tensor],
    layers: Mapping[str, LayerSizes],
    model_weight: Tensor,
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
        model_weight: any weight of the model. The matrices get its dtype and its device.

    Raises:
        ModelError: if a tensor does not fit the model.
    """
    weights: dict[str, LayerPair] = {}
    for layer_name, matrices in _matrices_by_layer(file, tensors).items():
        problem = _describe_problem(layer_name, matrices, layers)
        if problem is not None:
            raise ModelError(f"{file}: {layer_name}: {problem}")
        lora_a = matrices["A"].to(model_weight)
        rank = len(lora_a)
        _check_rank(file, config, layer_name, rank)
        scaled_lora_b = matrices["B"].float() * config.scale(layer_name, rank)
        pair = LayerPair(lora_a, scaled_lora_b.to(model_weight))
        are_finite = all(matrix.isfinite().all() for matrix in pair)
        if not are_finite:
            raise ModelError(
                f"{file}: {layer_name}: a number in the matrix lora_A, or in lora_B times the "
                f"scale of the adapter, is too large for the model's type {model_weight.dtype}."
            )
        weights[layer_name] = pair
    return weights


def _describe_problem(
    layer_name: str, matrices: dict[str, Tensor], layers: Mapping[str, LayerSizes]
) -> str | None:
    """Return the reason why the model cannot use the matrices of a layer; None if it can.

    `layers` contains the linear layers of the model that an adapter can change.
    """
    sizes = layers.get(layer_name)
    if sizes is None:
        return _describe_unknown_layer(layer_name, layers)
    return _describe_misfit(matrices, sizes)


def _check_rank(file: Path, config: PeftConfig, layer_name: str, rank: int) -> None:
    """Raise a ModelError if the rank of a layer's weights differs from adapter_config.json.

    In this case, the two files do not belong to the same adapter.

    Args:
        file: the path of the weights.
        config: the content of adapter_config.json.
        layer_name: the name of the layer.
        rank: the number of rows of the layer's matrix lora_A.
    """
    config_rank = config.rank(layer_name)
    if config_rank is not None and config_rank != rank:
        raise ModelError(
            f"{file}: {layer_name}: the matrix lora_A has the rank {rank}, but {config.file} "
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
        ModelError: if a tensor is neither a matrix lora_A nor a matrix lora_B, if a layer has two
            matrices with the same letter, or if a tensor contains NaN, infinity or integers.
    """
    matrices: dict[str, dict[str, Tensor]] = {}
    for tensor_name, tensor in tensors.items():
        match = _MATRIX.fullmatch(tensor_name)
        if match is None:
            raise ModelError(
                f"{file}: the tensor {tensor_name} is neither the lora_A matrix nor the lora_B "
                "matrix of a linear layer, which is not supported. Merge the adapter into the "
                "model."
            )
        # torch implements `isfinite` only for some of the float8 types.
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise ModelError(
                f"{file}: the tensor {tensor_name} must contain finite floating point numbers."
            )
        layer_name, letter = match.groups()
        if letter in matrices.setdefault(layer_name, {}):
            raise ModelError(
                f"{file}: {layer_name}: the file contains two matrices lora_{letter}. Save each "
                "adapter in a folder of its own."
            )
        matrices[layer_name][letter] = tensor
    if not matrices:
        raise ModelError(f"{file}: the file contains no matrices.")
    return matrices


def _describe_unknown_layer(layer_name: str, layers: Iterable[str]) -> str:
    """Return the reason why a layer of an adapter is unknown, and a remedy.

    Versions of transformers have different names for the layers of some models. Example:
    "language_model.model.layers.0.mlp.up_proj" became "model.language_model.layers.0.mlp.up_proj".

    Args:
        layer_name: the name of the layer in the adapter.
        layers: the names of the model's layers that an adapter can change.
    """
    name_in_decoder = _DECODER_LAYER.search(layer_name)
    if name_in_decoder is not None:
        for other in layers:
            if other.endswith(name_in_decoder[0]):
                return (
                    f"the model has no such layer, but has the layer {other}. The adapter may be "
                    "from another version of transformers. Rename the tensors of the adapter, or "
                    f"train it with the installed version {version('transformers')}."
                )
    return (
        "the model has no such linear layer, or the layer cannot have an adapter. Only layers that "
        "compute every token of a step can have one. Merge the adapter into the model, or train it "
        "without this layer."
    )


def _describe_misfit(matrices: dict[str, Tensor], sizes: LayerSizes) -> str | None:
    """Return the reason why the matrices of an adapter do not fit a layer; None if they fit.

    Args:
        matrices: the matrices lora_A (key "A") and lora_B (key "B") of the layer.
        sizes: the sizes of the model's layer.
    """
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
