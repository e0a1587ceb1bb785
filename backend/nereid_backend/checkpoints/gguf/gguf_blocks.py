# SPDX-License-Identifier: Apache-2.0
"""Unpacks the blocks of GGUF files to integers with scales.

A tensor consists of blocks of 32 or 256 weights. The files ggml-common.h and ggml-quants.c in the
repository of ggml define the blocks. In the following table, `q` is the integer of a weight.
`scale` and `minimum` are float16 numbers, one for each block. `sub` and `min` are small integers,
one for each group of 16 or 32 weights.

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

# The 16 numbers that the integers of IQ4_NL and IQ4_XS represent (source: ggml-common.h).
_LEVELS = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
)


def _read_float16(blocks: Tensor, start: int) -> Tensor:
    """Read a float16 number from the bytes `start` and `start + 1` of each block.

    The result is float32 [blocks, 1].
    """
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _as_int8(blocks: Tensor) -> Tensor:
    """Reinterpret unsigned bytes as signed integers. Example: 255 becomes -1."""
    return blocks.contiguous().view(torch.int8)


def _unpack_4_bit(packed: Tensor, run_length: int) -> Tensor:
    """Unpack 4-bit integers. [blocks, bytes] becomes [blocks, 2 * bytes].

    Each run of `run_length` bytes contains `2 * run_length` integers. The first half of the
    integers are the low 4 bits of these bytes, and the second half are the high 4 bits. Example:
    with run_length=2, the bytes [0x31, 0x42] contain the integers [1, 2, 3, 4].
    """
    runs = packed.reshape(len(packed), -1, 1, run_length)
    return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)


def _unpack_2_bit(packed: Tensor, run_length: int) -> Tensor:
    """Unpack 2-bit integers. [blocks, bytes] becomes [blocks, 4 * bytes].

    Each run of `run_length` bytes contains `4 * run_length` integers. The first quarter of the
    integers are the lowest 2 bits of these bytes, the next quarter are the next 2 bits, and so on.
    """
    runs = packed.reshape(len(packed), -1, 1, run_length)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    return ((runs >> shifts) & 3).flatten(1)


def _unpack_bit_planes(packed: Tensor) -> Tensor:
    """Unpack one bit for each of the 256 weights in a block. [blocks, 32] becomes [blocks, 256].

    Bit g of byte i belongs to weight 32 * g + i.
    """
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    return ((packed.unsqueeze(1) >> shifts) & 1).flatten(1)


def _unpack_1_bit(packed: Tensor) -> Tensor:
    """Unpack the bits of bytes, from the lowest bit to the highest bit of each byte.

    [blocks, bytes] becomes [blocks, 8 * bytes].
    """
    return ((packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _weight_with_zero_point(
    values: Tensor, scales: Tensor, num_rows: int, *, zero_point: int, bits_in_memory: int
) -> IntegerWeight:
    """Create an IntegerWeight: weight = scale * (value - zero_point).

    `bits_in_memory` is 4, 6 or 8, because the CPU kernels support only these sizes. The differences
    `value - zero_point` must fit into signed integers of this size.
    """
    # Every value fits into int8: values of less than 8 bits are at most 63, and values of 8 bits
    # already are int8.
    differences = values.view(num_rows, -1).to(torch.int8) - zero_point
    scales = scales.view(num_rows, -1)
    group_size = differences.shape[1] // scales.shape[1]
    return IntegerWeight(
        differences, scales, zeros=None, group_size=group_size, bits=bits_in_memory
    )


def _weight_with_minimums(
    values: Tensor, scales: Tensor, minimums: Tensor, num_rows: int, *, bits_in_memory: int
) -> IntegerWeight:
    """Create an IntegerWeight. Each of its weights equals `scale * value - minimum`.

    Each group of consecutive weights has one scale and one minimum. An IntegerWeight has a zero
    point in place of the minimum: scale * value - minimum = (value - minimum / scale) * scale, so
    the zero point is minimum / scale. `bits_in_memory` is the size of a value, 4, 6 or 8, because
    the CPU kernels support only these sizes.
    """
    values = values.view(num_rows, -1)  # [rows, inputs]
    scales = scales.view(num_rows, -1)  # [rows, groups]
    group_size = values.shape[1] // scales.shape[1]
    is_scale_zero = scales == 0
    if is_scale_zero.any():
        # If the scale of a group is 0, all weights of the group equal `-minimum`. The IntegerWeight
        # represents these weights with the integer 0, the scale 1 and the zero point `minimum`: (0
        # - minimum) * 1 = -minimum.
        values_of_groups = is_scale_zero.repeat_interleave(group_size, dim=1)
        values = values.masked_fill(values_of_groups, 0)
        scales = scales.masked_fill(is_scale_zero, 1.0)
    zeros = minimums.view(num_rows, -1) / scales
    return IntegerWeight(values, scales, zeros, group_size, bits_in_memory)


def _decode_q8_0(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of Q8_0: weight = scale * q.

    Bytes 0 and 1 contain the scale, float16. The other 32 bytes contain the integers q, int8.
    """
    values = _as_int8(blocks[:, 2:])
    return _weight_with_zero_point(
        values, _read_float16(blocks, 0), num_rows, zero_point=0, bits_in_memory=8
    )


