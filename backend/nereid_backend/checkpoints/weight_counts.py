# SPDX-License-Identifier: Apache-2.0
"""Counts the weights of a checkpoint. Only the headers of the files are read."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nereid_backend.checkpoints.checkpoint_folder import GGUF_LINK
from nereid_backend.checkpoints.integer_panels import LazyWeight
from nereid_backend.checkpoints.quantised_tensors import LazyWeight as SafetensorsWeight
from nereid_backend.checkpoints.quantised_tensors import lazy_weights, settings_in
from nereid_backend.checkpoints.safetensors_files import open_tensors
from nereid_backend.errors import ModelError

# The weights are not read, so the data type to which they would be converted has no effect.
_ANY_DTYPE = torch.float32


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """The size of a checkpoint. In this class, "weight" means one number of a weight matrix.

    Attributes:
        num_weights: the number of weights.
        num_quantised_linear: the number of quantised weights in linear layers. The CPU kernels use
            them as integers with scales.
        integer_bytes: the size of these integers and their scales in memory, in bytes.
        num_unquantised_linear: the number of unquantised weights in linear layers, estimated from
            the names of the weights. For a GGUF file, the number is 0.
    """

    num_weights: int
    num_quantised_linear: int
    integer_bytes: int
    num_unquantised_linear: int


def count_weights(folder: Path) -> WeightCounts:
    """Count the weights of a checkpoint, to estimate its size in memory. No weight is read.

    Weights of linear layers are counted separately, because only these weights can stay quantised
    in memory. All other weights are dequantised when they are loaded.

    Raises:
        ModelError: if a file is missing or damaged.
        UnsupportedModelError: if the quantisation method is not supported.
    """
    weights = _weights(folder)
    # The model is not created, so only the name of a weight shows whether it can belong to a linear
    # layer. Vectors, such as the weights of norms, are neither quantised nor matrices, so the two
    # lists below contain no vectors.
    candidates = [weight for name, weight in weights.items() if _can_be_linear(name)]
    quantised_linear = [weight for weight in candidates if weight.has_integers]
    unquantised_linear = [weight for weight in candidates if _is_unquantised_matrix(weight)]
    return WeightCounts(
        num_weights=_num_elements(weights.values()),
        num_quantised_linear=_num_elements(quantised_linear),
        integer_bytes=sum(weight.integer_bytes for weight in quantised_linear),
        num_unquantised_linear=_num_elements(unquantised_linear),
    )


def _num_elements(weights: Iterable[LazyWeight]) -> int:
    """Return the total number of elements of some weights."""
    return sum(weight.num_elements for weight in weights)


def _is_unquantised_matrix(weight: LazyWeight) -> bool:
    """Return whether a weight is an unquantised matrix in a safetensors file."""
    return isinstance(weight, SafetensorsWeight) and weight.is_unquantised_matrix


def _can_be_linear(name: str) -> bool:
    """Return whether a matrix with the name `name` probably belongs to a linear layer.

    Embeddings and experts are matrices, too, but they do not belong to linear layers. If they are
    quantised, they are dequantised when they are loaded.
    """
    return not any(part in name for part in ("embed", ".experts."))


def _weights(folder: Path) -> dict[str, LazyWeight]:
    """Return the weights of a checkpoint by name. The elements of the weights are not read."""
    gguf_link = folder / GGUF_LINK
    if gguf_link.is_file():
        return _gguf_weights(gguf_link.resolve())
    config = _read_config(folder)
    # In a multimodal model, the field `quantization_config` may be in the config of the text model
    # instead of the main config.
    text_config = config.get("text_config")
    settings = settings_in(config)
    if not settings and isinstance(text_config, dict):
        settings = settings_in(text_config)
    stored = open_tensors(folder, for_reading=False)
    return dict(lazy_weights(stored, settings, _ANY_DTYPE))


def _gguf_weights(path: Path) -> dict[str, LazyWeight]:
    """Return the weights of a GGUF file by name.

    Only the names and sizes of the weights are used, so the numbers of heads have no effect.
    """
    # Only GGUF files need the gguf library.
    from nereid_backend.checkpoints.gguf.gguf_file import read_gguf
    from nereid_backend.checkpoints.gguf.gguf_weights import gguf_weights

    return dict(gguf_weights(read_gguf(path), num_heads=1, num_kv_heads=1, dtype=_ANY_DTYPE))


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json; {} if the file is missing or contains no valid JSON.

    Raises:
        ModelError: if the file contains another JSON value than an object.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        # The weights can be counted without config.json. If the file is missing or damaged,
        # `load_checkpoint` raises an error later, when it loads the checkpoint.
        return {}
    if not isinstance(config, dict):
        raise ModelError(
            f"{file} must contain a JSON object, but it contains another JSON value. Download the "
            "file again."
        )
    return config
