# SPDX-License-Identifier: Apache-2.0
"""The Triton model `executor`: requests go to the engine process, its tokens come back as steps.

execute (the server's thread)      --> new streams, requests to the engine
loop    (one thread, owns streams) <-- updates from the engine, feedback from the postprocessor
                                   --> steps and errors to the server

All responses are sent by the loop: a stub of server 2.51 that sends from several threads crashes.
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
from nereid_backend.serving.executor.engine_client import Begun, EngineClient
from nereid_backend.serving.executor.engine_metrics import Metrics
from nereid_backend.serving.executor.lost_clients import Delivery
from nereid_backend.serving.executor.request_statistics import Statistics
from nereid_backend.serving.executor.request_timing import Timing, limit_of
from nereid_backend.serving.executor.streams import Pacer, Sequence, Stream
from nereid_backend.serving.executor.waiting_limits import Admission
from nereid_backend.serving.feedback import FeedbackReader, Signal
from nereid_backend.serving.process.process_handle import EngineDiedError, Refusal
from nereid_backend.serving.serving_settings import read_settings
from nereid_backend.serving.wire import Opening, RequestEnvelope

_IDLE_POLL_S = 0.05
_PUBLISH_INTERVAL_S = 0.1


class ExecutorModel:
    """Second step of the ensemble: decoupled, one instance."""

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
        self._delivery = Delivery(self._feedback, self._settings.stale_after_ms / 1000)
        self._admission = Admission(config.max_num_waiting, self._settings.max_waiting_tokens)
        self._metrics = Metrics()
        self._statistics = Statistics()
        self._publish_due = 0.0
        self._num_restarts = 0
        # Engine processes that died since the last request that was answered to its end.
        self._num_deaths = 0
        self._outage = ""
        self._serials = itertools.count(1)
        self._arrivals: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._refused: queue.SimpleQueue[tuple[Any, Exception]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._stopping = threading.Event()
        self._loop_thread = threading.Thread(target=self._loop, name="executor-loop")
        self._loop_thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to the engine; its responses are sent by the loop."""
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
        """End what is running, then the engine process."""
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
        # Queued before the engine knows of it, so that the loop has the stream when updates come.
        self._arrivals.put(stream)
        # Should the engine have died by now, the loop ends this stream like all the others.
        with contextlib.suppress(EngineDiedError):
            self._engine.submit(stream.request_id, token_ids, envelope.params)

    def _admit(self, envelope: RequestEnvelope, num_tokens: int, sender: Any) -> Stream:  # noqa: ANN401
        settings, now = self._settings, time.monotonic()
        timing = Timing(
            now,
            num_tokens,
            limit_of(envelope.queue_timeout_s, settings.default_queue_timeout_s),
            limit_of(envelope.timeout_s, settings.default_timeout_s),
        )
        self._admission.enter(timing)
        slots = self._feedback.acquire(envelope.params.n)
        if slots is None:
            self._admission.leave(timing, None)
            raise CapacityError(
                self._admission.with_hint(
                    f"this request's {envelope.params.n} answers do not fit beside those in the "
                    f"executor; the limit is {settings.max_streams} (max_streams); "
                    "try again later"
                )
            )
        serial = next(self._serials)
        sequences = [Sequence(index, slot) for index, slot in enumerate(slots)]
        opening = Opening(envelope.context, self._feedback.path, slots)
        field = envelope.grammar_field
        stream = Stream(str(serial), sender, serial, sequences, opening, now, field)
        stream.timing = timing
        return stream

    # From here on: the loop's thread only.

    def _loop(self) -> None:
        wait_s = _IDLE_POLL_S
        while not self._stopping.is_set():
            try:
                answers = self._engine.receive(wait_s)
                limit_s = self._settings.engine_hang_timeout_s
                self._engine.check_pulse(limit_s, is_working=bool(self._streams))
                self._adopt()
                self._refuse()
                for answer in answers:
                    self._take(answer)
                wait_s = self._serve_streams()
            except EngineDiedError as error:
                self._restart(error)
            except Exception as error:  # noqa: BLE001 - without this loop nothing is answered
                tensors.log.exception("the executor's loop failed")
                self._recover(f"the executor failed: {type(error).__name__}: {error}")
                wait_s = _IDLE_POLL_S
        self._end_all(EngineError("the server is shutting down"))

    def _recover(self, problem: str) -> None:
        """A defect: what is in flight ends, and the loop goes on; else this process ends.

        The engine is told to stop what nobody waits for as soon as it speaks of it.
        """
        try:
            self._end_all(EngineError(problem))
        except Exception:  # noqa: BLE001 - as above
            tensors.log.exception(
                "%s; its process ends, for the server to be started again", problem
            )
            os._exit(1)

    def _adopt(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                stream = self._arrivals.get_nowait()
                self._streams[stream.request_id] = stream

    def _refuse(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sender, error = self._refused.get_nowait()
                self._note_refusal(error)
                tensors.send(sender, tensors.error_response(error), final=True)

    def _take(self, answer: RequestUpdate | Refusal | Begun) -> None:
        stream = self._streams.get(answer.request_id)
        if stream is None:
            if isinstance(answer, RequestUpdate) and answer.finish_reason is None:
                # Nobody waits for it any more; should the engine not know, it does now.
                self._engine.abort(answer.request_id)
            return
        if isinstance(answer, Begun):
            self._begin(stream, answer.at)
        elif isinstance(answer, Refusal):
            self._end(stream, answer.error)
        elif answer.error is not None:
            if len(stream.sequences) > 1:
                self._engine.abort(stream.request_id)
            refused = answer.is_refused
            message = answer.error
            self._end(
                stream, RequestError(stream.refusal(message)) if refused else EngineError(message)
            )
        else:
            now = time.monotonic()
            if answer.new_token_ids:
                self._begin(stream, now)
            self._statistics.note_update(stream, answer, now)
            stream.add(answer)
            if stream.num_pending > self._settings.max_pending_tokens:
                self._engine.abort(stream.request_id)
                limit = self._settings.max_pending_tokens
                self._end(
                    stream,
                    EngineError(
                        f"{stream.num_pending} tokens of this answer could not be sent on; the "
                        f"limit is {limit} (max_pending_tokens); the postprocessor is too slow"
                    ),
                )

    def _begin(self, stream: Stream, begun: float) -> None:
        if stream.timing.begun is None:
            stream.timing.begun = begun
            self._admission.leave(stream.timing, begun)
            self._statistics.note_begun(stream, begun)

    def _serve_streams(self) -> float:
        """Send what is due; seconds until something is due again."""
        now = time.monotonic()
        interval_s = self._pacer.interval_s(len(self._streams))
        heartbeat_s = self._settings.heartbeat_ms / 1000
        wake = now + _IDLE_POLL_S
        streams = list(self._streams.values())
        self._delivery.observe(streams, now)
        for stream in streams:
            self._end_unwanted(stream)
            if self._end_overdue(stream, now):
                continue
            wake = min(wake, stream.timing.next_deadline)
            due = stream.due_at(interval_s, heartbeat_s)
            if due <= now and stream.may_send():
                self._send_step(stream, now)
                due = stream.last_sent + (interval_s if stream.has_news else heartbeat_s)
            wake = min(wake, max(due, now + 0.001))
        self._publish(now)
        return max(wake - now, 0.0)

    def _publish(self, now: float) -> None:
        if now >= self._publish_due:
            self._publish_due = now + _PUBLISH_INTERVAL_S
            own = {
                "num_requests": len(self._streams),
                "num_engine_restarts": self._num_restarts,
                "engine_up": int(not self._outage),
            }
            self._metrics.publish(self._engine.stats, own, self._statistics)

    def _end_overdue(self, stream: Stream, now: float) -> bool:
        """End a request whose time is over; whether it was."""
        if now < stream.timing.next_deadline or stream.has_ended:
            return False
        error = stream.timing.overdue(now)
        if error is None:
            return False
        self._statistics.counts["requests_timed_out_total"] += 1
        self._engine.abort(stream.request_id)
        if isinstance(error, CapacityError):
            error = CapacityError(self._admission.with_hint(str(error)))
        self._end(stream, error, is_counted=True)
        return True

    def _end_unwanted(self, stream: Stream) -> None:
        """Ask the engine to end what nobody waits for: the client has gone, or a stop was met."""
        if stream.is_aborting or stream.has_ended:
            return
        signals = [self._feedback.signal(slot, stream.serial) for slot in stream.slots]
        if Signal.CANCELLED in signals or self._delivery.was_dropped(stream):
            stream.is_aborting = True
            self._statistics.counts["requests_disconnected_total"] += 1
            self._engine.abort(stream.request_id)
            return
        is_alone = len(stream.sequences) == 1
        for sequence, signal in zip(stream.sequences, signals, strict=True):
            if signal is Signal.STOP_STRING and not sequence.is_aborting:
                sequence.is_aborting = True
                if sequence.ending is None:
                    self._engine.abort(stream.request_id, None if is_alone else sequence.index)

    def _send_step(self, stream: Stream, now: float) -> None:
        token_ids, state = stream.take_step(now)
        self._statistics.note_step(has_news=bool(state.parts))
        self._delivery.record(stream)
        reply = tensors.response(
            {tensor_names.TOKEN_IDS: token_ids, tensor_names.STATE: state.pack()}
        )
        tensors.send(stream.sender, reply, final=state.is_last)
        if state.is_last:
            if any(one.ending.finish_reason != "abort" for one in stream.sequences if one.ending):
                self._num_deaths = 0
            self._forget(stream)

    def _end(self, stream: Stream, error: NereidError, *, is_counted: bool = False) -> None:
        if not is_counted:
            self._note_refusal(error)
            self._statistics.finished["error"] += not isinstance(error, CapacityError)
        tensors.send(stream.sender, tensors.error_response(error), final=True)
        self._forget(stream)

    def _note_refusal(self, error: Exception) -> None:
        if isinstance(error, CapacityError):
            self._statistics.counts["requests_refused_total"] += 1

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.request_id]
        if stream.timing.begun is None:
            self._admission.leave(stream.timing, None)
        self._statistics.note_end(stream, time.monotonic())
        self._feedback.release(stream.slots)

    def _end_all(self, error: NereidError) -> None:
        self._adopt()
        self._refuse()
        for stream in list(self._streams.values()):
            self._end(stream, error)

    def _restart(self, error: EngineDiedError) -> None:
        """The engine has died: end its requests with the reason, then start another."""
        hint_s = min(max(math.ceil(self._engine.load_s), 1), 60)
        self._outage = f"the engine is being started again; try again in {hint_s} s"
        tensors.log.error("%s", error)
        limit = self._settings.max_engine_restarts
        while self._num_deaths < limit:
            self._num_deaths += 1
            self._while_down(error)
            tensors.progress(f"{error}; starting it again (attempt {self._num_deaths} of {limit})")
            try:
                self._engine.start(
                    self._settings.engine_start_timeout_s, lambda: self._while_down(error)
                )
            except NereidError as failure:
                tensors.log.error("the engine did not start again: %s", failure)
                continue
            # One that came when the outage was not yet told of was sent to the old engine.
            self._end_all(error)
            self._num_restarts += 1
            self._outage = ""
            return
        self._outage = (
            f"the engine has died {limit + 1} times in a row (max_engine_restarts) and is not "
            f"started again, the last time because: {error}; restart the server"
        )
        self._while_down(error)
        tensors.progress(f"error: {self._outage}")
        while not self._stopping.wait(_IDLE_POLL_S):
            self._while_down(error)

    def _while_down(self, error: NereidError) -> None:
        """Nobody waits for an engine that is not there."""
        self._end_all(error)
        self._publish(time.monotonic())
