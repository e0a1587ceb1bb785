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
        # Each element is the list of messages that one call of `Channel.receive` has returned. When
        # the other process has ended, None is added as the last element.
        self._batches: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._is_closed = False  # whether the last element was taken from the queue
        threading.Thread(target=self._receive_all, name="inbox", daemon=True).start()

    def receive(self, timeout_s: float | None) -> list[Any]:
        """Return all messages that have arrived, in order. Only one thread may call this method.

        Args:
            timeout_s: the longest time to wait for the first message; None means no limit.

        Raises:
            ChannelClosedError: the other end is closed, and all messages have already been
                returned.
        """
        messages = [] if self._is_closed else self._take_messages(timeout_s)
        if self._is_closed and not messages:
            raise ChannelClosedError("the connection was closed")
        return messages

    def _take_messages(self, timeout_s: float | None) -> list[Any]:
        """Remove and return all queued messages. If there are none, wait for the first message.

        Mutates: `_is_closed`. It becomes True if the last element of the queue was removed.
        """
        can_wait = timeout_s != 0
        messages: list[Any] = []
        try:
            batch = self._batches.get(block=can_wait, timeout=timeout_s)
        except queue.Empty:
            return messages
        while batch is not None:
            messages += batch
            if self._batches.empty():
                return messages
            # This call does not block, because only one thread removes elements.
            batch = self._batches.get()
        self._is_closed = True  # The last element of the queue is None.
        return messages

    def _receive_all(self) -> None:
        """Receive messages until the other process has ended."""
        try:
            while True:
                self._batches.put(self._channel.receive(None))
        except ChannelClosedError:
            self._batches.put(None)
