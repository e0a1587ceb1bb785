# SPDX-License-Identifier: Apache-2.0
"""Returns unneeded memory to the operating system while a model is loaded.

The C library reserves freed memory for later allocations. While a model is loaded, large tensors of
different sizes are created and freed, so gaps arise between the tensors that are still used. Later
tensors often do not fit into these gaps. Without this module, a process that loads a model needs up
to twice the memory of the weights.
"""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
from torch import Tensor, nn

# Each call that returns memory takes about 1 ms, so memory is returned only after _STEP_BYTES bytes
# have been freed.
_STEP_BYTES = 32 * 2**20
_PAGE_BYTES = mmap.PAGESIZE
# The file /proc/self/pagemap contains 64 bits for each page of this process. One of these bits
# shows whether the page is in memory, one shows whether it is in the swap space, and one shows
# whether it belongs to a file. If this process has changed a page of a file, the page is a copy
# that does not belong to the file.
_IS_PRESENT, _IS_SWAPPED, _IS_FILE_PAGE = 1 << 63, 1 << 62, 1 << 61


class FreedMemory:
    """Counts freed bytes. Returns memory to the operating system after every 32 MiB."""

    def __init__(self) -> None:
        self._num_bytes = 0
        # This function exists only in glibc.
        function = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._trim = cast("Callable[[int], int] | None", function)

    def add(self, num_bytes: int) -> None:
        """Count freed bytes."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _STEP_BYTES:
            self.give_back()

    def give_back(self) -> None:
        """Return all freed memory to the operating system now."""
        self._num_bytes = 0
        if self._trim is not None:
            self._trim(0)


def discard_pages(address: int, num_bytes: int) -> None:
    """Return the pages of unneeded memory to the operating system.

    Only whole pages are returned. The memory stays allocated, but its contents are lost. On systems
    other than Linux, nothing happens.

    Example: the address is 4000, num_bytes is 9000, and pages have 4096 bytes. The two pages from
    address 4096 to 12288 are returned.
    """
    pages = _whole_pages(address, num_bytes)  # a range of page numbers
    if sys.platform == "linux" and pages:
        start_address = ctypes.c_void_p(pages.start * _PAGE_BYTES)
        size = ctypes.c_size_t(len(pages) * _PAGE_BYTES)
        # The call is only meant to save memory, so its errors are ignored.
        ctypes.CDLL(None).madvise(start_address, size, mmap.MADV_DONTNEED)


def discard_file_pages(tensor: Tensor) -> None:
    """If a tensor is in a mapped file, return the memory of the tensor to the operating system.

    The library safetensors maps the files of a checkpoint into memory. The tensor keeps its values,
    because the operating system reads a page from the file again when the page is used. If this
    process has changed the tensor, no memory is returned, because the change would be lost. On
    systems other than Linux, no memory is returned.
    """
    if tensor.device.type != "cpu":
        return
    pages = _whole_pages(tensor.data_ptr(), tensor.nbytes)
    if pages and _are_unchanged_file_pages(pages):
        discard_pages(tensor.data_ptr(), tensor.nbytes)


@contextlib.contextmanager
def discard_weights_after_use(model: nn.Module) -> Iterator[None]:
    """In the `with` block, free the memory of a module's weights whenever the module has run.

    Only the memory of weights in mapped files is freed, and only until the weights are used again;
    see `discard_file_pages`. This saves memory if a model is called once for a test, before its
    weights are moved.
    """

    def discard(module: nn.Module, *_: object) -> None:
        for weight in module.parameters(recurse=False):
            discard_file_pages(weight)

    hooks = [module.register_forward_hook(discard) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _whole_pages(address: int, num_bytes: int) -> range:
    """Return the page numbers of the memory pages that lie completely inside an address range."""
    first_page = (address + _PAGE_BYTES - 1) // _PAGE_BYTES  # rounded up
    end_page = (address + num_bytes) // _PAGE_BYTES  # rounded down
    return range(first_page, end_page)


def _are_unchanged_file_pages(pages: range) -> bool:
    """Return whether all pages belong to mapped files and are unchanged by this process.

    If this process changes a page of a file, the operating system replaces the page by a copy,
    which does not belong to the file. Such a copy is in memory or in the swap space. `pages`
    contains the numbers of the pages: the addresses divided by the size of a page.
    """
    try:
        # The file contains 8 bytes of flags for each page of this process.
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            file.seek(8 * pages.start)
            flags = np.frombuffer(file.read(8 * len(pages)), np.uint64)
    except OSError:
        return False  # Only Linux has this file.
    is_in_memory = (flags & _IS_PRESENT) != 0
    is_file_page = (flags & _IS_FILE_PAGE) != 0
    is_copy = is_in_memory & ~is_file_page
    # If a page is in the swap space, this process has changed the page. Linux never writes an
    # unchanged page of a file to the swap space, because Linux can read the page from the file
    # again.
    is_swapped_copy = (flags & _IS_SWAPPED) != 0
    return len(flags) == len(pages) and not is_copy.any() and not is_swapped_copy.any()
