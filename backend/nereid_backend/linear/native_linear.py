# SPDX-License-Identifier: Apache-2.0
"""Linear layers for CPUs with vector instructions. A C++ kernel (cpu_linear.cpp) computes them.

On a processor with matrix tiles (AMX), the kernel in cpu_tile_linear.cpp computes the layers in
bfloat16.

In a step with few rows, reading the weights takes most of the time. Therefore, the kernels read the
weights in order and prefetch them. The layout of the weights does not depend on the number of rows.
The output of a row has the same bits for any number of rows in the call. The kernels are a torch
operator, so models that use the kernels can be traced and compiled. Compiled models call the
kernels without Python (attention/cpu/cpu_shim.cpp).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.attention.cpu.cpu_library import has_kernels, kernels

# The CPU kernels read a weight in panels. A panel contains the weights of `LANES` outputs.
LANES = 16
# The number of outputs that are packed at a time. It must be a multiple of LANES.
_SLICE_ROWS = 1024


class NativeLinear(nn.Linear):
    """A linear layer for inference on a CPU. The weight has the layout of the kernel.

    If no other layer shares the weight, the attribute `weight` contains only NaN; see
    `PackedLinear`.

    Attributes:
        packed: the weight in panels of 16 outputs. A float32 weight is [panels, in_features, 16],
            and a bfloat16 weight is [panels, in_features / 2, 16, 2].
    """

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Compute the output of the layer with the CPU kernel.

        Args:
            input: [..., in_features], with the weight's dtype.

        Returns:
            [..., out_features], with the weight's dtype.
        """
        if torch.compiler.is_compiling():
            # torch.export cannot trace `linear`, because `linear` calls a C function.
            output: Tensor = torch.ops.nereid.packed_linear(
                input, self.packed, self.bias, self.out_features
            )
            return output
        return linear(input, self.packed, self.bias, self.out_features)


def can_pack(weight: Tensor) -> bool:
    """Return whether the kernel can compute a linear layer with this weight.

    The shape of `weight` is [out_features, in_features].
    """
    if weight.device.type != "cpu" or 0 in weight.shape or not is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return weight.shape[1] % 2 == 0
    return weight.dtype == torch.float32


def pack(weight: Tensor, release: Callable[[Tensor], None] = lambda _: None) -> Tensor:
    """Rearrange a weight into panels of 16 outputs, which the CPU kernel reads in order.

    Example: a float32 weight of the shape [20, 8] becomes a tensor of the shape [2, 8, 16], which
    contains two panels of 16 outputs. The last 12 outputs are padding, whose weights are 0. In
    bfloat16, two consecutive inputs are adjacent, so the shape is [2, 4, 16, 2].

    Args:
        weight: the weight [out_features, in_features].
        release: called with some rows of the weight when these rows have been packed, so that the
            caller can free their memory.
    """
    num_rows, dim = weight.shape
    num_panels = -(-num_rows // LANES)
    row_shape: tuple[int, ...] = (dim,)
    panel_shape: tuple[int, ...] = (dim, LANES)
    if weight.dtype == torch.bfloat16:
        row_shape = (dim // 2, 2)
        panel_shape = (dim // 2, LANES, 2)
    packed = weight.new_empty(num_panels, *panel_shape)
    # The rows are packed in slices, so that the memory never contains a large weight twice.
    for start in range(0, num_rows, _SLICE_ROWS):
        rows = weight[start : start + _SLICE_ROWS]
        missing = -len(rows) % LANES
        padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        panels = padded.reshape(-1, LANES, *row_shape).transpose(1, 2)
        first_panel = start // LANES
        packed[first_panel : first_panel + len(panels)] = panels
        release(rows)
    return packed


def unpack_rows(packed: Tensor, indices: Tensor) -> Tensor:
    """Return some rows of a packed weight. A row contains the weights of one output.

    Args:
        packed: the weight in panels of 16 rows, [panels, in_features, 16] in float32, or
            [panels, in_features / 2, 16, 2] in bfloat16.
        indices: the indices of the rows, an integer tensor of any shape [...].

    Returns:
        [..., in_features], with the dtype of the weight.
    """
    # Because the slice `:` separates two index tensors, torch moves the indexed dimensions to the
    # front. The result is [..., in_features] in float32, or [..., in_features / 2, 2] in bfloat16.
    rows = packed[indices // LANES, :, indices % LANES]
    return rows.flatten(-2) if packed.dim() == 4 else rows


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """Compute one linear layer with the CPU kernel.

    Args:
        x: the input [..., in_features].
        packed: the weight in panels of 16 outputs, with the dtype of x; see `NativeLinear.packed`.
        bias: [out_features]; None if the layer has no bias.
        out_features: the number of outputs, without the padding of the last panel.

    Returns:
        The output [..., out_features], with the dtype of x.

    Raises:
        ValueError: if the weight has another dtype or another number of features than x.
    """
    dim = x.shape[-1]
    if x.dtype != packed.dtype:
        raise ValueError(f"The input must be {packed.dtype}, but its dtype is {x.dtype}.")
    # A panel contains the weights of `LANES` outputs for all inputs. The distance between two
    # panels (the stride) is therefore `LANES` times the number of inputs.
    num_weight_features = packed.stride(0) // LANES
    if dim != num_weight_features:
        raise ValueError(f"The input has {dim} features, but the weight has {num_weight_features}.")
    x = x.contiguous()
    num_rows = x.numel() // dim
    out = x.new_empty(*x.shape[:-1], out_features)
    kernels().nereid_linear(
        x.dtype == torch.bfloat16,
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
        num_rows,
        dim,
        out_features,
        torch.get_num_threads(),
    )
    return out


def _linear_meta(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:  # noqa: ARG001
    """Return an uninitialised tensor with the shape of the output. torch uses it for tracing."""
    return x.new_empty(*x.shape[:-1], out_features)


def is_available() -> bool:
    """Return whether the kernel exists for the instruction set of this processor."""
    return has_kernels() and bool(kernels().nereid_has_linear())


_library: Any = torch.library.Library("nereid", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")
_library.impl("packed_linear", linear, "CPU")
_library.impl("packed_linear", _linear_meta, "Meta")
