# SPDX-License-Identifier: Apache-2.0
"""A separate thread sends messages to a child process.

Sending blocks while the child process does not read its messages. A child process that hangs must
not block the server's thread, because this thread delivers requests. It must not block the loop
either, because the loop detects the hang.
"""

import queue
import threading

from nereid_backend.serving.process.channel import Channel, ChannelClosedError


class Outbox:
    """A queue of messages to send. A thread sends the messages in order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Queue a packed message. If the other process has ended, drop the message.

        The caller packs the message. If the sending thread packed messages, an error while packing
        would end this thread, and no later message would be sent.
        """
        if self._thread.is_alive():
            self._messages.put(data)

    def finish(self) -> None:
        """Let the thread send all queued messages and then close the channel."""
        self._messages.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until the thread has ended."""
        self._thread.join(timeout_s)

    def _send_all(self) -> None:
        """Send the queued messages until `finish` is called or the other process has ended."""
        try:
            while (data := self._messages.get()) is not None:
                self._channel.send_packed(data)
        except ChannelClosedError:
            # Do not close the channel here, because messages that the other process sent before its
            # end may not have been read yet.
            return
        self._channel.close()
