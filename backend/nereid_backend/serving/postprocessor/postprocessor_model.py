# SPDX-License-Identifier: Apache-2.0
"""The Triton model `postprocessor`: token ids -> text -> what the client gets.

Decoupled, one instance (two would mix the order of a stream's steps). A step may answer nothing;
the last step of a request always answers.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nereid_backend.errors import NereidError
from nereid_backend.serving import tensor_names, tensors
from nereid_backend.serving.chat_format import choose_format
from nereid_backend.serving.feedback import FeedbackWriter, Signal
from nereid_backend.serving.postprocessor.choice import Answer, Piece
from nereid_backend.serving.postprocessor.choices import Answers
from nereid_backend.serving.postprocessor.message_builder import (
    MessageBuilder,
    ParsedMessage,
    PlainMessage,
)
from nereid_backend.serving.postprocessor.strict_check import strict_check
from nereid_backend.serving.serving_settings import read_settings
from nereid_backend.serving.tokenizer.prompt_builder import load_tokenizer
from nereid_backend.serving.wire import Opening, StepState, StreamContext
from nereid_backend.text.detokenizer import decoder
from nereid_backend.text.logprob_entries import vllm_entry
from nereid_backend.text.token_text import TokenText

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
            self._keepalive_s = settings.keepalive_ms / 1000
        except NereidError as error:
            raise tensors.load_error(error) from error
        self._decoders = {
            skip: decoder(tokenizer, skip_special_tokens=skip) for skip in (True, False)
        }
        self._texts = TokenText(tokenizer)
        self._feedback = FeedbackWriter()
        # By the stream's slot: a stream that ended without a last step makes room when its slot is
        # used again.
        self._answers: dict[int, Answers] = {}

    def execute(self, requests: list[Any]) -> None:
        """Take steps of streams, in order."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                reply = self._step(request)
            except NereidError as error:
                reply = tensors.error_response(error)
            except Exception as error:  # noqa: BLE001 - the step ends here and must be answered
                tensors.log.exception("step failed in the postprocessor")
                reply = tensors.error_response(error)
            tensors.send(sender, reply, final=True)

    def finalize(self) -> None:
        """Nothing to release."""

    def _step(self, request: Any) -> Any:  # noqa: ANN401 - the server's own types
        """The response to one step, None when it says nothing to the client."""
        state = StepState.unpack(tensors.array(request, tensor_names.STATE))
        if state.opening is not None:
            self._feedback.attach(state.opening.feedback_path)
            self._answers[state.slot] = self._open(state.opening, state.serial)
        answers = self._answers.get(state.slot)
        self._feedback.report(state.slot, state.serial, state.step)
        if answers is None or answers.serial != state.serial:
            # Its stream has ended: it failed here, or it was forgotten.
            return None
        try:
            return self._advance(answers, state, request)
        except Exception:
            # The client hears of the error; nobody waits for the rest.
            self._answers.pop(state.slot, None)
            self._feedback.raise_signal(state.slot, state.serial, Signal.CANCELLED)
            raise

    def _advance(self, answers: Answers, state: StepState, request: Any) -> Any:  # noqa: ANN401
        answers.take(tensors.array(request, tensor_names.TOKEN_IDS).tolist(), state)
        if state.is_last:
            del self._answers[state.slot]
        else:
            self._check_cancel(answers, state, request)
            if not answers.is_cancelled:
                for slot in answers.stopped_slots():
                    self._feedback.raise_signal(slot, state.serial, Signal.STOP_STRING)
        reply = self._reply(answers, answers.pieces(is_last=state.is_last))
        return self._keepalive(answers) if reply is None else reply

    def _keepalive(self, answers: Answers) -> Any:  # noqa: ANN401 - the server's own types
        """An empty response where a stream has been silent for long, else None."""
        if not (self._keepalive_s and answers.context.stream):
            return None
        now = time.monotonic()
        if now - answers.replied < self._keepalive_s:
            return None
        answers.replied = now
        return tensors.response(
            {
                tensor_names.TEXT_OUTPUT: tensors.strings(""),
                tensor_names.DELTA: tensors.strings("{}"),
            }
        )

    def _check_cancel(self, answers: Answers, state: StepState, request: Any) -> None:  # noqa: ANN401
        now = time.monotonic()
        if now - answers.cancel_checked > _CANCEL_CHECK_S:
            answers.cancel_checked = now
            if request.is_cancelled():
                answers.is_cancelled = True
                self._feedback.raise_signal(state.slot, state.serial, Signal.CANCELLED)

    def _open(self, opening: Opening, serial: int) -> Answers:
        context = StreamContext.unpack(opening.context)
        # A format's markers are often special tokens, which must be there to be read.
        skips = context.skip_special_tokens and not self._is_parsed(context)
        decode, check = self._decoders[skips], strict_check(context)
        answers = (
            Answer(context, index, decode, self._message(context), self._texts, check)
            for index in range(context.n)
        )
        return Answers(context, serial, opening.slots, answers)

    def _is_parsed(self, context: StreamContext) -> bool:
        return context.prompt is not None and self._format is not None

    def _message(self, context: StreamContext) -> MessageBuilder:
        if context.prompt is None or self._format is None:
            return PlainMessage()
        return ParsedMessage(self._format, context)

    def _reply(self, answers: Answers, pieces: Sequence[Piece]) -> Any:  # noqa: ANN401
        if not pieces:
            return None
        answers.replied = time.monotonic()
        deltas = (json.dumps(piece.delta, ensure_ascii=False) for piece in pieces)
        outputs: dict[str, npt.NDArray[Any]] = {
            tensor_names.TEXT_OUTPUT: tensors.strings(*(piece.text for piece in pieces)),
            tensor_names.DELTA: tensors.strings(*deltas),
        }
        for name in answers.context.returns:
            outputs[name] = self._returned(name, pieces)
        return tensors.response(outputs)

    def _returned(self, name: str, pieces: Sequence[Piece]) -> npt.NDArray[Any]:
        """An optional output: one element a choice; the prompt's length only once."""
        if name == tensor_names.FINISH_REASON:
            reasons = [piece.finish_reason for piece in pieces]
            return tensors.strings(*(reason or "" for reason in reasons if any(reasons)))
        if name == tensor_names.LOGPROBS:
            return tensors.strings(*(self._vllm_logprobs(piece) for piece in pieces))
        if name == tensor_names.CUMULATIVE_LOGPROB:
            return np.array([piece.cumulative_logprob for piece in pieces], np.float32)
        if name == tensor_names.NUM_INPUT_TOKENS:
            return np.array([pieces[0].num_input_tokens], np.uint32)
        return np.array([piece.num_output_tokens for piece in pieces], np.uint32)

    def _vllm_logprobs(self, piece: Piece) -> str:
        entries = [vllm_entry(row, self._texts) for row in piece.logprobs]
        return json.dumps(entries, ensure_ascii=False)
