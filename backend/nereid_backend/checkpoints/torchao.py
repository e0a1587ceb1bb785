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

from collections.abc import Mapping

import torch
from torch import Tensor

from nereid_backend.checkpoints.fp8 import FLOAT8
from nereid_backend.checkpoints.integer_weight import (
    IntegerWeight,
    by_row,
    scale_blocks,
    unpack_nibbles,
)
from nereid_backend.checkpoints.layout import Format, Layout, Settings

_MAIN, _SCALE, _ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"


def torchao_format(settings: Settings) -> Format:  # noqa: ARG001 - the tensors show the variant
    """Return the layouts of a torchao checkpoint."""
    return Format(
        layouts=(
            Layout(
                main=_MAIN,
                others=(_SCALE,),
                decode=_decode_int8,
                optional=(_ZERO,),
                main_dtypes=("I8",),
                has_integers=True,
            ),
            Layout(main=_MAIN, others=(_SCALE,), decode=_decode_float8, main_dtypes=FLOAT8),
            Layout(
                main=_MAIN,
                others=(_SCALE, _ZERO),
                decode=_decode_int4,
                main_dtypes=("U8",),
                numbers_per_element=2,
                has_integers=True,
            ),
        ),
        ignored=("._weight_act_quant_scale", "._weight_act_quant_zero_point"),
    )


def _decode_int8(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> IntegerWeight:  # noqa: ARG001
    values = tensors[_MAIN]
    scales = by_row(tensors[_SCALE], len(values))
    zeros = tensors.get(_ZERO)
    if zeros is not None:
        zeros = by_row(zeros, len(values)) if bool(zeros.any()) else None
    is_small = bool(values.min() >= -8) and bool(values.max() <= 7)
    group_size = -(-values.shape[1] // scales.shape[1])
    return IntegerWeight(values, scales, zeros, group_size, bits=4 if is_small else 8)


def _decode_float8(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    return scale_blocks(tensors[_MAIN], tensors[_SCALE], dtype)


def _decode_int4(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> IntegerWeight:  # noqa: ARG001
    """Decode an Int4Tensor.

    In the checkpoint, weight = integer * scale + zero. In an IntegerWeight, weight = (integer -
    zero) * scale. The zeros are therefore converted.
    """
    if tensors[_SCALE].dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"4-bit weights with scales of {tensors[_SCALE].dtype} are not supported")
    nibbles = unpack_nibbles(tensors[_MAIN]).to(torch.int8)
    # The integers are signed: the codes 8 to 15 are the integers -8 to -1.
    values = ((nibbles ^ 8) - 8).to(torch.int8)
    scales = tensors[_SCALE].T.float()  # [out_features, groups]
    if values.shape[1] % scales.shape[1]:
        raise ValueError(
            f"{values.shape[1]} inputs cannot be divided into {scales.shape[1]} groups"
        )
    # If all weights of a group have the same value w, the file contains the scale 0 and the zero
    # point w. An IntegerWeight represents w with the scale 1 and the zero point -w.
    divisors = torch.where(scales == 0, 1.0, scales)
    zeros = -tensors[_ZERO].T.float() / divisors
    return IntegerWeight(values, divisors, zeros, values.shape[1] // scales.shape[1], bits=4)
