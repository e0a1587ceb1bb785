# SPDX-License-Identifier: Apache-2.0
"""The Triton model `postprocessor`. It converts token ids to text, and sends the text to clients.

The model is decoupled: a step may have no response, but the last step of a request always has a
response. The model has exactly one instance, because several instances would change the order of a
stream's steps.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nereid_backend.errors import EngineError, NereidError, RequestError
from nereid_backend.serving import tensor_names, triton_api
from nereid_backend.serving.chat_format import choose_format
from nereid_backend.serving.feedback import Signal
from nereid_backend.serving.postprocessor.choice import Choice, ChoiceOutput
from nereid_backend.serving.postprocessor.choices import Choices
from nereid_backend.serving.postprocessor.message_builder import ParsedMessage, PlainMessage
from nereid_backend.serving.postprocessor.open_streams import OpenStreams
from nereid_backend.serving.postprocessor.strict_check import strict_check
from nereid_backend.serving.serving_settings import check_single_instance, read_settings
from nereid_backend.serving.tokenizer.prompt_builder import load_tokenizer
from nereid_backend.serving.tracing import Tracing
from nereid_backend.serving.wire import StepState, StreamContext
from nereid_backend.text.detokenizer import decoder
from nereid_backend.text.logprob_entries import vllm_entry
from nereid_backend.text.token_text import TokenText

# The postprocessor repeatedly asks the server whether the client of a stream has cancelled the
# request. `_CANCEL_CHECK_S` is the shortest time between two checks of one stream.
# `_CANCEL_CHECKS_PER_SECOND` is the largest number of checks per second for all streams together.
# Each check is a round trip to the server, and takes about 5 % of the CPU time of a response. With
# 256 streams, each stream is checked every 0.64 s.
_CANCEL_CHECK_S = 0.1
_CANCEL_CHECKS_PER_SECOND = 400
# If the executor is loaded again, for example with other settings, the old executor continues its
# streams while the new executor already begins streams.
_MAX_EXECUTORS = 2


class PostprocessorModel:
    """The third step of the ensemble."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint's tokenizer and choose its chat format."""
        try:
            check_single_instance(args)
            settings, _ = read_settings(args)
            tokenizer = load_tokenizer(settings.model)
            chat_format = choose_format(settings)
        except NereidError as error:
            raise triton_api.load_error(error) from error
        self._format = chat_format
        self._keepalive_s = settings.keepalive_ms / 1000
        self._decode_with_special_tokens = decoder(tokenizer, skip_special_tokens=False)
        self._decode_without_special_tokens = decoder(tokenizer, skip_special_tokens=True)
        # The texts of single tokens, for log-probabilities.
        self._texts = TokenText(tokenizer)
        self._tracing = Tracing("postprocessor")
        # Maps the address of each executor's shared memory to the open streams of the executor. The
        # executor that has sent the most recent step is the last key.
        self._streams_by_executor: OrderedDict[bytes, OpenStreams] = OrderedDict()
        # The open streams of the executor that has sent the last step; empty before the first step.
        self._streams = OpenStreams()

    def execute(self, requests: list[Any]) -> None:
        """Process the messages in `requests` in order, and respond to each message.

        A step is a message of the executor with new tokens. All steps of the same client request
        belong to one stream. Triton server forwards the response to a step to the client.
        """
        for request in requests:
            sender = request.get_response_sender()
            try:
                response = self._process_step(request)  # None if the step has no output.
            except Exception as error:  # noqa: BLE001 - the step ends here and needs a response
                if not isinstance(error, NereidError):
                    triton_api.log.exception(
                        "a step of request %s failed in the postprocessor", request.request_id()
                    )
                response = triton_api.error_response(error)
            # `final=True` ends the Triton request of this step. It does not end the stream, which
            # can have further steps.
            triton_api.send(sender, response, final=True)

    def finalize(self) -> None:
        """Send the recorded spans."""
        self._tracing.close()

    def _process_step(self, request: Any) -> Any:  # noqa: ANN401 - the server's own types
        """Process one step, and return the response to the client; None if there is no output.

        A step belongs to the stream of one client request. While the stream is open, it owns a slot
        in the shared memory in which this process sends reports and signals to the executor.
        """
        # `state` contains the new tokens and the slot of the stream.
        state = self._verify_and_select_executor(request)
        if self._streams.is_late(state):
            return None  # The stream has ended, and another stream already uses its slot.
        # Report the step to the executor before the step is processed here. The executor can then
        # send the next step earlier, and the report is sent even if the processing fails.
        self._streams.feedback.report(state.slot, state.serial, state.step)
        try:
            return self._add_step(state, request)
        except Exception:
            # The method `execute` sends the error to the client as the last response of the stream.
            self._streams.remove(state)
            self._streams.feedback.raise_signal(state.slot, state.serial, Signal.CANCELLED)
            raise

    def _verify_and_select_executor(self, request: Any) -> StepState:  # noqa: ANN401 - the server's own type
        """Check that an executor has signed the message in `request`, and return the StepState.

        Mutates: `_streams`, which then contains the open streams of this executor.

        Raises:
            RequestError: the step was not signed by an executor.
        """
        message = triton_api.array(request, tensor_names.STATE).tobytes()
        address = message.partition(b"\n")[0]  # the address of the executor's shared memory
        streams = self._streams_by_executor.get(address)
        if streams is None:
            streams = OpenStreams()
        packed_state = streams.feedback.attach_and_verify(message)
        if streams is not self._streams:
            self._switch_executor(address, streams)
        return StepState.unpack(packed_state)

    def _switch_executor(self, address: bytes, streams: OpenStreams) -> None:
        """Make an executor the current executor. Store only the last `_MAX_EXECUTORS` executors.

        `address` is the address of the executor's shared memory. `streams` are its open streams.
        """
        self._streams = streams
        self._streams_by_executor[address] = streams
        self._streams_by_executor.move_to_end(address)
        if len(self._streams_by_executor) > _MAX_EXECUTORS:
            # Remove the streams of an executor that has ended.
            self._streams_by_executor.popitem(last=False)

    def _add_step(self, state: StepState, request: Any) -> Any:  # noqa: ANN401
        """Add the tokens of a step to its stream. Return the response; None if there is none.

        `request` is the Triton request that contains the step `state`.
        """
        if self._streams.is_new(state):
            self._open_stream(state)
        choices = self._streams.choices_of(state)
        if choices is None:
            return None  # The stream has failed, and the client already has the error.
        choices.add(state)
        if state.is_last:
            self._end_stream(state, choices)
        else:
            self._send_signals(choices, state, request)
        outputs = choices.take_outputs(is_last=state.is_last)
        if not outputs:
            return self._keepalive_response(choices)
        choices.last_response_at = time.monotonic()
        return self._response(choices.context, outputs)

    def _end_stream(self, state: StepState, choices: Choices) -> None:
        """Remove a stream from the open streams, and record a span for the stream.

        `state` is the last step of the stream. It contains the slot by which `_streams` finds the
        stream.
        """
        self._streams.remove(state)
        self._tracing.record(
            "nereid.parse",
            choices.context.traceparent,
            choices.opened_at,
            time.monotonic(),
            {"nereid.busy_seconds": choices.parsing_s},
        )

    def _keepalive_response(self, choices: Choices) -> Any:  # noqa: ANN401 - the server's own types
        """Return an empty response if a keepalive is due, otherwise None.

        A keepalive is due if a stream has sent no response in the last `keepalive_ms` milliseconds.
        It is needed because Triton's HTTP endpoint detects a disconnected client only when it sends
        a response. The value 0 of the setting turns keepalives off.

        Mutates: `choices.last_response_at`, if a response is returned.
        """
        has_keepalives = self._keepalive_s > 0 and choices.context.stream
        if not has_keepalives:
            return None
        now = time.monotonic()
        if now - choices.last_response_at < self._keepalive_s:
            return None
        choices.last_response_at = now
        return triton_api.response(
            {
                tensor_names.TEXT_OUTPUT: triton_api.strings(""),
                tensor_names.DELTA: triton_api.strings("{}"),
            }
        )

    def _send_signals(self, choices: Choices, state: StepState, request: Any) -> None:  # noqa: ANN401
        """Signal to the executor which sequences of a stream need no more tokens.

        If the client has cancelled the request, these are all sequences. Otherwise, these are the
        sequences that have reached a stop string.

        Mutates: `choices.last_cancel_check_at`, and `choices.is_cancelled` (in `_check_cancel`).
        """
        now = time.monotonic()
        # Each check for a cancelled request is a round trip to the server. Therefore, the time
        # between two checks of a stream grows with the number of streams.
        interval_s = max(_CANCEL_CHECK_S, len(self._streams) / _CANCEL_CHECKS_PER_SECOND)
        if now - choices.last_cancel_check_at > interval_s:
            choices.last_cancel_check_at = now
            self._check_cancel(choices, state, request)
        if not choices.is_cancelled:
            for slot in choices.stopped_slots():
                self._streams.feedback.raise_signal(slot, state.serial, Signal.STOP_STRING)

    def _check_cancel(self, choices: Choices, state: StepState, request: Any) -> None:  # noqa: ANN401
        """If the client has cancelled the request, signal to the executor to end all sequences.

        Triton server marks the later steps (`request`) of a disconnected client as cancelled.
        """
        if request.is_cancelled():
            choices.is_cancelled = True
            self._streams.feedback.raise_signal(state.slot, state.serial, Signal.CANCELLED)

    def _open_stream(self, state: StepState) -> None:
        """Open the stream of a client's request. If this fails, later steps are ignored.

        Raises:
            RequestError: the context of the request is damaged.
            EngineError: `state` is not the first message, because the postprocessor was restarted
                after the first message.
        """
        # Assign the slot in the shared memory to the stream first, because a stream without a slot
        # counts as new. If opening fails below, the next message must not open the stream again.
        self._streams.assign_slot(state)
        opening = state.opening
        if opening is None:
            raise EngineError(
                "the postprocessor was restarted during this request. Send the request again."
            )
        context = StreamContext.unpack(opening.context)
        if context.n != len(opening.slots):
            raise RequestError(
                f"envelope: the executor started {len(opening.slots)} sequences, but the "
                f"tokenizer's message to the postprocessor describes {context.n} sequences."
            )
        choices = Choices(context, opening.slots, self._make_choices(context))
        self._streams.open(state, choices)

    def _make_choices(self, context: StreamContext) -> list[Choice]:
        """Create the choices of a new request.

        If the request is a chat and the checkpoint has a chat format, the output is parsed with
        this format. Otherwise, the output is plain text.
        """
        is_chat = context.prompt is not None
        fmt = self._format if is_chat else None
        # Special tokens are skipped only in plain text, because the markers that the parser needs
        # are often special tokens.
        if fmt is None and context.skip_special_tokens:
            decode = self._decode_without_special_tokens
        else:
            decode = self._decode_with_special_tokens
        schema_check = strict_check(context)  # None if the request has no strict schema.
        choices = []
        for index in range(context.n):
            message = PlainMessage() if fmt is None else ParsedMessage(fmt, context)
            choices.append(Choice(context, index, decode, message, self._texts, schema_check))
        return choices

    def _response(self, context: StreamContext, outputs: Sequence[ChoiceOutput]) -> Any:  # noqa: ANN401
        """Return the response that contains the outputs of one or several choices.

        The tensors with the text and with the JSON object (`delta`) have one element for each
        element of `outputs`. `context.returns` contains the names of the optional tensors that the
        client has requested, such as the finish reasons.
        """
        output_tensors: dict[str, npt.NDArray[Any]] = {
            tensor_names.TEXT_OUTPUT: triton_api.strings(*(output.text for output in outputs)),
            tensor_names.DELTA: triton_api.json_strings(*(output.delta for output in outputs)),
        }
        for name in context.returns:
            output_tensors[name] = self._optional_output(name, context, outputs)
        return triton_api.response(output_tensors)

    def _optional_output(
        self, name: str, context: StreamContext, outputs: Sequence[ChoiceOutput]
    ) -> npt.NDArray[Any]:
        """Build an optional output tensor. It has one element for each item of `outputs`.

        There are two exceptions. The tensor with the number of prompt tokens has only one element,
        because all choices have the same prompt. If no choice has ended, the tensor with the finish
        reasons has no elements.
        """
        match name:
            case tensor_names.FINISH_REASON:
                reasons = [output.finish_reason or "" for output in outputs]
                if not any(reasons):
                    reasons = []  # No choice has ended.
                return triton_api.strings(*reasons)
            case tensor_names.LOGPROBS:
                entries_of_outputs = (
                    [vllm_entry(row, self._texts) for row in output.logprobs] for output in outputs
                )
                return triton_api.json_strings(*entries_of_outputs)
            case tensor_names.CUMULATIVE_LOGPROB:
                return np.array([output.cumulative_logprob for output in outputs], np.float32)
            case tensor_names.NUM_INPUT_TOKENS:
                return np.array([context.num_prompt_tokens], np.uint32)
            case tensor_names.NUM_OUTPUT_TOKENS:
                return np.array([output.num_output_tokens for output in outputs], np.uint32)
        raise AssertionError(f"{name} is not an optional output")
