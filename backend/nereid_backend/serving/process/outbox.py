# SPDX-License-Identifier: Apache-2.0
"""Messages on their way out of this process, sent by a thread of their own.

Sending waits when the other end does not read: a process that hangs must neither hold up the
server's thread that brings requests nor the loop that is to find out that it hangs.
"""

import queue
import threading

from nereid_backend.serving.process.channel import Channel, ChannelClosedError


class Outbox:
    """Sends messages in their order; a thread that ends with the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Send a message soon.

        Raises:
            ChannelClosedError: the other end has gone.
        """
        if self._is_closed.is_set():
            raise ChannelClosedError("it has gone")
        self._messages.put(message)

    def finish(self) -> None:
        """Close the channel behind what was put so far."""
        self._messages.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended."""
        self._thread.join(timeout_s)

    def _send_all(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                self._channel.send(message)
        except ChannelClosedError:
            # What the other end said last can still be read, so this end stays open.
            self._is_closed.set()
        else:
            self._is_closed.set()
            self._channel.close()
