# SPDX-License-Identifier: Apache-2.0
"""Converts messages with tool calls to the form that a chat template expects."""

import itertools
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nereid_backend.serving.tokenizer.message_reasoning import REASONING_FIELDS, reasoning_of


@dataclass(frozen=True)
class CallForm:
    """A form of the assistant messages that contain tool calls.

    Attributes:
        has_short_ids: whether each id of a tool call has 9 letters and digits. Other ids are
            replaced.
        has_one_call_each: whether a message with several tool calls becomes several messages with
            one call, each of which is followed by the result of this call.
        are_separate: whether a message with text becomes two messages: one with the text, and one
            with the tool calls, whose content is None.
        joins_reasoning: whether the text of a message with reasoning is appended to the reasoning.
        is_flat: whether a call is `{"name": .., "arguments": ..}`. Otherwise, the name and the
            arguments are in the field `function` of the call.
        has_text_arguments: whether the arguments are JSON text instead of an object.
    """

    has_short_ids: bool
    has_one_call_each: bool
    are_separate: bool
    joins_reasoning: bool
    is_flat: bool
    has_text_arguments: bool

    def convert(self, messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in this form. Messages without tool calls are not changed.

        Args:
            messages: messages as `read_messages` returns them. The arguments are objects.
        """
        if self.has_short_ids:
            messages = _with_short_ids(messages)
        if self.has_one_call_each:
            messages = _with_one_call_each(messages)
        return [converted for message in messages for converted in self._convert(message)]

    def _convert(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the message or the messages that replace a message in this form."""
        if not message.get("tool_calls"):
            yield message
            return
        message = {
            **message,
            "tool_calls": [self._convert_call(call) for call in message["tool_calls"]],
        }
        if self.joins_reasoning:
            message = _with_joined_reasoning(message)
        if self.are_separate:
            if message.get("content"):
                yield {name: value for name, value in message.items() if name != "tool_calls"}
                message = {"role": message["role"], "tool_calls": message["tool_calls"]}
            message = {**message, "content": None}
        yield message

    def _convert_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a tool call in this form."""
        function = call["function"]
        if self.has_text_arguments:
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": arguments}
        return function if self.is_flat else {**call, "function": function}


CALL_FORMS = tuple(CallForm(*values) for values in itertools.product((False, True), repeat=6))
"""All forms. The first form is the form of `read_messages`, which most templates expect.

The templates of DeepSeek expect arguments that are text, and the template of DeepSeek R1 renders
tool calls only if the content is None. The template of gpt-oss refuses a message with text,
reasoning and tool calls, and renders only the first call. The template of Llama 3.1 refuses a
message with several calls. Older templates of Mistral require ids of 9 letters and digits.
"""

_SHORT_ID_LENGTH = 9


def _with_short_ids(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Replace each id that does not have 9 letters and digits, in the calls and in the results.

    Example: if "call_ab" is the first replaced id of a chat, it becomes "000000000".
    """
    short_ids: dict[str, str] = {}

    def shortened(item: dict[str, Any], field: str) -> dict[str, Any]:
        given = item.get(field)
        if not isinstance(given, str) or _is_short_id(given):
            return item
        return {
            **item,
            field: short_ids.setdefault(given, str(len(short_ids)).zfill(_SHORT_ID_LENGTH)),
        }

    for message in messages:
        if message.get("tool_calls"):
            calls = [shortened(call, "id") for call in message["tool_calls"]]
            yield {**message, "tool_calls": calls}
        else:
            yield shortened(message, "tool_call_id")


def _is_short_id(given: str) -> bool:
    """Return whether an id has 9 letters and digits."""
    return len(given) == _SHORT_ID_LENGTH and given.isascii() and given.isalnum()


def _with_one_call_each(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one message for each tool call. The result of the call follows this message.

    Example: a message with the calls 1 and 2, the result of call 1 and the result of call 2 become
    a message with call 1, the result of call 1, a message with call 2 and the result of call 2.
    """
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            yield message
            continue
        results = defaultdict(list)
        while rest and rest[0]["role"] in ("tool", "function"):
            result = rest.popleft()
            results[str(result.get("tool_call_id"))].append(result)
        for call in calls:
            yield {**message, "tool_calls": [call]}
            yield from results.pop(str(call.get("id")), ())
            message = {"role": message["role"], "content": ""}
        yield from itertools.chain.from_iterable(results.values())


def _with_joined_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Append the text of a message to its reasoning. A message without reasoning is not changed."""
    reasoning = reasoning_of(message)
    text = message.get("content")
    if not reasoning or not isinstance(text, str):
        return message
    joined = "\n\n".join(filter(None, (reasoning, text)))
    return {**message, **dict.fromkeys(REASONING_FIELDS, joined), "content": ""}
