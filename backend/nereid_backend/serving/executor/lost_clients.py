# SPDX-License-Identifier: Apache-2.0
"""Detects clients that have disconnected while tokens are generated for them.

A step is a message from the executor to the postprocessor with new tokens of a stream. Triton
server reports a disconnected client to the postprocessor, not to the executor. Version 2.51 runs
the remaining steps of the stream with `is_cancelled` set, and the postprocessor informs the
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

# Each call of `observe` adds the time since the previous call to the waiting times of messages, but
# at most `_LONGEST_INTERVAL_S` seconds. If more time has passed, this process was probably paused,
# and perhaps the postprocessor, too.
_LONGEST_INTERVAL_S = 0.25


class LostClientDetector:
    """Finds messages that the executor has sent, but that never reach the postprocessor.

    Only one thread may use the detector.

    Args:
        feedback: the memory in which the postprocessor reports consumed steps.
        patience_s: the time after which an unconsumed step counts as dropped.
    """

    def __init__(self, feedback: FeedbackReader, patience_s: float) -> None:
        self._feedback = feedback
        self._patience_s = patience_s
        # This counter numbers the messages to the postprocessor in the order in which they are
        # sent. All streams share the counter.
        self._step_numbers = itertools.count(1)
        # The messages to the postprocessor are numbered. `_newest_consumed` is the highest number
        # among the messages that the postprocessor has processed so far.
        self._newest_consumed = 0
        self._last_observed = 0.0

    def record(self, stream: Stream) -> None:
        """Give the next message of `stream` a number. Call this before sending the message."""
        stream.unconsumed.append(next(self._step_numbers))

    def observe(self, streams: Iterable[Stream], now: float) -> None:
        """Read from the feedback memory how many messages of each stream were processed."""
        passed_s = min(now - self._last_observed, _LONGEST_INTERVAL_S)
        self._last_observed = now
        for stream in streams:
            stream.waited_s += passed_s
            self.remove_consumed_steps(stream)

    def has_lost_client(self, stream: Stream) -> bool:
        """Return whether the server has dropped a message of `stream`, because the client is gone.

        A step is a message to the postprocessor. All steps of all streams reach the postprocessor
        in the order in which they were sent. A step was therefore dropped if the postprocessor has
        not processed the step, but has already processed a newer step of any stream. A step also
        counts as dropped if it is not processed within `patience_s` seconds.
        """
        if stream.unconsumed and stream.waited_s > self._patience_s:
            return True
        if not self._has_skipped_step(stream):
            return False
        # The postprocessor may have processed the step after the feedback memory was last read.
        # Therefore, read the memory again before you conclude that the client has disconnected.
        self.remove_consumed_steps(stream)
        return self._has_skipped_step(stream)

    def _has_skipped_step(self, stream: Stream) -> bool:
        """Return whether the postprocessor has skipped a step (a message) of `stream`.

        A step was skipped if the postprocessor has consumed a newer step of any stream, but not
        this step.
        """
        return bool(stream.unconsumed) and stream.unconsumed[0] < self._newest_consumed

    def remove_consumed_steps(self, stream: Stream) -> None:
        """Remove from `stream.unconsumed` each message that the postprocessor has processed."""
        consumed = self._feedback.consumed(stream.slot, stream.serial)
        while stream.unconsumed and stream.num_sent_steps - len(stream.unconsumed) < consumed:
            self._newest_consumed = max(self._newest_consumed, stream.unconsumed.popleft())
            stream.waited_s = 0.0
        if not stream.unconsumed:
            stream.waited_s = 0.0
