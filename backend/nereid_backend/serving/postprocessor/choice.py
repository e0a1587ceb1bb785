# SPDX-License-Identifier: Apache-2.0
"""The output of one choice of a request: tokens come in, text and delta objects go out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_backend.serving.postprocessor.message_builder import MessageBuilder
from nereid_backend.serving.wire import Ending, SequenceDelta, StreamContext
from nereid_backend.text.detokenizer import Decode, Detokenizer
from nereid_backend.text.logprob_entries import openai_entry, prompt_entries
from nereid_backend.text.stop_strings import StopStrings
from nereid_backend.text.token_text import TokenText

# Validates a complete message, given as {"content": text, "calls": [{"name", "arguments"}, ...]}.
# Raises an error if the message does not match the request's strict schema.
Check = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """The output of one choice in one response.

    Attributes:
        text: the new text, exactly as the model wrote it.
        delta: the JSON object of the output `delta`, described in docs/reference/tensors.md.
        finish_reason: the reason why the choice ended; None while it continues.
        cumulative_logprob: the sum of the log-probabilities of all tokens of the choice so far.
        num_input_tokens: the number of prompt tokens.
        num_output_tokens: the number of new tokens.
        logprobs: for each new token the fields of a TokenLogprobs; empty if not requested.
    """

    text: str
    delta: dict[str, Any]
    finish_reason: str | None
    cumulative_logprob: float
    num_input_tokens: int
    num_output_tokens: int
    logprobs: tuple[Any, ...] = ()


class Choice:
    """The postprocessor's state of one choice.

    Args:
        context: the part of the request that the postprocessor needs.
        index: the index of the choice in its request.
        decode: converts token ids to text.
        message: parses the text.
        texts: the texts of single tokens, for log-probabilities.
        check: validates the complete message if the model itself ended the choice. None for no
            validation.

    Attributes:
        context: the part of the request that the postprocessor needs.
        stop_string: the stop string that ended the choice; None without one.
        is_finished: whether the last output of the choice has been taken.
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
        self._checked = _CheckedMessage(check) if check is not None else None
        # Stop strings and the count of reasoning tokens need the text after each single token.
        self._decodes_single_tokens = bool(context.stop) or message.reads_reasoning
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
        self._has_sent_output = False

    def add(self, token_ids: Sequence[int], delta: SequenceDelta) -> None:
        """Add the tokens of one step. After a stop string only the ending has an effect.

        Args:
            token_ids: the new tokens.
            delta: the other data of the step about this choice.
        """
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        if self.stop_string is None:
            count = self._add_tokens(list(token_ids), delta)
            self._count_tokens(token_ids[:count], delta)
            if delta.ending is not None:
                self._flush_text()
        if delta.ending is not None:
            self._finish(delta.ending)

    def take_output(self) -> ChoiceOutput | None:
        """Return the output since the last call, or None if there is none.

        Without streaming there is no output before the choice has ended.
        """
        if self.is_finished:
            return None
        if self._finish_reason is None and not (self.context.stream and self._has_output):
            return None
        output = ChoiceOutput(
            text=self._prepend + self._text,
            delta=self._build_delta(),
            finish_reason=self._finish_reason,
            cumulative_logprob=self._cumulative_logprob,
            num_input_tokens=self.context.num_prompt_tokens,
            num_output_tokens=len(self._new_ids),
            logprobs=tuple(self._logprobs),
        )
        self._text = ""
        self._prepend = ""
        self._new_ids = []
        self._logprobs = []
        self._has_sent_output = True
        self.is_finished = self._finish_reason is not None
        return output

    @property
    def _has_output(self) -> bool:
        if self._text or self._logprobs:
            return True
        return self.context.prompt_token_ids is not None and bool(self._new_ids)

    def _add_tokens(self, token_ids: list[int], delta: SequenceDelta) -> int:
        """Convert tokens to text up to a stop string. Return the number of tokens before its end.

        Without a stop string, that is the number of all tokens.
        """
        visible_ids = _without_stop_token(token_ids, delta.ending)
        if not self._decodes_single_tokens:
            self._search_stop_string(self._detokenizer.feed(visible_ids))
            return len(token_ids)
        for position, token_id in enumerate(visible_ids):
            was_reasoning = self._message.is_reasoning
            text = self._detokenizer.feed([token_id])
            if self._num_tokens + position < self.context.min_tokens:
                self._add_text(text)  # Before min_tokens, stop strings have no effect.
            else:
                self._search_stop_string(text)
            self._num_reasoning_tokens += was_reasoning or self._message.is_reasoning
            if self.stop_string is not None:
                return position + 1
        has_stop_token = len(visible_ids) < len(token_ids)
        # A stop token in the middle of reasoning counts as a reasoning token.
        self._num_reasoning_tokens += has_stop_token and self._message.is_reasoning
        return len(token_ids)

    def _count_tokens(self, token_ids: Sequence[int], delta: SequenceDelta) -> None:
        """Record the tokens up to a stop string and their log-probabilities."""
        count = len(token_ids)
        self._num_tokens += count
        self._new_ids += token_ids
        if count:
            self._cumulative_logprob = delta.cumulative_logprobs[count - 1]
        if delta.logprobs is not None:
            self._logprobs += delta.logprobs[:count]

    def _flush_text(self) -> None:
        """Add the text that the detokenizer and the search for stop strings have held back."""
        if self.stop_string is None:
            self._search_stop_string(self._detokenizer.finish())
        if self.stop_string is None:
            self._add_text(self._stops.finish())

    def _finish(self, ending: Ending) -> None:
        """Determine the finish reason and the stop reason."""
        self._message.finish()
        has_stop_string = self.stop_string is not None
        self._finish_reason = "stop" if has_stop_string else ending.finish_reason
        if self._finish_reason == "stop" and self._message.has_calls:
            self._finish_reason = "tool_calls"
        self._stop_reason = self.stop_string if has_stop_string else ending.stop_reason
        if self._checked is not None and ending.finish_reason == "stop" and not has_stop_string:
            self._checked.is_complete = True

    def _search_stop_string(self, text: str) -> None:
        """Add `text` up to a stop string. A possible beginning of one is held back."""
        match = self._stops.feed(text)
        self._add_text(match.text)
        self.stop_string = match.stop

    def _add_text(self, text: str) -> None:
        self._text += text
        self._message.feed(text)

    def _build_delta(self) -> dict[str, Any]:
        """Return the JSON object for the output since the last call."""
        message = self._message.take()
        if self._checked is not None:
            self._checked.add(message)
        # The first choice has no index, so that a request with one choice has shorter deltas.
        delta = ({"index": self._index} if self._index else {}) | message
        if self._logprobs:
            delta["logprobs"] = [openai_entry(row, self._texts) for row in self._logprobs]
        if self.context.prompt_token_ids is not None and self._new_ids:
            delta["token_ids"] = self._new_ids
        if not self._has_sent_output and self._index == 0:
            delta |= self._prompt_fields()
        if self._finish_reason is not None:
            delta["cumulative_logprob"] = self._cumulative_logprob
            delta["finish_reason"] = self._finish_reason
            if self._stop_reason is not None:
                delta["stop_reason"] = self._stop_reason
        delta["usage"] = self._usage()
        return delta

    def _prompt_fields(self) -> dict[str, Any]:
        """Return the fields about the prompt, which only the request's first delta has."""
        fields: dict[str, Any] = {}
        if self.context.prompt_token_ids is not None:
            fields["prompt_token_ids"] = list(self.context.prompt_token_ids)
        if self._prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_entries(self._prompt_logprobs, self._texts)
            self._prompt_logprobs = None
        return fields

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.context.num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
        }


def _without_stop_token(token_ids: list[int], ending: Ending | None) -> list[int]:
    """Return the tokens whose text belongs to the output: all except the stop token at the end."""
    if ending is None or ending.finish_reason != "stop" or ending.stop_reason is None:
        return token_ids
    return token_ids[:-1] if token_ids[-1:] == [ending.stop_reason] else token_ids


class _CheckedMessage:
    """The message so far. It is validated once it is complete.

    Attributes:
        is_complete: whether the next delta is the last one of the message.
    """

    def __init__(self, check: Check) -> None:
        self.is_complete = False
        self._check = check
        self._content: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, delta: dict[str, Any]) -> None:
        """Add a delta to the message, and validate the message if it is complete.

        Raises:
            EngineError: the message does not match the request's strict schema.
        """
        self._content.append(delta.get("content", ""))
        for call_delta in delta.get("tool_calls", ()):
            call = self._calls.setdefault(call_delta["index"], {"name": "", "arguments": ""})
            call["name"] = call_delta.get("name", call["name"])
            call["arguments"] += call_delta["arguments"]
        if self.is_complete:
            self._check({"content": "".join(self._content), "calls": list(self._calls.values())})
