# SPDX-License-Identifier: Apache-2.0
"""Describes how a checkpoint stores one weight as several tensors.

Example: a checkpoint stores the weight of one layer as these three tensors:

    model.layers.0.mlp.up_proj.qweight     packed integers
    model.layers.0.mlp.up_proj.qzeros      packed integers
    model.layers.0.mlp.up_proj.scales      float16

The layout has main=".qweight" and others=(".qzeros", ".scales"). Its decoder computes the tensor
`model.layers.0.mlp.up_proj.weight`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import IntegerWeight

Decoder = Callable[[Mapping[str, Tensor], torch.dtype], Tensor | IntegerWeight]
"""A function that computes a weight from the tensors of a checkpoint.

The first argument maps the suffix of each tensor to the tensor. The second argument is the data
type of the weight. If the shapes of the tensors do not match, the function raises a ValueError.
"""
Settings = Mapping[str, Any]
"""The field `quantization_config` of a config.json."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes how one weight is stored.

    Attributes:
        main: the suffix of the tensor that contains the quantised numbers.
        others: the suffixes of the other tensors that must exist.
        decode: computes the weight.
        target: the suffix of the weight's name in the model.
        optional: the suffixes of tensors that may be missing.
        main_dtypes: the allowed data types of the main tensor, as named in safetensors files. None
            allows every data type.
        numbers_per_element: the number of weights in one element of the main tensor.
        has_integers: whether the decoder returns an IntegerWeight.
    """

    main: str
    others: tuple[str, ...]
    decode: Decoder
    target: str = ".weight"
    optional: tuple[str, ...] = ()
    main_dtypes: tuple[str, ...] | None = None
    numbers_per_element: float = 1
    has_integers: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """The layouts of one quantisation method.

    Attributes:
        layouts: the layouts, in the order in which they are tried. The first layout whose tensors
            exist is used for a weight.
        ignored: the suffixes of tensors that are not needed. Example: scales of activations.
    """

    layouts: tuple[Layout, ...]
    ignored: tuple[str, ...] = ()


class UnknownVariantError(Exception):
    """Raised if the settings name an unsupported variant of a quantisation method.

    The message completes the sentence "the weights cannot be read, because ...".
    """
