# SPDX-License-Identifier: Apache-2.0
"""Creates the streams of accepted requests, and refuses requests that exceed a limit."""

import itertools
import threading
import time
from typing import Any

from nereid_backend.errors import CapacityError
from nereid_backend.serving.executor.request_timing import RequestTiming, effective_limit_s
from nereid_backend.serving.executor.shared_limit import SharedLimit
from nereid_backend.serving.executor.streams import Sequence, Stream
from nereid_backend.serving.executor.waiting_limits import WaitingLimits
from nereid_backend.serving.feedback import FeedbackReader
from nereid_backend.serving.serving_settings import ServingSettings
from nereid_backend.serving.wire import Opening, RequestEnvelope


class StreamAdmission:
    """The limits on waiting requests and on sequences.

    The server's thread calls `open`. The loop's thread calls the other methods.
    """

    def __init__(
        self, settings: ServingSettings, max_num_waiting: int, feedback: FeedbackReader
    ) -> None:
        """Store the limits.

        Args:
            settings: the settings, with the limits on sequences and prompt tokens.
            max_num_waiting: the largest number of waiting requests.
            feedback: the slots of shared memory for the sequences.
        """
        self._settings = settings
        self._feedback = feedback
        # The next serial number. The engine uses the serial number to identify a request, and the
        # postprocessor uses it to identify the stream of the request.
        self._serials = itertools.count(1)
        # The limits on waiting requests and on their prompt tokens.
        self._waiting = WaitingLimits(max_num_waiting, settings.max_waiting_tokens)
        # The limit on running and waiting sequences.
        self._sequences = SharedLimit(settings.max_streams)
        self._sequences_lock = threading.Lock()

    def open(self, envelope: RequestEnvelope, num_tokens: int, sender: Any) -> Stream:  # noqa: ANN401
        """Create and return the stream of a new request, if the limits allow one more request.

        The request counts as waiting until the engine starts the request (`note_start`). Each of
        its sequences occupies a slot in the shared memory until the stream is closed (`close`).

        Args:
            envelope: the message from the tokenizer.
            num_tokens: the number of prompt tokens.
            sender: the response sender of the request.

        Raises:
            CapacityError: the executor has too many waiting requests or too many sequences.
        """
        timing = self._new_timing(envelope, num_tokens)
        self._waiting.enter(timing)
        slots = self._acquire_slots(envelope)
        if slots is None:  # There are not enough free slots.
            self._waiting.leave(timing, started=None)
            raise self._too_many_sequences(envelope)
        serial = next(self._serials)
        return Stream(
            request_id=str(serial),
            sender=sender,
            serial=serial,
            sequences=[Sequence(index, slot) for index, slot in enumerate(slots)],
            opening=Opening(envelope.context, slots),
            last_sent=timing.arrived,
            grammar_field=envelope.grammar_field,
            timing=timing,
        )

    def _new_timing(self, envelope: RequestEnvelope, num_tokens: int) -> RequestTiming:
        """Return the RequestTiming of a request that has just arrived.

        A time limit comes from the request or, if the request has none, from the settings.
        """
        settings = self._settings
        return RequestTiming(
            arrived=time.monotonic(),
            num_prompt_tokens=num_tokens,
            queue_timeout_s=effective_limit_s(
                envelope.queue_timeout_s, settings.default_queue_timeout_s
            ),
            timeout_s=effective_limit_s(envelope.timeout_s, settings.default_timeout_s),
            client_id=envelope.client_id,
            traceparent=envelope.traceparent,
        )

    def note_start(self, stream: Stream, started: float) -> None:
        """Record that the engine has started a request. The request no longer counts as waiting."""
        stream.timing.started = started
        self._waiting.leave(stream.timing, started)

    def close(self, stream: Stream) -> None:
        """Release the memory slots of an ended stream, and no longer count it toward limits."""
        if stream.timing.started is None:
            self._waiting.leave(stream.timing, None)
        self._feedback.release(stream.slots)
        with self._sequences_lock:
            self._sequences.remove(stream.timing.client_id, len(stream.slots))

    def with_retry_time(self, error: CapacityError, client_id: str) -> CapacityError:
        """Return a copy of `error` whose message says when to try again (see `WaitingLimits`)."""
        return CapacityError(self._waiting.with_retry_time(str(error), client_id))

    def _too_many_sequences(self, envelope: RequestEnvelope) -> CapacityError:
        """Return the error for a request that would exceed the limit max_streams."""
        error = CapacityError(
            f"with the {envelope.n} sequences of this request, the server would have more than "
            f"{self._settings.max_streams} sequences, or this client would have more than its "
            "share of them (max_streams). Try again later."
        )
        return self.with_retry_time(error, envelope.client_id)

    def _acquire_slots(self, envelope: RequestEnvelope) -> tuple[int, ...] | None:
        """Reserve one slot of 16 bytes in the shared memory for each sequence of a request.

        Return the numbers of the slots. Return None if the request would exceed the limit
        max_streams, or the client's share of this limit.
        """
        with self._sequences_lock:
            if not self._sequences.allows(envelope.client_id, envelope.n):
                return None
            self._sequences.add(envelope.client_id, envelope.n)
        return self._feedback.acquire(envelope.n)
