# SPDX-License-Identifier: Apache-2.0
"""Converts messages with tool calls to the form that a chat template expects."""

import itertools
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nereid_backend.serving.tokenizer.chat.message_reasoning import REASONING_FIELDS, reasoning_of


@dataclass(frozen=True)
class CallForm:
    """The format in which a template expects assistant messages with tool calls.

    Attributes:
        ids: the ids of the tool calls: "given" by the client, "short" ids of 9 letters and digits,
            or "named" ids, which contain the name of the function, such as "functions.f:0".
        has_one_call_each: whether a message with several tool calls becomes several messages with
            one call, each of which is followed by the result of this call.
        are_separate: whether a message with text becomes two messages: one with the text, and one
            with the tool calls, whose content is None.
        joins_reasoning: whether the text of a message with reasoning is appended to the reasoning.
        is_flat: whether a call is `{"name": .., "arguments": ..}`. Otherwise, the name and the
            arguments are in the field `function` of the call.
        has_text_arguments: whether the arguments are JSON text instead of an object.
    """

    ids: Literal["given", "short", "named"]
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
        if self.ids != "given":
            messages = _with_ids(messages, _short_id if self.ids == "short" else _named_id)
        if self.has_one_call_each:
            messages = _with_one_call_each(messages)
        return [converted for message in messages for converted in self._convert(message)]

    def _convert(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Convert one message to this form, and return the resulting messages.

        If `joins_reasoning` is true, the text of the message is appended to the reasoning. If
        `are_separate` is true, a message with text and tool calls becomes two messages.
        """
        if not message.get("tool_calls"):
            return [message]
        calls = [self._convert_call(call) for call in message["tool_calls"]]
        with_calls = {**message, "tool_calls": calls}
        joined = _with_joined_reasoning(with_calls) if self.joins_reasoning else with_calls
        return _separate_calls(joined) if self.are_separate else [joined]

    def _convert_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a tool call in this form."""
        function = call["function"]
        if self.has_text_arguments:
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": arguments}
        return function if self.is_flat else {**call, "function": function}


_ID_FORMS: tuple[Literal["given", "short", "named"], ...] = ("given", "short", "named")
CALL_FORMS = tuple(
    CallForm(ids, *values)
    for ids, values in itertools.product(_ID_FORMS, itertools.product((False, True), repeat=5))
)
"""All forms. The first form is the form of `read_messages`, which most templates expect.

The templates of DeepSeek expect arguments that are text, and the template of DeepSeek R1 renders
tool calls only if the content is None. The template of gpt-oss refuses a message with text,
reasoning and tool calls, and renders only the first call. The template of Llama 3.1 refuses a
message with several calls. Older templates of Mistral require ids of 9 letters and digits. The
templates of Kimi K2 render the id of a call instead of the function's name.
"""

_SHORT_ID_LENGTH = 9


def _with_ids(
    messages: Iterable[dict[str, Any]], new_id: Callable[[dict[str, Any], int], str]
) -> Iterator[dict[str, Any]]:
    """Replace the ids in tool calls and in the results of these calls.

    Args:
        messages: the messages.
        new_id: returns the new id of a tool call. The arguments are the call, and the number of
            other ids that were replaced before.
    """
    new_ids: dict[str, str] = {}  # maps each given id to the new id
    for message in messages:
        calls = message.get("tool_calls") or []
        for call in calls:
            given = call.get("id")
            if isinstance(given, str) and given not in new_ids:
                new_ids[given] = new_id(call, len(new_ids))
        if calls:
            yield {**message, "tool_calls": [_with_id(call, "id", new_ids) for call in calls]}
        else:
            yield _with_id(message, "tool_call_id", new_ids)


def _with_id(item: dict[str, Any], field: str, new_ids: Mapping[str, str]) -> dict[str, Any]:
    """Replace the id in a field of a tool call or of a message, if there is a new id."""
    given = item.get(field)
    if not isinstance(given, str) or given not in new_ids:
        return item
    return {**item, field: new_ids[given]}


def _short_id(call: dict[str, Any], number: int) -> str:
    """Return an id of exactly 9 ASCII letters or digits, which older Mistral templates require.

    If the tool call's own id has this form, return the own id. Otherwise, return `number` with
    leading zeros. Example: for the id "call_1" and the number 3, the result is "000000003".
    """
    given: str = call["id"]
    is_short = len(given) == _SHORT_ID_LENGTH and given.isascii() and given.isalnum()
    return given if is_short else str(number).zfill(_SHORT_ID_LENGTH)


def _named_id(call: dict[str, Any], number: int) -> str:
    """Return an id such as "functions.f:0", which contains the name of the called function."""
    given: str = call["id"]
    prefix = f"functions.{call['function']['name']}:"
    return given if given.startswith(prefix) else f"{prefix}{number}"


def _with_one_call_each(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one message for each tool call. The result of the call follows this message.

    If a message has several calls, only the message with the first call has the content. Results
    whose ids belong to no call come last.

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
        empty = {"role": message["role"], "content": ""}
        for index, call in enumerate(calls):
            base = message if index == 0 else empty
            yield {**base, "tool_calls": [call]}
            yield from results.pop(str(call.get("id")), ())
        yield from itertools.chain.from_iterable(results.values())


def _separate_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a message into a message with the text and a message with the tool calls.

    The content of the message with the tool calls is None. Return only this message if `message`
    has no text.
    """
    if not message.get("content"):
        return [{**message, "content": None}]
    text_message = {name: value for name, value in message.items() if name != "tool_calls"}
    call_message = {
        "role": message["role"],
        "tool_calls": message["tool_calls"],
        "content": None,
    }
    return [text_message, call_message]


def _with_joined_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Append the text of a message to its reasoning. A message without reasoning is not changed."""
    reasoning = reasoning_of(message)
    text = message.get("content")
    if not reasoning or not isinstance(text, str):
        return message
    joined = "\n\n".join(filter(None, (reasoning, text)))
    return {**message, **dict.fromkeys(REASONING_FIELDS, joined), "content": ""}
