# SPDX-License-Identifier: Apache-2.0
"""The Triton model `executor`: it sends requests to the engine process and its tokens onwards.

execute (the server's thread)      --> new streams, requests to the engine
loop    (one thread, owns streams) <-- updates from the engine, feedback from the postprocessor
                                   --> steps and errors to the server

Only the loop's thread sends responses, because a stub of Triton server 2.51 crashes if several
threads send.
"""

import contextlib
import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.errors import CapacityError, EngineError, NereidError, RequestError
from nereid_backend.serving import tensor_names, tensors
from nereid_backend.serving.executor.engine_client import EngineClient, RequestStarted
from nereid_backend.serving.executor.engine_metrics import EngineMetrics
from nereid_backend.serving.executor.lost_clients import LostClientDetector
from nereid_backend.serving.executor.request_statistics import RequestStatistics
from nereid_backend.serving.executor.request_timing import RequestTiming, effective_limit_s
from nereid_backend.serving.executor.streams import Pacer, Sequence, Stream
from nereid_backend.serving.executor.waiting_limits import WaitingLimits
from nereid_backend.serving.feedback import FeedbackReader, Signal
from nereid_backend.serving.process.process_handle import EngineDiedError, Refusal
from nereid_backend.serving.serving_settings import read_settings
from nereid_backend.serving.wire import Opening, RequestEnvelope

_IDLE_POLL_S = 0.05
_PUBLISH_INTERVAL_S = 0.1
_LONGEST_RETRY_S = 60


