# SPDX-License-Identifier: Apache-2.0
"""Messages between the executor's stub and the engine process: msgpack over a socket pair."""

import select
import socket
from typing import Any

import msgpack

_READ_BYTES = 1 << 20


class ChannelClosedError(Exception):
    """The other process has gone."""


class Channel:
    """One end of a stream socket that carries msgpack values, in order.

    Sending may happen in one thread while another receives; each direction has one user.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()  # unlike select, not limited to descriptors below 1024
        self._poll.register(connection, select.POLLIN)
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=0)

    def fileno(self) -> int:
        """The socket's descriptor, so that the channel can be waited for."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send one message; waits while the other end is slow.

        Raises:
            ChannelClosedError: the other end has gone.
        """
        try:
            self._socket.sendall(msgpack.packb(message, use_bin_type=True))
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout_s: float | None) -> list[Any]:
        """Messages that have arrived, waiting at most `timeout_s` for the first (None: no limit).

        Raises:
            ChannelClosedError: the other end has gone and all its messages were read.
        """
        try:
            if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
                return []
            data = self._socket.recv(_READ_BYTES)
        except (OSError, ValueError) as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("the connection was closed")
        self._unpacker.feed(data)
        return list(self._unpacker)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
