# SPDX-License-Identifier: Apache-2.0
"""Shared memory that the postprocessor writes and the executor reads.

The executor needs two facts that Triton server does not report to it: whether a client has
cancelled its request, and how many steps of a stream the postprocessor has consumed. The
postprocessor writes these facts into shared memory, the feedback memory. The memory is divided into
slots. Each sequence of a stream has one slot. A slot consists of two 64-bit words, and only the
postprocessor writes into slots:

    progress   serial << 32 | number of consumed steps
    signal     serial << 32 | Signal

The slot of a stream's first sequence contains the progress of the stream and the signal CANCELLED.
Each word contains the stream's serial number, so that the executor can ignore a late write for an
earlier stream of the same slot. Aligned 8-byte stores are atomic on the machines that Triton server
supports.

Clients of Triton server can call the postprocessor directly. The postprocessor therefore maps only
a memfd whose name contains the random token of an executor, and writes only into existing slots.
The memory begins with a random key. The executor signs each step with this key. The postprocessor
processes only signed steps, so that a client cannot read or end the stream of another client.
"""

import hashlib
import hmac
import mmap
import os
import re
import secrets
from collections import deque
from collections.abc import Iterable
from enum import IntEnum

from nereid_backend.errors import RequestError

_KEY_WORDS = 4
_KEY_BYTES = 8 * _KEY_WORDS
_SIGNATURE_BYTES = 16
_WORDS = 2
_BYTES_PER_SLOT = 8 * _WORDS
_LOW_32_BITS = 0xFFFFFFFF
# Matches the address of the memory. The address consists of the process id of the executor, the
# file descriptor of the memfd, and the name of the memfd.
_ADDRESS = re.compile(r"([0-9]{1,10})/([0-9]{1,10})/(nereid-feedback-[0-9a-f]{32})", re.ASCII)


class Signal(IntEnum):
    """The reason why a sequence or a whole stream must end."""

    NONE = 0
    CANCELLED = 1
    STOP_STRING = 2


class FeedbackReader:
    """Creates the shared memory, and reads what the postprocessor has written into the memory.

    The executor uses this class. The memory is an anonymous file (memfd). The kernel frees the file
    when the executor and the postprocessor have ended.

    Attributes:
        address: the address of the memory, for example "4711/12/nereid-feedback-0f3c9a...". It
            consists of the process id of the executor, the number of the file descriptor in the
            executor, and the name of the file.
    """

    def __init__(self, num_slots: int) -> None:
        """Create the shared memory, into which the postprocessor writes and which this class reads.

        The memory consists of a random key and of one slot for each of `num_slots` sequences.
        """
        name = _new_memory_name()
        self._fd = os.memfd_create(name)
        # Messages to the postprocessor contain this address, with which it maps the memory.
        self.address = f"{os.getpid()}/{self._fd}/{name}"
        os.ftruncate(self._fd, _KEY_BYTES + num_slots * _BYTES_PER_SLOT)
        self._map = mmap.mmap(self._fd, 0)
        # The memory as unsigned integers of 64 bits (words). Each slot consists of two words.
        self._words = memoryview(self._map).cast("Q")
        # The executor signs its messages with this key, and the postprocessor checks them.
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._map[:_KEY_BYTES] = self._key
        # A queue of the numbers of the free slots. Slots are taken from the beginning of the queue,
        # and released slots are added at the end. So a released slot stays unused for as long as
        # possible.
        self._free = deque(range(num_slots))

    def acquire(self, count: int = 1) -> tuple[int, ...] | None:
        """Reserve `count` free slots, and return their numbers.

        If fewer than `count` slots are free, return None.

        Only one thread may call this method. Other threads may call `release`.
        """
        if len(self._free) < count:
            return None
        return tuple(self._free.popleft() for _ in range(count))

    def release(self, slots: Iterable[int]) -> None:
        """Mark slots as free."""
        self._free.extend(slots)

    def consumed(self, slot: int, serial: int) -> int:
        """Return the number of processed messages of the stream `serial`."""
        return self._value(_KEY_WORDS + slot * _WORDS, serial)

    def signal(self, slot: int, serial: int) -> Signal:
        """Return the signal in `slot` if it belongs to the stream `serial`, otherwise `NONE`."""
        return Signal(self._value(_KEY_WORDS + slot * _WORDS + 1, serial))

    def sign(self, state: bytes) -> bytes:
        """Add the memory's address and a signature to a packed message, and return the result.

        Args:
            state: the packed StepState.

        Returns:
            The address, a line feed, the signature of 16 bytes, and `state`.
        """
        return b"".join((self.address.encode(), b"\n", _signature(self._key, state), state))

    def _value(self, index: int, serial: int) -> int:
        """Return the number that the memory contains at `index` for the stream `serial`.

        The upper half of the word at `index` contains the serial number of a stream, and the lower
        half contains the number that is stored for this stream. Return 0 if the serial number in
        the word is not `serial`.
        """
        word: int = self._words[index]
        return word & _LOW_32_BITS if word >> 32 == serial else 0

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._map.close()
        os.close(self._fd)