class ExecutorModel:
    """The second step of the ensemble. It is decoupled and has exactly one instance."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the engine process and wait until its model is loaded."""
        try:
            self._settings, config = read_settings(args)
            self._feedback = FeedbackReader(self._settings.max_streams)
            self._engine = EngineClient(config, tensors.progress, self._settings.engine_module)
            self._engine.start(self._settings.engine_start_timeout_s)
        except NereidError as error:
            raise tensors.load_error(error) from error
        self._pacer = Pacer(self._settings.responses_per_second)
        self._lost_clients = LostClientDetector(
            self._feedback, self._settings.stale_after_ms / 1000
        )
        self._waiting = WaitingLimits(config.max_num_waiting, self._settings.max_waiting_tokens)
        self._metrics = EngineMetrics()
        self._statistics = RequestStatistics()
        self._publish_due = 0.0
        self._num_restarts = 0
        # The number of engine processes that have died since the last request finished.
        self._num_deaths = 0
        # Why no request is accepted; empty while the engine runs.
        self._outage = ""
        self._serials = itertools.count(1)
        self._arrivals: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._refused: queue.SimpleQueue[tuple[Any, Exception]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._stopping = threading.Event()
        self._loop_thread = threading.Thread(target=self._loop, name="executor-loop")
        self._loop_thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Send each request to the engine. The loop sends the responses."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except NereidError as error:
                self._refused.put((sender, error))
            except Exception as error:  # noqa: BLE001 - the request ends here and must be answered
                tensors.log.exception("request failed in the executor")
                self._refused.put((sender, error))

    def finalize(self) -> None:
        """End all requests, then the engine process."""
        self._stopping.set()
        self._loop_thread.join()
        self._engine.stop()
        self._feedback.close()

    def _accept(self, request: Any, sender: Any) -> None:  # noqa: ANN401 - the server's own types
        if self._outage:
            raise CapacityError(self._outage)
        envelope = RequestEnvelope.unpack(tensors.array(request, tensor_names.ENVELOPE))
        token_ids = tensors.array(request, tensor_names.PROMPT_TOKEN_IDS)
        stream = self._admit(envelope, len(token_ids), sender)
        # Queue the stream before the engine receives the request, so that the loop knows the stream
        # when the first update arrives.
        self._arrivals.put(stream)
        # If the engine has died in the meantime, the loop ends this stream with all other streams.
        with contextlib.suppress(EngineDiedError):
            self._engine.submit(stream.request_id, token_ids, envelope.params)

    def _admit(self, envelope: RequestEnvelope, num_tokens: int, sender: Any) -> Stream:  # noqa: ANN401
        """Create the stream of a new request.

        Raises:
            CapacityError: the executor has too many waiting requests or too many sequences.
        """
        settings = self._settings
        now = time.monotonic()
        timing = RequestTiming(
            now,
            num_tokens,
            effective_limit_s(envelope.queue_timeout_s, settings.default_queue_timeout_s),
            effective_limit_s(envelope.timeout_s, settings.default_timeout_s),
        )
        self._waiting.enter(timing)
        slots = self._feedback.acquire(envelope.n)
        if slots is None:
            self._waiting.leave(timing, None)
            raise CapacityError(
                self._waiting.with_retry_time(
                    f"with the {envelope.n} sequences of this request, the server would "
                    f"have more than {settings.max_streams} sequences (max_streams). "
                    "Try again later."
                )
            )
        serial = next(self._serials)
        sequences = [Sequence(index, slot) for index, slot in enumerate(slots)]
        opening = Opening(envelope.context, self._feedback.path, slots)
        field = envelope.grammar_field
        stream = Stream(str(serial), sender, serial, sequences, opening, now, field)
        stream.timing = timing
        return stream

    # Only the loop's thread calls the methods below.

    def _loop(self) -> None:
        """Receive the engine's messages and send steps, until `finalize` is called."""
        wait_s = _IDLE_POLL_S
        while not self._stopping.is_set():
            try:
                received = self._engine.receive(wait_s)
                limit_s = self._settings.engine_hang_timeout_s
                self._engine.kill_if_hanging(limit_s, is_working=bool(self._streams))
                self._add_new_streams()
                self._send_refusals()
                for message in received:
                    self._handle(message)
                wait_s = self._serve_streams()
            except EngineDiedError as error:
                self._restart(error)
            except Exception as error:  # noqa: BLE001 - without this loop no request gets a response
                tensors.log.exception("the executor's loop failed")
                self._recover(f"the executor failed: {type(error).__name__}: {error}")
                wait_s = _IDLE_POLL_S
        self._end_all(EngineError("the server is shutting down"))

    def _recover(self, problem: str) -> None:
        """End all requests after an unexpected error, so that the loop can continue.

        If that fails, too, the process exits, and Triton server starts it again. The engine's
        requests are aborted when their next update arrives (see _handle).
        """
        try:
            self._end_all(EngineError(problem))
        except Exception:  # noqa: BLE001 - as above
            tensors.log.exception(
                "%s. Its requests cannot be ended, so the process exits and must be restarted",
                problem,
            )
            os._exit(1)

    def _add_new_streams(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                stream = self._arrivals.get_nowait()
                self._streams[stream.request_id] = stream

    def _send_refusals(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sender, error = self._refused.get_nowait()
                self._note_refusal(error)
                tensors.send(sender, tensors.error_response(error), final=True)

    def _handle(self, message: RequestUpdate | Refusal | RequestStarted) -> None:
        """Handle one message of the engine."""
        stream = self._streams.get(message.request_id)
        if stream is None:
            if isinstance(message, RequestUpdate) and message.finish_reason is None:
                # The stream has ended, but the engine still computes its request.
                self._engine.abort(message.request_id)
        elif isinstance(message, RequestStarted):
            self._note_start(stream, message.at)
        elif isinstance(message, Refusal):
            self._end(stream, message.error)
        elif message.error is not None:
            self._end_with_engine_error(stream, message.error, is_refused=message.is_refused)
        else:
            self._add_update(stream, message)

    def _end_with_engine_error(self, stream: Stream, text: str, *, is_refused: bool) -> None:
        if len(stream.sequences) > 1:
            self._engine.abort(stream.request_id)
        error = RequestError(stream.refusal(text)) if is_refused else EngineError(text)
        self._end(stream, error)

    def _add_update(self, stream: Stream, update: RequestUpdate) -> None:
        now = time.monotonic()
        if update.new_token_ids:
            self._note_start(stream, now)
        self._statistics.note_update(stream, update, now)
        stream.add(update)
        limit = self._settings.max_pending_tokens
        if stream.num_pending > limit:
            self._engine.abort(stream.request_id)
            error = EngineError(
                f"{stream.num_pending} generated tokens of this request wait to be sent, but the "
                f"limit is {limit} (max_pending_tokens). The postprocessor is too slow."
            )
            self._end(stream, error)

    def _note_start(self, stream: Stream, started: float) -> None:
        """Record that the engine has started to compute a request, unless that is known."""
        if stream.timing.started is None:
            stream.timing.started = started
            self._waiting.leave(stream.timing, started)
            self._statistics.note_start(stream, started)

    def _serve_streams(self) -> float:
        """Send all steps that are due. Return the seconds until the next step is due."""
        now = time.monotonic()
        interval_s = self._pacer.interval_s(len(self._streams))
        heartbeat_s = self._settings.heartbeat_ms / 1000
        wake = now + _IDLE_POLL_S
        streams = list(self._streams.values())
        self._lost_clients.observe(streams, now)
        for stream in streams:
            self._abort_unwanted(stream)
            if self._end_if_overdue(stream, now):
                continue
            wake = min(wake, stream.timing.next_deadline)
            due = stream.due_at(interval_s, heartbeat_s)
            if due <= now and stream.may_send():
                self._send_step(stream, now)
                due = stream.last_sent + (interval_s if stream.has_output else heartbeat_s)
            wake = min(wake, max(due, now + 0.001))
        self._publish(now)
        return max(wake - now, 0.0)

    def _publish(self, now: float) -> None:
        """Publish the metrics, at most ten times a second."""
        if now >= self._publish_due:
            self._publish_due = now + _PUBLISH_INTERVAL_S
            own = {
                "num_requests": len(self._streams),
                "num_engine_restarts": self._num_restarts,
                "engine_up": int(not self._outage),
            }
            self._metrics.publish(self._engine.stats, own, self._statistics)

    def _end_if_overdue(self, stream: Stream, now: float) -> bool:
        """End a request that has exceeded a time limit. Return whether it has."""
        if now < stream.timing.next_deadline or stream.has_ended:
            return False
        error = stream.timing.deadline_error(now)
        if error is None:
            return False
        self._statistics.counts["requests_timed_out_total"] += 1
        self._engine.abort(stream.request_id)
        if isinstance(error, CapacityError):
            error = CapacityError(self._waiting.with_retry_time(str(error)))
        self._end(stream, error, is_counted=True)
        return True

    def _abort_unwanted(self, stream: Stream) -> None:
        """Abort a request without a client, and sequences that have reached a stop string."""
        if stream.is_aborting or stream.has_ended:
            return
        signals = [self._feedback.signal(slot, stream.serial) for slot in stream.slots]
        if Signal.CANCELLED in signals or self._lost_clients.has_lost_client(stream):
            stream.is_aborting = True
            self._statistics.counts["requests_disconnected_total"] += 1
            self._engine.abort(stream.request_id)
            return
        is_only_sequence = len(stream.sequences) == 1
        for sequence, signal in zip(stream.sequences, signals, strict=True):
            if signal is Signal.STOP_STRING and not sequence.is_aborting:
                sequence.is_aborting = True
                if sequence.ending is None:
                    self._engine.abort(
                        stream.request_id, None if is_only_sequence else sequence.index
                    )

    def _send_step(self, stream: Stream, now: float) -> None:
        """Send the next step of `stream`, and remove the stream after its last step."""
        token_ids, state = stream.take_step(now)
        self._statistics.note_step(has_output=bool(state.deltas))
        self._lost_clients.record(stream)
        reply = tensors.response(
            {tensor_names.TOKEN_IDS: token_ids, tensor_names.STATE: state.pack()}
        )
        tensors.send(stream.sender, reply, final=state.is_last)
        if state.is_last:
            endings = [sequence.ending for sequence in stream.sequences if sequence.ending]
            if any(ending.finish_reason != "abort" for ending in endings):
                self._num_deaths = 0
            self._remove(stream)

    def _end(self, stream: Stream, error: NereidError, *, is_counted: bool = False) -> None:
        """Send `error` as the last response of `stream`, and remove the stream."""
        if not is_counted:
            self._note_refusal(error)
            self._statistics.finished["error"] += not isinstance(error, CapacityError)
        tensors.send(stream.sender, tensors.error_response(error), final=True)
        self._remove(stream)

    def _note_refusal(self, error: Exception) -> None:
        if isinstance(error, CapacityError):
            self._statistics.counts["requests_refused_total"] += 1

    def _remove(self, stream: Stream) -> None:
        del self._streams[stream.request_id]
        if stream.timing.started is None:
            self._waiting.leave(stream.timing, None)
        self._statistics.note_end(stream, time.monotonic())
        self._feedback.release(stream.slots)

    def _end_all(self, error: NereidError) -> None:
        self._add_new_streams()
        self._send_refusals()
        for stream in list(self._streams.values()):
            self._end(stream, error)

    def _restart(self, error: EngineDiedError) -> None:
        """End all requests after the death of the engine process, and start a new one.

        After max_engine_restarts unsuccessful restarts, every request is refused until the server
        is restarted.
        """
        retry_s = min(max(math.ceil(self._engine.load_s), 1), _LONGEST_RETRY_S)
        self._outage = f"the engine is restarting. Try again in {retry_s} s."
        tensors.log.error("%s", error)
        limit = self._settings.max_engine_restarts
        while self._num_deaths < limit:
            self._num_deaths += 1
            self._end_during_outage(error)
            tensors.progress(
                f"restarting the engine (attempt {self._num_deaths} of {limit}), because {error}"
            )
            try:
                self._engine.start(
                    self._settings.engine_start_timeout_s, lambda: self._end_during_outage(error)
                )
            except NereidError as failure:
                tensors.log.error("the engine could not be restarted: %s", failure)
                continue
            # Requests that arrived just before the outage was noticed went to the old engine.
            self._end_all(error)
            self._num_restarts += 1
            self._outage = ""
            return
        times = f"{limit + 1} times in a row" if limit else "once"
        self._outage = (
            f"the engine process has died {times}, and is not restarted again "
            f"(max_engine_restarts). Restart the server. The last reason was: {error}"
        )
        self._end_during_outage(error)
        tensors.progress(f"error: {self._outage}")
        while not self._stopping.wait(_IDLE_POLL_S):
            self._end_during_outage(error)

    def _end_during_outage(self, error: NereidError) -> None:
        """End all requests while no engine runs, and publish the metrics."""
        self._end_all(error)
        self._publish(time.monotonic())
