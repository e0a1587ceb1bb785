# SPDX-License-Identifier: Apache-2.0
"""Converts the token ids of one choice of a request to text and JSON deltas.

token ids --Detokenizer--> text --StopStrings--> text to send --Message--> fields of the delta
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nereid_backend.serving.postprocessor.message_builder import Message
from nereid_backend.serving.postprocessor.strict_check import Check, CheckedMessage
from nereid_backend.serving.wire import Ending, SequenceDelta, StreamContext
from nereid_backend.text.detokenizer import Decode, Detokenizer
from nereid_backend.text.logprob_entries import openai_entry, prompt_entries
from nereid_backend.text.stop_strings import StopStrings
from nereid_backend.text.token_text import TokenText


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """The output of one choice in one response.

    Attributes:
        text: the new text. It is not parsed.
        delta: the JSON object of the output `delta`, described in docs/reference/tensors.md.
        finish_reason: the reason why the choice ended; None while it continues.
        cumulative_logprob: the sum of the log-probabilities of all tokens of the choice so far.
        num_output_tokens: the number of new tokens.
        logprobs: one entry for each new token: the fields of a TokenLogprobs. Empty if the request
            does not ask for log-probabilities.
    """

    text: str
    delta: dict[str, Any]
    finish_reason: str | None
    cumulative_logprob: float
    num_output_tokens: int
    logprobs: tuple[Any, ...] = ()


@dataclass(slots=True)
class _UnsentOutput:
    """Collects the output of one choice until the next response is built.

    Attributes:
        text: the new text.
        token_ids: the new tokens.
        logprobs: one entry for each of these tokens: the fields of a TokenLogprobs. Empty if the
            request does not ask for log-probabilities.
        prompt_logprobs: the log-probabilities of the prompt; see SequenceDelta.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: tuple[Any, ...] | None = None


@dataclass(slots=True)
class _Totals:
    """Counts the tokens of a choice, for the field `usage`."""

    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    cumulative_logprob: float = 0.0

    def usage(self, num_prompt_tokens: int) -> dict[str, Any]:
        """Return the value of the field `usage` in the format of the OpenAI API."""
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }


class _EndReasons(NamedTuple):
    """The reasons why a choice has ended, in the format of the OpenAI API.

    Attributes:
        finish_reason: such as "stop", "length" or "tool_calls".
        stop_reason: the stop token or the stop string that ended the choice; None for neither.
        is_complete: whether the model itself has ended the message. A stop string or a length limit
            ends a message early.
    """

    finish_reason: str
    stop_reason: int | str | None
    is_complete: bool