class FeedbackWriter:
    """Maps the executor's shared memory into the postprocessor, and writes into this memory.

    Attributes:
        address: the address of the mapped memory; None before the first step.
    """

    def __init__(self) -> None:
        self.address: str | None = None
        self._words = memoryview(b"")
        self._key = b""

    def attach(self, address: str) -> None:
        """Map the executor's memory at `address` into this process, so that it can be written to.

        Do nothing if this memory is already mapped. Another mapped memory belongs to an executor
        that has ended, and is replaced by the new memory.

        Raises:
            RequestError: the address does not belong to the feedback memory of an executor.
        """
        if address == self.address:
            return
        try:
            memory = _map_memory(address)
        except OSError as error:
            raise _address_error(os.strerror(error.errno or 0)) from None
        self._words = memory.cast("Q")
        # The memory begins with the random key with which the executor signs its messages.
        self._key = bytes(memory[:_KEY_BYTES])
        self.address = address

    def attach_and_verify(self, message: bytes) -> bytes:
        """Map the shared memory of an executor, and verify that the executor signed `message`.

        Return the packed StepState in the message.

        Args:
            message: the address of the memory, a line feed, the signature, and the packed StepState
                (the return value of `FeedbackReader.sign`).

        Raises:
            RequestError: the address is not that of an executor's memory, or the executor did not
                sign the step.
        """
        address, _, signed_state = message.partition(b"\n")
        self.attach(address.decode("ascii", "replace"))
        # The key of the signature comes from the mapped memory. A client cannot choose this memory,
        # because `attach` accepts only a memory file of the server's own user.
        signature = signed_state[:_SIGNATURE_BYTES]
        state = signed_state[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, _signature(self._key, state)):
            raise RequestError(
                "state: the signature of the step is wrong. Only the executor may send requests to "
                "the postprocessor."
            )
        return state

    def check_slot(self, slot: int) -> None:
        """Raise a RequestError if `slot` is not the number of a slot in the shared memory."""
        num_slots = max(len(self._words) - _KEY_WORDS, 0) // _WORDS
        if not 0 <= slot < num_slots:
            raise RequestError(
                f"state: the slot {slot} does not exist. The shared memory of the executor has "
                f"{num_slots} slots, whose numbers begin with 0."
            )

    def report(self, slot: int, serial: int, consumed: int) -> None:
        """Store `consumed`, the number of processed messages of the stream `serial`.

        Raises:
            RequestError: the memory has no such slot.
        """
        self.check_slot(slot)
        self._words[_KEY_WORDS + slot * _WORDS] = serial << 32 | consumed

    def raise_signal(self, slot: int, serial: int, signal: Signal) -> None:
        """Tell the executor to end a sequence or a stream: store `signal` in the shared memory.

        STOP_STRING ends the sequence of the slot. CANCELLED ends all sequences of the stream.

        Raises:
            RequestError: the memory has no such slot.
        """
        self.check_slot(slot)
        self._words[_KEY_WORDS + slot * _WORDS + 1] = serial << 32 | signal


def _new_memory_name() -> str:
    """Return a name for a new shared memory file, such as "nereid-feedback-0f3c9a...".

    The name contains a random part, so that clients cannot guess the name. The kernel reports the
    real name of each open file in /proc. The postprocessor accepts only a file whose real name
    begins with `nereid-feedback-`.
    """
    return f"nereid-feedback-{secrets.token_hex(16)}"


def _map_memory(address: str) -> memoryview:
    """Map the shared memory of an executor into this process, and return its bytes.

    Args:
        address: the process id of the executor, the number of the file descriptor in the executor,
            and the name of the memory, such as "4711/12/nereid-feedback-0f3c9a...".

    Raises:
        OSError: the process or its file does not exist, or is not accessible.
        RequestError: the file is not the feedback memory of an executor.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise _address_error("the text has the wrong form")
    pid, fd, name = match.groups()
    # A memfd has no path in a folder. Other processes can open it only through /proc.
    memory_file = _open_memory_file(f"/proc/{pid}/fd/{fd}", name)
    try:
        return memoryview(mmap.mmap(memory_file, 0))
    finally:
        os.close(memory_file)


def _open_memory_file(path: str, name: str) -> int:
    """Open the file of the shared memory at `path`, and return the file descriptor.

    Args:
        path: a path such as "/proc/4711/fd/12", which names a file of the process 4711. A client
            may have chosen the path, so the file is checked before it is opened.
        name: the name that the memory must have.

    Raises:
        OSError: the process or its file does not exist, or is not accessible.
        RequestError: the file is another file, or belongs to another user.
    """
    # Opening a device file can have side effects, so the file must be checked before it is opened.
    # O_PATH creates a reference to the file without opening the file. The checks and the later
    # `os.open` use this reference, so the file cannot be replaced between them.
    reference = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        link = f"/proc/self/fd/{reference}"
        is_own = os.fstat(reference).st_uid == os.geteuid()
        # Linux reports the path of every memfd in this form.
        has_name = os.readlink(link) == f"/memfd:{name} (deleted)"
        if not (is_own and has_name):
            raise _address_error("the file is not the shared memory of an executor")
        return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(reference)


def _signature(key: bytes, state: bytes) -> bytes:
    """Return 16 bytes that prove to the postprocessor that the executor has sent `state`."""
    return hashlib.blake2b(state, key=key, digest_size=_SIGNATURE_BYTES).digest()


def _address_error(reason: str) -> RequestError:
    return RequestError(
        f"state: the address of the executor's shared memory is wrong: {reason}. Only the executor "
        "may send requests to the postprocessor."
    )
