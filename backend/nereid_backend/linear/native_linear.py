# SPDX-License-Identifier: Apache-2.0
"""Linear layers computed by our own kernel (cpu_linear.cpp), on CPUs with 512-bit vectors.

The kernel reads weights in order and ahead of time, which a step of few rows lives on, from a
layout that serves one row and many. A row gives the same bits alone and among others. As an
operator of torch's it can be traced and compiled; compiled models call it without Python
(attention/cpu/cpu_shim.cpp).
"""

import functools
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.attention.cpu.cpu_attention import has_kernels, kernels

_LANES = 16


class NativeLinear(nn.Linear):
    """A linear layer whose weight is kept in the kernel's layout; inference on a CPU only.

    ``weight`` still tells shape, dtype and device, but its numbers are NaN, unless others share
    them, as in `PackedLinear`.

    Attributes:
        packed: float32 [panels, in_features, 16] or bfloat16 [panels, in_features / 2, 16, 2].
    """

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the weight's dtype."""
        if torch.compiler.is_compiling():
            found: Tensor = torch.ops.nereid.packed_linear(
                input, self.packed, self.bias, self.out_features
            )
            return found
        return linear(input, self.packed, self.bias, self.out_features)


def can_pack(weight: Tensor) -> bool:
    """Whether the kernel takes a layer with this weight, [out_features, in_features]."""
    if weight.device.type != "cpu" or 0 in weight.shape or not is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return weight.shape[1] % 2 == 0 and not _has_tiles()
    return weight.dtype == torch.float32


def pack(weight: Tensor) -> Tensor:
    """A weight as the kernel reads it; see `NativeLinear.packed`."""
    padded = functional.pad(weight, (0, 0, 0, -weight.shape[0] % _LANES))
    if weight.dtype == torch.bfloat16:
        return padded.view(-1, _LANES, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()
    return padded.view(-1, _LANES, weight.shape[1]).transpose(1, 2).contiguous()


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """One layer, [..., in_features] to [..., out_features] in the input's dtype.

    Args:
        x: the input.
        packed: of x's dtype; see `NativeLinear.packed`.
        bias: [out_features], or None.
        out_features: how many of the last panel's outputs there are.
    """
    dim = x.shape[-1]
    if x.dtype != packed.dtype or dim * _LANES != packed.stride(0):
        raise ValueError(
            f"an input of {dim} x {x.dtype} does not go with a weight of "
            f"{packed.stride(0) // _LANES} x {packed.dtype}"
        )
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], out_features)
    _kernel()(
        x.dtype == torch.bfloat16,
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
        x.numel() // dim,
        dim,
        out_features,
        torch.get_num_threads(),
    )
    return out


def _linear_meta(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], out_features)


@functools.cache
def _kernel():  # type: ignore[no-untyped-def]  # noqa: ANN202 - ctypes has no public type for it
    function = kernels().nereid_linear
    pointers, sizes = [c_void_p] * 4, [c_int64] * 3
    function.argtypes, function.restype = [c_int, *pointers, *sizes, c_int], None
    return function


@functools.cache
def is_available() -> bool:
    """Whether the kernel can be built here."""
    return has_kernels() and bool(kernels().nereid_has_linear())


@functools.cache
def _has_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (AMX), which oneDNN uses and we do not."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


_library: Any = torch.library.Library("nereid", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")
_library.impl("packed_linear", linear, "CPU")
_library.impl("packed_linear", _linear_meta, "Meta")
