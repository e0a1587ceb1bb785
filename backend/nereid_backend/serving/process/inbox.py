# SPDX-License-Identifier: Apache-2.0
"""A separate thread receives the messages that the parent process sends.

The buffer of a socket contains at most about 200 KB, the size of about twenty long prompts. Suppose
that the engine read the socket only between two steps. Then the engine would receive only about
twenty requests between two steps. A short request or an abort that was sent after 200 long prompts
would have to wait for ten steps.
"""

import queue
import threading
from typing import Any

from nereid_backend.serving.process.channel import Channel, ChannelClosedError


class Inbox:
    """A queue of received messages. A thread receives messages until the channel is closed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # Each element is the list of messages that one call of `Channel.receive` has returned. None
        # means that the other process has ended.
        self._batches: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive_all, name="inbox", daemon=True).start()

    def receive(self, timeout_s: float | None) -> list[Any]:
        """Return all messages that have arrived, in order. Only one thread may call this method.

        Args:
            timeout_s: the longest time to wait for the first message; None means no limit.

        Raises:
            ChannelClosedError: the other end is closed, and all messages have already been
                returned.
        """
        # Another thread reads the channel, and puts lists of messages into `_batches`. None means
        # that the channel is closed.
        can_wait = timeout_s != 0
        try:
            batch = self._batches.get(block=can_wait, timeout=timeout_s)
        except queue.Empty:
            return []
        messages: list[Any] = []
        while batch is not None:
            messages += batch
            if self._batches.empty():
                return messages
            # This call does not block, because only one thread calls `receive`.
            batch = self._batches.get()
        # The channel is closed. Put None back into the queue, so that the next call of this method
        # also detects that the channel is closed.
        self._batches.put(None)
        if messages:
            return messages
        raise ChannelClosedError("the connection was closed")

    def _receive_all(self) -> None:
        """Receive messages until the other process has ended."""
        try:
            while True:
                self._batches.put(self._channel.receive(None))
        except ChannelClosedError:
            self._batches.put(None)
