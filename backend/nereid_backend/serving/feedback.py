# SPDX-License-Identifier: Apache-2.0
"""What the postprocessor tells the executor, in shared memory with one writer per cell.

Cancelling an ensemble request does not reach a decoupled step that already runs, and nothing says
how far its responses have been consumed. The postprocessor knows both. One slot belongs to each
sequence (answer) of a stream in the executor, and holds two 64-bit words that only the
postprocessor writes:

    progress   serial << 32 | steps consumed      of the stream, in its first sequence's slot
    signal     serial << 32 | Signal              CANCELLED in the first sequence's slot ends all

A word carries the serial number of the stream it speaks of, so that a late write for an earlier
stream of the same slot is never taken for the present one. Aligned 8-byte stores are atomic on the
machines that Triton server runs on.
"""

import mmap
import os
from collections import deque
from collections.abc import Iterable
from enum import IntEnum

_WORDS = 2
_BYTES_PER_SLOT = 8 * _WORDS
_MASK = 0xFFFFFFFF


class Signal(IntEnum):
    """Why the postprocessor wants a sequence, or the whole stream, to end."""

    NONE = 0
    CANCELLED = 1
    STOP_STRING = 2


class FeedbackReader:
    """The executor's end: owns the memory, hands out slots, reads what was consumed.

    The memory is anonymous (a memfd), so nothing is left behind whichever process dies.
    """

    def __init__(self, num_slots: int) -> None:
        self._fd = os.memfd_create("nereid-feedback")
        os.ftruncate(self._fd, num_slots * _BYTES_PER_SLOT)
        self._map = mmap.mmap(self._fd, num_slots * _BYTES_PER_SLOT)
        self._words = memoryview(self._map).cast("Q")
        # First in, first out: a slot rests as long as possible before it is used again.
        self._free = deque(range(num_slots))
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def acquire(self, count: int = 1) -> tuple[int, ...] | None:
        """So many free slots, or None when there are fewer. Used by one thread."""
        # Others may only add to the free ones meanwhile.
        if len(self._free) < count:
            return None
        return tuple(self._free.popleft() for _ in range(count))

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back."""
        self._free.extend(slots)

    def consumed(self, slot: int, serial: int) -> int:
        """Steps of this stream that the postprocessor has seen."""
        word: int = self._words[slot * _WORDS]
        return word & _MASK if word >> 32 == serial else 0

    def signal(self, slot: int, serial: int) -> Signal:
        """What the postprocessor wants of this sequence."""
        word: int = self._words[slot * _WORDS + 1]
        return Signal(word & _MASK) if word >> 32 == serial else Signal.NONE

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._map.close()
        os.close(self._fd)


class FeedbackWriter:
    """The postprocessor's end; opens the executor's memory when the first step names it."""

    def __init__(self) -> None:
        self._path = ""
        self._words: memoryview | None = None

    def attach(self, path: str) -> None:
        """Map the memory at `path`, once; a new path means that the executor was restarted."""
        if path == self._path:
            return
        fd = os.open(path, os.O_RDWR)
        try:
            self._words = memoryview(mmap.mmap(fd, os.fstat(fd).st_size)).cast("Q")
        finally:
            os.close(fd)
        self._path = path

    def report(self, slot: int, serial: int, consumed: int) -> None:
        """Say how many steps of a stream have been consumed."""
        if self._words is not None:
            self._words[slot * _WORDS] = serial << 32 | consumed

    def raise_signal(self, slot: int, serial: int, signal: Signal) -> None:
        """Ask the executor to end a sequence, or all of them."""
        if self._words is not None:
            self._words[slot * _WORDS + 1] = serial << 32 | signal
