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
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from torch import Tensor, nn

# Each call that returns memory takes about 1 ms, so memory is returned only after _STEP_BYTES bytes
# have been freed.
_STEP_BYTES = 32 * 2**20
_PAGE_BYTES = mmap.PAGESIZE
# Matches a file that is mapped into the memory of this process, if none of its pages was changed.
# Linux describes mapped files in /proc/self/smaps. Here are two lines of a description:
# "7f3489600000-7f34d06e9000 rw-p 00000000 fe:00 2361743   /models/chat/model.safetensors"
# "Anonymous:             0 kB"
_UNCHANGED_FILE = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* .*\n(?:[A-Z]\S+:.*\n)*?Anonymous: +0 kB",
    re.MULTILINE,
)


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


class MappedFiles:
    """Returns the pages of mapped files to the operating system after their tensors were used.

    The safetensors library maps the files of a checkpoint into the memory. The tensors keep their
    values, because the operating system reads a page from the file again when the page is used. If
    this process has changed a page of a file, the whole file is left out, because the change would
    be lost. On systems other than Linux, nothing is returned.
    """

    def __init__(self) -> None:
        self._ranges = _unchanged_file_ranges()

    def discard(self, tensor: Tensor) -> None:
        """If a tensor is in a mapped file, return the tensor's pages to the operating system."""
        address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        if any(start <= address < end for start, end in self._ranges):
            discard_pages(address, tensor.nbytes)

    @contextlib.contextmanager
    def discard_after_use(self, model: nn.Module) -> Iterator[None]:
        """In the `with` block, discard the memory pages of a module's weights after each call."""

        def discard(module: nn.Module, *_: object) -> None:
            for weight in module.parameters(recurse=False):
                self.discard(weight)

        hooks = [module.register_forward_hook(discard) for module in model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _unchanged_file_ranges() -> list[tuple[int, int]]:
    """Return the start address and end address of each mapped file that has no changed pages."""
    try:
        description = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []  # Only Linux has this file.
    return [
        (int(match[1], 16), int(match[2], 16)) for match in _UNCHANGED_FILE.finditer(description)
    ]
