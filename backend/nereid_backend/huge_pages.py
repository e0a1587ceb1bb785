# SPDX-License-Identifier: Apache-2.0
"""Memory in huge pages, for what a CPU reads from end to end in every step.

A processor looks up where each page of memory lies; of pages of 4 KiB it keeps only some thousand
places, fewer than the weights of a small model have. Read in pages of 2 MiB, memory is a fifth to
two fifths faster (docs/performance.md). Linux gives them to who asks, where its setting
``transparent_hugepage`` is ``madvise`` or ``always``; elsewhere all this is ordinary memory.
"""

import contextlib
import math
import mmap
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

_HUGE_BYTES = 2 * 2**20
_PAGE_BYTES = 4096
# Where a vector begins: in two cache lines it would be read twice.
_ALIGNMENT = 64
# What is smaller stays where it is.
_LEAST_BYTES = 64 * 2**10


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on a CPU, aligned to a page, that take memory only once they are written to."""
    size = math.prod(shape) * dtype.itemsize
    return _mapped(size)[:size].view(dtype).view(shape)


@torch.no_grad()
def move_weights(model: nn.Module) -> None:
    """Move a model's parameters and buffers on a CPU there, one after the other in its own order.

    What shares memory still does. Tensors in layouts of a library's own stay where they are.

    Args:
        model: mutated; for inference only.
    """
    sharing: dict[int, list[Tensor]] = {}
    for tensor in _distinct(chain(model.parameters(), model.buffers())):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_mkldnn:
            continue
        if tensor.untyped_storage().nbytes() >= _LEAST_BYTES:
            sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    room = sum(_aligned(tensors[0].untyped_storage().nbytes()) for tensors in sharing.values())
    if not room:
        return
    mapped, start = _mapped(room), 0
    while sharing:
        # Let go of one by one, so that hardly more memory is needed than before.
        tensors = sharing.pop(next(iter(sharing)))
        before = tensors[0].untyped_storage()
        size = before.nbytes()
        mapped[start : start + size].copy_(torch.tensor([], dtype=torch.uint8).set_(before))
        for tensor in tensors:
            offset = (mapped.storage_offset() + start) // tensor.itemsize
            # A tensor that was made for inference only stays one, and others do not become one.
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = torch.tensor([], dtype=tensor.dtype).set_(
                    mapped.untyped_storage(),
                    offset + tensor.storage_offset(),
                    tensor.shape,
                    tensor.stride(),
                )
        start += _aligned(size)


def _distinct(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    return {id(tensor): tensor for tensor in tensors}.values()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _mapped(size: int) -> Tensor:
    """At least so many zero bytes from the system, in huge pages where it has them."""
    is_large = size >= _HUGE_BYTES
    alignment = _HUGE_BYTES if is_large else _PAGE_BYTES
    # Only what covers a huge page whole can be one, so the last one is asked for whole.
    room = -(-size // alignment) * alignment
    pages = mmap.mmap(-1, room + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_large and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % alignment
    return whole[start : start + room]
