"""Invented conversations that the analysis renders with a chat template.

The made-up texts are `CONTENT_TEXT`, `FIRST_TOOL`, and so on. No template contains these texts, so
the analysis can find them in a rendering.

Templates expect messages in different forms. Some templates read content only from a list of parts,
and other templates read the arguments of a tool call only from a JSON string. An `InputForm`
describes such a form. The analysis tries several forms until the template renders the whole
conversation (see `probe.py`).
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
# A string with a line break and markup characters. Some templates write delimiters, such as
# `<![CDATA[`, around a string only if the string contains such characters.
SPECIAL_VALUE = f"{FIRST_VALUE}\n<&> {SECOND_VALUE}"
# Placeholders for the tokens of an unknown tokenizer. They never become a part of a format.
EOS_TOKEN = "<|zq-end-of-sequence|>"
BOS_TOKEN = "<|zq-begin-of-sequence|>"


def _tool(name: str) -> dict[str, Any]:
    """Return the definition of a tool in OpenAI's form. The tool has two string arguments."""
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
    """A tool call in a conversation that the analysis renders.

    Attributes:
        name: The name of the called function.
        arguments: The arguments, as pairs of a key and a value.
    """

    name: str = FIRST_TOOL
    arguments: tuple[tuple[str, Any], ...] = ((FIRST_KEY, FIRST_VALUE),)


TWO_ARGUMENTS = ((FIRST_KEY, FIRST_VALUE), (SECOND_KEY, SECOND_VALUE))
ONE_CALL = (ProbeCall(),)
TWO_CALLS = (*ONE_CALL, ProbeCall(SECOND_TOOL, ((SECOND_KEY, SECOND_VALUE),)))


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """An assistant message. Its content, its reasoning and its list of tool calls may be empty."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ProbeCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Switches:
    """The values of the switches that turn a model's thinking on or off.

    A switch is a template variable, or a word in the system message.

    Attributes:
        variables: The names and values of template variables: (("enable_thinking", False),).
        system: The text of the system message, such as "/no_think", or "" for no system message.
    """

    variables: tuple[tuple[str, Any], ...] = ()
    system: str = ""

    def describe(self) -> str:
        """Return the values of the switches as one line of text for the report.

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
        generation_prompt: Whether to render the generation prompt, which is the text at the end of
            a prompt that opens the model's answer.
        tools: Whether to offer tools to the model.
        after_tool_result: Whether a tool call and its result precede the answer.
        user_replies: Whether the user writes once more after the answer.
        switches: The setting of the switches that turn thinking on or off.
    """

    answer: AssistantMessage | None = None
    generation_prompt: bool = False
    tools: bool = False
    after_tool_result: bool = False
    user_replies: bool = False
    switches: Switches = NO_SWITCHES


def conversation_with_calls(*calls: ProbeCall, content: str = "") -> Conversation:
    """Return a conversation that offers tools. The answer contains the given tool calls.

    Args:
        calls: The tool calls.
        content: The text of the answer before the tool calls, or "".
    """
    return Conversation(AssistantMessage(content, calls=calls), tools=True)


# ---- the messages that a template reads ---------------------------------------------------------

# The fields of an assistant message from which templates read the reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# `InputForm.reasoning_place` is the name of a message field, or one of the following constants.
ALL_REASONING_FIELDS = ""
PARTS = "parts"
BLOCKS = "blocks"

# The three forms of the field `content` that templates expect in a message without content. The
# keys are the values of `InputForm.empty_content`.
_EMPTY_CONTENT: dict[str, dict[str, Any]] = {
    "text": {"content": ""},
    "null": {"content": None},
    "absent": {},
}

_REPLY_TEXT = "Go on."


@dataclass(frozen=True, slots=True)
class InputForm:
    """The data structure that a template expects in its variables `messages` and `tools`.

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
        reasoning_place: The place of the reasoning in an assistant message:
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
    reasoning_place: str = ALL_REASONING_FIELDS

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Return the messages of a conversation as dicts, in the form that the template expects.

        The template reads the result from its variable `messages`.

        >>> InputForm().messages(Conversation(AssistantMessage("Hello.")))
        [{'role': 'user', 'content': 'Quokka asks for something.'},
         {'role': 'assistant', 'content': 'Hello.'}]
        """
        messages = []
        if conversation.switches.system:
            messages.append(self._text_message("system", conversation.switches.system))
        messages.append(self._text_message("user", USER_TEXT))
        num_earlier_calls = 0
        if conversation.after_tool_result:
            messages += self._call_with_result()
            num_earlier_calls = 1
        if conversation.answer is not None:
            # The tool calls of a conversation are numbered from 0.
            message = self._assistant_message(conversation.answer, first_number=num_earlier_calls)
            messages.append(message)
        if conversation.user_replies:
            messages.append(self._text_message("user", _REPLY_TEXT))
        return messages

    def _call_with_result(self) -> list[dict[str, Any]]:
        """Return two messages: the assistant calls a tool, and the tool returns a result.

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
        """Return the id of a tool call in the form that the template expects.

        Some templates read the function's name and the number of the tool call from the id. The
        tool calls of a conversation are numbered from 0.

        >>> InputForm().call_id("f", 0), InputForm(ids="numbered").call_id("f", 0)
        ('zq7id0000', 'functions.f:0')
        """
        return f"functions.{name}:{number}" if self.ids == "numbered" else f"zq7id000{number}"

    def _text_message(self, role: str, text: str) -> dict[str, Any]:
        """Return a message with text, in the form that the template expects.

        The text is the content itself, or the only member of a list:

        >>> InputForm(content_in_parts=True)._text_message("user", "Hi.")
        {'role': 'user', 'content': [{'type': 'text', 'text': 'Hi.'}]}
        """
        content = [{"type": "text", "text": text}] if self.content_in_parts else text
        return {"role": role, "content": content}

    def _assistant_message(self, answer: AssistantMessage, first_number: int) -> dict[str, Any]:
        """Return an assistant message as a dict, in the form that the template expects.

        The tool calls of `answer` are numbered from `first_number`.

        >>> InputForm()._assistant_message(AssistantMessage("Hello."), 0)
        {'role': 'assistant', 'content': 'Hello.'}
        """
        if answer.reasoning and self.reasoning_place == BLOCKS:
            return _message_of_blocks(answer)  # The blocks contain the tool calls, too.
        message = self._message_without_calls(answer)
        if answer.calls:
            message["tool_calls"] = [
                self._tool_call(call, number)
                for number, call in enumerate(answer.calls, first_number)
            ]
        return message

    def _message_without_calls(self, answer: AssistantMessage) -> dict[str, Any]:
        """Convert an answer into a message with content and reasoning. The tool calls are omitted.

        The template reads the reasoning from a part of the content (PARTS), or from message fields.
        In this example, the template reads the reasoning from the field "thinking":

        >>> form = InputForm(reasoning_place="thinking")
        >>> form._message_without_calls(AssistantMessage("Hello.", reasoning="A greeting."))
        {'role': 'assistant', 'content': 'Hello.', 'thinking': 'A greeting.'}
        """
        if not answer.reasoning:
            return self._message_with_content(answer.content)
        if self.reasoning_place == PARTS:
            return {"role": "assistant", "content": _content_with_thinking(answer)}
        reasoning_fields = dict.fromkeys(self._reasoning_fields(), answer.reasoning)
        return {**self._message_with_content(answer.content), **reasoning_fields}

    def _reasoning_fields(self) -> tuple[str, ...]:
        """Return the names of the message fields to which the reasoning is written.

        >>> InputForm(reasoning_place="thinking")._reasoning_fields()
        ('thinking',)
        """
        if self.reasoning_place == ALL_REASONING_FIELDS:
            return REASONING_FIELDS
        return (self.reasoning_place,)

    def _message_with_content(self, content: str) -> dict[str, Any]:
        """Return an assistant message with the given content, in the form of the template.

        In this example, the content is "", and the template then expects None:

        >>> InputForm(empty_content="null")._message_with_content("")
        {'role': 'assistant', 'content': None}
        """
        if content:
            return self._text_message("assistant", content)
        return {"role": "assistant", **_EMPTY_CONTENT[self.empty_content]}

    def _tool_call(self, call: ProbeCall, number: int) -> dict[str, Any]:
        """Return a tool call as a dict, in the form that the template expects.

        In the first example, the template expects a dict with two keys, and the arguments as JSON:

        >>> call = ProbeCall("f", (("a", 1),))
        >>> InputForm(flat_calls=True, arguments="text")._tool_call(call, 0)
        {'name': 'f', 'arguments': '{"a": 1}'}
        >>> InputForm()._tool_call(call, 0)
        {'id': 'zq7id0000', 'type': 'function', 'function': {'name': 'f', 'arguments': {'a': 1}}}
        """
        arguments: Any = dict(call.arguments)
        if self.arguments == "text":
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        if self.flat_calls:
            return function
        return {"id": self.call_id(call.name, number), "type": "function", "function": function}