def _decode_q4_0(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of Q4_0: weight = scale * (q - 8).

    Bytes 0 and 1 contain the scale, float16. The other 16 bytes contain 32 integers q of 4 bits.
    """
    return _weight_with_zero_point(
        _unpack_4_bit(blocks[:, 2:], run_length=16),
        _read_float16(blocks, 0),
        num_rows,
        zero_point=8,
        bits_in_memory=4,
    )


def _decode_q4_1(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of Q4_1: weight = scale * q + offset.

    Bytes 0 to 3 contain the scale and the offset, float16. The other 16 bytes contain 32 integers q
    of 4 bits.
    """
    values = _unpack_4_bit(blocks[:, 4:], run_length=16)
    return _weight_with_minimums(
        values, _read_float16(blocks, 0), -_read_float16(blocks, 2), num_rows, bits_in_memory=4
    )


def _decode_q5_0(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of Q5_0: weight = scale * (q - 16).

    Bytes 0 and 1 contain the scale, float16. Bytes 2 to 5 contain the highest bits of the 32
    integers q, and the other 16 bytes contain the low 4 bits of the integers.
    """
    values = _unpack_4_bit(blocks[:, 6:], run_length=16) | (_unpack_1_bit(blocks[:, 2:6]) << 4)
    return _weight_with_zero_point(
        values, _read_float16(blocks, 0), num_rows, zero_point=16, bits_in_memory=6
    )


def _decode_q5_1(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of Q5_1: weight = scale * q + offset.

    Bytes 0 to 3 contain the scale and the offset, float16. Bytes 4 to 7 contain the highest bits of
    the 32 integers q, and the other 16 bytes contain the low 4 bits of the integers.
    """
    values = _unpack_4_bit(blocks[:, 8:], run_length=16) | (_unpack_1_bit(blocks[:, 4:8]) << 4)
    return _weight_with_minimums(
        values, _read_float16(blocks, 0), -_read_float16(blocks, 2), num_rows, bits_in_memory=6
    )


def _decode_q2_k(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of Q2_K: weight = scale * q - minimum.

    A block has 256 weights in 16 groups of 16. The scale of a group is block_scale * group_scale,
    and the minimum is block_minimum * group_minimum. A block contains these bytes:

        0 to 15    the low half of byte i is the scale of group i, and the high half its minimum
        16 to 79   the integers q of 2 bits
        80 to 81   the block scale, float16
        82 to 83   the block minimum, float16

    In memory, the integers have 4 bits, the smallest size that the CPU kernels support.
    """
    group_scales, group_minimums = blocks[:, :16] & 15, blocks[:, :16] >> 4
    values = _unpack_2_bit(blocks[:, 16:80], run_length=32)
    scales = _read_float16(blocks, 80) * group_scales
    minimums = _read_float16(blocks, 82) * group_minimums
    return _weight_with_minimums(values, scales, minimums, num_rows, bits_in_memory=4)


def _decode_q3_k(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of Q3_K: weight = block_scale * (group_scale - 32) * (q - 4).

    A block has 256 weights in 16 groups of 16. A block contains these bytes. In each line, byte i
    is counted from the first byte of the line.

        0 to 31      the high bits of the integers q: bit j of byte i belongs to q[32 * j + i]
        32 to 63     the low 2 bits of q[0] to q[127]: the bits 2 * j and 2 * j + 1 of byte i belong
                     to q[32 * j + i]
        64 to 95     the low 2 bits of q[128] to q[255], in the same order
        96 to 103    the low 4 bits of the group scales: the low half of byte i belongs to group i,
                     and the high half belongs to group i + 8
        104 to 107   the high 2 bits of the group scales: the bits 2 * j and 2 * j + 1 of byte i
                     belong to group 4 * j + i
        108 to 109   the block scale, float16
    """
    high_bits = _unpack_bit_planes(blocks[:, :32])
    low_2_bits = _unpack_2_bit(blocks[:, 32:96], run_length=32)
    values = low_2_bits | (high_bits << 2)
    scale_low_4_bits = _unpack_4_bit(blocks[:, 96:104], run_length=8)
    scale_high_2_bits = _unpack_2_bit(blocks[:, 104:108], run_length=4)
    group_scales = scale_low_4_bits | (scale_high_2_bits << 4)
    scales = _read_float16(blocks, 108) * (group_scales.float() - 32)  # [blocks, 16]
    # The differences `q - 4` are integers from -4 to 3, which fit into 4 bits.
    return _weight_with_zero_point(values, scales, num_rows, zero_point=4, bits_in_memory=4)


def _decode_q4_k(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of Q4_K: weight = scale * q - minimum.

    A block has 256 weights in 8 groups of 32. Bytes 0 to 15 contain the scales and the minimums,
    and the other 128 bytes contain the integers q of 4 bits.
    """
    return _weight_with_minimums(
        _unpack_4_bit(blocks[:, 16:], run_length=32),
        *_read_6_bit_pairs(blocks),
        num_rows=num_rows,
        bits_in_memory=4,
    )


def _decode_q5_k(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of Q5_K: weight = scale * q - minimum.

    A block has 256 weights in 8 groups of 32. Bytes 0 to 15 contain the scales and the minimums,
    bytes 16 to 47 the highest bits of the integers q, and bytes 48 to 175 their low 4 bits.
    """
    low_bits = _unpack_4_bit(blocks[:, 48:], run_length=32)
    values = low_bits | (_unpack_bit_planes(blocks[:, 16:48]) << 4)
    return _weight_with_minimums(
        values, *_read_6_bit_pairs(blocks), num_rows=num_rows, bits_in_memory=6
    )


def _decode_q6_k(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of Q6_K: weight = block_scale * group_scale * (q - 32).

    A block has 256 weights in 16 groups of 16. Bytes 0 to 127 contain the low 4 bits of the
    integers q, bytes 128 to 191 their high 2 bits, bytes 192 to 207 the group scales (int8), and
    bytes 208 and 209 the block scale, float16.
    """
    low_bits = _unpack_4_bit(blocks[:, :128], run_length=64)
    values = low_bits | (_unpack_2_bit(blocks[:, 128:192], run_length=32) << 4)
    scales = _read_float16(blocks, 208) * _as_int8(blocks[:, 192:208])
    return _weight_with_zero_point(values, scales, num_rows, zero_point=32, bits_in_memory=6)


def _decode_iq4_nl(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of IQ4_NL: weight = scale * _LEVELS[q].

    `_LEVELS` contains the 16 numbers that the 4-bit integers q represent. Bytes 0 and 1 contain the
    scale, float16. The other 16 bytes contain 32 integers q.
    """
    # `_LEVELS` contains int8 numbers, so the weight needs 8 bits and no zero point.
    values = _LEVELS[_unpack_4_bit(blocks[:, 2:], run_length=16).int()]
    return _weight_with_zero_point(
        values, _read_float16(blocks, 0), num_rows, zero_point=0, bits_in_memory=8
    )


def _decode_iq4_xs(blocks: Tensor, num_rows: int) -> IntegerWeight:
    """Unpack blocks of IQ4_XS: weight = block_scale * (group_scale - 32) * _LEVELS[q].

    `_LEVELS` contains the 16 numbers that the 4-bit integers q represent. A block has 256 weights
    in 8 groups of 32, and contains these bytes:

        0 to 1     the block scale, float16
        2 to 3     the high 2 bits of the group scales: groups 0 to 3 in byte 2, groups 4 to 7 in
                   byte 3, from the lowest bits to the highest bits of a byte
        4 to 7     the low 4 bits of the group scales: groups 0 and 1 in byte 4, groups 2 and 3 in
                   byte 5, and so on, the first group in the low half of the byte
        8 to 135   the integers q, 16 bytes for each group: the low halves of the bytes contain the
                   first 16 integers, and the high halves contain the other 16 integers
    """
    # Each byte contains bits of consecutive groups. With run_length=1, each byte is unpacked alone,
    # so the unpacked numbers have the order of the groups.
    scale_high_2_bits = _unpack_2_bit(blocks[:, 2:4], run_length=1)
    scale_low_4_bits = _unpack_4_bit(blocks[:, 4:8], run_length=1)
    group_scales = scale_low_4_bits | (scale_high_2_bits << 4)
    scales = _read_float16(blocks, 0) * (group_scales.float() - 32)  # [blocks, 8]
    # `_LEVELS` contains int8 numbers, so the weight needs 8 bits and no zero point.
    values = _LEVELS[_unpack_4_bit(blocks[:, 8:], run_length=16).int()]
    return _weight_with_zero_point(values, scales, num_rows, zero_point=0, bits_in_memory=8)


def _read_6_bit_pairs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minimums of blocks of Q4_K or Q5_K. The shapes are [blocks, 8].

    A block has 8 groups. The scale of a group is its 6-bit number `scale` times the float16 number
    at byte 0, and the minimum is its 6-bit number `min` times the float16 number at byte 2. Bytes 4
    to 15 contain the 6-bit numbers:

        Groups   Number   Bits of the number, from the lowest to the highest
        0 to 3   scale    the low 6 bits of bytes 4 to 7
        0 to 3   min      the low 6 bits of bytes 8 to 11
        4 to 7   scale    the low 4 bits of bytes 12 to 15, then the high 2 bits of bytes 4 to 7
        4 to 7   min      the high 4 bits of bytes 12 to 15, then the high 2 bits of bytes 8 to 11
    """
    bytes_4_to_7, bytes_8_to_11, bytes_12_to_15 = torch.split(blocks[:, 4:16], 4, dim=1)
    last_scales = (bytes_12_to_15 & 15) | ((bytes_4_to_7 >> 6) << 4)
    last_mins = (bytes_12_to_15 >> 4) | ((bytes_8_to_11 >> 6) << 4)
    scales = torch.cat((bytes_4_to_7 & 63, last_scales), dim=1)
    mins = torch.cat((bytes_8_to_11 & 63, last_mins), dim=1)
    return _read_float16(blocks, 0) * scales, _read_float16(blocks, 2) * mins


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block type of GGUF files. The CPU kernels can use the integers in blocks of this type.

    Attributes:
        decode: a function that unpacks the blocks of a weight. The arguments are the blocks, uint8
            [blocks, bytes of a block], and the number of rows of the weight.
        bits: the number of bits of an integer in memory, 4, 6 or 8.
        group_size: the number of weights in a group. Each group has one scale.
        has_minimums: whether each group also has a minimum.
    """

    decode: Callable[[Tensor, int], IntegerWeight]
    bits: int
    group_size: int
    has_minimums: bool = False

    @property
    def bytes_per_weight(self) -> float:
        """The number of bytes in memory for each weight, including scales and minimums."""
        numbers_per_group = 2 if self.has_minimums else 1
        return self.bits / 8 + 2 * numbers_per_group / self.group_size


BLOCK_TYPES = {
    "Q4_0": BlockType(_decode_q4_0, 4, 32),
    "Q4_1": BlockType(_decode_q4_1, 4, 32, has_minimums=True),
    "Q5_0": BlockType(_decode_q5_0, 6, 32),
    "Q5_1": BlockType(_decode_q5_1, 6, 32, has_minimums=True),
    "Q8_0": BlockType(_decode_q8_0, 8, 32),
    "Q2_K": BlockType(_decode_q2_k, 4, 16, has_minimums=True),
    "Q3_K": BlockType(_decode_q3_k, 4, 16),
    "Q4_K": BlockType(_decode_q4_k, 4, 32, has_minimums=True),
    "Q5_K": BlockType(_decode_q5_k, 6, 32, has_minimums=True),
    "Q6_K": BlockType(_decode_q6_k, 6, 16),
    "IQ4_NL": BlockType(_decode_iq4_nl, 8, 32),
    "IQ4_XS": BlockType(_decode_iq4_xs, 8, 32),
}
