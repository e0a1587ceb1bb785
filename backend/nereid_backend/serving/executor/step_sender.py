# SPDX-License-Identifier: Apache-2.0
"""Sends the generated tokens of the streams to the postprocessor.

A step is a message from the executor to the postprocessor with the new tokens of one stream. A step
without tokens is a heartbeat. When the postprocessor gets a heartbeat, it checks whether the client
is still connected.
"""

import math
from collections.abc import Callable, Sized

import numpy as np

from nereid_backend.serving import tensor_names, triton_api
from nereid_backend.serving.executor.lost_clients import LostClientDetector
from nereid_backend.serving.executor.request_statistics import RequestStatistics
from nereid_backend.serving.executor.streams import Pacer, Stream
from nereid_backend.serving.feedback import FeedbackReader
from nereid_backend.serving.serving_settings import ServingSettings

# Suppose that a step is due, but the postprocessor has not processed the earlier steps of the same
# stream. The step must then wait. The sender checks the stream `_CHECKS_PER_INTERVAL` times during
# the usual time between two steps, but waits at least `_MIN_WAIT_S` seconds between two checks.
_CHECKS_PER_INTERVAL = 10
_MIN_WAIT_S = 0.001
_IMMEDIATELY = 0.0  # a value of time.monotonic() that has always passed


class StepSender:
    """Decides when the next step of each stream is due, and sends this step.

    Only the loop's thread uses the sender.

    Args:
        streams: all streams of the executor. The time between two steps of a stream grows with
            their number.
        settings: the settings `responses_per_second` and `heartbeat_ms`.
        feedback: signs the steps, so that the postprocessor accepts them.
        lost_clients: remembers the steps that the postprocessor has not consumed yet.
        statistics: counts the steps.
        on_last_step: is called with each stream whose last step was sent.
    """

    def __init__(
        self,
        streams: Sized,
        settings: ServingSettings,
        feedback: FeedbackReader,
        lost_clients: LostClientDetector,
        statistics: RequestStatistics,
        on_last_step: Callable[[Stream], None],
    ) -> None:
        self._streams = streams
        self._pacer = Pacer(settings.responses_per_second)
        self._heartbeat_s = settings.heartbeat_ms / 1000
        self._feedback = feedback
        self._lost_clients = lost_clients
        self._statistics = statistics
        self._on_last_step = on_last_step
        # The streams with unsent tokens, by request id.
        self._unsent: dict[str, Stream] = {}

    def note_output(self, stream: Stream) -> None:
        """Let the next call of `send_due_output` check `stream`, which has new unsent tokens."""
        self._unsent[stream.request_id] = stream
        stream.next_check = _IMMEDIATELY

    def stop_checking(self, stream: Stream) -> None:
        """Let `send_due_output` skip `stream` until the next call of `note_output`.

        Call this method when all tokens of `stream` have been sent, or when the stream is removed.
        """
        self._unsent.pop(stream.request_id, None)

    def send_due_output(self, now: float) -> float:
        """Send the steps that are due, for all streams with unsent tokens.

        A step is a message with the new tokens of one stream.

        Return the time of the next check, as a value of time.monotonic(), or infinity if no stream
        has unsent tokens.
        """
        next_check = math.inf
        for stream in list(self._unsent.values()):
            if stream.next_check <= now:
                stream.next_check = self.send_if_due(stream, now)
            next_check = min(next_check, stream.next_check)
        return next_check

    def send_if_due(self, stream: Stream, now: float) -> float:
        """If the next step of `stream` is due, send this step to the postprocessor.

        Returns:
            The time of the next call, as a value of time.monotonic():
            - If the step is not due yet: the time at which it is due.
            - If the step is due, but the postprocessor has too many unprocessed steps of the
              stream: a short time from now.
            - If the step was sent: the time of the next heartbeat. New output causes an earlier
              call.
        """
        # `interval_s` is the shortest time between two steps with output. `heartbeat_s` is the
        # shortest time between two heartbeats. Both times grow with the number of streams, because
        # the server can send only a limited number of messages per second.
        num_streams = len(self._streams)
        interval_s = self._pacer.interval_s(num_streams)
        heartbeat_s = self._pacer.heartbeat_s(num_streams, self._heartbeat_s)
        # `due_at` and `may_send` read the list of the steps that are not processed yet.
        self._lost_clients.remove_consumed_steps(stream)
        due = stream.due_at(interval_s, heartbeat_s)
        if due > now:
            return due
        if not stream.may_send():
            retry_s = max(interval_s / _CHECKS_PER_INTERVAL, _MIN_WAIT_S)
            return now + retry_s
        self._send(stream, now)
        return now + heartbeat_s

    def _send(self, stream: Stream, now: float) -> None:
        """Send a step with the unsent tokens of `stream`. Report the last step of the stream."""
        state = stream.take_step(now)  # contains all unsent tokens
        self.stop_checking(stream)
        self._statistics.note_step(has_output=bool(state.deltas))
        # The detector finds steps that never reach the postprocessor, so record the step before it
        # is sent.
        self._lost_clients.record_sent_step(stream)
        message = self._feedback.sign(state.pack())
        response = triton_api.response({tensor_names.STATE: np.frombuffer(message, dtype=np.uint8)})
        triton_api.send(stream.sender, response, final=state.is_last)
        if state.is_last:
            self._on_last_step(stream)
