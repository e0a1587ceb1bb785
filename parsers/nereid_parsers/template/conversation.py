"""The probe conversations that the analysis renders, and the messages that templates read.

No template contains the texts of these conversations (`CONTENT_TEXT`, `FIRST_TOOL`, ...). So the
analysis can find the texts in a rendering.

Templates expect the same conversation in different forms. Some templates read content only from a
list of parts, and other templates read the arguments of a tool call only from a JSON string. An
`InputForm` describes such a form. The analysis tries several forms until the template renders the
whole conversation (see `probe.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

USER_TEXT = "Quokka asks for something."
CONTENT_TEXT = "Wombat gives the answer."
REASONING_TEXT = "Numbat thinks about it."
RESULT_TEXT = "Bilby measured 42 degrees."
FIRST_TOOL = "zqFirstTool"
SECOND_TOOL = "zqSecondTool"
FIRST_KEY = "zqKeyOne"
SECOND_KEY = "zqKeyTwo"
FIRST_VALUE = "zqValueOne"
SECOND_VALUE = "zqValueTwo"
NUMBER_VALUE = 41
# A string with a line break and with markup characters. Some templates quote such strings.
SPECIAL_VALUE = f"{FIRST_VALUE}\n<&> {SECOND_VALUE}"
EOS_TOKEN = "<|zq-end-of-sequence|>"
BOS_TOKEN = "<|zq-begin-of-sequence|>"


def _tool(name: str) -> dict[str, Any]:
    """Return an OpenAI tool definition with the two probe arguments."""
    properties = {
        FIRST_KEY: {"type": "string", "description": "first"},
        SECOND_KEY: {"type": "string", "description": "second"},
    }
    parameters = {"type": "object", "properties": properties, "required": [FIRST_KEY]}
    return {
        "type": "function",
        "function": {"name": name, "description": "a tool", "parameters": parameters},
    }


TOOLS = [_tool(FIRST_TOOL), _tool(SECOND_TOOL)]


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A tool call of a probe conversation. `arguments` contains pairs of a key and a value."""

    name: str = FIRST_TOOL
    arguments: tuple[tuple[str, Any], ...] = ((FIRST_KEY, FIRST_VALUE),)


TWO_ARGUMENTS = ((FIRST_KEY, FIRST_VALUE), (SECOND_KEY, SECOND_VALUE))
ONE_CALL = (ProbeCall(),)
TWO_CALLS = (*ONE_CALL, ProbeCall(SECOND_TOOL, ((SECOND_KEY, SECOND_VALUE),)))


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """The assistant message of a probe conversation."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ProbeCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Switches:
    """Template variables and a system message that may turn thinking on or off.

    Attributes:
        variables: Pairs of name and value, such as (("enable_thinking", False),).
        system: The text of a system message, such as "/no_think". "" if there is no such message.
    """

    variables: tuple[tuple[str, Any], ...] = ()
    system: str = ""

    def describe(self) -> str:
        """Describe the switches in one line of text for the report.

        >>> Switches((("enable_thinking", False),), "/no_think").describe()
        "enable_thinking=False, system '/no_think'"
        """
        words = [f"{name}={value!r}" for name, value in self.variables]
        if self.system:
            words.append(f"system {self.system!r}")
        return ", ".join(words)


NO_SWITCHES = Switches()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A short conversation that the analysis renders, with the options for rendering it.

    The messages are: the system message of `switches`, the user's question, a tool call with its
    result (if `after_tool_result`), the assistant's `answer`, and the user's reply (if
    `user_replies`).

    Attributes:
        answer: The last assistant message. None if the conversation ends before this message.
        generation_prompt: Whether to render the generation prompt.
        tools: Whether to offer tools.
        after_tool_result: Whether a tool call and its result precede the answer.
        user_replies: Whether the user writes once more after the answer.
        switches: The settings of the thinking switches.
    """

    answer: AssistantMessage | None = None
    generation_prompt: bool = False
    tools: bool = False
    after_tool_result: bool = False
    user_replies: bool = False
    switches: Switches = NO_SWITCHES


def conversation_with_calls(*calls: ProbeCall, content: str = "") -> Conversation:
    """Return a conversation whose answer contains the given tool calls."""
    return Conversation(AssistantMessage(content, calls=calls), tools=True)


# ---- the messages that a template reads ---------------------------------------------------------

# The names under which templates read the reasoning of an assistant message.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# The values of `InputForm.reasoning` that are not names of fields.
ALL_REASONING_FIELDS = ""
PARTS = "parts"
BLOCKS = "blocks"

