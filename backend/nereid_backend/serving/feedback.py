# SPDX-License-Identifier: Apache-2.0
"""Shared memory in which the postprocessor reports to the executor.

The executor needs two facts that Triton server does not pass on: whether a client has cancelled its
request, and how many steps of a stream the postprocessor has consumed. The postprocessor writes
these facts into slots of shared memory. Each sequence of a stream has one slot with two 64-bit
words, which only the postprocessor writes:

    progress   serial << 32 | number of consumed steps
    signal     serial << 32 | Signal

The progress of a stream, and the signal CANCELLED, are in the slot of the stream's first sequence.
Each word contains the stream's serial number, so that a late write for an earlier stream in the
same slot is ignored. Aligned 8-byte stores are atomic on the machines that Triton server supports.
"""

import mmap
import os
from collections import deque
from collections.abc import Iterable
from enum import IntEnum

_WORDS = 2
_BYTES_PER_SLOT = 8 * _WORDS
_LOW_32_BITS = 0xFFFFFFFF


class Signal(IntEnum):
    """The reason why a sequence, or the whole stream, must end."""

    NONE = 0
    CANCELLED = 1
    STOP_STRING = 2


class FeedbackReader:
    """The executor's side: it owns the memory, assigns slots and reads the reports.

    The memory is an anonymous file (memfd), which the kernel frees when both processes have ended.

    Attributes:
        path: the path under which the postprocessor opens the memory.
    """

    def __init__(self, num_slots: int) -> None:
        self._fd = os.memfd_create("nereid-feedback")
        os.ftruncate(self._fd, num_slots * _BYTES_PER_SLOT)
        self._map = mmap.mmap(self._fd, num_slots * _BYTES_PER_SLOT)
        self._words = memoryview(self._map).cast("Q")
        # A queue, so that a released slot stays unused for as long as possible.
        self._free = deque(range(num_slots))
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def acquire(self, count: int = 1) -> tuple[int, ...] | None:
        """Return `count` free slots, or None if there are fewer.

        Only one thread may call this method. Other threads may call `release`.
        """
        if len(self._free) < count:
            return None
        return tuple(self._free.popleft() for _ in range(count))

    def release(self, slots: Iterable[int]) -> None:
        """Return slots to the free slots."""
        self._free.extend(slots)

    def consumed(self, slot: int, serial: int) -> int:
        """Return how many steps of the stream `serial` the postprocessor has consumed."""
        return self._value(slot * _WORDS, serial)

    def signal(self, slot: int, serial: int) -> Signal:
        """Return the signal for the sequence in `slot`; NONE if it is for an earlier stream."""
        return Signal(self._value(slot * _WORDS + 1, serial))

    def _value(self, index: int, serial: int) -> int:
        """Return the lower half of the word at `index`; 0 if it is for another stream."""
        word: int = self._words[index]
        return word & _LOW_32_BITS if word >> 32 == serial else 0

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._map.close()
        os.close(self._fd)


class FeedbackWriter:
    """The postprocessor's side. The first step of a stream names the memory to write to."""

    def __init__(self) -> None:
        self._path = ""
        self._words: memoryview | None = None

    def attach(self, path: str) -> None:
        """Map the memory at `path` unless it is mapped already.

        A new path means that the executor was restarted.
        """
        if path == self._path:
            return
        fd = os.open(path, os.O_RDWR)
        try:
            self._words = memoryview(mmap.mmap(fd, os.fstat(fd).st_size)).cast("Q")
        finally:
            os.close(fd)
        self._path = path

    def report(self, slot: int, serial: int, consumed: int) -> None:
        """Write how many steps of the stream `serial` have been consumed."""
        if self._words is not None:
            self._words[slot * _WORDS] = serial << 32 | consumed

    def raise_signal(self, slot: int, serial: int, signal: Signal) -> None:
        """Ask the executor to end the sequence in `slot`, or, for CANCELLED, the whole stream."""
        if self._words is not None:
            self._words[slot * _WORDS + 1] = serial << 32 | signal
