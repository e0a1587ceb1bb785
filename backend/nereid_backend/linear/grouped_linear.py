# SPDX-License-Identifier: Apache-2.0
"""Linear layers for CPUs. The weights are integers of 4, 6 or 8 bits, with a scale for each group.

A group consists of `group_size` consecutive weights of one output. The weights of a group are

    weight[o][i] = (value[o][i] - zero[o][g]) * scale[o][g]        with g = i // group_size

The dequantised weights are never stored in memory. Compared with bfloat16 weights, a step therefore
reads a quarter of the bytes (4 bits), three eighths of the bytes (6 bits) or half of the bytes (8
bits). The C++ kernel (cpu_grouped.cpp) also converts the inputs of the layer to 8-bit integers,
with one scale for each row and group. The output of a row has the same bits for any number of rows
in the call.

A processor with matrix tiles (AMX) is an exception. If there are many bfloat16 rows, the kernel of
cpu_tile_linear.cpp converts the weights to bfloat16, a few outputs at a time, and does not round
the inputs to integers. This is faster, and its results are slightly more accurate.
"""

import ctypes
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.attention.cpu.cpu_library import NativeGroupedWeights, has_kernels, kernels
from nereid_backend.linear.integer_layout import (
    LANES,
    dequantise,
    inputs_per_unit,
    pack_values,
    panels_of_groups,
)

_DTYPES = (torch.float32, torch.bfloat16)
# The largest number of inputs in a group. A larger group is divided, because one large activation
# makes all other activations in its group less accurate.
_MAX_GROUP_SIZE = 128
# The number of outputs that are packed at a time. It must be a multiple of LANES.
_SLICE_ROWS = 256