class Choice:
    """The postprocessor's state of one choice.

    Example: with the stop string "STOP", `add` gets the tokens "Hi", " ST" and "OP". After the
    second token, `take_output` returns the text "Hi ", because "ST" may be the beginning of the
    stop string. After the third token, `stop_string` is "STOP", and no more text follows.

    Attributes:
        context: the data of the request that the postprocessor needs.
        stop_string: the stop string that ended the choice; None if no stop string was found.
        is_finished: whether `take_output` has returned the last output of the choice.
    """

    def __init__(
        self,
        context: StreamContext,
        index: int,
        decode: Decode,
        message_parser: Message,
        token_texts: TokenText,
        validate_message: Check | None = None,
    ) -> None:
        """Initialise a choice that has no tokens yet.

        Args:
            context: the data of the request that the postprocessor needs.
            index: the index of the choice in its request.
            decode: converts token ids to text.
            message_parser: parses the text into reasoning, content and tool calls.
            token_texts: the texts of single tokens, for log-probabilities.
            validate_message: a function that validates the complete message, if the choice ends
                with a stop token of the model. None for no validation.
        """
        self.context = context
        self._index = index
        self._token_texts = token_texts
        # The following objects convert tokens to text, search the text for stop strings, and parse
        # the text. The text of the first output token can depend on the seed tokens, which are the
        # last tokens of a completion's prompt.
        self._detokenizer = Detokenizer(decode, context.seed_token_ids)
        self._stop_search = StopStrings(
            context.stop, include_in_output=context.include_stop_str_in_output
        )
        self._message_parser = message_parser
        # Collects the parsed message for `validate_message`.
        self._checked_message = CheckedMessage(validate_message) if validate_message else None
        # The output since the last call of `take_output`.
        self._unsent = _UnsentOutput()
        # Whether an earlier call of `take_output` has returned output.
        self._has_sent_output = False
        # The numbers of tokens in the whole choice, including tokens that were already sent.
        self._totals = _Totals()
        # How the choice has ended. `stop_string` and `_end_reasons` are None until the choice has
        # ended.
        self.stop_string: str | None = None
        self._end_reasons: _EndReasons | None = None
        self.is_finished = False

    def add(self, delta: SequenceDelta) -> None:
        """Add the tokens of one step (a message of the executor) to this choice.

        After a stop string was found, the tokens of `delta` are ignored, because they do not belong
        to the output. The other fields of `delta` still count, such as the reason why the sequence
        ended.
        """
        # A delta that does not report the number of cached tokens contains the number 0. Therefore
        # keep the larger of the old and the new number.
        self._totals.num_cached_tokens = max(
            self._totals.num_cached_tokens, delta.num_cached_tokens
        )
        if delta.prompt_logprobs is not None:
            self._unsent.prompt_logprobs = delta.prompt_logprobs
        if self.stop_string is None:
            self._add_tokens(delta)
        if delta.ending is not None:
            self._finish(delta.ending)

    def _add_tokens(self, delta: SequenceDelta) -> None:
        """Add the text of the tokens of one step, and count the tokens that belong to the output.

        If a stop string is found, the token that completes it is the last token of the output.
        Otherwise, all tokens of the step belong to the output. If the sequence has ended, also add
        the text that was withheld until then.
        """
        text_ids = _without_stop_token(list(delta.token_ids), delta.ending)
        num_output_tokens = self._add_text_of_tokens(text_ids)
        ends_with_stop_token = len(text_ids) < len(delta.token_ids)
        if ends_with_stop_token and self.stop_string is None:
            # A stop token has no text, but it counts as an output token.
            num_output_tokens += 1
            if self._message_parser.is_reasoning:
                self._totals.num_reasoning_tokens += 1
        self._record_tokens(num_output_tokens, delta)
        if delta.ending is not None:
            self._add_withheld_text()

    def take_output(self) -> ChoiceOutput | None:
        """Return the output that was added since the last call.

        The result contains the new output twice: as unparsed text, and as a delta with the parsed
        message. `cumulative_logprob` is the sum over all tokens of the choice so far. Return None
        if no output must be sent now.
        """
        if not self._must_send:
            return None
        unsent = self._unsent
        end_reasons = self._end_reasons  # None if this is not the last output of the choice
        # `prepend` is the text of the prompt, if the client wants the prompt in the output.
        prefix = "" if self._has_sent_output else self.context.prepend
        output = ChoiceOutput(
            text=prefix + unsent.text,
            delta=self._take_delta(),
            finish_reason=None if end_reasons is None else end_reasons.finish_reason,
            cumulative_logprob=self._totals.cumulative_logprob,
            num_output_tokens=len(unsent.token_ids),
            logprobs=tuple(unsent.logprobs),
        )
        self._unsent = _UnsentOutput()
        self._has_sent_output = True
        self.is_finished = end_reasons is not None
        return output

    @property
    def _must_send(self) -> bool:
        """Whether output of this choice must be sent now.

        The last output is sent once, when the choice has ended. Before, output is sent only if the
        request is streaming, and if there are new texts, log-probabilities or requested token ids.
        """
        if self._end_reasons is not None:
            return not self.is_finished
        if not self.context.stream:
            return False
        if self._unsent.text or self._unsent.logprobs:
            return True
        # The context contains the token ids of the prompt only if the request asks for token ids.
        returns_token_ids = self.context.prompt_token_ids is not None
        return returns_token_ids and bool(self._unsent.token_ids)

    def _add_text_of_tokens(self, token_ids: list[int]) -> int:
        """Add the text of `token_ids`. Ignore the tokens after the first stop string.

        Example: for the tokens "Hi", " END" and " you" and the stop string "END", the text "Hi " is
        added and 2 is returned. The third token has no effect.

        Returns:
            The number of tokens up to the one that completes the stop string; the number of all
            tokens if there is no stop string.
        """
        # The search for stop strings and the count of reasoning tokens need the text of each single
        # token. Otherwise, decoding all tokens together is faster.
        needs_single_tokens = bool(self.context.stop) or self._message_parser.reads_reasoning
        if not needs_single_tokens:
            self._add_text(self._detokenizer.feed(token_ids))
            return len(token_ids)
        num_earlier_tokens = self._totals.num_tokens  # `token_ids` are counted later.
        for index, token_id in enumerate(token_ids):
            # Do not search for stop strings in the first `min_tokens` tokens of the output.
            can_stop = num_earlier_tokens + index >= self.context.min_tokens
            self._add_text_of_token(token_id, can_stop=can_stop)
            if self.stop_string is not None:
                return index + 1
        return len(token_ids)

    def _add_text_of_token(self, token_id: int, *, can_stop: bool) -> None:
        """Add the text of one token. If the token belongs to reasoning, count the token."""
        was_reasoning = self._message_parser.is_reasoning
        text = self._detokenizer.feed([token_id])
        if can_stop:
            self._add_text_before_stop(text)
        else:
            self._add_text(text)
        # The tokens of the marker that ends the reasoning count as reasoning tokens, too.
        if was_reasoning or self._message_parser.is_reasoning:
            self._totals.num_reasoning_tokens += 1

    def _add_text_before_stop(self, text: str) -> None:
        """Add a text. If the text contains a stop string, add only the part before the stop string.

        If the end of `text` may be the beginning of a stop string, this end is stored and not added
        yet.
        """
        match = self._stop_search.feed(text)
        self._add_text(match.text)
        self.stop_string = match.stop

    def _add_withheld_text(self) -> None:
        """Add the text that the detokenizer and the search for stop strings have held back."""
        if self.stop_string is None:
            self._add_text_before_stop(self._detokenizer.finish())
        if self.stop_string is None:
            self._add_text(self._stop_search.finish())

    def _add_text(self, text: str) -> None:
        """Add a text to the next response and to the parsed message."""
        self._unsent.text += text
        self._message_parser.feed(text)

    def _record_tokens(self, num_output_tokens: int, delta: SequenceDelta) -> None:
        """Record the first `num_output_tokens` tokens of `delta` and their log-probabilities.

        The remaining tokens of the step do not belong to the output.
        """
        self._totals.num_tokens += num_output_tokens
        self._unsent.token_ids += delta.token_ids[:num_output_tokens]
        if num_output_tokens:
            # Item i of `cumulative_logprobs` is the sum of the log-probabilities of all tokens of
            # the choice, up to and including token i of this step.
            self._totals.cumulative_logprob = delta.cumulative_logprobs[num_output_tokens - 1]
        if delta.logprobs is not None:
            self._unsent.logprobs += delta.logprobs[:num_output_tokens]

    def _finish(self, ending: Ending) -> None:
        """End the parsed message, and set the reasons why the choice has ended.

        `ending` contains the reasons why the engine has ended the sequence.
        """
        self._message_parser.finish()
        self._end_reasons = _choose_end_reasons(
            ending, self.stop_string, has_calls=self._message_parser.has_calls
        )

    def _take_delta(self) -> dict[str, Any]:
        """Return a delta: a JSON object with the output that has not been sent yet.

        Example of a delta: `{"content": "Hi", "token_ids": [5], "usage": {...}}`. The fields for
        log-probabilities and token ids exist only if the request asks for them. The last delta also
        has the fields "cumulative_logprob" and "finish_reason".

        Raises:
            EngineError: the message is complete, and does not match a strict schema of the request.
        """
        # The index 0 is omitted, so that the deltas of requests with only one choice are shorter.
        index_field = {"index": self._index} if self._index else {}
        return {
            **index_field,
            **self._take_message(),
            **self._logprob_fields(),
            **self._token_id_fields(),
            **self._ending_fields(),
            "usage": self._totals.usage(self.context.num_prompt_tokens),
        }

    def _take_message(self) -> dict[str, Any]:
        """Return the new part of the parsed message. Validate the message if it is now complete.

        Raises:
            EngineError: the message is complete, and does not match a strict schema of the request.
        """
        new_part = self._message_parser.take()
        if self._checked_message is not None:
            # Store each part, because only the complete message can be validated. A message that
            # ends early, for example at a length limit, need not match the schema.
            self._checked_message.add(new_part)
            if self._end_reasons is not None and self._end_reasons.is_complete:
                self._checked_message.validate()
        return new_part

    def _logprob_fields(self) -> dict[str, Any]:
        """Return the fields with log-probabilities; {} if the request asks for none."""
        unsent = self._unsent
        fields: dict[str, Any] = {}
        if unsent.logprobs:
            fields["logprobs"] = [openai_entry(row, self._token_texts) for row in unsent.logprobs]
        if unsent.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_entries(unsent.prompt_logprobs, self._token_texts)
        return fields

    def _ending_fields(self) -> dict[str, Any]:
        """If the choice has ended, return the fields that only the last delta has, otherwise {}."""
        if self._end_reasons is None:
            return {}
        fields: dict[str, Any] = {
            "cumulative_logprob": self._totals.cumulative_logprob,
            "finish_reason": self._end_reasons.finish_reason,
        }
        if self._end_reasons.stop_reason is not None:
            fields["stop_reason"] = self._end_reasons.stop_reason
        return fields

    def _token_id_fields(self) -> dict[str, list[int]]:
        """Return the fields that contain token ids; {} if the request asks for no token ids."""
        prompt_token_ids = self.context.prompt_token_ids
        if prompt_token_ids is None:
            return {}
        fields = {}
        if self._unsent.token_ids:
            fields["token_ids"] = self._unsent.token_ids
        if self._index == 0 and not self._has_sent_output:
            fields["prompt_token_ids"] = list(prompt_token_ids)
        return fields


