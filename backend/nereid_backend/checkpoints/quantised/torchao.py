# SPDX-License-Identifier: Apache-2.0
"""The layouts of torchao checkpoints in safetensors files.

Source: flatten_tensor_state_dict in torchao 0.18, torchao/prototype/safetensors, and the tensor
classes in torchao/quantization/quantize_/workflows.

    _weight_qdata       int8 [out_features, in_features] (Int8Tensor, IntxUnpackedToInt8Tensor),
                        float8 [out_features, in_features] (Float8Tensor), or
                        uint8 [out_features, in_features / 2] (Int4Tensor), two signed 4-bit
                        integers in each byte; the low 4 bits contain the first integer
    _weight_scale       [out_features, groups]; for Int4Tensor [groups, out_features]
    _weight_zero_point  the same shape as the scales

weight = (integer - zero) * scale. For Int4Tensor, weight = integer * scale + zero.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import (
    IntegerWeight,
    by_row,
    scale_blocks,
    unpack_nibbles,
)
from nereid_backend.checkpoints.layout import Format, Layout, Settings
from nereid_backend.checkpoints.quantised.fp8 import FLOAT8

_MAIN, _SCALE, _ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
# These tensors contain the scales and zero points of activations. They are ignored, because the
# engine does not quantise activations.
_ACTIVATION_TENSORS = ("._weight_act_quant_scale", "._weight_act_quant_zero_point")


def torchao_format(settings: Settings) -> Format:  # noqa: ARG001 - the tensors show the variant
    """Return the layouts of the weights in a torchao checkpoint.

    A layout lists the tensors of one weight, and contains the function that decodes them. The data
    type of the main tensor, which contains the quantised numbers, shows which layout a weight has.
    """
    int8 = Layout(
        main=_MAIN,
        others=(_SCALE,),
        decode=_decode_int8,
        optional=(_ZERO,),
        main_dtypes=("I8",),
        has_integers=True,  # The result of `decode` is integers with scales.
    )
    float8 = Layout(main=_MAIN, others=(_SCALE,), decode=_decode_float8, main_dtypes=FLOAT8)
    int4 = Layout(
        main=_MAIN,
        others=(_SCALE, _ZERO),
        decode=_decode_int4,
        main_dtypes=("U8",),
        numbers_per_element=2,  # A byte contains two 4-bit integers.
        has_integers=True,
    )
    # The tensors that contain the scales of activations are ignored, because the engine does not
    # quantise activations.
    return Format(layouts=(int8, float8, int4), ignored=_ACTIVATION_TENSORS)


def _decode_int8(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> IntegerWeight:  # noqa: ARG001
    """Convert the tensors of a weight with int8 integers to an IntegerWeight.

    The integers may have only 4 bits (torchao's class IntxUnpackedToInt8Tensor).
    """
    values = tensors[_MAIN]
    num_rows, num_inputs = values.shape
    # The shape is [out_features, groups]. If the file contains one scale for all rows, `by_row`
    # repeats this scale.
    scales = by_row(tensors[_SCALE], num_rows)
    zeros = tensors.get(_ZERO)
    if zeros is not None:
        # An IntegerWeight without zero points takes less memory and computes faster.
        has_nonzero = bool(zeros.any())
        zeros = by_row(zeros, num_rows) if has_nonzero else None
    fits_4_bits = bool(values.min() >= -8) and bool(values.max() <= 7)
    num_groups = scales.shape[1]
    group_size = math.ceil(num_inputs / num_groups)  # The last group may have fewer inputs.
    return IntegerWeight(values, scales, zeros, group_size, bits=4 if fits_4_bits else 8)


def _decode_float8(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Decode 8-bit floating point numbers: weight = number * scale."""
    return scale_blocks(tensors[_MAIN], tensors[_SCALE], dtype)


def _decode_int4(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> IntegerWeight:  # noqa: ARG001
    """Decode the 4-bit integers of a weight (torchao's class Int4Tensor).

    In the checkpoint, weight = integer * scale + zero_point. In an IntegerWeight, weight =
    (integer - zero) * scale. Therefore, zero = -zero_point / scale.
    """
    stored_scales = tensors[_SCALE]
    if stored_scales.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"4-bit weights with scales of {stored_scales.dtype} are not supported")
    values = _unpack_signed_nibbles(tensors[_MAIN])
    scales = stored_scales.T.float()  # [out_features, groups]
    num_inputs = values.shape[1]
    num_groups = scales.shape[1]
    if num_inputs % num_groups != 0:
        raise ValueError(f"{num_inputs} inputs cannot be divided into {num_groups} groups")
    # If all weights of a group equal w, the file may contain the scale 0 and the zero point w:
    # weight = integer * 0 + w. Convert such a group to the scale 1, the zero point -w, and integers
    # that are all 0: weight = (0 - (-w)) * 1 = w.
    group_size = num_inputs // num_groups
    is_constant = scales == 0
    values = values.masked_fill(is_constant.repeat_interleave(group_size, dim=1), 0)
    scales = scales.masked_fill(is_constant, 1.0)
    zero_points = tensors[_ZERO].T.float()  # [out_features, groups]
    return IntegerWeight(values, scales, -zero_points / scales, group_size, bits=4)


def _unpack_signed_nibbles(packed: Tensor) -> Tensor:
    """Unpack the two signed 4-bit integers of each byte. [..., bytes] becomes [..., 2 * bytes].

    Example: the codes 0 to 7 are the integers 0 to 7, and the codes 8 to 15 are the integers -8 to
    -1. The result is int8.
    """
    codes = unpack_nibbles(packed).to(torch.int8)
    return torch.where(codes < 8, codes, codes - 16)
