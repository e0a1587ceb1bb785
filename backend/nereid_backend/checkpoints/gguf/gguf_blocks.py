# SPDX-License-Identifier: Apache-2.0
"""Unpacks the blocks of GGUF files to integers with scales.

A tensor consists of blocks, and a block has 32 or 256 numbers. ggml-common.h and ggml-quants.c in
the repository of ggml define the blocks. `q` is the integer of a weight. `scale` and `minimum` are
float16 numbers of the block. `sub` and `min` are small integers of each group of 16 or 32 weights.

    Type    Parts of a block, in order                                Weight
    Q4_0    scale, 32 x 4 bits                                        scale * (q - 8)
    Q4_1    scale, minimum, 32 x 4 bits                               scale * q + minimum
    Q5_0    scale, 32 high bits, 32 x 4 bits                          scale * (q - 16)
    Q5_1    scale, minimum, 32 high bits, 32 x 4 bits                 scale * q + minimum
    Q8_0    scale, 32 x int8                                          scale * q
    Q2_K    16 x (sub, min) of 4 bits, 256 x 2 bits, scale, minimum   see below
    Q3_K    256 high bits, 256 x 2 bits, 16 x sub of 6 bits, scale    scale * sub * (q - 4)
    Q4_K    scale, minimum, 8 x (sub, min) of 6 bits, 256 x 4 bits    see below
    Q5_K    as Q4_K, with 256 high bits before the 4-bit numbers      see below
    Q6_K    256 x 4 bits, 256 x 2 high bits, 16 x sub of int8, scale  scale * sub * (q - 32)
    IQ4_NL  scale, 32 x 4 bits                                        scale * _LEVELS[q]
    IQ4_XS  scale, 8 x sub of 6 bits, 256 x 4 bits                    scale * sub * _LEVELS[q]

A weight of Q2_K, Q4_K or Q5_K is scale * sub * q - minimum * min.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import IntegerWeight

# The 16 numbers that the integers of IQ4_NL and IQ4_XS select, from ggml-common.h.
_LEVELS = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
)


def _read_float16(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at byte `start` of each block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _as_int8(blocks: Tensor) -> Tensor:
    """Return unsigned bytes as signed integers (255 becomes -1), in the same shape."""
    return blocks.contiguous().view(torch.int8)


def _unpack_4_bit(packed: Tensor, run_length: int) -> Tensor:
    """Return the 4-bit integers of bytes, [blocks, 2 * bytes].

    Each run of `run_length` bytes contains `2 * run_length` integers: first the low 4 bits of all
    its bytes, then the high 4 bits. Example: with run_length=2, the bytes [0x31, 0x42] contain
    [1, 2, 3, 4].
    """
    runs = packed.reshape(len(packed), -1, 1, run_length)
    return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)


def _unpack_2_bit(packed: Tensor) -> Tensor:
    """Return the 2-bit integers of bytes, [blocks, 4 * bytes].

    Each run of 32 bytes contains 128 integers: first the lowest 2 bits of all its bytes, then the
    next 2 bits, and so on.
    """
    runs = packed.reshape(len(packed), -1, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    return ((runs >> shifts) & 3).flatten(1)


def _unpack_bit_planes(packed: Tensor) -> Tensor:
    """Return one bit for each of the 256 weights, 0 or 1, [blocks, 256].

    The bit g of the byte i belongs to the weight 32 * g + i.
    """
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    return ((packed.unsqueeze(1) >> shifts) & 1).flatten(1)


def _unpack_1_bit(packed: Tensor) -> Tensor:
    """Return the bits of bytes, 0 or 1, [blocks, 8 * bytes]. The lowest bit of a byte is first."""
    return ((packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _weight_with_middle(
    values: Tensor, scales: Tensor, num_rows: int, *, middle: int, bits: int
) -> IntegerWeight:
    """Return the weights, which are scale * (value - middle)."""
    centred = values.view(num_rows, -1).to(torch.int8) - middle
    scales = scales.view(num_rows, -1)
    return IntegerWeight(centred, scales, None, centred.shape[1] // scales.shape[1], bits)


def _weight_with_minimums(
    values: Tensor, scales: Tensor, minimums: Tensor, num_rows: int, *, bits: int
) -> IntegerWeight:
    """Return scale * value - minimum. Each group of weights has a scale and a minimum."""
    values, scales = values.view(num_rows, -1), scales.view(num_rows, -1)
    group_size = values.shape[1] // scales.shape[1]
    is_constant = scales == 0
    if is_constant.any():
        # If the scale of a group is 0, all weights of the group equal -minimum. An IntegerWeight
        # represents these weights exactly with the scale 1 and with integers of 0.
        groups = is_constant.repeat_interleave(group_size, dim=1)
        values = values.masked_fill(groups, 0)
        scales = scales.masked_fill(is_constant, 1.0)
    # The file defines weight = scale * q - minimum. An IntegerWeight is (q - zero) * scale. The two
    # are equal if zero = minimum / scale.
    zeros = minimums.view(num_rows, -1) / scales
    return IntegerWeight(values, scales, zeros, group_size, bits)


def _decode_q8_0(blocks: Tensor, num_rows: int) -> IntegerWeight:
    values = _as_int8(blocks[:, 2:])
    return _weight_with_middle(values, _read_float16(blocks, 0), num_rows, middle=0, bits=8)


def _decode_q4_0(blocks: Tensor, num_rows: int) -> IntegerWeight:
    return _weight_with_middle(
        _unpack_4_bit(blocks[:, 2:], 16), _read_float16(blocks, 0), num_rows, middle=8, bits=4
    )


def _decode_q4_1(blocks: Tensor, num_rows: int) -> IntegerWeight:
    values = _unpack_4_bit(blocks[:, 4:], 16)
    return _weight_with_minimums(
        values, _read_float16(blocks, 0), -_read_float16(blocks, 2), num_rows, bits=4
    )


def _decode_q5_0(blocks: Tensor, num_rows: int) -> IntegerWeight:
    values = _unpack_4_bit(blocks[:, 6:], 16) | (_unpack_1_bit(blocks[:, 2:6]) << 4)
    return _weight_with_middle(values, _read_float16(blocks, 0), num_rows, middle=16, bits=8)


def _decode_q5_1(blocks: Tensor, num_rows: int) -> IntegerWeight:
    values = _unpack_4_bit(blocks[:, 8:], 16) | (_unpack_1_bit(blocks[:, 4:8]) << 4)
    return _weight_with_minimums(
        values, _read_float16(blocks, 0), -_read_float16(blocks, 2), num_rows, bits=8
    )


def _decode_q2_k(blocks: Tensor, num_rows: int) -> IntegerWeight:
    pairs = blocks[:, :16]
    scales = _read_float16(blocks, 80) * (pairs & 15)
    minimums = _read_float16(blocks, 82) * (pairs >> 4)
    return _weight_with_minimums(
        _unpack_2_bit(blocks[:, 16:80]), scales, minimums, num_rows, bits=4
    )


def _decode_q3_k(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Convert blocks of Q3_K.

    The low 4 bits of the 16 numbers `sub` are in 8 bytes. The high 2 bits are in 4 bytes.
    """
    values = _unpack_2_bit(blocks[:, 32:96]) | (_unpack_bit_planes(blocks[:, :32]) << 2)
    low, high = _unpack_4_bit(blocks[:, 96:104], 8), blocks[:, 104:108].unsqueeze(1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    parts = low | (((high >> shifts) & 3).flatten(1) << 4)
    scales = _read_float16(blocks, 108) * (parts.float() - 32)
    return _weight_with_middle(values, scales, num_rows, middle=4, bits=4)


def _decode_q4_k(blocks: Tensor, num_rows: int) -> IntegerWeight:
    return _weight_with_minimums(
        _unpack_4_bit(blocks[:, 16:], 32), *_read_6_bit_pairs(blocks), num_rows=num_rows, bits=4
    )


def _decode_q5_k(blocks: Tensor, num_rows: int) -> IntegerWeight:
    values = _unpack_4_bit(blocks[:, 48:], 32) | (_unpack_bit_planes(blocks[:, 16:48]) << 4)
    return _weight_with_minimums(values, *_read_6_bit_pairs(blocks), num_rows=num_rows, bits=8)


def _decode_q6_k(blocks: Tensor, num_rows: int) -> IntegerWeight:
    values = _unpack_4_bit(blocks[:, :128], 64) | (_unpack_2_bit(blocks[:, 128:192]) << 4)
    scales = _read_float16(blocks, 208) * _as_int8(blocks[:, 192:208])
    return _weight_with_middle(values, scales, num_rows, middle=32, bits=8)


def _decode_iq4_nl(blocks: Tensor, num_rows: int) -> IntegerWeight:
    values = _LEVELS[_unpack_4_bit(blocks[:, 2:], 16).int()]
    return _weight_with_middle(values, _read_float16(blocks, 0), num_rows, middle=0, bits=8)


def _decode_iq4_xs(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Convert blocks of IQ4_XS.

    Bytes 2 and 3 contain the high 2 bits of the 8 numbers `sub`. The low 4 bits are in the next 4
    bytes.
    """
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = ((blocks[:, 2:4].unsqueeze(2) >> shifts) & 3).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    scales = _read_float16(blocks, 0) * ((low | (high << 4)).float() - 32)
    values = _LEVELS[_unpack_4_bit(blocks[:, 8:], 16).int()]
    return _weight_with_middle(values, scales, num_rows, middle=0, bits=8)


def _read_6_bit_pairs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minimums of the groups of Q4_K and Q5_K, [blocks, 8] each.

    The bytes a to l of a block contain the numbers `sub` and `min` of 8 groups. The numbers `sub`
    of groups 0 to 3 are the low 6 bits of a to d, and the numbers `min` are the low 6 bits of e to
    h. For groups 4 to 7, the low 4 bits of `sub` are the low 4 bits of i to l, and the upper 2 bits
    of `sub` are the upper 2 bits of a to d. The numbers `min` of these groups are the high 4 bits
    of i to l and the upper 2 bits of e to h.
    """
    a_to_d, e_to_h, i_to_l = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    group_scales = torch.cat((a_to_d & 63, (i_to_l & 15) | ((a_to_d >> 6) << 4)), dim=1)
    group_minimums = torch.cat((e_to_h & 63, (i_to_l >> 4) | ((e_to_h >> 6) << 4)), dim=1)
    return _read_float16(blocks, 0) * group_scales, _read_float16(blocks, 2) * group_minimums


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks whose integers the CPU kernels can use.

    Attributes:
        decode: unpacks blocks. The arguments are the blocks of a weight, uint8 [blocks, bytes of a
            block], and the number of rows of the weight.
        bits: the number of bits of an integer in memory, 4 or 8.
        group_size: the number of weights with the same scale.
        has_minimums: whether the groups also have minimums.
    """

    decode: Callable[[Tensor, int], IntegerWeight]
    bits: int
    group_size: int
    has_minimums: bool = False

    @property
    def bytes_per_weight(self) -> float:
        """The memory in bytes of one weight, including its share of the scales and minimums."""
        numbers_per_group = 2 if self.has_minimums else 1
        return self.bits / 8 + 2 * numbers_per_group / self.group_size


BLOCK_TYPES = {
    "Q4_0": BlockType(_decode_q4_0, 4, 32),
    "Q4_1": BlockType(_decode_q4_1, 4, 32, has_minimums=True),
    "Q5_0": BlockType(_decode_q5_0, 8, 32),
    "Q5_1": BlockType(_decode_q5_1, 8, 32, has_minimums=True),
    "Q8_0": BlockType(_decode_q8_0, 8, 32),
    "Q2_K": BlockType(_decode_q2_k, 4, 16, has_minimums=True),
    "Q3_K": BlockType(_decode_q3_k, 4, 16),
    "Q4_K": BlockType(_decode_q4_k, 4, 32, has_minimums=True),
    "Q5_K": BlockType(_decode_q5_k, 8, 32, has_minimums=True),
    "Q6_K": BlockType(_decode_q6_k, 8, 16),
    "IQ4_NL": BlockType(_decode_iq4_nl, 8, 32),
    "IQ4_XS": BlockType(_decode_iq4_xs, 8, 32),
}