# The field `content` of a message that has no content, in three forms. The keys of the dict are the
# values of `InputForm.empty_content`.
_EMPTY_CONTENT: dict[str, dict[str, Any]] = {
    "text": {"content": ""},
    "null": {"content": None},
    "absent": {},
}

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
            ALL_REASONING_FIELDS  in all fields of REASONING_FIELDS
            the name of a field   only in this field; the name is one of REASONING_FIELDS
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
        """Return the messages of a conversation, in the form that the template expects.

        The result is the value of the variable `messages` when the template is rendered.

        >>> InputForm().messages(Conversation(AssistantMessage("Hello.")))
        [{'role': 'user', 'content': 'Quokka asks for something.'},
         {'role': 'assistant', 'content': 'Hello.'}]
        """
        messages = []
        if conversation.switches.system:
            messages.append(self._text_message("system", conversation.switches.system))
        messages.append(self._text_message("user", USER_TEXT))
        first_call_number = 0  # the number of the first tool call in the answer
        if conversation.after_tool_result:
            messages += self._call_with_result()  # This tool call has the number 0.
            first_call_number = 1
        if conversation.answer is not None:
            messages.append(self._assistant_message(conversation.answer, first_call_number))
        if conversation.user_replies:
            messages.append(self._text_message("user", _REPLY_TEXT))
        return messages

    def _call_with_result(self) -> list[dict[str, Any]]:
        """Return two messages: the assistant calls a tool, and the tool returns a result.

        Tool calls are numbered, because some templates render the number. This call has the
        number 0.

        >>> [message["role"] for message in InputForm()._call_with_result()]
        ['assistant', 'tool']
        """
        call = self._assistant_message(AssistantMessage(calls=ONE_CALL), first_number=0)
        result = {
            "role": "tool",
            "tool_call_id": self.call_id(FIRST_TOOL, 0),
            "name": FIRST_TOOL,
            "content": RESULT_TEXT,
        }
        return [call, result]

    def call_id(self, name: str, number: int) -> str:
        """Return the id of a tool call. The calls of a conversation are numbered from 0.

        >>> InputForm().call_id("f", 0), InputForm(ids="numbered").call_id("f", 0)
        ('zq7id0000', 'functions.f:0')
        """
        return f"functions.{name}:{number}" if self.ids == "numbered" else f"zq7id000{number}"

    def _text_message(self, role: str, text: str) -> dict[str, Any]:
        """Return a message that consists of text.

        >>> InputForm(content_in_parts=True)._text_message("user", "Hi.")
        {'role': 'user', 'content': [{'type': 'text', 'text': 'Hi.'}]}
        """
        content = [{"type": "text", "text": text}] if self.content_in_parts else text
        return {"role": role, "content": content}

    def _assistant_message(self, answer: AssistantMessage, first_number: int) -> dict[str, Any]:
        """Return an assistant message in the form that the template expects.

        The tool calls of a conversation are numbered. The first tool call of this message has the
        number `first_number`.

        >>> InputForm(reasoning="thinking")._assistant_message(AssistantMessage("Hi.", "Hm."), 0)
        {'role': 'assistant', 'content': 'Hi.', 'thinking': 'Hm.'}
        """
        if answer.reasoning and self.reasoning == BLOCKS:
            return _message_of_blocks(answer)  # The blocks contain the tool calls too.
        if answer.reasoning and self.reasoning == PARTS:  # The content contains the reasoning.
            message = {"role": "assistant", "content": _content_with_thinking(answer)}
        else:
            message = self._message_without_calls(answer)
        if answer.calls:
            message["tool_calls"] = [
                self._tool_call(call, number)
                for number, call in enumerate(answer.calls, first_number)
            ]
        return message

    def _message_without_calls(self, answer: AssistantMessage) -> dict[str, Any]:
        """Return an assistant message with its content and reasoning, but without tool calls.

        The content and the reasoning are in separate fields of the message.

        >>> InputForm(empty_content="null")._message_without_calls(AssistantMessage())
        {'role': 'assistant', 'content': None}
        """
        if answer.content:
            message = self._text_message("assistant", answer.content)
        else:
            message = {"role": "assistant", **_EMPTY_CONTENT[self.empty_content]}
        if answer.reasoning:
            message.update(dict.fromkeys(self._reasoning_fields(), answer.reasoning))
        return message

    def _reasoning_fields(self) -> tuple[str, ...]:
        """Return the names of the fields that contain the reasoning.

        >>> InputForm(reasoning="thinking")._reasoning_fields()
        ('thinking',)
        """
        is_in_all_fields = self.reasoning == ALL_REASONING_FIELDS
        return REASONING_FIELDS if is_in_all_fields else (self.reasoning,)

    def _tool_call(self, call: ProbeCall, number: int) -> dict[str, Any]:
        """Return a tool call in the form that the template expects.

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
    """Return the `content` of an answer as a list: the reasoning, then the text.

    >>> _content_with_thinking(AssistantMessage("Hello.", reasoning="A greeting."))
    [{'type': 'thinking', 'thinking': 'A greeting.'}, {'type': 'text', 'text': 'Hello.'}]
    """
    parts = [{"type": "thinking", "thinking": answer.reasoning}]
    if answer.content:
        parts.append({"type": "text", "text": answer.content})
    return parts


def _message_of_blocks(answer: AssistantMessage) -> dict[str, Any]:
    """Return an assistant message whose content is a list of blocks.

    A few templates expect this form. The blocks contain the reasoning, the tool calls and the text.

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
    """Yield all forms in which a template may expect content. The most common form is first."""
    for content_in_parts, always_tools in product((False, True), (False, True)):
        yield InputForm(content_in_parts, always_tools)


def forms_of_calls(form: InputForm) -> Iterator[InputForm]:
    """Yield all forms in which a template may expect tool calls. The most common form is first."""
    for flat_calls, ids, arguments, empty_content in product(
        (False, True), ("plain", "numbered"), ("object", "text"), ("text", "null", "absent")
    ):
        yield replace(
            form, flat_calls=flat_calls, ids=ids, arguments=arguments, empty_content=empty_content
        )