def _content_with_thinking(answer: AssistantMessage) -> list[dict[str, str]]:
    """Return the `content` of an assistant message as a list: first the reasoning, then the text.

    >>> _content_with_thinking(AssistantMessage("Hello.", reasoning="A greeting."))
    [{'type': 'thinking', 'thinking': 'A greeting.'}, {'type': 'text', 'text': 'Hello.'}]
    """
    parts = [{"type": "thinking", "thinking": answer.reasoning}]
    if answer.content:
        parts.append({"type": "text", "text": answer.content})
    return parts


def _message_of_blocks(answer: AssistantMessage) -> dict[str, Any]:
    """Return an assistant message whose content contains a list of objects, called blocks.

    A few templates expect this form. The first block contains the reasoning. Other blocks contain
    the tool calls and the text, if the answer has tool calls or text.

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
    """Yield the forms in which a template may expect content. The most common form is first.

    Example: in the first form, `content` is a string. In another form, `content` is a list.
    """
    for content_in_parts, always_tools in product((False, True), (False, True)):
        yield InputForm(content_in_parts, always_tools)


def forms_of_calls(form: InputForm) -> Iterator[InputForm]:
    """Yield the forms in which a template may expect tool calls. The most common form is first.

    The forms are copies of `form`, the form of the content, in which the attributes for tool calls
    have all possible values. `InputForm` explains the values.
    """
    for flat_calls, ids, arguments, empty_content in product(
        (False, True),  # `flat_calls`
        ("plain", "numbered"),  # `ids`
        ("object", "text"),  # `arguments`
        ("text", "null", "absent"),  # `empty_content`
    ):
        yield replace(
            form, flat_calls=flat_calls, ids=ids, arguments=arguments, empty_content=empty_content
        )