def _choose_end_reasons(ending: Ending, stop_string: str | None, *, has_calls: bool) -> _EndReasons:
    """Return the reasons why a choice has ended.

    A stop string takes precedence over the engine's reasons, because the engine does not search for
    stop strings. In the OpenAI API, the finish reason of a message with tool calls is "tool_calls"
    instead of "stop".

    Args:
        ending: the reasons why the engine has ended the sequence.
        stop_string: the stop string that ended the choice; None if no stop string was found.
        has_calls: whether the message contains tool calls.
    """
    if stop_string is None:
        is_complete = ending.finish_reason == "stop"
        reasons = _EndReasons(ending.finish_reason, ending.stop_reason, is_complete)
    else:
        reasons = _EndReasons("stop", stop_string, is_complete=False)
    if reasons.finish_reason == "stop" and has_calls:
        return reasons._replace(finish_reason="tool_calls")
    return reasons


def _without_stop_token(token_ids: list[int], ending: Ending | None) -> list[int]:
    """Return all tokens except the stop token that ended the sequence. A stop token has no text.

    Example: the tokens [5, 6, 2] and `Ending("stop", stop_reason=2)` return [5, 6].
    """
    if ending is None or ending.finish_reason != "stop" or ending.stop_reason is None:
        return token_ids
    return token_ids[:-1] if token_ids[-1:] == [ending.stop_reason] else token_ids
