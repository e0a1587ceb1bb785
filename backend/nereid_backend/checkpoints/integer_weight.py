# SPDX-License-Identifier: Apache-2.0
"""The class `IntegerWeight`, and functions that unpack integers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# The approximate number of weights that are dequantised at a time. With this limit, the float32
# numbers need little memory.
PART_NUMBERS = 2**22


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight matrix of integers with scales and zero points.

    The inputs are divided into groups. For each output, a group has one scale and one zero point
    (the integer that represents the weight 0). If input i belongs to group g, the weight of output
    o is:

        weight[o][i] = (values[o][i] - zeros[o][g]) * scales[o][g]

    Attributes:
        values: int8 or uint8 [out_features, in_features].
        scales: [out_features, groups], of any floating-point data type.
        zeros: the zero points, [out_features, groups], of any data type; None if all of them are 0.
        group_size: the number of consecutive inputs in one group.
        bits: the number of bits of a value.
        input_groups: int64 [in_features], the group of each input; None if groups are consecutive.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    bits: int
    input_groups: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError if the shapes of the tensors do not match."""
        num_rows, num_inputs = self.values.shape
        has_consecutive_groups = self.input_groups is None
        if has_consecutive_groups:
            num_groups = math.ceil(num_inputs / max(1, self.group_size))
        else:
            # If the inputs of a group need not be consecutive, groups can have different sizes. A
            # row may therefore have any number of scales. However, it must have as many zero points
            # as scales.
            num_groups = self.scales.shape[-1]
        needed_shape = (num_rows, num_groups)
        for name, numbers in (("scales", self.scales), ("zeros", self.zeros)):
            if numbers is not None and tuple(numbers.shape) != needed_shape:
                raise ValueError(
                    f"the {name} have the shape {tuple(numbers.shape)}, but a weight of the shape "
                    f"{(num_rows, num_inputs)} with groups of {self.group_size} inputs needs "
                    f"{needed_shape}"
                )

    def reordered(self, rows: Tensor) -> "IntegerWeight":
        """Return a weight that consists of the given rows of this weight, in the given order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, values=self.values[rows], scales=self.scales[rows], zeros=zeros)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as floating-point numbers, [out_features, in_features].

        Each number is (value - zero_point) * scale, with the zero point and the scale of its group.
        The weight is computed in float32 and then rounded to `dtype`.
        """
        num_rows, num_inputs = self.values.shape
        group_of_input = self.input_groups
        if group_of_input is None:
            group_of_input = torch.arange(num_inputs) // self.group_size
        weight = torch.empty(num_rows, num_inputs, dtype=dtype)
        # Convert a part of the rows in each iteration. The float32 numbers of all rows would need
        # too much memory.
        for rows in _row_slices(num_rows, num_inputs):
            numbers = self.values[rows].float()
            if self.zeros is not None:
                numbers -= self.zeros[rows].float()[:, group_of_input]
            numbers *= self.scales[rows].float()[:, group_of_input]
            weight[rows] = numbers
        return weight


