# SPDX-License-Identifier: Apache-2.0
"""The Triton model `executor`: requests go to the engine process, its tokens come back as steps.

execute (the server's thread)      --> new streams, requests to the engine
loop    (one thread, owns streams) <-- updates from the engine, feedback from the postprocessor
                                   --> steps and errors to the server

All responses are sent by the loop: a stub of server 2.51 that sends from several threads crashes.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.errors import CapacityError, EngineError, NereidError, RequestError
from nereid_backend.serving import names, tensors
from nereid_backend.serving.delivery import Delivery
from nereid_backend.serving.engine_client import EngineClient, EngineDiedError, Refusal
from nereid_backend.serving.feedback import FeedbackReader, Signal
from nereid_backend.serving.metrics import Gauges
from nereid_backend.serving.settings import read_settings
from nereid_backend.serving.streams import Pacer, Sequence, Stream
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
        self._gauges = Gauges()
        self._publish_due = 0.0
        self._num_restarts = 0
        self._serials = itertools.count(1)
        self._arrivals: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._refused: queue.SimpleQueue[tuple[Any, Exception]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._available = True
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
        if not self._available:
            raise CapacityError("the engine is being started again; try again in a few seconds")
        envelope = RequestEnvelope.unpack(tensors.array(request, names.ENVELOPE))
        slots = self._feedback.acquire(envelope.params.n)
        if slots is None:
            raise CapacityError(
                f"this request's {envelope.params.n} answers do not fit beside those in the "
                f"executor; the limit is {self._settings.max_streams} (max_streams); "
                "try again later"
            )
        serial, now = next(self._serials), time.monotonic()
        sequences = [Sequence(index, slot) for index, slot in enumerate(slots)]
        opening = Opening(envelope.context, self._feedback.path, slots)
        field = envelope.grammar_field
        stream = Stream(str(serial), sender, serial, sequences, opening, now, field)
        # Queued before the engine knows of it, so that the loop has the stream when updates come.
        self._arrivals.put(stream)
        token_ids = tensors.array(request, names.PROMPT_TOKEN_IDS)
        # Should the engine have died by now, the loop ends this stream like all the others.
        with contextlib.suppress(EngineDiedError):
            self._engine.submit(stream.request_id, token_ids, envelope.params)

    # From here on: the loop's thread only.

    def _loop(self) -> None:
        wait_s = _IDLE_POLL_S
        while not self._stopping.is_set():
            try:
                answers = self._engine.receive(wait_s)
                self._adopt()
                self._refuse()
                for answer in answers:
                    self._take(answer)
                wait_s = self._serve_streams()
            except EngineDiedError as error:
                self._restart(error)
        self._end_all(EngineError("the server is shutting down"))

    def _adopt(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                stream = self._arrivals.get_nowait()
                self._streams[stream.request_id] = stream

    def _refuse(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sender, error = self._refused.get_nowait()
                tensors.send(sender, tensors.error_response(error), final=True)

    def _take(self, answer: RequestUpdate | Refusal) -> None:
        stream = self._streams.get(answer.request_id)
        if stream is None:
            return
        if isinstance(answer, Refusal):
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
            stream.add(answer)

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
            own = {"num_requests": len(self._streams), "num_engine_restarts": self._num_restarts}
            self._gauges.publish(self._engine.stats | own)

    def _end_unwanted(self, stream: Stream) -> None:
        """Ask the engine to end what nobody waits for: the client has gone, or a stop was met."""
        if stream.is_aborting or stream.has_ended:
            return
        signals = [self._feedback.signal(slot, stream.serial) for slot in stream.slots]
        if Signal.CANCELLED in signals or self._delivery.was_dropped(stream):
            stream.is_aborting = True
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
        self._delivery.record(stream)
        reply = tensors.response({names.TOKEN_IDS: token_ids, names.STATE: state.pack()})
        tensors.send(stream.sender, reply, final=state.is_last)
        if state.is_last:
            self._forget(stream)

    def _end(self, stream: Stream, error: NereidError) -> None:
        tensors.send(stream.sender, tensors.error_response(error), final=True)
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.request_id]
        self._feedback.release(stream.slots)

    def _end_all(self, error: NereidError) -> None:
        self._adopt()
        self._refuse()
        for stream in list(self._streams.values()):
            self._end(stream, error)

    def _restart(self, error: EngineDiedError) -> None:
        """The engine has died: end its requests with the reason, then start another."""
        self._available = False
        tensors.log.error("%s", error)
        for attempt in range(1, self._settings.max_engine_restarts + 1):
            self._end_all(error)
            tensors.progress(f"{error}; starting it again (attempt {attempt})")
            try:
                self._engine.start(self._settings.engine_start_timeout_s, self._refuse)
            except NereidError as failure:
                tensors.log.error("the engine did not start again: %s", failure)
                continue
            self._end_all(error)
            self._num_restarts += 1
            self._available = True
            return
        tensors.log.error("the engine cannot be started again; every request is refused")
        while not self._stopping.wait(_IDLE_POLL_S):
            self._end_all(error)
