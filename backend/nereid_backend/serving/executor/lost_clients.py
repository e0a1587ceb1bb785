# SPDX-License-Identifier: Apache-2.0
"""Detects streams whose client has disconnected, from the steps that the server drops.

Triton server reports a disconnected client to the postprocessor, not to the executor. Version 2.51
runs the remaining steps of the stream with `is_cancelled` set, and the postprocessor reports that.
Other versions and schedulers silently drop these steps before the postprocessor. But steps reach
the postprocessor in the order in which they were sent. So if a later step of any stream has been
consumed and an earlier step has not, the earlier step was dropped. If there is no later step, a
step counts as dropped after a time limit.
"""

import itertools
from collections.abc import Iterable

from nereid_backend.serving.executor.streams import Stream
from nereid_backend.serving.feedback import FeedbackReader

# If this process was paused, the postprocessor may have been paused, too. So one interval between
# two calls counts as at most this many seconds of waiting.
_LONGEST_INTERVAL_S = 0.25


class LostClientDetector:
    """Follows the steps on their way to the postprocessor. Only one thread may use it.

    Args:
        feedback: the memory in which the postprocessor reports consumed steps.
        patience_s: the time after which an unconsumed step counts as dropped.
    """

    def __init__(self, feedback: FeedbackReader, patience_s: float) -> None:
        self._feedback = feedback
        self._patience_s = patience_s
        self._orders = itertools.count(1)
        self._newest_consumed = 0
        self._last_observed = 0.0

    def record(self, stream: Stream) -> None:
        """Assign a number to a step of `stream`. Call this directly before the step is sent."""
        stream.unconsumed.append(next(self._orders))

    def observe(self, streams: Iterable[Stream], now: float) -> None:
        """Read how many steps of each stream have been consumed."""
        passed_s = min(now - self._last_observed, _LONGEST_INTERVAL_S)
        self._last_observed = now
        for stream in streams:
            stream.waited_s += passed_s
            self._observe(stream)

    def has_lost_client(self, stream: Stream) -> bool:
        """Return whether a step of `stream` was dropped, because its client has disconnected."""
        if not stream.unconsumed:
            return False
        if stream.waited_s > self._patience_s:
            return True
        newest = self._newest_consumed
        if stream.unconsumed[0] >= newest:
            return False
        # The step may have been consumed since the last observation, so read the feedback again.
        self._observe(stream)
        return bool(stream.unconsumed) and stream.unconsumed[0] < newest

    def _observe(self, stream: Stream) -> None:
        consumed = self._feedback.consumed(stream.slot, stream.serial)
        while stream.unconsumed and stream.sent - len(stream.unconsumed) < consumed:
            self._newest_consumed = max(self._newest_consumed, stream.unconsumed.popleft())
            stream.waited_s = 0.0
        if not stream.unconsumed:
            stream.waited_s = 0.0
