# SPDX-License-Identifier: Apache-2.0
"""The layouts of torchao's tensors in safetensors files.

Source: flatten_tensor_state_dict in torchao 0.18, torchao/prototype/safetensors, and the tensor
classes in torchao/quantization/quantize_/workflows.

    _weight_qdata       int8 [out_features, in_features] (Int8Tensor, IntxUnpackedToInt8Tensor),
                        float8 [out_features, in_features] (Float8Tensor), or
                        uint8 [out_features, in_features / 2], two signed 4-bit integers in a byte,
                        the first one in the lower half (Int4Tensor)
    _weight_scale       [out_features, groups]; for Int4Tensor [groups, out_features]
    _weight_zero_point  the shape of the scales

weight = (integer - zero) * scale. For Int4Tensor, weight = integer * scale + zero.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nereid_backend.checkpoints.fp8 import FLOAT8
from nereid_backend.checkpoints.integer_weight import IntegerWeight, scale_blocks, unpack_nibbles
from nereid_backend.checkpoints.layout import Format, Layout, Settings

_MAIN, _SCALE, _ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"


def torchao_format(settings: Settings) -> Format:  # noqa: ARG001 - the tensors show the variant
    """Return the layouts of a torchao checkpoint."""
    return Format(
        (
            Layout(
                _MAIN,
                (_SCALE,),
                _decode_int8,
                optional=(_ZERO,),
                main_dtypes=("I8",),
                has_integers=True,
            ),
            Layout(_MAIN, (_SCALE,), _decode_float8, main_dtypes=FLOAT8),
            Layout(
                _MAIN,
                (_SCALE, _ZERO),
                _decode_int4,
                main_dtypes=("U8",),
                numbers_per_element=2,
                has_integers=True,
            ),
        ),
        ("._weight_act_quant_scale", "._weight_act_quant_zero_point"),
    )


def _decode_int8(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> IntegerWeight:  # noqa: ARG001
    values = tensors[_MAIN]
    scales = _by_row(tensors[_SCALE], len(values))
    zeros = tensors.get(_ZERO)
    if zeros is not None:
        zeros = _by_row(zeros, len(values)) if bool(zeros.any()) else None
    is_small = bool(values.min() >= -8) and bool(values.max() <= 7)
    group_size = -(-values.shape[1] // scales.shape[1])
    return IntegerWeight(values, scales, zeros, group_size, bits=4 if is_small else 8)


def _by_row(of_groups: Tensor, num_rows: int) -> Tensor:
    """Return scales or zeros as [num_rows, groups]; one number is repeated for all rows."""
    of_groups = of_groups if of_groups.dim() == 2 else of_groups.reshape(-1, 1)
    return of_groups.expand(num_rows, -1)


def _decode_float8(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return scale_blocks(tensors[_MAIN], tensors[_SCALE], dtype)


def _decode_int4(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> IntegerWeight:  # noqa: ARG001
    scales = tensors[_SCALE]
    if scales.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"4-bit weights with scales of {scales.dtype} are not supported")
    nibbles = unpack_nibbles(tensors[_MAIN]).to(torch.int8)
    values = ((nibbles ^ 8) - 8).to(torch.int8)
    scales = scales.T.float()
    if values.shape[1] % scales.shape[1]:
        raise ValueError(
            f"{values.shape[1]} inputs cannot be divided into {scales.shape[1]} groups"
        )
    # A group of equal weights has the scale 0, and the zero contains the weight.
    divisors = torch.where(scales == 0, 1.0, scales)
    zeros = -tensors[_ZERO].T.float() / divisors
    return IntegerWeight(values, divisors, zeros, values.shape[1] // scales.shape[1], bits=4)
