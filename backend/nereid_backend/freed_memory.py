# SPDX-License-Identifier: Apache-2.0
"""Returns freed memory to the operating system while a model is loaded.

The C library reserves freed memory for later allocations. While a model is loaded, large tensors of
different sizes are created and freed, so gaps arise between the tensors that are still used. Later
tensors often do not fit into these gaps. Without this module, a process that loads a model needs up
to twice the memory of the weights.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import cast

# Each call that returns memory takes about 1 ms, so memory is returned only after _STEP_BYTES bytes
# have been freed.
_STEP_BYTES = 32 * 2**20
_PAGE_BYTES = mmap.PAGESIZE


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
    first_page = (address + _PAGE_BYTES - 1) // _PAGE_BYTES  # rounded up
    end_page = (address + num_bytes) // _PAGE_BYTES  # rounded down
    if sys.platform == "linux" and end_page > first_page:
        start_address = ctypes.c_void_p(first_page * _PAGE_BYTES)
        size = ctypes.c_size_t((end_page - first_page) * _PAGE_BYTES)
        # The call is only meant to save memory, so its errors are ignored.
        ctypes.CDLL(None).madvise(start_address, size, mmap.MADV_DONTNEED)
