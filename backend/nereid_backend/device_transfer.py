# SPDX-License-Identifier: Apache-2.0
"""Copies data between the CPU and a GPU without making the CPU wait.

A copy from pinned memory to a GPU is only queued, and the CPU continues immediately. For a copy
from other memory, the CPU waits until the GPU has finished all earlier work. A copy from a GPU into
pinned memory is queued, too, and an event signals the end of the copy. If the device is a CPU,
nothing is copied.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

# The number of int64 values in 64 bytes, the size of a cache line. Each array in a packed tensor
# starts at a multiple of 64 bytes, because the Triton language compiles a second kernel for
# addresses that are not multiples of 16 bytes.
_ALIGNED_VALUES = 64 // 8


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device, and return the tensor.

    If the device is a CPU, the tensor uses the memory of the array.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # torch keeps this pinned memory reserved until the copy has ended.
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_all(arrays: Sequence[Integers], device: torch.device) -> list[Tensor]:
    """Copy integer arrays to the device, and return one tensor for each array.

    A tensor has the shape of its array. A single copy transfers all arrays to a GPU.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return upload_packed(arrays, device)


def upload_packed(arrays: Sequence[Integers], device: torch.device) -> list[Tensor]:
    """Copy integer arrays to the device in one transfer, and return a tensor for each array.

    Each tensor starts at an aligned address.
    """
    packed = pack(arrays, pinned=device.type == "cuda")
    return unpack(packed.to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[Integers], *, pinned: bool = False) -> Tensor:
    """Concatenate integer arrays into one int64 tensor of shape [n].

    Each array starts at a multiple of 8 numbers (64 bytes; see `_ALIGNED_VALUES`). Example: arrays
    of 3 and 2 numbers give a tensor of 16 numbers, in which the second array starts at index 8. The
    other numbers are not initialised and never read.

    Args:
        arrays: the arrays.
        pinned: whether the tensor is in pinned memory.
    """
    sizes = [_aligned_size(array) for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=pinned)
    values = packed.numpy()  # a view of the same memory
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        values[start : start + array.size] = array.reshape(-1)
        start += size
    return packed


def unpack(packed: Tensor, arrays: Sequence[Integers]) -> list[Tensor]:
    """Split a tensor that `pack` returned, and return one view for each packed array."""
    tensors = []
    start = 0
    for array in arrays:
        tensors.append(packed[start : start + array.size].view(array.shape))
        start += _aligned_size(array)
    return tensors


class HostCopy:
    """Copies some tensors from the device to the CPU in the background.

    Later work on the GPU may overwrite the original tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copies on the current stream."""
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].device.type == "cuda":
            self._tensors = [_begin_copy(tensor) for tensor in tensors]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[Tensor]:
        """Wait until the copies are complete, and return the tensors on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _begin_copy(tensor: Tensor) -> Tensor:
    """Start to copy a tensor into pinned memory."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def _aligned_size(array: Integers) -> int:
    """Return how many int64 values an array and its padding need in a packed tensor.

    The size is rounded up to a multiple of 8 values. Examples: 3 gives 8, and 16 gives 16.
    """
    num_lines = (array.size + _ALIGNED_VALUES - 1) // _ALIGNED_VALUES
    return num_lines * _ALIGNED_VALUES
