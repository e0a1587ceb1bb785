"""Render probe conversations through a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    FIRST_KEY,
    FIRST_TOOL,
    FIRST_VALUE,
    NO_SWITCHES,
    ONE_CALL,
    RESULT_TEXT,
    SECOND_KEY,
    SECOND_TOOL,
    SECOND_VALUE,
    TOOLS,
    TWO_ARGUMENTS,
    USER_TEXT,
    AssistantMessage,
    Conversation,
    ProbeCall,
    Switches,
)
from nereid_parsers.template.difference import drop_common_suffix, text_after_last
from nereid_parsers.template.environment import CompiledTemplate, RenderRefused

# The names under which templates read the reasoning of an assistant message.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

# Renderings have these characters in place of the number and the id of each tool call. Two
# renderings that differ only in numbers and ids are then equal.
COUNTER_MARK = "\ue010"
ID_MARK = "\ue011"
_CALL_ID = "zq7id000{number}"
_CALL_ID_PATTERN = re.compile(r"zq7id000\d")
_NUMBER_AFTER_NAME = re.compile(rf"({FIRST_TOOL}|{SECOND_TOOL})([:#.-])\d\b")

_SWITCH_NAME = re.compile(r"think|reason", re.IGNORECASE)
_NO_SWITCH_NAME = re.compile(
    r"content|prompt|history|start|end_token|begin|text|token|last|index|parts"
)
_EFFORTS = ("high", "low", "none", "enabled", "disabled")
_SYSTEM_SWITCHES = ("/think", "/no_think")
# Limits on the number of switches, so that an analysis ends within its time.
_MAX_SWITCH_NAMES = 4
_MAX_SWITCH_VALUES = 6
_MAX_SWITCH_SETTINGS = 20

_UNDEFINED_VARIABLE = re.compile(r"'(\w+)' is undefined")


@dataclass(frozen=True, slots=True)
class CallInputForm:
    """The form in which a template expects tool calls in its `messages` variable.

    Attributes:
        is_flat: Whether a tool call is {"name": .., "arguments": ..}. Otherwise it is
            {"id": .., "type": "function", "function": {"name": .., "arguments": ..}}.
        ids: "plain" if the template accepts any id. "numbered" if the id must be
            `functions.NAME:0`, because the template renders the id instead of the name.
        arguments: "object", or "text" if the template expects the arguments as a JSON string.
        empty: The `content` of a message without content: "text" (""), "null" or "absent".
    """

    is_flat: bool = False
    ids: str = "plain"
    arguments: str = "object"
    empty: str = "text"

    def call_id(self, name: str, number: int) -> str:
        """Return the id of the tool call with this number (from 0) in the conversation.

        >>> CallInputForm(ids="numbered").call_id("zqFirstTool", 0)
        'functions.zqFirstTool:0'
        """
        if self.ids == "numbered":
            return f"functions.{name}:{number}"
        return _CALL_ID.format(number=number)

    def message_call(self, call: ProbeCall, number: int) -> dict[str, Any]:
        """Return `call` as an entry of a message's `tool_calls`."""
        arguments: Any = dict(call.arguments)
        if self.arguments == "text":
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        if self.is_flat:
            return function
        return {"id": self.call_id(call.name, number), "type": "function", "function": function}


def _call_input_forms() -> Iterator[CallInputForm]:
    """Yield every form, from the most common form to the least common."""
    for is_flat, ids, arguments, empty in product(
        (False, True), ("plain", "numbered"), ("object", "text"), ("text", "null", "absent")
    ):
        yield CallInputForm(is_flat, ids, arguments, empty)


