# SPDX-License-Identifier: Apache-2.0
"""The layouts of bitsandbytes checkpoints.

Source: QuantState and dequantize_4bit in bitsandbytes 0.50, bitsandbytes/functional.py.

Weights with 8 bits: weight = integer * SCB / 127.

    weight                                 int8 [out_features, in_features], the integers
    SCB                                    float32 [out_features], the largest absolute weight of
                                           each output

Weights with 4 bits (NF4 and FP4): weight = quant_map[code] * absmax[block].

    weight                                 uint8 [numbers / 2, 1], two codes in each byte; the upper
                                           4 bits contain the first code; the bytes can also be
                                           stored as bfloat16, float16 or float32 numbers
    weight.quant_map                       float32 [16], the number for each code
    weight.absmax                          [blocks], the factor of each block of weights
    weight.quant_state.bitsandbytes__nf4   uint8, a JSON text with the shape of the weight and the
                                           size of a block

With nested quantisation, absmax is quantised, too, and has the type uint8. The factors are then
nested_quant_map[absmax] * nested_absmax[block] + nested_offset.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import PART_NUMBERS, IntegerWeight, unpack_nibbles
from nereid_backend.checkpoints.layout import Format, Layout, Settings

_ABSMAX = ".weight.absmax"
_MAP = ".weight.quant_map"
_NESTED_ABSMAX = ".weight.nested_absmax"
_NESTED_MAP = ".weight.nested_quant_map"
# There are two 4-bit data types, nf4 and fp4. The name of a weight's tensor `quant_state` ends with
# one of these suffixes, depending on the data type of the weight.
_STATE_SUFFIXES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
# The data types of the packed codes, with the number of bytes of one element. The setting
# bnb_4bit_quant_storage selects the data type.
_STORAGE_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}
_MAX_INT8 = 127


def bitsandbytes_format(settings: Settings) -> Format:  # noqa: ARG001 - tensors show the variant
    """Return the layouts of the weights in a bitsandbytes checkpoint.

    A layout lists the tensors of one weight, and contains the function that decodes them. A weight
    with 8 bits has a tensor `.weight` of int8 numbers ("I8"). A weight with 4 bits has a tensor
    `.weight` of one of the types in `_STORAGE_BYTES`.
    """
    eight_bits = Layout(
        main=".weight",
        others=(".SCB",),  # the largest absolute weight of each output
        decode=_decode_eight_bits,
        main_dtypes=("I8",),
        has_integers=True,  # The result of `decode` is integers with scales.
    )
    # For each of the two 4-bit data types, nf4 and fp4, the tensor `quant_state` has a different
    # name.
    four_bits = [
        _four_bit_layout(suffix, storage)
        for suffix in _STATE_SUFFIXES
        for storage in _STORAGE_BYTES
    ]
    # The tensor `.weight_format` is ignored. It contains only a number that selects a memory layout
    # for the kernels of bitsandbytes.
    return Format(layouts=(*four_bits, eight_bits), ignored=(".weight_format",))


def _four_bit_layout(state_suffix: str, storage: str) -> Layout:
    """Return the layout of the weights of one 4-bit data type, either nf4 or fp4.

    Args:
        state_suffix: the suffix of the tensor `quant_state`, which names the data type. Example:
            ".weight.quant_state.bitsandbytes__nf4".
        storage: the data type of the tensor that contains the packed codes, such as "U8".
    """
    return Layout(
        main=".weight",
        others=(_ABSMAX, _MAP, state_suffix),
        decode=partial(_decode_four_bits, state_suffix=state_suffix),
        # These tensors exist only if the scales of the weight are quantised, too.
        optional=(_NESTED_ABSMAX, _NESTED_MAP),
        main_dtypes=(storage,),
        numbers_per_element=2 * _STORAGE_BYTES[storage],  # A byte contains two 4-bit codes.
    )


def _decode_eight_bits(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> IntegerWeight:  # noqa: ARG001
    """Return an 8-bit weight. Each row of the weight is a row of integers, times SCB / 127.

    The tensor SCB contains one number for each row: the row's largest absolute weight. `dtype` is
    not used.
    """
    values = tensors[".weight"]
    scales = tensors[".SCB"].float().unsqueeze(1) / _MAX_INT8
    # Each row of the weight has one scale, so all inputs of a row form one group.
    return IntegerWeight(values, scales, zeros=None, group_size=values.shape[1], bits=8)


def _decode_four_bits(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, state_suffix: str
) -> Tensor:
    """Return a 4-bit weight: weight[i] = quant_map[code[i]] * factor[i // blocksize].

    Args:
        tensors: the tensors of the weight, by suffix. The tensor `.weight` contains the codes, and
            the tensor `quant_map` contains the number that each of the 16 codes represents.
        dtype: the data type of the result.
        state_suffix: the suffix of the tensor quant_state, which contains the shape and the block
            size as JSON.
    """
    state = _read_state(tensors[state_suffix])
    shape = torch.Size(state["shape"])
    block_size = int(state["blocksize"])
    packed_codes = tensors[".weight"].flatten().view(torch.uint8)  # two codes in each byte
    factors = _block_factors(tensors, state)  # one factor for each block of `block_size` weights
    num_decodable = min(2 * len(packed_codes), len(factors) * block_size)
    if shape.numel() > num_decodable:
        raise ValueError(
            f"the packed weight or its factors are too short for the shape {tuple(shape)}"
        )
    number_by_code = tensors[_MAP].float()
    weight = torch.empty(shape.numel(), dtype=dtype)
    # Decode the weight in parts, because float32 numbers for the whole weight would need much
    # memory. `start` and `part_size` are even, because `_read_state` accepts only even block sizes.
    # Therefore, the two codes in a byte always belong to the same part.
    part_size = max(1, PART_NUMBERS // block_size) * block_size
    for start in range(0, len(weight), part_size):
        part = weight[start : start + part_size]
        part_bytes = packed_codes[start // 2 : (start + part_size) // 2]
        codes = unpack_nibbles(part_bytes, high_first=True)[: len(part)]
        block_of_weight = torch.arange(start, start + len(part)) // block_size
        part.copy_(number_by_code[codes.int()] * factors[block_of_weight])
    return weight.view(shape)


def _read_state(content: Tensor) -> dict[str, Any]:
    """Parse the JSON object in a tensor of bytes."""
    state = json.loads(bytes(content.tolist()))
    if not isinstance(state, dict) or int(state["blocksize"]) < 1 or int(state["blocksize"]) % 2:
        raise ValueError("quant_state has no valid blocksize, which must be an even number")
    return state


def _block_factors(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """Return one scale (a factor) for each block of weights, float32 [blocks].

    If the factors are quantised, dequantise them.
    """
    absmax = tensors[_ABSMAX]
    if _NESTED_ABSMAX not in tensors:
        return absmax.float()
    blocks = torch.arange(len(absmax)) // int(state["nested_blocksize"])
    numbers = tensors[_NESTED_MAP].float()[absmax.int()]
    return numbers * tensors[_NESTED_ABSMAX].float()[blocks] + float(state["nested_offset"])
