# SPDX-License-Identifier: Apache-2.0
"""Which steps the server still runs: how a client that has gone is noticed.

When a client goes away, the server goes on accepting the steps of its stream from the executor.
Version 2.51 runs them with `is_cancelled` set, which the postprocessor reports; other versions and
schedulers drop them before the postprocessor, and nothing says that a step was dropped. But steps
reach the one postprocessor in the order in which they were sent: where a later step of anybody has
been consumed and an earlier one has not, the earlier one was dropped. Where there is no later step,
patience decides.
"""

import itertools
from collections.abc import Iterable

from nereid_backend.serving.executor.streams import Stream
from nereid_backend.serving.feedback import FeedbackReader

# A pause of this process counts as no more than this: the postprocessor may have paused with it.
_LONGEST_LOOK_S = 0.25


class Delivery:
    """Follows steps on their way to the postprocessor. Used by one thread.

    Args:
        feedback: where the postprocessor reports.
        patience_s: a step that is on its way for so long will not arrive.
    """

    def __init__(self, feedback: FeedbackReader, patience_s: float) -> None:
        self._feedback = feedback
        self._patience_s = patience_s
        self._orders = itertools.count(1)
        self._newest_consumed = 0
        self._last_look = 0.0

    def record(self, stream: Stream) -> None:
        """Note that a step of this stream is about to be sent."""
        stream.unconsumed.append(next(self._orders))

    def observe(self, streams: Iterable[Stream], now: float) -> None:
        """Read how far each stream has been consumed."""
        passed_s = min(now - self._last_look, _LONGEST_LOOK_S)
        self._last_look = now
        for stream in streams:
            stream.waited_s += passed_s
            self._observe(stream)

    def was_dropped(self, stream: Stream) -> bool:
        """Whether a step of this stream will not arrive, because its client has gone."""
        if not stream.unconsumed:
            return False
        if stream.waited_s > self._patience_s:
            return True
        newest = self._newest_consumed
        if stream.unconsumed[0] >= newest:
            return False
        # It may have been consumed since it was looked at, before the later one was.
        self._observe(stream)
        return bool(stream.unconsumed) and stream.unconsumed[0] < newest

    def _observe(self, stream: Stream) -> None:
        consumed = self._feedback.consumed(stream.slot, stream.serial)
        while stream.unconsumed and stream.sent - len(stream.unconsumed) < consumed:
            self._newest_consumed = max(self._newest_consumed, stream.unconsumed.popleft())
            stream.waited_s = 0.0
        if not stream.unconsumed:
            stream.waited_s = 0.0