@dataclass(slots=True)
class Prober:
    """Renders probe conversations with one template, and stores each rendering.

    Attributes:
        template: The compiled template.
        bos, eos: The tokens that the template renders as `bos_token` and `eos_token`.
        kwargs: Template variables that are set in every rendering.
        call_form: The form in which the template expects tool calls.
        has_call_form: Whether the template renders some form of tool calls completely.
        reasoning_form: The form of reasoning in a message: one of REASONING_FIELDS, "parts" or
            "blocks" (see `_assistant`). "" sets all of REASONING_FIELDS.
        sends_parts: Whether content is a list of parts, because the template ignores a string.
        needs_tools: Whether tools are always offered, because the template fails without tools.
        refusals: The template's error messages, by the conversation that it refused to render.
        filled: The undefined variables without which the template failed. They are rendered as "".
        renderings: The number of renderings so far.
    """

    template: CompiledTemplate
    bos: str
    eos: str
    kwargs: Mapping[str, Any]
    call_form: CallInputForm = field(default_factory=CallInputForm)
    has_call_form: bool = False
    reasoning_form: str = ""
    sends_parts: bool = False
    needs_tools: bool = False
    refusals: dict[Conversation, str] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    renderings: int = 0
    _cache: dict[Any, str | None] = field(default_factory=dict)

    def render(self, conversation: Conversation) -> str | None:
        """Return the rendered conversation, or None if the template refuses to render it.

        The numbers and ids of calls are replaced by COUNTER_MARK and ID_MARK.
        """
        key = (
            conversation,
            self.call_form,
            self.reasoning_form,
            self.sends_parts,
            self.needs_tools,
        )
        if key not in self._cache:
            self._cache[key] = self._render(conversation)
        return self._cache[key]

    def _render(self, conversation: Conversation) -> str | None:
        offers_tools = conversation.tools or self.needs_tools
        variables = {
            "messages": self._messages(conversation),
            # The template gets a copy, because it may change the list.
            "tools": json.loads(json.dumps(TOOLS)) if offers_tools else None,
            "documents": None,
            "add_generation_prompt": conversation.generation_prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
            **self.filled,
            **self.kwargs,
            **dict(conversation.switches.variables),
        }
        self.renderings += 1
        try:
            text = self.template.render(variables)
        except RenderRefused as refusal:
            if self._fill_undefined_variable(str(refusal)):
                return self._render(conversation)
            self.refusals[conversation] = str(refusal)
            return None
        return _mask_call_ids(text, self.call_form)

    def _fill_undefined_variable(self, refusal: str) -> bool:
        """Set the undefined variable that caused a refusal to "". Return False if there is none.

        Some templates read variables that only the model's own code sets.
        """
        match = _UNDEFINED_VARIABLE.search(refusal)
        if match is None:
            return False
        name = match.group(1)
        if name not in self.template.names or name in self.filled:
            return False
        self.filled[name] = ""
        return True

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Return the conversation as the `messages` variable of the template."""
        messages = []
        if conversation.switches.system:
            messages.append(self._message("system", conversation.switches.system))
        messages.append(self._message("user", USER_TEXT))
        num_calls = 0
        if conversation.after_tool_result:
            messages.append(self._assistant(AssistantMessage(calls=ONE_CALL), num_calls))
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": self.call_form.call_id(FIRST_TOOL, num_calls),
                    "name": FIRST_TOOL,
                    "content": RESULT_TEXT,
                }
            )
            num_calls += 1
        if conversation.answer is not None:
            messages.append(self._assistant(conversation.answer, num_calls))
        if conversation.user_replies:
            messages.append(self._message("user", "Go on."))
        return messages

    def _message(self, role: str, text: str) -> dict[str, Any]:
        if self.sends_parts:
            return {"role": role, "content": [{"type": "text", "text": text}]}
        return {"role": role, "content": text}

    def _assistant(self, answer: AssistantMessage, num_earlier_calls: int) -> dict[str, Any]:
        """Return an assistant message in the form that the template expects.

        The form of reasoning determines where the message has its reasoning:

            "reasoning"  {"reasoning": ..}, and the other REASONING_FIELDS likewise
            "parts"      {"content": [{"type": "thinking", "thinking": ..}, ..]}
            "blocks"     {"content": {"blocks": [{"type": "thoughts", "text": ..}, ..]}}
        """
        if answer.reasoning and self.reasoning_form == "blocks":
            return _message_of_blocks(answer)
        message: dict[str, Any] = {"role": "assistant"}
        if answer.content:
            message = self._message("assistant", answer.content)
        elif self.call_form.empty != "absent":
            message["content"] = "" if self.call_form.empty == "text" else None
        if answer.reasoning:
            self._add_reasoning(message, answer)
        if answer.calls:
            message["tool_calls"] = [
                self.call_form.message_call(call, number)
                for number, call in enumerate(answer.calls, num_earlier_calls)
            ]
        return message

    def _add_reasoning(self, message: dict[str, Any], answer: AssistantMessage) -> None:
        if self.reasoning_form == "parts":
            parts = [{"type": "thinking", "thinking": answer.reasoning}]
            if answer.content:
                parts.append({"type": "text", "text": answer.content})
            message["content"] = parts
            return
        fields = (self.reasoning_form,) if self.reasoning_form else REASONING_FIELDS
        message.update(dict.fromkeys(fields, answer.reasoning))

    # ---- the form of the input -------------------------------------------------------------------

    def find_content_form(self) -> bool:
        """Find a form of plain content that the template renders, and use this form from now on.

        Set `sends_parts` and `needs_tools`.

        Returns:
            False if the template renders no form.
        """
        conversation = Conversation(AssistantMessage(CONTENT_TEXT))
        for sends_parts, needs_tools in product((False, True), (False, True)):
            self.sends_parts = sends_parts
            self.needs_tools = needs_tools
            text = self.render(conversation)
            if text is not None and CONTENT_TEXT in text and USER_TEXT in text:
                return True
        self.sends_parts = False
        self.needs_tools = False
        return False

    def find_call_form(self) -> None:
        """Find a form of tool calls that the template renders completely, and use it from now on.

        Set `call_form` and `has_call_form`.
        """
        call = ProbeCall(arguments=TWO_ARGUMENTS)
        conversation = Conversation(AssistantMessage(calls=(call,)), tools=True)
        for form in _call_input_forms():
            self.call_form = form
            text = self.render(conversation)
            if text is not None and _shows_call(self._text_of_answer(text)):
                self.has_call_form = True
                return
        self.call_form = CallInputForm()

    def _text_of_answer(self, text: str) -> str:
        """Return the text that the answer adds to a rendering.

        Some templates list the tools at the end of the conversation. This list is removed from the
        text.
        """
        without_answer = self.render(Conversation(tools=True)) or ""
        after_question = text_after_last(without_answer, USER_TEXT)
        return drop_common_suffix(text_after_last(text, USER_TEXT), after_question)

    def thinking_switches(self) -> list[Switches]:
        """Return the settings of the thinking switches to try. The first one sets no switch.

        A switch is a template variable whose name refers to thinking, or "/think" or "/no_think"
        in the system message. Example: for a template that reads `enable_thinking`, the settings
        are none, enable_thinking=True and enable_thinking=False.
        """
        names = sorted(name for name in self.template.names if is_thinking_switch(name))
        names = [name for name in names[:_MAX_SWITCH_NAMES] if name not in self.kwargs]
        settings = [NO_SWITCHES]
        if len(names) > 1:  # some templates think only if several switches are on
            for value in (True, False):
                settings.append(Switches(tuple((name, value) for name in names)))
        for name in names:
            settings += [Switches(((name, value),)) for value in self._switch_values(name)]
        for word in _SYSTEM_SWITCHES:
            if any(word in literal for literal in self.template.literals):
                settings.append(Switches(system=word))
        return settings[:_MAX_SWITCH_SETTINGS]

    def _switch_values(self, name: str) -> list[Any]:
        """Return the values to try for a switch. Values from comparisons come first."""
        constants = self.template.compared.get(name, ())
        values: list[Any] = [value for value in constants if isinstance(value, str | int)]
        if "effort" in name or "mode" in name:
            values += _EFFORTS
        else:
            values += (True, False)
        distinct = {repr(value): value for value in values}  # as dict keys, True and 1 are equal
        return list(distinct.values())[:_MAX_SWITCH_VALUES]


def is_thinking_switch(name: str) -> bool:
    """Return whether a template variable with this name may turn thinking on or off.

    >>> is_thinking_switch("enable_thinking"), is_thinking_switch("reasoning_content")
    (True, False)
    """
    return bool(_SWITCH_NAME.search(name)) and not _NO_SWITCH_NAME.search(name)


def _mask_call_ids(text: str, form: CallInputForm) -> str:
    r"""Replace the numbers and ids of tool calls in a rendering by COUNTER_MARK and ID_MARK.

    >>> _mask_call_ids("zqFirstTool:1 id=zq7id0001", CallInputForm())
    'zqFirstTool:\ue010 id=\ue011'
    """
    text = _NUMBER_AFTER_NAME.sub(rf"\1\2{COUNTER_MARK}", text)
    return text if form.ids == "numbered" else _CALL_ID_PATTERN.sub(ID_MARK, text)


def unmask_call_ids(text: str) -> str:
    r"""Replace COUNTER_MARK and ID_MARK by the number and the id of the first tool call.

    >>> unmask_call_ids("zqFirstTool:\ue010 id=\ue011")
    'zqFirstTool:0 id=zq7id0000'
    """
    return text.replace(COUNTER_MARK, "0").replace(ID_MARK, _CALL_ID.format(number=0))


def _message_of_blocks(answer: AssistantMessage) -> dict[str, Any]:
    """Return an assistant message whose content is {"blocks": [thoughts, tool calls, response]}."""
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


def _shows_call(text: str) -> bool:
    """Return whether `text` contains the tool call of `find_call_form` with both of its arguments.

    Arguments that are printed as a Python dict, or as JSON inside a JSON string, are not accepted,
    because the template then expects arguments in another form. A tool call after "None" is not
    accepted either, because the template then expects empty content in another form.
    """
    name_at = text.find(FIRST_TOOL)
    if name_at < 0:
        return False
    arguments = text[name_at:]
    if not all(word in arguments for word in (FIRST_KEY, FIRST_VALUE, SECOND_KEY, SECOND_VALUE)):
        return False
    is_python_dict = f"'{FIRST_KEY}'" in text
    is_json_in_string = f'\\"{FIRST_KEY}' in text
    prints_none = "None" in text[:name_at]
    return not (is_python_dict or is_json_in_string or prints_none)
