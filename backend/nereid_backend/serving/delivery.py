# SPDX-License-Identifier: Apache-2.0
"""Which steps the server still runs: how a client that has gone is noticed.

When a client goes away, the server goes on accepting the steps of its stream from the executor.
Version 2.51 runs them with `is_cancelled` set, which the postprocessor reports; other versions and
schedulers drop them before the postprocessor, and nothing says that a step was dropped. But steps
reach the one postprocessor in the order in which they were sent: where a later step of anybody has
been consumed and an earlier one has not, the earlier one was dropped. Where there is no later step,
a probe, sent straight to the postprocessor, takes its place.
"""

import itertools
from collections.abc import Callable, Iterable

from nereid_backend.serving.feedback import FeedbackReader
from nereid_backend.serving.streams import Stream, Unconsumed
from nereid_backend.serving.wire import StepState

# A healthy postprocessor consumes a step within milliseconds.
_PROBE_AFTER_S = 0.1


class Delivery:
    """Follows steps on their way to the postprocessor. Used by one thread.

    Args:
        feedback: where the postprocessor reports.
        send_probe: sends a step straight to the postprocessor, without waiting for it.
    """

    def __init__(self, feedback: FeedbackReader, send_probe: Callable[[StepState], None]) -> None:
        self._feedback = feedback
        self._send_probe = send_probe
        self._orders = itertools.count(1)
        self._newest_consumed = 0
        slot = feedback.acquire()
        assert slot is not None, "the first slot is free"
        # Serial 0 belongs to the probe; streams count from 1.
        self._probe = StepState(slot, serial=0, step=0)
        self._probe_order: int | None = None
        self._probe_sent = 0.0

    def record(self, stream: Stream, now: float) -> None:
        """Note that a step of this stream is about to be sent."""
        stream.unconsumed.append(Unconsumed(next(self._orders), now))

    def observe(self, streams: Iterable[Stream]) -> None:
        """Read how far each stream, and the probe, have been consumed."""
        for stream in streams:
            self._observe(stream)
        if self._probe_order is not None:
            seen = self._feedback.consumed(self._probe.slot, self._probe.serial)
            if seen == self._probe.step:
                self._newest_consumed = max(self._newest_consumed, self._probe_order)
                self._probe_order = None

    def was_dropped(self, stream: Stream) -> bool:
        """Whether a step of this stream was dropped on its way, so that its client has gone."""
        newest = self._newest_consumed
        if not stream.unconsumed or stream.unconsumed[0].order >= newest:
            return False
        # It may have been consumed since it was looked at, before the later one was.
        self._observe(stream)
        return bool(stream.unconsumed) and stream.unconsumed[0].order < newest

    def probe(self, streams: Iterable[Stream], now: float) -> None:
        """Send a probe if a step has been on its way for long and none is out already."""
        if self._probe_order is not None or now - self._probe_sent < _PROBE_AFTER_S:
            return
        waiting = (stream.unconsumed[0].sent for stream in streams if stream.unconsumed)
        if now - min(waiting, default=now) > _PROBE_AFTER_S:
            state = self._probe
            self._probe = StepState(state.slot, state.serial, state.step + 1)
            self._probe_order, self._probe_sent = next(self._orders), now
            self._send_probe(self._probe)

    def _observe(self, stream: Stream) -> None:
        consumed = self._feedback.consumed(stream.slot, stream.serial)
        while stream.unconsumed and stream.sent - len(stream.unconsumed) < consumed:
            self._newest_consumed = max(self._newest_consumed, stream.unconsumed.popleft().order)
