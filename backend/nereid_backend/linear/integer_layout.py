# SPDX-License-Identifier: Apache-2.0
"""Converts matrices of 4-bit, 6-bit or 8-bit integers to the layout of the CPU kernels, and back.

A panel contains the integers of 16 outputs (rows of the weight). The integers of four consecutive
inputs of one output are adjacent, because the kernels multiply four inputs at a time.
"""

import torch
from torch import Tensor
from torch.nn import functional

# The CPU kernels read a weight in panels. A panel contains the weights of `LANES` outputs.
LANES = 16


def inputs_per_unit(bits: int) -> int:
    """Return the number of inputs that a kernel reads at once: 16 with 6 bits, otherwise 8.

    The number of inputs of each group must be a multiple of this number.
    """
    return 16 if bits == 6 else 8


def pack_values(values: Tensor, bits: int, group_size: int) -> Tensor:
    """Rearrange unsigned integers [out_features, in_features] for the kernels.

    16 outputs form one panel. The outputs are padded with zeros to whole panels, and the inputs are
    padded with zeros to whole groups. The shape of the result depends on `bits`:

        8 bits   [panels, inputs / 4, 16, 4]. Four inputs of one output are adjacent.
        4 bits   [panels, inputs / 8, 16, 4]. Each byte contains two inputs; see `_pack_bytes`.
        6 bits   [panels, 3 * inputs / 16, 16, 4]; see `_pack_6_bits`.
    """
    padding = (0, -values.shape[1] % group_size, 0, -values.shape[0] % LANES)
    # `pad` copies the values, so it is called only if padding is needed.
    padded = functional.pad(values, padding) if any(padding) else values.contiguous()
    # The shape is [panels, inputs / 4, 16, 4].
    quadruples = padded.view(-1, LANES, padded.shape[1] // 4, 4).transpose(1, 2)
    if bits == 8:
        return quadruples.contiguous()
    if bits == 4:
        return _pack_bytes(quadruples, bits)
    return _pack_6_bits(quadruples)


def _pack_bytes(quadruples: Tensor, bits: int) -> Tensor:
    """Pack integers of 2 or 4 bits into bytes.

    [panels, inputs / 4, 16, 4] becomes [panels, bytes / 4, 16, 4]. A byte contains four integers of
    2 bits or two integers of 4 bits. Consecutive inputs of an output are in consecutive bytes: with
    4 bits, byte j contains input j in its lower half and input j + 4 in its upper half. Example:
    the inputs [1, 2, 3, 4, 5, 6, 7, 8] become the bytes [0x51, 0x62, 0x73, 0x84]. With 2 bits, byte
    j contains the inputs j, j + 4, j + 8 and j + 12, from its lowest to its highest bits.
    """
    integers_per_byte = 8 // bits
    packed = quadruples[:, 0::integers_per_byte].clone(memory_format=torch.contiguous_format)
    for k in range(1, integers_per_byte):
        packed |= quadruples[:, k::integers_per_byte] << (bits * k)
    return packed


def _pack_6_bits(quadruples: Tensor) -> Tensor:
    """Pack the integers of 6 bits of each output. 16 integers (a unit) become 12 bytes.

    The 12 bytes of a unit are three groups of four bytes. For j from 0 to 3, byte j of each group
    contains these bits of the 16 inputs, from its lowest to its highest bits:

        first group     the lower four bits of the inputs j and j + 4
        second group    the lower four bits of the inputs j + 8 and j + 12
        third group     the upper two bits of the inputs j, j + 4, j + 8 and j + 12

    Example: the inputs [0, 1, 2, ..., 15], whose upper two bits are 0, become the groups [0x40,
    0x51, 0x62, 0x73], [0xc8, 0xd9, 0xea, 0xfb] and [0, 0, 0, 0].

    Args:
        quadruples: the integers, [panels, inputs / 4, 16 outputs, 4 inputs].

    Returns:
        The bytes, [panels, 3 * units, 16 outputs, 4 bytes].
    """
    lower_bits = _pack_bytes(quadruples & 0b1111, 4)  # [panels, 2 * units, 16, 4]
    upper_bits = _pack_bytes(quadruples >> 4, 2)  # [panels, units, 16, 4]
    first_group, second_group = lower_bits[:, 0::2], lower_bits[:, 1::2]
    # The shape [panels, units, 3, 16, 4] puts the three groups of each unit next to each other.
    groups_of_units = torch.stack((first_group, second_group, upper_bits), dim=2)
    return groups_of_units.flatten(1, 2)


def unpack_values(packed: Tensor, bits: int) -> Tensor:
    """Convert packed integers back to a matrix, uint8 [panels * 16, padded inputs].

    This is the inverse of `pack_values`. A panel contains the integers of 16 outputs. With 4 bits,
    the bytes [0x51, 0x62, 0x73, 0x84] of one output become the inputs [1, 2, 3, 4, 5, 6, 7, 8].
    """
    row_bytes = packed.transpose(1, 2).reshape(packed.shape[0] * LANES, -1)
    return _unpack_rows(row_bytes, bits)


def _unpack_rows(row_bytes: Tensor, bits: int) -> Tensor:
    """Unpack the integers of rows. The result is uint8 [..., inputs].

    Args:
        row_bytes: the bytes of each row in the order in which `pack_values` stores them, uint8
            [..., inputs * bits / 8].
        bits: the number of bits of an integer, 4, 6 or 8.
    """
    if bits == 8:
        return row_bytes
    return _unpack_bytes(row_bytes, bits) if bits == 4 else _unpack_6_bits(row_bytes)


def _unpack_bytes(row_bytes: Tensor, bits: int) -> Tensor:
    """Unpack integers of 2 or 4 bits from bytes: [..., bytes] becomes [..., inputs].

    Four bytes contain the integers of 16 inputs (2 bits) or eight inputs (4 bits). The first four
    inputs are in the lowest bits of the four bytes. Example with 4 bits: [0x51, 0x62, 0x73, 0x84]
    becomes [1, 2, 3, 4, 5, 6, 7, 8].
    """
    mask = 2**bits - 1
    four_bytes = row_bytes.reshape(*row_bytes.shape[:-1], row_bytes.shape[-1] // 4, 4)
    four_inputs = [(four_bytes >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(four_inputs, dim=-2).flatten(-3)


def _unpack_6_bits(row_bytes: Tensor) -> Tensor:
    """Unpack integers of 6 bits: [..., 3 * inputs / 4] becomes [..., inputs].

    A unit of 12 bytes contains 16 integers. Its first eight bytes contain the lower four bits of
    each integer, and its last four bytes contain the upper two bits; see `_unpack_bytes`.
    """
    units = row_bytes.reshape(*row_bytes.shape[:-1], row_bytes.shape[-1] // 12, 12)
    lower_bits = _unpack_bytes(units[..., :8], 4)
    upper_bits = _unpack_bytes(units[..., 8:], 2)
    return (lower_bits | (upper_bits << 4)).flatten(-2)  # [..., units, 16] becomes [..., inputs]


def dequantise_rows(
    indices: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    group_size: int,
) -> Tensor:
    """Return some rows of a packed weight as floating-point numbers.

    A row contains the weights of one output. A weight is (integer - zero) * scale, with one zero
    and one scale for each group of `group_size` consecutive inputs.

    Args:
        indices: the indices of the rows, an integer tensor of any shape [...].
        values: the packed integers; see `pack_values`.
        scales: [panels, groups, 16]. A panel contains 16 rows.
        zeros: [panels, groups, 16], uint8 or float16. None means that every zero is
            2 ** (bits - 1).
        bits: the number of bits of an integer, 4, 6 or 8.
        group_size: the number of inputs in a group.

    Returns:
        float32 [..., groups * group_size]. The last inputs may be padding.
    """
    panels, lanes = indices // LANES, indices % LANES  # a lane is the index of a row in its panel
    # Indexing with [panels, :, lanes] gives a result that begins with the dimensions of `indices`.
    row_bytes = values[panels, :, lanes].flatten(-2)  # [..., inputs * bits / 8]
    integers = _unpack_rows(row_bytes, bits).float()
    integers = integers.reshape(*indices.shape, -1, group_size)  # [..., groups, group_size]
    scale = scales[panels, :, lanes].float().unsqueeze(-1)  # [..., groups, 1]
    zero = 2.0 ** (bits - 1) if zeros is None else zeros[panels, :, lanes].float().unsqueeze(-1)
    return ((integers - zero) * scale).flatten(-2)


def panels_of_groups(of_groups: Tensor) -> Tensor:
    """Rearrange scales or zeros from [out_features, groups] to [panels, groups, 16 outputs].

    A panel contains 16 outputs. The last panel is padded with zeros.
    """
    padded = functional.pad(of_groups, (0, 0, 0, -of_groups.shape[0] % LANES))
    return padded.view(-1, LANES, of_groups.shape[1]).transpose(1, 2).contiguous()


def dequantise(
    values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group_size: int
) -> Tensor:
    """Return a packed weight as float32 [panels * 16, groups * group_size].

    `dequantise_rows` describes the arguments.
    """
    zero = 2.0 ** (bits - 1) if zeros is None else _by_input(zeros, group_size)
    return (unpack_values(values, bits).float() - zero) * _by_input(scales, group_size)


def _by_input(of_groups: Tensor, group_size: int) -> Tensor:
    """Repeat the scale or zero of each group, so that every weight of the group gets a copy.

    The result is [panels * 16, groups * group_size].
    """
    rows = of_groups.float().transpose(1, 2).reshape(-1, of_groups.shape[1])
    return rows.repeat_interleave(group_size, dim=1)
