# SPDX-License-Identifier: Apache-2.0
"""Sends messages to a child process from a thread of its own.

Sending blocks while the child process does not read. A child process that hangs must not block the
server's thread that delivers requests, nor the loop that detects the hang.
"""

import queue
import threading

from nereid_backend.serving.process.channel import Channel, ChannelClosedError


class Outbox:
    """A queue of messages and the thread that sends them in order, until the channel is closed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Queue a packed message. If the other process has ended, the message is dropped.

        The caller packs the message, because an error in the thread would end it, and no later
        message would be sent.
        """
        if self._thread.is_alive():
            self._messages.put(data)

    def finish(self) -> None:
        """Close the channel after all queued messages have been sent."""
        self._messages.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until the thread has ended."""
        self._thread.join(timeout_s)

    def _send_all(self) -> None:
        try:
            while (data := self._messages.get()) is not None:
                self._channel.send_packed(data)
        except ChannelClosedError:
            # The last messages of the other process can still be read, so this end stays open.
            return
        self._channel.close()
