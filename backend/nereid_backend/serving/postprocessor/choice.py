# SPDX-License-Identifier: Apache-2.0
"""One answer as it grows: tokens in, pieces for the client out. Knows nothing of the server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_backend.serving.postprocessor.message_builder import MessageBuilder
from nereid_backend.serving.wire import SequenceDelta, StreamContext
from nereid_backend.text.detokenizer import Decode, Detokenizer
from nereid_backend.text.logprob_entries import openai_entry, prompt_entries
from nereid_backend.text.stop_strings import StopStrings
from nereid_backend.text.token_text import TokenText

# Given the content and the calls of a whole answer; raises if they break a strict schema.
Check = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one response says of one answer.

    Attributes:
        text: text that it adds, as the model wrote it.
        delta: the JSON object described in docs/contract.md.
        finish_reason: in the last piece only.
        num_output_tokens: tokens that it adds.
        logprobs: a row (TokenLogprobs) for each of them, where the request asked for them.
    """

    text: str
    delta: dict[str, Any]
    finish_reason: str | None
    cumulative_logprob: float
    num_input_tokens: int
    num_output_tokens: int
    logprobs: tuple[Any, ...] = ()


class Answer:
    """The postprocessor's state of one of a request's answers.

    Args:
        context: what it must know of the request.
        index: which of the request's answers.
        decode: ids to text.
        message: reads the text.
        texts: of single tokens, for log-probabilities.
        check: is given the whole message of an answer that the model ended itself.
    """

    def __init__(
        self,
        context: StreamContext,
        index: int,
        decode: Decode,
        message: MessageBuilder,
        texts: TokenText,
        check: Check | None = None,
    ) -> None:
        self.context = context
        self.stop_string: str | None = None
        self.is_finished = False
        self._index = index
        self._detokenizer = Detokenizer(decode, context.seed_token_ids)
        self._stops = StopStrings(
            context.stop, include_in_output=context.include_stop_str_in_output
        )
        self._message = message
        self._texts = texts
        self._whole = _Whole(check) if check is not None else None
        self._one_by_one = bool(context.stop) or message.reads_reasoning
        self._text = ""
        self._prepend = context.prepend
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._cumulative_logprob = 0.0
        self._num_tokens = 0
        self._num_reasoning_tokens = 0
        self._num_cached_tokens = 0
        self._new_ids: list[int] = []
        self._logprobs: list[Any] = []
        self._prompt_logprobs: tuple[Any, ...] | None = None
        self._has_begun = False

    def take(self, token_ids: Sequence[int], part: SequenceDelta) -> None:
        """Take in one step; behind a stop string only its ending counts."""
        self._num_cached_tokens = max(self._num_cached_tokens, part.num_cached_tokens)
        if part.prompt_logprobs is not None:
            self._prompt_logprobs = part.prompt_logprobs
        if self.stop_string is None:
            count = self._take_tokens(list(token_ids), part)
            self._count(token_ids[:count], part)
            if part.ending is not None and self.stop_string is None:
                self._take_text(self._detokenizer.finish())
            if part.ending is not None and self.stop_string is None:
                self._give(self._stops.finish())
        if part.ending is not None:
            self._finish(part)

    def piece(self) -> Piece | None:
        """What the client gets now; None when it gets nothing yet."""
        if self.is_finished:
            return None
        if self._finish_reason is None and not (self.context.stream and self._has_output):
            return None
        text, self._text = self._text, ""
        new_ids, self._new_ids = self._new_ids, []
        logprobs, self._logprobs = self._logprobs, []
        prepend, self._prepend = self._prepend, ""
        delta = self._delta(new_ids, logprobs)
        self._has_begun = True
        self.is_finished = self._finish_reason is not None
        return Piece(
            text=prepend + text,
            delta=delta,
            finish_reason=self._finish_reason,
            cumulative_logprob=self._cumulative_logprob,
            num_input_tokens=self.context.num_prompt_tokens,
            num_output_tokens=len(new_ids),
            logprobs=tuple(logprobs),
        )

    @property
    def _has_output(self) -> bool:
        if self._text or self._logprobs:
            return True
        return self.context.prompt_token_ids is not None and bool(self._new_ids)

    def _take_tokens(self, token_ids: list[int], part: SequenceDelta) -> int:
        """Turn tokens into text up to a stop string; how many were taken."""
        visible = self._visible(token_ids, part)
        if not self._one_by_one:
            self._take_text(self._detokenizer.feed(visible))
            return len(token_ids)
        for at, token_id in enumerate(visible):
            was_reasoning = self._message.is_reasoning
            text = self._detokenizer.feed([token_id])
            if self._num_tokens + at < self.context.min_tokens:
                self._give(text)  # too early for a stop string
            else:
                self._take_text(text)
            self._num_reasoning_tokens += was_reasoning or self._message.is_reasoning
            if self.stop_string is not None:
                return at + 1
        # The stop token that ended the answer belongs to what it ended.
        self._num_reasoning_tokens += len(visible) < len(token_ids) and self._message.is_reasoning
        return len(token_ids)

    def _visible(self, token_ids: list[int], part: SequenceDelta) -> list[int]:
        """The ids whose text is part of the answer: not the stop token that ended it."""
        ending = part.ending
        if ending is None or ending.finish_reason != "stop" or ending.stop_reason is None:
            return token_ids
        return token_ids[:-1] if token_ids[-1:] == [ending.stop_reason] else token_ids

    def _count(self, token_ids: Sequence[int], part: SequenceDelta) -> None:
        count = len(token_ids)
        self._num_tokens += count
        self._new_ids += token_ids
        if count:
            self._cumulative_logprob = part.cumulative_logprobs[count - 1]
        if part.logprobs is not None:
            self._logprobs += part.logprobs[:count]

    def _finish(self, part: SequenceDelta) -> None:
        assert part.ending is not None
        self._message.finish()
        found = self.stop_string is not None
        self._finish_reason = "stop" if found else part.ending.finish_reason
        if self._finish_reason == "stop" and self._message.has_calls:
            self._finish_reason = "tool_calls"
        self._stop_reason = self.stop_string if found else part.ending.stop_reason
        if self._whole is not None and part.ending.finish_reason == "stop" and not found:
            self._whole.is_complete = True

    def _take_text(self, text: str) -> None:
        match = self._stops.feed(text)
        self._give(match.text)
        self.stop_string = match.stop

    def _give(self, text: str) -> None:
        self._text += text
        self._message.feed(text)

    def _delta(self, new_ids: list[int], logprobs: list[Any]) -> dict[str, Any]:
        message = self._message.take()
        if self._whole is not None:
            self._whole.add(message)
        delta = ({"index": self._index} if self._index else {}) | message
        if logprobs:
            delta["logprobs"] = [openai_entry(row, self._texts) for row in logprobs]
        prompt = self.context.prompt_token_ids
        if prompt is not None and new_ids:
            delta["token_ids"] = new_ids
        if not self._has_begun and self._index == 0:
            delta |= self._of_the_prompt()
        if self._finish_reason is not None:
            delta["cumulative_logprob"] = self._cumulative_logprob
            delta["finish_reason"] = self._finish_reason
            if self._stop_reason is not None:
                delta["stop_reason"] = self._stop_reason
        delta["usage"] = self._usage()
        return delta

    def _of_the_prompt(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.context.prompt_token_ids is not None:
            found["prompt_token_ids"] = list(self.context.prompt_token_ids)
        if self._prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_entries(self._prompt_logprobs, self._texts)
            self._prompt_logprobs = None
        return found

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.context.num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
        }


class _Whole:
    """The message so far, for a check once it is complete."""

    def __init__(self, check: Check) -> None:
        self.is_complete = False
        self._check = check
        self._content: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, delta: dict[str, Any]) -> None:
        """Add a delta's parts; check the message when it is complete.

        Raises:
            EngineError: it breaks the request's strict schema.
        """
        self._content.append(delta.get("content", ""))
        for piece in delta.get("tool_calls", ()):
            call = self._calls.setdefault(piece["index"], {"name": "", "arguments": ""})
            call["name"] = piece.get("name", call["name"])
            call["arguments"] += piece["arguments"]
        if self.is_complete:
            self._check({"content": "".join(self._content), "calls": list(self._calls.values())})
