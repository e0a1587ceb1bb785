# SPDX-License-Identifier: Apache-2.0
"""Counts the weights of a checkpoint. Only the headers of the files are read."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from nereid_backend.checkpoints.checkpoint_folder import GGUF_LINK
from nereid_backend.checkpoints.integer_panels import LazyWeight
from nereid_backend.checkpoints.quantised_tensors import LazyWeight as SafetensorsWeight
from nereid_backend.checkpoints.quantised_tensors import lazy_weights
from nereid_backend.checkpoints.safetensors_files import open_tensors
from nereid_backend.errors import ModelError


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """The size of a checkpoint.

    Attributes:
        num_weights: the number of weights.
        num_integers: the number of weights that the CPU kernels use as integers with scales.
        integer_bytes: the size of these integers and their scales in memory, in bytes.
        num_linear: the number of unquantised weights in linear layers, estimated from the names of
            the weights. For a GGUF file, the number is 0.
    """

    num_weights: int
    num_integers: int
    integer_bytes: int
    num_linear: int


def count_weights(folder: Path) -> WeightCounts:
    """Count the weights of a checkpoint. No weight is read.

    Raises:
        ModelError: if a file is missing or damaged.
        UnsupportedModelError: if the quantisation method is not supported.
    """
    named = _weights(folder)
    weights = named.values()
    integers = [
        weight for name, weight in named.items() if weight.has_integers and _can_be_linear(name)
    ]
    return WeightCounts(
        num_weights=sum(weight.num_elements for weight in weights),
        num_integers=sum(weight.num_elements for weight in integers),
        integer_bytes=sum(weight.integer_bytes for weight in integers),
        num_linear=sum(
            weight.num_elements
            for name, weight in named.items()
            if not weight.has_integers and _is_linear(name, weight)
        ),
    )


def _is_linear(name: str, weight: LazyWeight) -> bool:
    """Return whether a weight in a safetensors file probably belongs to a linear layer."""
    is_matrix = isinstance(weight, SafetensorsWeight) and weight.is_matrix
    return is_matrix and _can_be_linear(name)


def _can_be_linear(name: str) -> bool:
    """Return whether a matrix with this name probably belongs to a linear layer.

    Embeddings and experts are matrices, too, but they do not belong to linear layers. If they are
    quantised, they are dequantised when they are loaded.
    """
    return not any(part in name for part in ("embed", ".experts."))


def _weights(folder: Path) -> dict[str, LazyWeight]:
    """Return the weights of a checkpoint by name. The elements of the weights are not read.

    Only the names and sizes of the weights are used. The number of heads and the data type in this
    function therefore have no effect.
    """
    if (folder / GGUF_LINK).is_file():
        # Only GGUF files need the gguf library.
        from nereid_backend.checkpoints.gguf.gguf_file import read_gguf
        from nereid_backend.checkpoints.gguf.gguf_weights import gguf_weights

        file = read_gguf((folder / GGUF_LINK).resolve())
        return dict(gguf_weights(file, 1, 1, torch.float32))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}  # load_checkpoint reports the damaged file
    if not isinstance(config, dict):
        raise ModelError(
            f"{folder / 'config.json'} must contain a JSON object, but it contains another JSON "
            "value. Download the file again."
        )
    text_config = config.get("text_config") or {}
    settings = config.get("quantization_config") or text_config.get("quantization_config")
    return dict(lazy_weights(open_tensors(folder, for_reading=False), settings, torch.float32))
