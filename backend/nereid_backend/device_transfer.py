# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device for which nobody waits.

To a GPU a copy is only queued if it comes from pinned memory; from other memory the host waits
until the device has done all that was asked of it before. The same holds for the way back, where an
event then says when the copy is there. On a CPU nothing is copied.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

# Kernels are compiled anew for addresses that are not multiples of 16 bytes; 64 is a cache line.
_ALIGNED = 64 // 8


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on the device; on a CPU one with the same memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # The allocator of pinned memory keeps a buffer until the copies from it are done.
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_all(arrays: Sequence[Integers], device: torch.device) -> list[Tensor]:
    """Integer arrays as tensors of their shapes on the device, in one copy."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    return unpack(pack(arrays, pinned=True).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[Integers], *, pinned: bool = False) -> Tensor:
    """Integer arrays one behind the other, each from an aligned place on: [n] int64."""
    packed = torch.empty(sum(map(_room, arrays)), dtype=torch.int64, pin_memory=pinned)
    room = packed.numpy()
    start = 0
    for array in arrays:
        room[start : start + array.size] = array.reshape(-1)
        start += _room(array)
    return packed


def unpack(packed: Tensor, arrays: Sequence[Integers]) -> list[Tensor]:
    """The parts of what `pack` made of these arrays: views."""
    tensors = []
    start = 0
    for array in arrays:
        tensors.append(packed[start : start + array.size].view(array.shape))
        start += _room(array)
    return tensors


class HostCopy:
    """Tensors on their way to the host; what they are copied from may change meanwhile."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copies behind what the current stream has to do."""
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].device.type == "cuda":
            self._tensors = [_begin_copy(tensor) for tensor in tensors]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[Tensor]:
        """The tensors, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _begin_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def _room(array: Integers) -> int:
    return -(-array.size // _ALIGNED) * _ALIGNED
