# SPDX-License-Identifier: Apache-2.0
"""The Triton model `executor`.

The executor sends requests to the engine, and sends the engine's tokens to the postprocessor.

The server's thread creates a stream for each request. The loop's thread (supervised_model.py) owns
the streams. The loop adds the engine's updates to the streams, reads the signals of the
postprocessor (feedback.py), and sends steps and errors to the server.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

from nereid_backend.config import EngineConfig
from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.errors import CapacityError, EngineError, NereidError, RequestError
from nereid_backend.serving import tensor_names, triton_api
from nereid_backend.serving.executor.engine_calls import EngineCalls
from nereid_backend.serving.executor.engine_metrics import EngineMetrics
from nereid_backend.serving.executor.lost_clients import LostClientDetector
from nereid_backend.serving.executor.replica_selector import ReplicaSelector
from nereid_backend.serving.executor.request_spans import record_spans
from nereid_backend.serving.executor.request_statistics import RequestStatistics
from nereid_backend.serving.executor.start_engines import start_engines
from nereid_backend.serving.executor.step_sender import StepSender
from nereid_backend.serving.executor.stream_aborts import StreamAborts, send_abort
from nereid_backend.serving.executor.stream_admission import StreamAdmission
from nereid_backend.serving.executor.streams import Stream
from nereid_backend.serving.feedback import FeedbackReader
from nereid_backend.serving.process.process_handle import refusal_error
from nereid_backend.serving.process.supervised_model import SupervisedModel
from nereid_backend.serving.process.supervised_process import SupervisedProcess
from nereid_backend.serving.serving_settings import check_single_instance, read_settings
from nereid_backend.serving.tracing import Tracing
from nereid_backend.serving.triton_api import Tensors
from nereid_backend.serving.wire import RequestEnvelope, unpack_update

_IDLE_POLL_S = 0.05
_TOKEN_BYTES = 4
# The largest size of the tensor `envelope` in a request for an operation, which generates no text;
# see `ExecutorModel.accept`. In a request for text, the tensor contains a packed RequestEnvelope,
# which has more bytes.
_MAX_PLACEHOLDER_BYTES = 1
# The inspection of one stream takes about 10 µs of CPU time. The time between two inspections of
# all streams is 0.4 ms multiplied by the number of streams, so inspections take at most 2.5 % of a
# core.
_INSPECTION_INTERVAL_S_PER_STREAM = 0.0004
_LONGEST_RETRY_S = 60
_IMMEDIATELY = 0.0  # a value of time.monotonic() that has always passed
# The client id of the requests with which `nereid serve` tests whether the server hangs.
_HEALTH_CHECK_CLIENT_ID = "nereid-serve"


class ExecutorModel(SupervisedModel[Stream]):
    """The Triton model `executor`, the second step of the ensemble. It has exactly one instance.

    The model is decoupled: one request can have several responses.
    """

    title = "executor"

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the engine processes, and wait until their models are loaded.

        Afterwards, start the loop: the thread that sends all responses. `args` is the server's
        description of this Triton model.
        """
        try:
            check_single_instance(args)
            settings, config = read_settings(args)
            self._settings = settings
            # The shared memory in which the postprocessor reports disconnected clients and
            # processed messages.
            self._feedback = FeedbackReader(settings.max_streams)
            self.processes = start_engines(settings, config)
        except NereidError as error:
            raise triton_api.load_error(error) from error
        self._init_shared_state(config)
        self._init_loop_state(args.get("model_name", "executor"))
        self.start_loop()

    def _init_shared_state(self, config: EngineConfig) -> None:
        """Create the attributes that both the server's thread and the loop's thread use."""
        # Decides whether a request may start.
        self._admission = StreamAdmission(self._settings, config.max_num_waiting, self._feedback)
        # Chooses the engine process of a request.
        self._selector = ReplicaSelector(len(self.processes))
        # Handles the requests about adapters, weights and the prefix cache.
        self._engine_calls = EngineCalls(
            self.processes,
            # The metric of refused requests counts only requests that generate text.
            respond=self._respond_uncounted,
            outage=lambda: self.outage,  # Why no engine process accepts requests, or "".
            names_at_start=list(config.lora_adapters),
        )

    def _init_loop_state(self, model_name: str) -> None:
        """Create the attributes that only the loop's thread uses.

        `model_name` is the name of this Triton model, for the labels of the metrics.
        """
        settings = self._settings
        # An inspection of all streams takes long, so the next inspection must not begin before
        # `_inspection_allowed_at`. It is needed at `_inspection_due_at`, when a heartbeat is due or
        # a time limit expires, so `do_periodic_work` is called at this time at the latest. Both are
        # values of time.monotonic().
        self._inspection_allowed_at = _IMMEDIATELY
        self._inspection_due_at = _IMMEDIATELY
        self._lost_clients = LostClientDetector(self._feedback, settings.stale_after_ms / 1000)
        self._statistics = RequestStatistics()
        self._step_sender = StepSender(
            self.requests,
            settings,
            self._feedback,
            self._lost_clients,
            self._statistics,
            on_last_step=self._finish,
        )
        # Aborts requests in the engine, for example when a client has disconnected.
        self._aborts = StreamAborts(
            self._feedback, self._lost_clients, self._statistics, self.owner
        )
        self._metrics = EngineMetrics(model_name, self.processes)
        self._tracing = Tracing(self.title)  # exports a trace (OpenTelemetry) of each request

    def finalize(self) -> None:
        """End all requests, and stop the engine processes."""
        super().finalize()
        self._feedback.close()
        self._tracing.close()

    def accept(self, request: Any, sender: Any) -> None:  # noqa: ANN401 - the server's own types
        """Send a request for text to an engine process, or queue an operation for all processes.

        An operation is a request about adapters, weights or the prefix cache. The envelope of a
        request for text contains its parameters. The envelope of an operation is a placeholder of
        at most one byte, because every request to the executor must have an envelope.

        Raises:
            CapacityError: the executor has too many waiting requests or too many sequences.
        """
        packed_envelope = triton_api.array(request, tensor_names.ENVELOPE)
        # The parameters alone do not show whether a request is an operation, because a client can
        # add a parameter with the name of an operation, such as "cache", to a request for text.
        # Therefore, a request can be an operation only if its envelope is as small as a
        # placeholder.
        can_be_operation = packed_envelope.size <= _MAX_PLACEHOLDER_BYTES
        if can_be_operation:
            is_operation = self._engine_calls.put(triton_api.parameters(request), sender)
            if is_operation:
                return
        envelope = RequestEnvelope.unpack(packed_envelope)
        self._refuse_health_check_during_replacement(envelope)
        token_ids = triton_api.array(request, tensor_names.PROMPT_TOKEN_IDS).tobytes()
        self._open_stream(envelope, token_ids, sender)

    def _refuse_health_check_during_replacement(self, envelope: RequestEnvelope) -> None:
        """Raise a CapacityError for a health check while the weights are being replaced.

        New requests wait until the weights are replaced, which can take minutes. A health check
        tests whether the server hangs, and any response shows that it does not hang.
        """
        is_health_check = envelope.client_id == _HEALTH_CHECK_CLIENT_ID
        if is_health_check and self._engine_calls.is_replacing_weights:
            raise CapacityError("the weights of the model are being replaced. Try again.")

    def _open_stream(self, envelope: RequestEnvelope, token_ids: bytes, sender: Any) -> None:  # noqa: ANN401
        """Create the stream of a request, and send the request to one of the engine processes.

        A stream is the state of one request in the executor. `token_ids` contains the prompt, 4
        bytes for each token, and `sender` is the server's object that sends the responses.

        Raises:
            CapacityError: the executor has too many waiting requests or too many sequences.
        """
        replica = self._select_replica(token_ids, envelope.n)
        try:
            stream = self._admission.open(envelope, len(token_ids) // _TOKEN_BYTES, sender)
        except CapacityError:
            # The selector must no longer count the sequences of the refused request.
            self._selector.release(replica, envelope.n)
            raise
        images = [envelope.images] if envelope.images else []
        message = ["add", stream.request_id, token_ids, envelope.params, envelope.n, *images]
        self.add_request(stream.request_id, stream, message, replica)

    def _select_replica(self, token_ids: bytes, num_sequences: int) -> int:
        """Select an engine process for a new request, and return the number of the process.

        A process is preferred if its cache probably contains a prefix of the prompt, unless another
        process has much less work.

        Raises:
            CapacityError: no engine process runs.
        """
        running = [process.index for process in self.processes if process.is_running]
        if not running:  # The last process has died since the request arrived.
            raise CapacityError(self.restart_message())
        return self._selector.select(token_ids, num_sequences, running)

    # Only the loop's thread calls the methods below.

    def handle(self, process: SupervisedProcess, kind: str, values: list[Any]) -> None:
        """Handle a message of an engine process. engine_process.py describes the messages."""
        match kind, *values:
            case "updates", rows:
                for row in rows:
                    self._handle_update(process, unpack_update(row))
            case "started", start_times:
                self._note_started(start_times)
            case "compiled", compilation_times:
                self._note_compiled(compilation_times)
            case "stats", stats:
                self._metrics.note_stats(process, stats)
            case "refused", request_id, error_class, text:
                self._handle_refusal(process, request_id, error_class, text)
            case (("adapters" | "cache"), call_id, answer):
                self._engine_calls.note_answer(process, kind, call_id, answer)

    def do_periodic_work(self) -> float:
        """Send the messages that are due now, and return the seconds until the next call.

        A stream is the state of one request. A step is a message to the postprocessor with the new
        tokens of a stream. Each call checks only the streams with unsent tokens. All streams are
        inspected only from time to time, because the inspection of 256 streams takes as long as
        sending ten steps.
        """
        self._engine_calls.send_new()
        now = time.monotonic()
        if now >= self._inspection_allowed_at:
            min_interval_s = len(self.requests) * _INSPECTION_INTERVAL_S_PER_STREAM
            self._inspection_allowed_at = now + min_interval_s
            next_event = self._inspect_all_streams(now)
            self._inspection_due_at = max(next_event, self._inspection_allowed_at)
        next_output = self._step_sender.send_due_output(now)
        next_call = min(now + _IDLE_POLL_S, self._inspection_due_at, next_output)
        return max(next_call - now, 0.0)

    def _inspect_all_streams(self, now: float) -> float:
        """Check all streams for disconnected clients, stop strings, time limits and due messages.

        Return the time at which the next message of a stream is due or its time limit expires.
        """
        streams = list(self.requests.values())
        self._lost_clients.observe(streams, now)
        return min((self._inspect(stream, now) for stream in streams), default=math.inf)

    def _inspect(self, stream: Stream, now: float) -> float:
        """Abort or end `stream` if necessary. Otherwise, send its next message if this is due.

        Return the time at which the next message is due or a time limit of the stream expires. For
        a stream that was ended because of its time limit, return infinity.
        """
        self._aborts.abort_unwanted(stream)
        if self._end_if_overdue(stream, now):
            return math.inf
        return min(self._step_sender.send_if_due(stream, now), stream.timing.next_deadline)

    def end(self, stream: Stream, error: NereidError) -> None:
        """Send `error` as the last response of `stream`, and remove the stream."""
        if not isinstance(error, CapacityError):
            self._statistics.note_unfinished(stream, "error")
        self.respond(stream.sender, error)
        self._remove(stream)

    def respond(self, sender: Any, result: Tensors | Exception) -> None:  # noqa: ANN401
        """Send a final response. If it is a CapacityError, count the request as refused."""
        if isinstance(result, CapacityError):
            self._statistics.counts["requests_refused_total"] += 1
        self._respond_uncounted(sender, result)

    def _respond_uncounted(self, sender: Any, result: Tensors | Exception) -> None:  # noqa: ANN401
        """Send a final response. Do not count a CapacityError as a refused request."""
        super().respond(sender, result)

    def end_all(self, error: NereidError) -> None:
        """End all requests, including requests about adapters, weights and the prefix cache."""
        super().end_all(error)
        self._engine_calls.end_all(error)

    def restart_message(self) -> str:
        """Return the message that clients get while the engine restarts."""
        load_s = min(process.child.load_s for process in self.processes)
        retry_s = min(max(math.ceil(load_s), 1), _LONGEST_RETRY_S)
        return f"the engine is restarting. Try again in {retry_s} s."

    def failure_message(self, error: NereidError) -> str:
        """Return the message that clients get after all restarts of the engine have failed."""
        limit = self._settings.max_engine_restarts
        times = f"{limit + 1} times in a row" if limit else "once"
        return (
            f"the engine process has died {times} and is not restarted again "
            f"(max_engine_restarts). Restart the server. The last reason was: {error}"
        )

    def on_death(self, process: SupervisedProcess, error: NereidError) -> None:
        """Delete the prompts and statistics of a dead process, and stop waiting for its answers."""
        self._selector.forget(process.index)
        self._metrics.note_death(process)
        self._engine_calls.on_death(process, error)

    def on_restart(self, process: SupervisedProcess) -> None:
        """Repeat all operations on the adapters and the weights in a restarted engine process.

        The next call of `publish_metrics` publishes the new number of restarts.
        """
        self._engine_calls.on_restart(process)
        self._metrics.note_restart()

    def publish_metrics(self) -> None:
        """Publish the metrics, at most ten times a second."""
        self._metrics.publish(len(self.requests), self._statistics)

    def _handle_refusal(
        self, process: SupervisedProcess, request_id: str, error_class: str, text: str
    ) -> None:
        """End a request that an engine process has refused."""
        error = refusal_error(error_class, text)
        if stream := self.requests.get(request_id):
            self.end(stream, error)
        else:
            self._engine_calls.note_refusal(process, request_id, error)

    def _handle_update(self, process: SupervisedProcess, update: RequestUpdate) -> None:
        """Add an update from the engine to its stream, or end the stream because of an error."""
        stream = self.requests.get(update.request_id)
        if stream is None:
            # The stream has already ended, for example because of a time limit. Abort the request
            # in the engine, unless the engine has just ended it.
            if update.finish_reason is None:
                send_abort(process, update.request_id)
        elif update.error is None:
            self._add_update(stream, update)
        else:
            self._end_with_error(process, stream, update.error, is_refused=update.is_refused)

    def _end_with_error(
        self, process: SupervisedProcess, stream: Stream, message: str, *, is_refused: bool
    ) -> None:
        """End a stream with an error that the engine has reported.

        Args:
            process: the engine process.
            stream: the stream.
            message: the error message.
            is_refused: whether the engine has refused the request, because the request is invalid.
                If False, the engine has failed.
        """
        if len(stream.sequences) > 1:
            # The engine has ended only one sequence, but the error ends the whole request.
            send_abort(process, stream.request_id)
        if is_refused:
            # In an error about a grammar, the engine names the type of the grammar. `refusal`
            # replaces this type with the name of the field in which the client sent the grammar.
            self.end(stream, RequestError(stream.refusal(message)))
        else:
            self.end(stream, EngineError(message))

    def _add_update(self, stream: Stream, update: RequestUpdate) -> None:
        """Add an update from the engine to `stream`, and let the loop check the stream at once.

        If the stream then has too many unsent tokens, end the stream.
        """
        now = time.monotonic()
        if update.new_token_ids:
            self._note_start(stream, now)
        self._statistics.note_update(stream, update, now)
        stream.add(update)
        self._step_sender.note_output(stream)
        if stream.num_pending > self._settings.max_pending_tokens:
            self._end_with_too_many_unsent_tokens(stream)

    def _end_with_too_many_unsent_tokens(self, stream: Stream) -> None:
        """Abort `stream` in the engine, and end it with an error about its unsent tokens."""
        self._aborts.abort(stream)
        error = EngineError(
            f"{stream.num_pending} generated tokens of this request wait to be sent, but the limit "
            f"is {self._settings.max_pending_tokens} (max_pending_tokens). The postprocessor is "
            "too slow."
        )
        self.end(stream, error)

    def _note_start(self, stream: Stream, started: float) -> None:
        """Record the time at which the engine started a request.

        Only the first call has an effect.
        """
        if stream.timing.started is None:
            self._admission.note_start(stream, started)
            self._statistics.note_start(stream, started)

    def _note_started(self, started: list[tuple[str, float]]) -> None:
        """Record the times at which requests left the engine's waiting queue.

        The argument `started` has the form of StepEngine.started.
        """
        for request_id, start_time in started:
            if stream := self.requests.get(request_id):
                self._note_start(stream, start_time)

    def _note_compiled(self, compiled: list[tuple[str, float, float]]) -> None:
        """Record when the compilation of each request's grammar began and ended.

        The argument `compiled` has the form of StepEngine.compiled.
        """
        for request_id, requested, finished in compiled:
            if stream := self.requests.get(request_id):
                stream.timing.compilation = (requested, finished)

    def _end_if_overdue(self, stream: Stream, now: float) -> bool:
        """End a request that has exceeded its queue_timeout or its timeout.

        The engine stops computing the request, and the client gets an error.

        Returns:
            Whether the request was ended.
        """
        if stream.has_ended:
            return False  # The output is complete. Only the last step must still be sent.
        error = stream.timing.deadline_error(now)
        if error is None:
            return False
        if isinstance(error, CapacityError):
            # The request has waited too long in the queue. Add to the error message the time after
            # which the client should try again.
            error = self._admission.with_retry_time(error, stream.timing.client_id)
        self._aborts.abort(stream)
        self._statistics.counts["requests_timed_out_total"] += 1
        self._statistics.note_unfinished(stream, "abort")
        # This request was not refused, even if the error is a CapacityError.
        self._respond_uncounted(stream.sender, error)
        self._remove(stream)
        return True

    def _finish(self, stream: Stream) -> None:
        """Remove a stream whose last step was sent."""
        if stream.has_finished_sequence:
            # The engine process works again, so its earlier attempts to restart no longer count
            # toward the limit max_engine_restarts.
            self.owner(stream.request_id).num_attempts = 0
        self._remove(stream)

    def _remove(self, stream: Stream) -> None:
        """Remove a stream, release its memory slots, and record the end of its request."""
        self._selector.release(self.owner(stream.request_id).index, len(stream.slots))
        self.remove(stream.request_id)
        self._step_sender.stop_checking(stream)
        now = time.monotonic()
        self._statistics.note_end(stream, now)
        record_spans(self._tracing, stream, now)
        self._admission.close(stream)