def _row_slices(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Divide the rows of a matrix into parts of about `PART_NUMBERS` numbers.

    Example: if the number of rows is 5, and two rows fit into a part, the slices contain the rows 0
    to 1, 2 to 3, and 4.
    """
    rows_per_part = max(1, PART_NUMBERS // max(1, num_columns))
    for start in range(0, num_rows, rows_per_part):
        yield slice(start, min(num_rows, start + rows_per_part))


def by_row(of_groups: Tensor, num_rows: int) -> Tensor:
    """Convert scales or zero points to the shape [num_rows, groups].

    Args:
        of_groups: the scales or zero points. The shape is [num_rows, groups], or [num_rows] if each
            row has one group. A single number is repeated for all rows.
        num_rows: the number of rows of the weight.
    """
    of_groups = of_groups if of_groups.dim() == 2 else of_groups.reshape(-1, 1)
    return of_groups.expand(num_rows, -1)


def scale_blocks(
    values: Tensor, scales: Tensor, dtype: torch.dtype, block_shape: tuple[int, int] | None = None
) -> Tensor:
    """Multiply each block of `values` by the scale of the block.

    Example: if `values` has the shape [256, 384] and `scales` has the shape [2, 3], a block has 128
    rows and 128 columns.

    Args:
        values: [..., rows, columns], of any data type that torch can convert to float32.
        scales: the scales. The shape is [..., row blocks, column blocks]. If each row has one
            scale, the shape can also be [rows] or [rows, 1]. If the whole weight has one scale,
            `scales` can be a single number.
        dtype: the data type of the result.
        block_shape: the number of rows and the number of columns of a block. If None, it is derived
            from the shapes of `values` and `scales`, as in the example.
    """
    num_rows, num_columns = values.shape[-2:]
    matrices = values.reshape(-1, num_rows, num_columns)
    scales_of_matrices = _scales_of_matrices(scales, len(matrices))
    num_blocks = scales_of_matrices.shape[1:]
    if block_shape is None:
        block_shape = _divided_up((num_rows, num_columns), num_blocks)
    _check_num_blocks((num_rows, num_columns), block_shape, num_blocks)
    weight = torch.empty(matrices.shape, dtype=dtype)
    for matrix, matrix_scales, result in zip(matrices, scales_of_matrices, weight, strict=True):
        _scale_matrix(matrix, _as_float(matrix_scales), block_shape, result)
    return weight.view(values.shape)


def _divided_up(shape: Sequence[int], divisors: Sequence[int]) -> tuple[int, int]:
    """Divide each size in `shape` by its divisor in `divisors`, and round the quotients up.

    Example: a matrix of 256 rows and 299 columns with the divisors (2, 3) returns (128, 100).
    """
    (num_rows, num_columns), (row_divisor, column_divisor) = shape, divisors
    return math.ceil(num_rows / row_divisor), math.ceil(num_columns / column_divisor)


def _check_num_blocks(
    shape: tuple[int, int], block: tuple[int, int], num_blocks: Sequence[int]
) -> None:
    """Raise a ValueError if the number of scales does not match the number of blocks.

    Example: a weight of the shape (256, 300) with blocks of (128, 128) needs (2, 3) scales.

    Args:
        shape: the number of rows and the number of columns of the weight.
        block: the number of rows and the number of columns of a block.
        num_blocks: the number of rows and the number of columns of the matrix of scales.
    """
    num_needed = _divided_up(shape, block)
    if tuple(num_blocks) != num_needed:
        height, width = block
        raise ValueError(
            f"the scales have the shape {tuple(num_blocks)}, but a weight of the shape {shape} "
            f"with blocks of {height} x {width} needs {num_needed}"
        )


def _scales_of_matrices(scales: Tensor, num_matrices: int) -> Tensor:
    """Return scales in the shape [num_matrices, row blocks, column blocks].

    `scale_blocks` describes the shapes that `scales` can have. Scales without the first dimension
    apply to every matrix.
    """
    if scales.dim() < 2 or scales.numel() == 1:
        # There is one scale for each row, or one scale in total.
        scales = scales.reshape(-1, 1)
    num_row_blocks, num_column_blocks = scales.shape[-2:]
    scales = scales.reshape(-1, num_row_blocks, num_column_blocks)
    return scales.expand(num_matrices, -1, -1)


def _scale_matrix(values: Tensor, scales: Tensor, block: tuple[int, int], result: Tensor) -> None:
    """Multiply each block of a matrix by its scale, and write the products into `result`.

    Args:
        values: [rows, columns].
        scales: float32 [row blocks, column blocks].
        block: the rows and columns of a block.
        result: [rows, columns]. Mutated.
    """
    height, width = block
    num_rows, num_columns = values.shape
    block_of_row = torch.arange(num_rows) // height
    block_of_column = torch.arange(num_columns) // width
    # Scale the matrix in parts, because float32 numbers for all rows would need much memory.
    for rows in _row_slices(num_rows, num_columns):
        element_scales = scales[block_of_row[rows]][:, block_of_column]
        result[rows] = values[rows].float().mul_(element_scales)


def _as_float(scales: Tensor) -> Tensor:
    """Convert scales to float32. In a uint8 tensor, the byte b means the scale 2**(b - 127)."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def unpack_integers(packed: Tensor, bits: int, count: int | None = None) -> Tensor:
    """Unpack unsigned integers from 32-bit words. The result is uint8 [rows, count].

    The first integer of a row is in the lowest bits of the first word. An integer may begin in one
    word and end in the next word. Example: with 4 bits, [[0x76543210]] becomes
    [[0, 1, 2, 3, 4, 5, 6, 7]].

    Args:
        packed: int32 [rows, words].
        bits: the number of bits of an integer, 1 to 8.
        count: the number of integers in each row; None for as many integers as fit into the words.
    """
    row_bytes = packed.contiguous().view(torch.uint8)
    num_available = row_bytes.shape[1] * 8 // bits
    if count is not None and count > num_available:
        raise ValueError(
            f"each row of the packed integers contains {num_available} integers, but {count} are "
            "needed"
        )
    if bits == 8:
        values = row_bytes
    elif bits in (1, 2, 4):
        # No integer begins in one byte and ends in the next byte, because 8 is a multiple of
        # `bits`.
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        mask = 2**bits - 1
        values = ((row_bytes.unsqueeze(2) >> shifts) & mask).flatten(1)
    else:
        values = _unpack_across_bytes(row_bytes, bits)
    return values[:, :count]


def _unpack_across_bytes(row_bytes: Tensor, bits: int) -> Tensor:
    """Unpack integers that may begin in one byte and end in the next byte.

    The lowest bits of a byte come first. Example: with 3 bits, the bytes 0b11_010_001 and
    0b0_101_100_0 contain the integers 1, 2, 3, 4 and 5. The third integer consists of the two
    highest bits of the first byte and the lowest bit of the second byte.
    """
    num_bytes = row_bytes.shape[1]
    num_integers = num_bytes * 8 // bits
    # For each integer, the position of its lowest bit, counted from the start of the row.
    start_bits = torch.arange(num_integers) * bits
    first_bytes = start_bits // 8
    # Two bytes are read for each integer. The last byte has no successor, so the row is padded.
    padded = torch.nn.functional.pad(row_bytes, (0, 1))
    pairs = padded[:, first_bytes].int() | (padded[:, first_bytes + 1].int() << 8)
    mask = 2**bits - 1
    values: Tensor = ((pairs >> (start_bits % 8)) & mask).to(torch.uint8)
    return values


def unpack_nibbles(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """Unpack the two 4-bit integers of each byte. [..., bytes] becomes [..., 2 * bytes].

    Example: [0x21] becomes [1, 2]. With high_first=True, it becomes [2, 1].
    """
    low, high = packed & 15, packed >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, dim=-1).flatten(-2)
