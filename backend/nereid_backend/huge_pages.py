# SPDX-License-Identifier: Apache-2.0
"""Memory in huge pages, for data that a CPU reads completely in every step.

A processor caches the addresses of a few thousand memory pages. The weights of even a small model
have more pages of 4 KiB than that. Memory in huge pages of 2 MiB is read 20 to 40 % faster
(docs/history/cpu-kernels.md). Linux provides huge pages on request if its setting
`transparent_hugepage` is `madvise` or `always`. Otherwise these functions return ordinary memory.
"""

import contextlib
import math
import mmap
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from nereid_backend.freed_memory import FreedMemory, discard_pages

_HUGE_BYTES = 2 * 2**20
_PAGE_BYTES = 4096
# Each tensor starts at a multiple of this number of bytes, the size of a cache line. A CPU vector
# that spans two cache lines would need two reads.
_ALIGNMENT = 64
# The number of bytes that are moved at a time.
_SLICE_BYTES = 4 * 2**20
# Smaller tensors are not moved.
_MIN_BYTES = 64 * 2**10


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on the CPU, whose memory is aligned to a page.

    The operating system provides the memory of a page when the page is first written.
    """
    size = math.prod(shape) * dtype.itemsize
    return _mapped(size)[:size].view(dtype).view(shape)


@torch.no_grad()
def move_weights(model: nn.Module) -> None:
    """Move the parameters and buffers of a model into huge pages, if they are on a CPU.

    The tensors are placed in the order of the model.

    Tensors that share memory before the call also share memory after the call. Tensors on other
    devices, small tensors, and tensors in the layout of a library such as oneDNN are not moved.

    Args:
        model: the model, for inference only. Mutated.
    """
    sharing: dict[int, list[Tensor]] = {}
    for tensor in _distinct(chain(model.parameters(), model.buffers())):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_mkldnn:
            continue
        if tensor.untyped_storage().nbytes() >= _MIN_BYTES:
            sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    total = sum(_aligned(tensors[0].untyped_storage().nbytes()) for tensors in sharing.values())
    if not total:
        return
    mapped = _mapped(total)
    start = 0
    freed = FreedMemory()
    freed.give_back()
    while sharing:
        # `pop` removes the old tensors from `sharing`, so that each iteration frees the memory of
        # its old tensors. Otherwise, all weights would be in memory twice at the end.
        tensors = sharing.pop(next(iter(sharing)))
        storage = tensors[0].untyped_storage()
        size = storage.nbytes()
        _move(storage, mapped[start:], len(tensors))
        for tensor in tensors:
            tensor.data = _view_of_copy(tensor, mapped, start)
        # These names also refer to the old memory.
        del storage, tensors
        start += _aligned(size)
        freed.add(size)
    freed.give_back()


def _move(storage: torch.UntypedStorage, target: Tensor, num_tensors: int) -> None:
    """Copy a storage to the beginning of `target`.

    If only the tensors that are moved use the storage, its pages are returned to the operating
    system while they are copied. The memory then never contains a large weight twice.

    Args:
        storage: the old memory of some tensors. Its contents are undefined after the call, unless
            other tensors also use the storage.
        target: bytes, uint8. Mutated.
        num_tensors: the number of tensors that are moved with this storage.
    """
    # The variable `storage` of the caller also counts.
    is_unshared = torch._C._storage_Use_Count(storage._cdata) <= num_tensors + 1
    source = torch.tensor([], dtype=torch.uint8).set_(storage)
    for start in range(0, len(source), _SLICE_BYTES):
        part = source[start : start + _SLICE_BYTES]
        target[start : start + len(part)].copy_(part)
        if is_unshared:
            discard_pages(part.data_ptr(), len(part))


def _view_of_copy(tensor: Tensor, mapped: Tensor, start: int) -> Tensor:
    """Return a tensor that equals `tensor`, but uses the memory of `mapped`.

    Args:
        tensor: a tensor whose storage was copied to `mapped[start:]`.
        mapped: bytes, uint8.
        start: the index of the copy's first byte in `mapped`, a multiple of the item size.
    """
    # The storage of `mapped` may begin before `mapped`, so the offset of `mapped` is added. `set_`
    # expects offsets as numbers of items, not as bytes.
    start_of_copy = (mapped.storage_offset() + start) // tensor.itemsize
    # torch has inference tensors and normal tensors. The new tensor must be of the same kind as the
    # old tensor.
    with torch.inference_mode(tensor.is_inference()):
        return torch.tensor([], dtype=tensor.dtype).set_(
            mapped.untyped_storage(),
            start_of_copy + tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )


def _distinct(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Return the tensors without duplicates, in their order."""
    return {id(tensor): tensor for tensor in tensors}.values()


def _aligned(size: int) -> int:
    """Return a size in bytes, rounded up to the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _mapped(size: int) -> Tensor:
    """Return zero bytes from the operating system, in huge pages if possible.

    The tensor has at least `size` bytes.
    """
    is_large = size >= _HUGE_BYTES
    alignment = _HUGE_BYTES if is_large else _PAGE_BYTES
    # The size is rounded up to whole huge pages. Otherwise, the end of the memory would consist of
    # small pages.
    rounded = -(-size // alignment) * alignment
    pages = mmap.mmap(-1, rounded + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_large and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the operating system has no huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(pages, dtype=torch.uint8)
    start = -mapped.data_ptr() % alignment
    return mapped[start : start + rounded]
