# SPDX-License-Identifier: Apache-2.0
"""Detects streams whose client has disconnected. The server drops the steps of such streams.

Triton server reports a disconnected client to the postprocessor, not to the executor. Version 2.51
runs the remaining steps of the stream with `is_cancelled` set, and the postprocessor informs the
executor. Other versions and schedulers drop the remaining steps without a message, so the
postprocessor does not receive these steps. However, steps reach the postprocessor in the order in
which they were sent. Suppose step 7 was sent before step 8. If the postprocessor has consumed step
8, but not step 7, then step 7 was dropped. The two steps may belong to different streams. If no
later step was sent, a step counts as dropped after a time limit.
"""

import itertools
from collections.abc import Iterable

from nereid_backend.serving.executor.streams import Stream
from nereid_backend.serving.feedback import FeedbackReader

# If more than `_LONGEST_INTERVAL_S` seconds pass between two calls of `observe`, this process was
# paused. The postprocessor may have been paused, too. Therefore at most `_LONGEST_INTERVAL_S`
# seconds count as waiting time.
_LONGEST_INTERVAL_S = 0.25


class LostClientDetector:
    """Finds the steps that never reach the postprocessor. Only one thread may use the detector.

    Args:
        feedback: the memory in which the postprocessor reports consumed steps.
        patience_s: the time after which an unconsumed step counts as dropped.
    """

    def __init__(self, feedback: FeedbackReader, patience_s: float) -> None:
        self._feedback = feedback
        self._patience_s = patience_s
        # A counter for the steps of all streams. The steps are numbered in the order in which they
        # are sent.
        self._step_numbers = itertools.count(1)
        # The highest step number that the postprocessor has consumed so far.
        self._newest_consumed = 0
        self._last_observed = 0.0

    def record(self, stream: Stream) -> None:
        """Assign a number to the next step of `stream`. Call this before the step is sent."""
        stream.unconsumed.append(next(self._step_numbers))

    def observe(self, streams: Iterable[Stream], now: float) -> None:
        """Read the number of consumed steps of each stream from the feedback memory."""
        passed_s = min(now - self._last_observed, _LONGEST_INTERVAL_S)
        self._last_observed = now
        for stream in streams:
            stream.waited_s += passed_s
            self.remove_consumed_steps(stream)

    def has_lost_client(self, stream: Stream) -> bool:
        """Return whether a step of `stream` was dropped because the client has disconnected.

        A step was dropped if the postprocessor has not consumed the step, but has already consumed
        a newer step of any stream. A step also counts as dropped after `patience_s` seconds.
        """
        if stream.unconsumed and stream.waited_s > self._patience_s:
            return True
        if not self._has_skipped_step(stream):
            return False
        # The step may have been consumed since the last observation, so read the feedback again.
        self.remove_consumed_steps(stream)
        return self._has_skipped_step(stream)

    def _has_skipped_step(self, stream: Stream) -> bool:
        """Return whether the postprocessor has skipped a step of `stream`.

        A step was skipped if the postprocessor has consumed a newer step of any stream, but not
        this step.
        """
        return bool(stream.unconsumed) and stream.unconsumed[0] < self._newest_consumed

    def remove_consumed_steps(self, stream: Stream) -> None:
        """Remove steps from `stream.unconsumed` if the postprocessor has consumed these steps."""
        consumed = self._feedback.consumed(stream.slot, stream.serial)
        while stream.unconsumed and stream.sent - len(stream.unconsumed) < consumed:
            self._newest_consumed = max(self._newest_consumed, stream.unconsumed.popleft())
            stream.waited_s = 0.0
        if not stream.unconsumed:
            stream.waited_s = 0.0
