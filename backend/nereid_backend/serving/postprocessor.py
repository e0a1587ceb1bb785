# SPDX-License-Identifier: Apache-2.0
"""The Triton model `postprocessor`: token ids -> text -> what the client gets.

Decoupled, one instance (two would mix the order of a stream's steps). A step may answer nothing;
the last step of a request always answers.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nereid_backend.errors import NereidError
from nereid_backend.output.detokenizer import decoder
from nereid_backend.serving import names, tensors
from nereid_backend.serving.answer import Answer
from nereid_backend.serving.feedback import FeedbackWriter, Signal
from nereid_backend.serving.formats import choose_format
from nereid_backend.serving.message import ParsedMessage, PlainMessage
from nereid_backend.serving.prompts import load_tokenizer
from nereid_backend.serving.settings import read_settings
from nereid_backend.serving.wire import StepState, StreamContext

# Asking the server whether a request was cancelled is a message to it and back.
_CANCEL_CHECK_S = 0.1


class PostprocessorModel:
    """Third step of the ensemble."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint's tokenizer and find out how it writes."""
        try:
            settings, _ = read_settings(args)
            tokenizer = load_tokenizer(settings.model)
            self._format = choose_format(settings)
        except NereidError as error:
            raise tensors.load_error(error) from error
        self._decoders = {
            skip: decoder(tokenizer, skip_special_tokens=skip) for skip in (True, False)
        }
        self._feedback = FeedbackWriter()
        # One answer a slot: a stream that ended without a last step makes room when its slot is
        # used again.
        self._answers: dict[int, Answer] = {}

    def execute(self, requests: list[Any]) -> None:
        """Take steps of streams, in order."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                reply = self._step(request)
            except Exception as error:  # noqa: BLE001 - the step ends here and must be answered
                tensors.log.exception("step failed in the postprocessor")
                reply = tensors.error_response(error)
            tensors.send(sender, reply, final=True)

    def finalize(self) -> None:
        """Nothing to release."""

    def _step(self, request: Any) -> Any:  # noqa: ANN401 - the server's own types
        """The response to one step, None when it says nothing to the client."""
        state = StepState.unpack(tensors.array(request, names.STATE))
        answer = self._answer(state)
        self._feedback.report(state.slot, state.serial, state.step)
        if answer is None:
            # Its stream has ended (a stop string was found and answered, or it was forgotten).
            return None
        now = time.monotonic()
        if now - answer.cancel_checked > _CANCEL_CHECK_S and state.ending is None:
            answer.cancel_checked = now
            if request.is_cancelled():
                self._feedback.raise_signal(state.slot, state.serial, Signal.CANCELLED)
        token_ids = tensors.array(request, names.TOKEN_IDS).tolist()
        answer.take(token_ids, state)
        if answer.stop_string is not None and state.ending is None:
            self._feedback.raise_signal(state.slot, state.serial, Signal.STOP_STRING)
        if state.ending is not None:
            del self._answers[state.slot]
        return self._reply(answer)

    def _answer(self, state: StepState) -> Answer | None:
        if state.opening is not None:
            self._feedback.attach(state.opening.feedback_path)
            context = StreamContext.unpack(state.opening.context)
            self._answers[state.slot] = self._open(context, state.serial)
        answer = self._answers.get(state.slot)
        return answer if answer is not None and answer.serial == state.serial else None

    def _open(self, context: StreamContext, serial: int) -> Answer:
        if context.prompt is None or self._format is None:
            decode = self._decoders[context.skip_special_tokens]
            return Answer(context, serial, decode, PlainMessage())
        # A format's markers are often special tokens, which must be there to be read.
        message = ParsedMessage(self._format, context.tools, context.prompt)
        return Answer(context, serial, self._decoders[False], message)

    def _reply(self, answer: Answer) -> Any:  # noqa: ANN401 - the server's own type
        piece = answer.piece()
        if piece is None:
            return None
        outputs: dict[str, npt.NDArray[Any]] = {
            names.TEXT_OUTPUT: tensors.strings(piece.text),
            names.DELTA: tensors.strings(json.dumps(piece.delta, ensure_ascii=False)),
        }
        for name in answer.context.returns:
            outputs[name] = _OPTIONAL[name](piece)
        return tensors.response(outputs)


_OPTIONAL: dict[str, Any] = {
    names.FINISH_REASON: lambda piece: tensors.strings(
        *([piece.finish_reason] if piece.finish_reason else [])
    ),
    names.CUMULATIVE_LOGPROB: lambda piece: np.array([piece.cumulative_logprob], np.float32),
    names.NUM_INPUT_TOKENS: lambda piece: np.array([piece.num_input_tokens], np.uint32),
    names.NUM_OUTPUT_TOKENS: lambda piece: np.array([piece.num_output_tokens], np.uint32),
}
