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

While the postprocessor is loaded again, for example with other settings, the old postprocessor
processes the steps of older streams, and the new postprocessor those of newer streams. A step can
then overtake a step of another stream. Therefore a step counts as dropped only if no step of its
stream has been consumed for a short time.
"""

import itertools
from collections.abc import Iterable

from nereid_backend.serving.executor.streams import Stream
from nereid_backend.serving.feedback import FeedbackReader

# Each call of `observe` adds the time since the previous call to the waiting times of messages, but
# at most `_LONGEST_INTERVAL_S` seconds. If more time has passed, this process was probably paused,
# and perhaps the postprocessor, too.
_LONGEST_INTERVAL_S = 0.25
# Suppose that the postprocessor has processed step 8 of stream A, but has not processed step 7 of
# stream B, which was sent before step 8. If the postprocessor processes no step of stream B for
# `_OVERTAKING_S` seconds, step 7 counts as dropped. In a shorter time, step 8 may only have
# overtaken step 7.
_OVERTAKING_S = 1.0


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
        # The number of the newest message that the postprocessor has processed so far.
        self._newest_consumed = 0
        self._last_observed = 0.0

    def record_sent_step(self, stream: Stream) -> None:
        """Give the next message of `stream` a number. Call this before sending the message."""
        stream.unconsumed_steps.append(next(self._step_numbers))

    def observe(self, streams: Iterable[Stream], now: float) -> None:
        """Update `unconsumed_steps` and `stalled_s` of each stream from the feedback memory.

        Call this method regularly. `now` is the current time.
        """
        passed_s = min(now - self._last_observed, _LONGEST_INTERVAL_S)
        self._last_observed = now
        for stream in streams:
            stream.stalled_s += passed_s
            self.remove_consumed_steps(stream)

    def detect_lost_client(self, stream: Stream) -> bool:
        """Return whether the server has dropped a step of `stream`. If so, the client is gone.

        A step is a message to the postprocessor. The postprocessor normally consumes the steps of
        all streams in the order in which they were sent. An unconsumed step of `stream` counts as
        dropped in two cases:
        - For more than `patience_s` seconds, no step of `stream` was consumed.
        - For at least `_OVERTAKING_S` seconds, no step of `stream` was consumed, and a step that
          was sent later, of any stream, was consumed. Example: step 7 belongs to `stream`, and step
          8 was consumed, but step 7 was not.

        Mutates: `stream.unconsumed_steps` and `stream.stalled_s`.
        """
        # `stalled_s` is the time since the postprocessor last consumed a step of `stream`.
        is_patience_over = stream.stalled_s > self._patience_s
        if is_patience_over and stream.unconsumed_steps:
            return True  # the first case
        may_be_overtaken = stream.stalled_s >= _OVERTAKING_S and self._is_overtaken(stream)
        if not may_be_overtaken:
            return False
        # The later step may belong to another stream, whose feedback was read after the feedback of
        # `stream`. In the meantime, the postprocessor may have consumed the oldest step of
        # `stream`, too. Therefore, read the feedback of `stream` again.
        self.remove_consumed_steps(stream)
        return self._is_overtaken(stream)  # the second case

    def _is_overtaken(self, stream: Stream) -> bool:
        """Return whether a later step has overtaken the oldest unconsumed step of `stream`.

        This is the case if a step that was sent later has already been consumed. The later step may
        belong to any stream.
        """
        return bool(stream.unconsumed_steps) and stream.unconsumed_steps[0] < self._newest_consumed

    def remove_consumed_steps(self, stream: Stream) -> None:
        """Remove the consumed steps from `stream.unconsumed_steps`.

        A step is consumed if the postprocessor has processed the step.

        Example: 5 steps were sent, and `unconsumed_steps` contains the numbers of the last 3 steps.
        If the postprocessor has processed 4 steps, the two oldest of these numbers are removed.

        Mutates: if a step is removed or none is left, `stream.stalled_s` becomes 0. If a removed
        step has a higher number than `_newest_consumed`, this attribute gets the number.
        """
        steps = stream.unconsumed_steps
        num_unconsumed = stream.num_sent_steps - self._feedback.consumed(stream.slot, stream.serial)
        num_before = len(steps)
        while steps and len(steps) > num_unconsumed:
            self._newest_consumed = max(self._newest_consumed, steps.popleft())
        if len(steps) < num_before or not steps:
            stream.stalled_s = 0.0