class GroupedLinear(nn.Linear):
    """A linear layer for inference on a CPU. The weights are integers of 4, 6 or 8 bits.

    If no other layer shares the weight, the attribute `weight` contains only NaN; see
    `PackedLinear`.

    Attributes:
        values: the integers as uint8, in panels of 16 outputs; see integer_layout.py.
        scales: float16 [panels, groups, 16].
        zeros: [panels, groups, 16], uint8 if every zero point is an integer from 0 to 255, and
            otherwise float16. None means that the zero point of every group is the middle of the
            range (8 for 4 bits, 128 for 8 bits).
        bits: the number of bits of an integer, 4, 6 or 8.
        group_size: the number of inputs that share a scale.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int

    @classmethod
    def from_quantised(
        cls,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        group_size: int,
        *,
        bits: int,
        bias: Tensor | None = None,
    ) -> Self:
        """Create a layer from the integers and scales of a quantised checkpoint.

        Example: `values` is [[3, -8]] (int8), `scales` is [[0.5]], and bits=4. The layer has the
        weights [[1.5, -4]].

        Args:
            values: [out_features, in_features], one integer in each element. The integers are
                either uint8 from 0 to 2**bits - 1, or int8 from -2**(bits - 1) to
                2**(bits - 1) - 1.
            scales: [out_features, groups], any floating-point dtype. The number of groups is
                in_features / group_size, rounded up.
            zeros: [out_features, groups], the zero point of each group in the range of `values`.
                Any integer or floating-point dtype is accepted. None means the middle of the range:
                0 for int8, or 2**(bits - 1) for uint8.
            group_size: the number of inputs that share a scale. It must be a multiple of 8 (16 with
                6 bits) or at least in_features. If it is at least in_features, each output has one
                scale.
            bits: 4, 6 or 8.
            bias: [out_features]; None if the layer has no bias.

        Raises:
            ValueError: if the shapes do not match, or if the group size is not supported.
        """
        out_features, in_features = values.shape
        _check_quantised_weight(values, scales, zeros, group_size, bits)
        # On the device `meta`, the constructor of nn.Linear allocates no memory for a weight.
        layer = cls(in_features, out_features, bias=False, device="meta")
        # The layer computes its output from the packed integers. `weight` only provides the shape:
        # all its elements share one NaN in memory.
        weight = torch.full((1, 1), float("nan")).expand(out_features, in_features)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        layer.set_quantised(values, scales, zeros, group_size, bits=bits)
        return layer

    def set_quantised(
        self,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        group_size: int,
        *,
        bits: int,
    ) -> None:
        """Pack the integers, scales and zero points of all outputs, and store them in the layer.

        The CPU kernel reads the packed integers in panels of 16 outputs. Mutates: the layer.

        Args:
            values: the integers, [out_features, in_features]: uint8 from 0 to 2**bits - 1, or int8
                from -2**(bits - 1) to 2**(bits - 1) - 1.
            scales: the scale of each group of inputs, [out_features, groups].
            zeros: the integer that represents the weight 0 in each group, [out_features, groups];
                None if this is the middle of the range in every group.
            group_size: the number of consecutive inputs that share a scale.
            bits: the number of bits of an integer, 4, 6 or 8.
        """
        zeros_dtype = None
        if zeros is not None:
            zeros_dtype = _stored_dtype(zeros.float() + _offset(values.dtype, bits))
        self.allocate_panels(values.shape[1], group_size, bits=bits, zeros_dtype=zeros_dtype)
        # The outputs are processed in slices, so that the temporary copies need little memory.
        for start in range(0, len(values), _SLICE_ROWS):
            rows = slice(start, start + _SLICE_ROWS)
            self.store_rows(
                start, values[rows], scales[rows], None if zeros is None else zeros[rows]
            )

    def allocate_panels(
        self, in_features: int, group_size: int, *, bits: int, zeros_dtype: torch.dtype | None
    ) -> None:
        """Allocate the memory for the numbers that `store_rows` will store.

        A large group of the checkpoint is stored as several smaller groups with equal scales; see
        `_used_group_size`. Example with 4 bits: a row of 768 inputs has 4 groups of 192 inputs in
        the checkpoint. It is stored as 8 groups of 96 inputs, which are 96 words of 32 bits.

        Mutates: the layer.

        Args:
            in_features: the number of inputs.
            group_size: the number of consecutive inputs that share a scale in the checkpoint.
            bits: the number of bits of an integer, 4, 6 or 8.
            zeros_dtype: the dtype of the stored zero points, uint8 or float16; None if the groups
                have no zero points.
        """
        self.bits = bits
        self.group_size = _used_group_size(group_size, in_features, inputs_per_unit(bits))
        # The argument `group_size` can be larger than a row, but a group contains at most one row.
        inputs_per_checkpoint_group = min(group_size, in_features)
        self._num_subgroups = _divide_up(inputs_per_checkpoint_group, self.group_size)
        num_panels = _divide_up(self.out_features, LANES)  # a panel has LANES outputs
        num_groups = _divide_up(in_features, self.group_size)
        # The integers of each output are divided into words of 32 bits (4 bytes).
        num_words = num_groups * self.group_size * bits // 32
        values = torch.empty(num_panels, num_words, LANES, 4, dtype=torch.uint8)
        scales = torch.empty(num_panels, num_groups, LANES, dtype=torch.float16)
        zeros = None if zeros_dtype is None else torch.empty_like(scales, dtype=zeros_dtype)
        for name, tensor in (("values", values), ("scales", scales), ("zeros", zeros)):
            self.register_buffer(name, tensor, persistent=False)

    def store_rows(self, start: int, values: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        """Pack and store the integers, scales and zero points of consecutive outputs (rows).

        The kernels read blocks of LANES outputs, which are called panels. A call stores whole
        panels, but the last panel of the layer may be incomplete. Mutates: the layer.

        Args:
            start: the index of the first output, a multiple of LANES.
            values: the integers, [num_rows, in_features], uint8 or int8.
            scales: the scale of each group of inputs, [num_rows, groups].
            zeros: the integer that represents the weight 0 in each group, [num_rows, groups]; None
                if the layer has no zero points.
        """
        first_panel = start // LANES
        panels = slice(first_panel, first_panel + _divide_up(len(values), LANES))
        # `offset` is added to signed integers and their zero points, so that they become unsigned.
        # The difference (integer - zero point) does not change.
        offset = _offset(values.dtype, self.bits)
        # The sum is computed in int16, because it can exceed the range of int8.
        unsigned = (values.to(torch.int16) + offset).to(torch.uint8) if offset else values
        self.values[panels] = pack_values(unsigned, self.bits, self.group_size)
        self.scales[panels] = self._stored_layout(scales.float())
        if self.zeros is not None:
            assert zeros is not None, "the zero points of all outputs are required"
            self.zeros[panels] = self._stored_layout(zeros.float() + offset)

    def _stored_layout(self, of_groups: Tensor) -> Tensor:
        """Convert scales or zero points of the shape [out_features, groups] to the kernels' layout.

        A number is repeated for each smaller group into which a group of the checkpoint is divided.
        """
        repeated = of_groups.repeat_interleave(self._num_subgroups, dim=1)
        # Every group of the checkpoint is divided into `_num_subgroups` smaller groups, which get
        # copies of the scale. The last group of a row may be shorter and need fewer copies, so the
        # slice removes the surplus copies.
        num_stored_groups = self.scales.shape[1]
        return panels_of_groups(repeated[:, :num_stored_groups])

    def dequantised(self) -> Tensor:
        """Return the weights as float32 [out_features, in_features]."""
        weights = dequantise(self.values, self.scales, self.zeros, self.bits, self.group_size)
        return weights[: self.out_features, : self.in_features]

    def forward(self, input: Tensor) -> Tensor:
        """Compute the output [..., out_features] of the layer for an input [..., in_features]."""
        return self.compute(
            input, self.values, self.scales, self.zeros, self.bias, self.out_features
        )

    def compute(
        self,
        x: Tensor,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        num_outputs: int,
    ) -> Tensor:
        """Multiply an input by weights that have this layer's number of bits and group size.

        The caller can concatenate the weights of several layers, so that one call computes all of
        these layers.

        Args:
            x: the input, [..., in_features].
            values: the integers, packed as uint8 in panels of 16 outputs.
            scales: the scale of each group of inputs, [panels, groups, 16].
            zeros: the integer that represents the weight 0 in each group, [panels, groups, 16];
                None if this is the middle of the range in every group.
            bias: [num_outputs], or None.
            num_outputs: the number of outputs, without the padding of the last panel.

        Returns:
            The output, [..., num_outputs].
        """
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if not is_available():
            # This processor has no kernel for integer weights, so torch computes the product.
            dense = dequantise(values, scales, zeros, self.bits, self.group_size)
            return functional.linear(x, dense[:num_outputs, : x.shape[-1]].to(x.dtype), bias)
        # torch.export cannot trace `linear`, because `linear` calls a C function.
        is_exporting = torch.compiler.is_compiling()
        operator = torch.ops.nereid.grouped_linear if is_exporting else linear
        output: Tensor = operator(
            x, values, scales, zeros, bias, self.bits, self.group_size, num_outputs
        )
        return output


def linear(  # noqa: PLR0913 - the arguments of a torch operator
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    out_features: int,
) -> Tensor:
    """Compute the output of a linear layer with the kernel for integer weights.

    The result is [..., out_features] for an input [..., in_features].

    Args:
        x: the input, float32 or bfloat16. The output has the same dtype.
        values: see `GroupedLinear`.
        scales: see `GroupedLinear`.
        zeros: see `GroupedLinear`.
        bias: [out_features], with the dtype of x; None if the layer has no bias.
        bits: see `GroupedLinear`.
        group_size: see `GroupedLinear`.
        out_features: the number of outputs, without the padding of the last panel.

    Raises:
        ValueError: if the dtype of x is not supported, or if x has the wrong number of features.
    """
    dim = x.shape[-1]
    if x.dtype not in _DTYPES:
        raise ValueError(f"The input must be float32 or bfloat16, but its dtype is {x.dtype}.")
    if -(-dim // group_size) != scales.shape[1]:
        raise ValueError(
            f"The input has {dim} features, but the weights have {scales.shape[1]} groups of "
            f"{group_size} features."
        )
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], out_features)
    weights = NativeGroupedWeights(
        values=values.data_ptr(),
        scales=scales.data_ptr(),
        zeros=None if zeros is None else zeros.data_ptr(),
        bits=bits,
        group_size=group_size,
        dim=dim,
        num_outputs=out_features,
        has_byte_zeros=zeros is not None and zeros.dtype == torch.uint8,
    )
    num_rows = x.numel() // dim
    if num_rows:
        kernels().nereid_grouped_linear(
            x.dtype == torch.bfloat16,
            ctypes.byref(weights),
            None if bias is None else bias.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            num_rows,
            torch.get_num_threads(),
        )
    return out


def _linear_meta(x: Tensor, *arguments: Any) -> Tensor:  # noqa: ANN401 - the arguments of `linear`
    """Return an uninitialised tensor with the shape of the output. torch uses it for tracing."""
    return x.new_empty(*x.shape[:-1], arguments[-1])


def is_available() -> bool:
    """Return whether the kernel exists for the instruction set of this processor."""
    return has_kernels() and bool(kernels().nereid_has_grouped_linear())


def _used_group_size(group_size: int, in_features: int, unit: int) -> int:
    """Return the group size of a layer: how many consecutive inputs share one scale.

    The checkpoint has groups of `group_size` inputs. A stored group has at most 128 inputs, because
    the inputs of large groups are rounded less accurately. A larger group is therefore divided into
    smaller groups of equal size, and each of them gets a copy of the scale. The size is a multiple
    of `unit`, which is 8 or 16; see `inputs_per_unit`.

    Examples with unit=8: groups of 192 inputs are stored as groups of 96 inputs. A row with one
    group of 300 inputs is stored in groups of 128 inputs. A row with one group of 20 inputs is
    padded to 24.
    """
    has_one_group = group_size >= in_features
    if has_one_group:
        # The row is divided into groups of this size. The last group may be incomplete.
        padded_row = _divide_up(in_features, unit) * unit
        return min(_MAX_GROUP_SIZE, padded_row)
    # `unit` divides `group_size`; see `_check_quantised_weight`.
    sizes = range(unit, _MAX_GROUP_SIZE + 1, unit)
    return max(size for size in sizes if group_size % size == 0)


def _offset(dtype: torch.dtype, bits: int) -> int:
    """Return the number that a layer adds to a checkpoint's integers and zero points.

    A layer stores unsigned integers. Example: signed integers of 4 bits, from -8 to 7, are stored
    as the integers from 0 to 15, so the result is 8.

    Args:
        dtype: the dtype of the integers of the checkpoint, uint8 or int8.
        bits: the number of bits of an integer.
    """
    return 2 ** (bits - 1) if dtype == torch.int8 else 0


def _stored_dtype(zeros: Tensor) -> torch.dtype:
    """Return the dtype in which a layer stores `zeros`, uint8 or float16.

    The zero point of a group is the value that represents the weight 0. If all zero points are
    integers from 0 to 255, return uint8. Otherwise, return float16.
    """
    are_bytes = (zeros >= 0) & (zeros <= torch.iinfo(torch.uint8).max) & (zeros == zeros.round())
    return torch.uint8 if bool(are_bytes.all()) else torch.float16


def _divide_up(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up. Example: `_divide_up(7, 3)` returns 3."""
    return -(-dividend // divisor)


def _check_quantised_weight(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, bits: int
) -> None:
    """Raise a ValueError if the arguments of `GroupedLinear.from_quantised` are invalid."""
    if bits not in (4, 6, 8):
        raise ValueError(f"bits must be 4, 6 or 8, but the value is {bits}.")
    if values.dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"values must be int8 or uint8, but the dtype is {values.dtype}.")
    out_features, in_features = values.shape
    # A kernel reads `unit` inputs at once, and these inputs must belong to the same group. If a row
    # has only one group, the group may have any size, because the row is padded.
    unit = inputs_per_unit(bits)
    has_several_groups = group_size < in_features
    if has_several_groups and group_size % unit:
        raise ValueError(f"group_size must be a multiple of {unit}, but the value is {group_size}.")
    num_groups = _divide_up(in_features, min(group_size, in_features))
    expected = (out_features, num_groups)
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None and tensor.shape != expected:
            raise ValueError(
                f"{name} must have the shape {expected} for weights of the shape "
                f"{tuple(values.shape)} and group_size {group_size}, but the shape is "
                f"{tuple(tensor.shape)}."
            )


_library: Any = torch.library.Library("nereid", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "grouped_linear(Tensor x, Tensor values, Tensor scales, Tensor? zeros, Tensor? bias, int bits, "
    "int group_size, int out_features) -> Tensor"
)
_library.impl("grouped_linear", linear, "CPU")
_library.impl("grouped_linear", _linear_meta, "Meta")
