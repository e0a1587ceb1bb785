# SPDX-License-Identifier: Apache-2.0
"""The layout of MXFP4 checkpoints.

MXFP4 weights are 4-bit floating-point numbers. Each group of 32 numbers has one exponent.

Sources: the OCP Microscaling Formats specification 1.0, section 5.3, and
convert_moe_packed_tensors in transformers 5.23, integrations/mxfp4.py.

    gate_up_proj_blocks  uint8 [experts, out_features, groups, 16], two numbers in each byte; the
                         low 4 bits contain the first number
    gate_up_proj_scales  uint8 [experts, out_features, groups], exponent + 127

In the model, the parameter is transposed: gate_up_proj [experts, in_features, out_features].
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import unpack_nibbles
from nereid_backend.checkpoints.layout import Format, Layout, Settings

# The file stores the sum of each exponent and `_EXPONENT_BIAS`. Example: the exponent -2 is stored
# as 125.
_EXPONENT_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT4_VALUES = (*_POSITIVE, *(-number for number in _POSITIVE))
"""The values of the 16 codes of a 4-bit floating-point number (e2m1)."""


def mxfp4_format(settings: Settings) -> Format:  # noqa: ARG001 - the layout has no variants
    """Return the layout of an MXFP4 checkpoint."""
    layout = Layout("_blocks", ("_scales",), _decode_mxfp4, target="", numbers_per_element=2)
    return Format((layout,))


def float4_numbers(packed: Tensor) -> Tensor:
    """Convert packed 4-bit codes to float32 numbers. [..., bytes] becomes [..., 2 * bytes]."""
    return torch.tensor(FLOAT4_VALUES)[unpack_nibbles(packed).long()]


def _decode_mxfp4(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Convert the MXFP4 weights of some experts to floating-point numbers of the type `dtype`.

    The tensor `_blocks` contains 4-bit numbers, and the tensor `_scales` contains exponent +
    _EXPONENT_BIAS for each group of 32 numbers: weight = number * 2 ** exponent. The weight of each
    expert is transposed, so the result has the shape [experts, in_features, out_features].
    """
    blocks = tensors["_blocks"]  # [experts, out_features, groups, 16], two numbers in each byte
    scales = tensors["_scales"]  # [experts, out_features, groups]
    if blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"the scales have the shape {tuple(scales.shape)}, but blocks of the shape "
            f"{tuple(blocks.shape)} need scales of the shape {tuple(blocks.shape[:-1])}"
        )
    num_experts, out_features, num_groups, group_bytes = blocks.shape
    in_features = num_groups * group_bytes * 2
    weight = torch.empty(num_experts, in_features, out_features, dtype=dtype)
    for packed, stored_exponents, result in zip(blocks, scales, weight, strict=True):
        factors = (stored_exponents.float() - _EXPONENT_BIAS).exp2().unsqueeze(-1)
        numbers = float4_numbers(packed) * factors  # [out_features, groups, 32]
        result.copy_(numbers.flatten(1).T)
    return weight
