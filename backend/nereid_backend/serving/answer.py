# SPDX-License-Identifier: Apache-2.0
"""One answer as it grows: tokens in, pieces for the client out. Knows nothing of the server."""

from dataclasses import dataclass
from typing import Any

from nereid_backend.output.detokenizer import Decode, Detokenizer
from nereid_backend.output.stops import StopStrings
from nereid_backend.serving.message import MessageBuilder
from nereid_backend.serving.wire import StepState, StreamContext


@dataclass(frozen=True, slots=True)
class Piece:
    """What one response says.

    Attributes:
        text: text that it adds, as the model wrote it.
        delta: the JSON object described in docs/contract.md.
        finish_reason: in the last piece only.
        num_output_tokens: tokens that it adds.
    """

    text: str
    delta: dict[str, Any]
    finish_reason: str | None
    cumulative_logprob: float
    num_input_tokens: int
    num_output_tokens: int


class Answer:
    """The postprocessor's state of one request.

    Args:
        context: what it must know of the request.
        serial: number of its stream.
        decode: ids to text.
        message: reads the text.
    """

    def __init__(
        self, context: StreamContext, serial: int, decode: Decode, message: MessageBuilder
    ) -> None:
        self.context = context
        self.serial = serial
        self.cancel_checked = 0.0
        self.stop_string: str | None = None
        self._detokenizer = Detokenizer(decode, context.seed_token_ids)
        self._stops = StopStrings(
            context.stop, include_in_output=context.include_stop_str_in_output
        )
        self._message = message
        self._text = ""
        self._prepend = context.prepend
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._cumulative_logprob = 0.0
        self._num_tokens = 0
        self._num_tokens_given = 0

    def take(self, token_ids: list[int], state: StepState) -> None:
        """Take in one step; behind a stop string only its ending counts."""
        ended = state.ending is not None
        if self.stop_string is None:
            self._num_tokens += len(token_ids)
            self._cumulative_logprob = state.cumulative_logprob
            self._take_text(self._detokenizer.feed(self._visible(token_ids, state)))
            if ended and self.stop_string is None:
                self._take_text(self._detokenizer.finish())
            if ended and self.stop_string is None:
                self._give(self._stops.finish())
        if state.ending is not None:
            self._message.finish()
            found = self.stop_string is not None
            self._finish_reason = "stop" if found else state.ending.finish_reason
            if self._finish_reason == "stop" and self._message.has_calls:
                self._finish_reason = "tool_calls"
            self._stop_reason = self.stop_string if found else state.ending.stop_reason

    def piece(self) -> Piece | None:
        """What the client gets now; None when it gets nothing yet."""
        if self._finish_reason is None and not (self.context.stream and self._text):
            return None
        text, self._text = self._text, ""
        added = self._num_tokens - self._num_tokens_given
        self._num_tokens_given = self._num_tokens
        prepend, self._prepend = self._prepend, ""
        return Piece(
            text=prepend + text,
            delta=self._delta(),
            finish_reason=self._finish_reason,
            cumulative_logprob=self._cumulative_logprob,
            num_input_tokens=self.context.num_prompt_tokens,
            num_output_tokens=added,
        )

    def _visible(self, token_ids: list[int], state: StepState) -> list[int]:
        """The ids whose text is part of the answer: not the stop token that ended it."""
        ending = state.ending
        if ending is None or ending.finish_reason != "stop" or ending.stop_reason is None:
            return token_ids
        return token_ids[:-1] if token_ids[-1:] == [ending.stop_reason] else token_ids

    def _take_text(self, text: str) -> None:
        match = self._stops.feed(text)
        self._give(match.text)
        self.stop_string = match.stop

    def _give(self, text: str) -> None:
        self._text += text
        self._message.feed(text)

    def _delta(self) -> dict[str, Any]:
        delta = self._message.take()
        if self._finish_reason is not None:
            delta["finish_reason"] = self._finish_reason
            if self._stop_reason is not None:
                delta["stop_reason"] = self._stop_reason
        delta["usage"] = {
            "prompt_tokens": self.context.num_prompt_tokens,
            "completion_tokens": self._num_tokens,
        }
        return delta
