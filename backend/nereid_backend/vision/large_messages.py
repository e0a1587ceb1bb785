# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes that prepare images.

A request can contain 32 MiB of image files, and an answer can contain more than 100 MB of pixels.
Two sockets lie between the engine's process and the process that decodes images, and each socket
copies the bytes several times. A large message is therefore written once to a file in memory, and
the sockets pass only the descriptor of the file.
"""

import contextlib
import os
import weakref
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Self

# Smaller messages are sent through the socket, because a file takes longer to create.
_MIN_FILE_BYTES = 2**18
# A correct sender never sends a message of more than `_MAX_BYTES` bytes.
_MAX_BYTES = 2**31
# An empty message announces that a file descriptor follows. Requests and answers are packed with
# msgpack, so they are never empty.
_FILE_FOLLOWS = b""


class Message:
    """The bytes of a message. The bytes of a large message are in a file in memory."""

    def __init__(self, data: bytes) -> None:
        """Store the bytes of a message. If the message is large, store them in a file in memory."""
        self._data = data
        self._descriptor: int | None = None
        if len(data) >= _MIN_FILE_BYTES:
            # If the file cannot be created, the bytes are sent through the socket.
            with contextlib.suppress(OSError, AttributeError):
                self._use_file(_write_memory_file(data))

    @classmethod
    def from_file(cls, descriptor: int) -> Self:
        """Return the message whose bytes are in the file with this descriptor."""
        message = cls(b"")
        message._use_file(descriptor)
        return message

    def _use_file(self, descriptor: int) -> None:
        """Use the bytes of a file as the message. Close the file when this object is deleted."""
        self._data = b""
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Free the memory that the message occupies in this process."""
        if self._descriptor is not None:
            self._close()

    def read(self) -> bytes:
        """Return the bytes of the message.

        Raises:
            OSError: the file is damaged.
        """
        if self._descriptor is None:
            return self._data
        # Read a copy of the file instead of mapping the file into memory. If the sender truncated a
        # mapped file, the next access to the mapping would crash this process.
        num_bytes = os.fstat(self._descriptor).st_size
        if num_bytes > _MAX_BYTES:
            raise OSError(f"a message has {num_bytes} bytes")
        return os.pread(self._descriptor, num_bytes, 0)

    def starts_with(self, prefix: bytes) -> bool:
        """Return whether the message starts with `prefix`.

        Raises:
            OSError: the file is damaged.
        """
        if self._descriptor is None:
            return self._data.startswith(prefix)
        return os.pread(self._descriptor, len(prefix), 0) == prefix

    def send(self, connection: Connection) -> None:
        """Send the message to another process. A message can be sent several times.

        Raises:
            OSError: the other process has ended.
        """
        if self._descriptor is None:
            connection.send_bytes(self._data)
        else:
            connection.send_bytes(_FILE_FOLLOWS)
            reduction.send_handle(connection, self._descriptor, None)


def receive_message(connection: Connection) -> Message:
    """Receive a message that `Message.send` has sent.

    Raises:
        EOFError, OSError: the other process has ended, or has sent no valid message.
    """
    data = connection.recv_bytes()
    if data != _FILE_FOLLOWS:
        return Message(data)
    # The bytes of a large message are in a file in memory. Receive the descriptor of this file.
    try:
        return Message.from_file(reduction.recv_handle(connection))
    except (RuntimeError, ValueError) as error:
        raise EOFError("a message contains no descriptor of a file") from error


def _write_memory_file(data: bytes) -> int:
    """Write bytes to a new file in memory, and return the descriptor of the file.

    Raises:
        OSError: the file cannot be created.
        AttributeError: the operating system has no files in memory.
    """
    descriptor = os.memfd_create("nereid-message")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
