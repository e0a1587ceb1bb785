# SPDX-License-Identifier: Apache-2.0
"""Sends messages between a Triton model and a child process: msgpack values over a socket pair."""

import select
import socket
from typing import Any

import msgpack

from nereid_backend.errors import RequestError, first_line

_READ_BYTES = 1 << 20


class ChannelClosedError(Exception):
    """The other process has ended or has closed its end of the channel."""


def pack(message: object) -> bytes:
    """Return a message as msgpack bytes.

    Raises:
        RequestError: the message contains a value that msgpack cannot pack. Examples: an integer of
            more than 64 bits, and a text with half of a surrogate pair.
    """
    try:
        packed: bytes = msgpack.packb(message, use_bin_type=True)
    except (ValueError, OverflowError, TypeError) as error:
        raise RequestError(
            f"request: a value cannot be sent to the model: {first_line(error)}"
        ) from None
    return packed


class Channel:
    """One end of a socket pair. It sends and receives msgpack values in order.

    One thread may send while another thread receives.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()  # select.select fails for descriptors above 1023
        self._poll.register(connection, select.POLLIN)
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=0)

    def fileno(self) -> int:
        """Return the socket's file descriptor. `select.poll` needs it to wait for messages."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send one message. If the socket's buffer is full, wait until the other process reads.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        self.send_packed(pack(message))

    def send_packed(self, data: bytes) -> None:
        """Send a message that `pack` has packed. This method raises the same errors as `send`."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout_s: float | None) -> list[Any]:
        """Return the messages that have arrived.

        Args:
            timeout_s: the longest time to wait for the first message; None means no limit.

        Raises:
            ChannelClosedError: the other end is closed, and all its messages have already been
                returned.
        """
        try:
            timeout_ms = None if timeout_s is None else timeout_s * 1000
            if not self._poll.poll(timeout_ms):
                return []
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:  # The other end is closed.
            raise ChannelClosedError("the connection was closed")
        # The data can end within a message. The unpacker stores the incomplete message, and
        # completes the message with the data of the next call.
        self._unpacker.feed(data)
        return list(self._unpacker)

    def close(self) -> None:
        """Close this end of the channel."""
        self._socket.close()
