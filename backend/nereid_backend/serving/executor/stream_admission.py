# SPDX-License-Identifier: Apache-2.0
"""Creates the streams of accepted requests, and refuses requests that exceed a limit."""

import itertools
import threading
import time
from typing import Any

from nereid_backend.errors import CapacityError
from nereid_backend.main_memory import available_memory
from nereid_backend.serving.executor.request_timing import RequestTiming, effective_limit_s
from nereid_backend.serving.executor.shared_limit import SharedLimit
from nereid_backend.serving.executor.streams import Sequence, Stream
from nereid_backend.serving.executor.waiting_limits import WaitingLimits
from nereid_backend.serving.feedback import FeedbackReader
from nereid_backend.serving.serving_settings import ServingSettings
from nereid_backend.serving.wire import Opening, RequestEnvelope

# The prepared images of all waiting requests may together use this share of the free memory.
_IMAGE_SHARE = 0.25


class StreamAdmission:
    """The limits on waiting requests and on sequences.

    The server's thread calls `open`. The loop's thread calls the other methods.
    """

    def __init__(
        self, settings: ServingSettings, max_num_waiting: int, feedback: FeedbackReader
    ) -> None:
        """Create the limits on waiting requests and on sequences. No request is counted yet.

        Args:
            settings: the settings. `max_streams` limits the sequences, and `max_waiting_tokens`
                limits the prompt tokens of all waiting requests together.
            max_num_waiting: the largest number of waiting requests.
            feedback: the slots of shared memory for the sequences.
        """
        self._settings = settings
        self._feedback = feedback
        # The next serial number. The engine uses the serial number to identify a request, and the
        # postprocessor uses it to identify the stream of the request.
        self._serials = itertools.count(1)
        # Counts the requests that wait for the engine. WaitingLimits is thread-safe.
        self._waiting_limits = WaitingLimits(
            max_num_waiting,
            settings.max_waiting_tokens,
            # The engine stores the prepared images of waiting requests in main memory.
            int(available_memory() * _IMAGE_SHARE),
        )
        # Counts the sequences of all running and waiting requests. A client that already has
        # sequences cannot use up the whole limit, so other clients can start sequences, too.
        # SharedLimit is not thread-safe, so it needs a lock.
        self._sequence_limit = SharedLimit(settings.max_streams)
        self._sequence_limit_lock = threading.Lock()

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
        self._waiting_limits.enter(timing)
        slots = self._acquire_slots(envelope)
        if slots is None:  # The request would exceed the limit max_streams.
            # The request no longer waits, and it was never started.
            self._waiting_limits.leave(timing, started=None)
            raise self._too_many_sequences(envelope)
        serial = next(self._serials)
        return Stream(
            request_id=str(serial),
            sender=sender,
            serial=serial,
            sequences=[Sequence(index, slot) for index, slot in enumerate(slots)],
            opening=Opening(envelope.context, slots),
            last_sent=timing.arrived,  # The first heartbeat is due one interval after this time.
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
            num_image_bytes=len(envelope.images),
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
        self._waiting_limits.leave(stream.timing, started)

    def close(self, stream: Stream) -> None:
        """Release the memory slots of an ended stream, and no longer count it toward limits."""
        if stream.timing.started is None:  # The request has ended while it was waiting.
            self._waiting_limits.leave(stream.timing, started=None)
        self._feedback.release(stream.slots)
        with self._sequence_limit_lock:
            self._sequence_limit.remove(stream.timing.client_id, len(stream.slots))

    def with_retry_time(self, error: CapacityError, client_id: str) -> CapacityError:
        """Return a copy of `error` whose message says in how many seconds to try again.

        Example: "Try again later." becomes "Try again in 3 s.".
        """
        return CapacityError(self._waiting_limits.with_retry_time(str(error), client_id))

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
        with self._sequence_limit_lock:
            if not self._sequence_limit.allows(envelope.client_id, envelope.n):
                return None
            self._sequence_limit.add(envelope.client_id, envelope.n)
        # `_sequence_limit` allows at most max_streams sequences, and the memory has max_streams
        # slots. Therefore enough slots are free.
        return self._feedback.acquire(envelope.n)
