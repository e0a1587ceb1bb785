"""The form in which a template expects the variable `messages`.

Templates read the same conversation from different dictionaries. Some templates read content only
from a list of parts, some read the arguments of a tool call only from a JSON string. The analysis
tries the forms until the template renders the whole conversation (see `probe.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from nereid_parsers.template.conversation import (
    FIRST_TOOL,
    ONE_CALL,
    RESULT_TEXT,
    USER_TEXT,
    AssistantMessage,
    Conversation,
    ProbeCall,
)

# The names under which templates read the reasoning of an assistant message.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Other values of `InputForm.reasoning`.
ALL_REASONING_FIELDS = ""
PARTS = "parts"
BLOCKS = "blocks"

_REPLY_TEXT = "Go on."


@dataclass(frozen=True, slots=True)
class InputForm:
    """The form in which a template expects the variables `messages` and `tools`.

    Attributes:
        content_in_parts: Whether content must be a list of parts, [{"type": "text", "text": ..}],
            because the template ignores a string.
        always_tools: Whether every conversation must offer tools, because the template fails
            without tools.
        flat_calls: Whether a tool call is {"name": .., "arguments": ..}. Otherwise a tool call is
            {"id": .., "type": "function", "function": {"name": .., "arguments": ..}}.
        ids: "plain" if the template accepts any id of a tool call. "numbered" if the id must be
            `functions.NAME:0`, because the template renders the id instead of the name.
        arguments: "object", or "text" if the template expects the arguments as a JSON string.
        empty_content: The `content` of a message without content: "text" (""), "null" or "absent".
        reasoning: The place of the reasoning in an assistant message:
            ALL_REASONING_FIELDS  in all of REASONING_FIELDS
            "reasoning"           in this field; the other REASONING_FIELDS likewise
            PARTS                 {"content": [{"type": "thinking", "thinking": ..}, ..]}
            BLOCKS                {"content": {"blocks": [{"type": "thoughts", "text": ..}, ..]}}
    """

    content_in_parts: bool = False
    always_tools: bool = False
    flat_calls: bool = False
    ids: str = "plain"
    arguments: str = "object"
    empty_content: str = "text"
    reasoning: str = ALL_REASONING_FIELDS

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Return the conversation as the variable `messages` of the template.

        >>> InputForm().messages(Conversation(AssistantMessage("Hello.")))
        [{'role': 'user', 'content': 'Quokka asks for something.'},
         {'role': 'assistant', 'content': 'Hello.'}]
        """
        messages = []
        if conversation.switches.system:
            messages.append(self._text_message("system", conversation.switches.system))
        messages.append(self._text_message("user", USER_TEXT))
        num_calls = 0
        if conversation.after_tool_result:
            messages.append(self._assistant_message(AssistantMessage(calls=ONE_CALL), num_calls))
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": self.call_id(FIRST_TOOL, num_calls),
                    "name": FIRST_TOOL,
                    "content": RESULT_TEXT,
                }
            )
            num_calls += 1
        if conversation.answer is not None:
            messages.append(self._assistant_message(conversation.answer, num_calls))
        if conversation.user_replies:
            messages.append(self._text_message("user", _REPLY_TEXT))
        return messages

    def call_id(self, name: str, number: int) -> str:
        """Return the id of the tool call with this number (from 0) in the conversation.

        >>> InputForm().call_id("f", 0), InputForm(ids="numbered").call_id("f", 0)
        ('zq7id0000', 'functions.f:0')
        """
        return f"functions.{name}:{number}" if self.ids == "numbered" else f"zq7id000{number}"

    def _text_message(self, role: str, text: str) -> dict[str, Any]:
        if self.content_in_parts:
            return {"role": role, "content": [{"type": "text", "text": text}]}
        return {"role": role, "content": text}

    def _assistant_message(
        self, answer: AssistantMessage, num_earlier_calls: int
    ) -> dict[str, Any]:
        """Return an assistant message. Its tool calls are numbered from `num_earlier_calls`.

        >>> InputForm(reasoning="thinking")._assistant_message(AssistantMessage("Hi.", "Hm."), 0)
        {'role': 'assistant', 'content': 'Hi.', 'thinking': 'Hm.'}
        """
        if answer.reasoning and self.reasoning == BLOCKS:
            return _message_of_blocks(answer)
        message: dict[str, Any] = {"role": "assistant"}
        if answer.content:
            message = self._text_message("assistant", answer.content)
        elif self.empty_content != "absent":
            message["content"] = "" if self.empty_content == "text" else None
        if answer.reasoning and self.reasoning == PARTS:
            message["content"] = _content_with_thinking(answer)
        elif answer.reasoning:
            names = (self.reasoning,) if self.reasoning else REASONING_FIELDS
            message.update(dict.fromkeys(names, answer.reasoning))
        if answer.calls:
            message["tool_calls"] = [
                self._tool_call(call, number)
                for number, call in enumerate(answer.calls, num_earlier_calls)
            ]
        return message

    def _tool_call(self, call: ProbeCall, number: int) -> dict[str, Any]:
        """Return a tool call of an assistant message.

        >>> InputForm(flat_calls=True, arguments="text")._tool_call(ProbeCall("f", (("a", 1),)), 0)
        {'name': 'f', 'arguments': '{"a": 1}'}
        """
        arguments: Any = dict(call.arguments)
        if self.arguments == "text":
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        if self.flat_calls:
            return function
        return {"id": self.call_id(call.name, number), "type": "function", "function": function}


def _content_with_thinking(answer: AssistantMessage) -> list[dict[str, str]]:
    """Return the reasoning and the content as parts of a message's content.

    >>> _content_with_thinking(AssistantMessage("Hello.", reasoning="A greeting."))
    [{'type': 'thinking', 'thinking': 'A greeting.'}, {'type': 'text', 'text': 'Hello.'}]
    """
    parts = [{"type": "thinking", "thinking": answer.reasoning}]
    if answer.content:
        parts.append({"type": "text", "text": answer.content})
    return parts


def _message_of_blocks(answer: AssistantMessage) -> dict[str, Any]:
    """Return an assistant message whose content is {"blocks": [thoughts, tool calls, response]}.

    >>> _message_of_blocks(AssistantMessage("Hi.", "Hm."))
    {'role': 'assistant', 'content': {'blocks': [{'type': 'thoughts', 'text': 'Hm.'},
     {'type': 'response', 'text': 'Hi.'}]}}
    """
    blocks: list[dict[str, Any]] = [{"type": "thoughts", "text": answer.reasoning}]
    if answer.calls:
        calls = [
            {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
            for call in answer.calls
        ]
        blocks.append({"type": "tool_calls", "calls": calls})
    if answer.content:
        blocks.append({"type": "response", "text": answer.content})
    return {"role": "assistant", "content": {"blocks": blocks}}


def forms_of_content() -> Iterator[InputForm]:
    """Yield the forms that differ in plain content, from the most common to the rarest."""
    for content_in_parts, always_tools in product((False, True), (False, True)):
        yield InputForm(content_in_parts, always_tools)


def forms_of_calls(form: InputForm) -> Iterator[InputForm]:
    """Yield copies of `form` that differ in tool calls, from the most common to the rarest."""
    for flat_calls, ids, arguments, empty_content in product(
        (False, True), ("plain", "numbered"), ("object", "text"), ("text", "null", "absent")
    ):
        yield replace(
            form, flat_calls=flat_calls, ids=ids, arguments=arguments, empty_content=empty_content
        )
