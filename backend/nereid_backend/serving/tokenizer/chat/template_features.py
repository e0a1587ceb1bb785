# SPDX-License-Identifier: Apache-2.0
"""Finds out which messages a chat template renders, by rendering test chats."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nereid_backend.serving.tokenizer.chat.call_forms import CALL_FORMS, CallForm
from nereid_backend.serving.tokenizer.chat.chat_messages import as_parts
from nereid_backend.serving.tokenizer.chat.message_reasoning import with_thinking_part
from nereid_backend.serving.tokenizer.chat.system_messages import SYSTEM_ROLES

if TYPE_CHECKING:
    from nereid_parsers.template import RequestTemplate

# The content of a message that is rendered to test a chat template.
_TEST_TEXT = "nereid7text7test"
# Matches a part of a content that is printed as a Python dict or as JSON, such as {'type': 'text',
# 'text': '...'}.
_PRINTED_PART = re.compile(f"""['"](text|thinking)['"]: ['"]{_TEST_TEXT}""")
_USER = {"role": "user", "content": "Hi"}
_USER_WITH_PARTS = {"role": "user", "content": as_parts("Hi")}
_ASSISTANT = {"role": "assistant", "content": "Hello"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
# The tools of test chats. A test chat with a tool call needs tools, because some templates render
# tool calls only if the request has tools.
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "A function.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]
# For each role, a chat that ends with a message of this role. In a chat with images, the content of
# a user's message is a list of parts.
_CHATS_BY_ROLE: dict[str, list[dict[str, Any]]] = {
    "system": [_SYSTEM],
    "user": [_USER_WITH_PARTS],
    "assistant": [_USER_WITH_PARTS, _ASSISTANT],
    "tool": [
        _USER_WITH_PARTS,
        {**_ASSISTANT, "tool_calls": [{"id": "call12340", **_CALL}]},
        {"role": "tool", "tool_call_id": "call12340", "name": "f", "content": "5"},
    ],
}
REPLACEABLE_ROLES = {"developer": "system", "function": "tool"}
"""Maps roles that many chat templates do not render to the roles that replace them.

Clients of OpenAI's API send instructions with the role developer, and older clients send the result
of a tool with the role function.
"""
# Contains a test chat for each key of `REPLACEABLE_ROLES`. Rendering the test chat shows whether a
# template renders messages of this role.
_TEST_CHATS: dict[str, list[dict[str, Any]]] = {
    "developer": [{"role": "developer", "content": _TEST_TEXT}, _USER],
    "function": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "function", "name": "f", "content": _TEST_TEXT},
    ],
}
TESTED_ROLES = frozenset(_CHATS_BY_ROLE)
"""The roles for which `TemplateFeatures.renders_medium` can test a template."""


class TemplateFeatures:
    """Finds out which messages one chat template renders.

    A property renders its test chats when it is read for the first time.
    """

    def __init__(self, template: "RequestTemplate", default_variables: Mapping[str, Any]) -> None:
        """Store the template. Render nothing.

        Args:
            template: the compiled template.
            default_variables: the variables that every chat template gets, such as "bos_token".
        """
        self.template = template
        self._default_variables = default_variables
        # Maps the roles of a chat to the result of `renders_roles`.
        self._rendered_roles: dict[tuple[str, ...], bool] = {}

    def with_expected_contents(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Convert texts to lists of parts if the template expects such lists.

        If one message has a list with an image, templates expect a list in each message. However,
        some templates render only a text in messages of certain roles, see `_roles_of_text`.
        """
        has_list = any(isinstance(each.get("content"), list) for each in messages)
        if not has_list and not self._reads_only_parts:
            return messages
        roles_of_text = self._roles_of_text if has_list else frozenset()
        return [
            each
            if each["role"] in roles_of_text
            else {**each, "content": as_parts(each.get("content"))}
            for each in messages
        ]

    @cached_property
    def _reads_only_parts(self) -> bool:
        """Whether the template renders a content only if the content is a list of parts.

        Example: for a content that is a text, the templates of LLaVA render an empty message.
        """

        def renders(content: object) -> bool:
            return self._renders_test_text([{"role": "user", "content": content}])

        return not renders(_TEST_TEXT) and renders(as_parts(_TEST_TEXT))

    @cached_property
    def _roles_of_text(self) -> frozenset[str]:
        """The roles whose content must be a text, even in a chat with images.

        Example: the template of GLM-4.1V renders a list in a message of the assistant as
        "[{'type': 'text', 'text': 'Hello'}]".
        """
        return frozenset(role for role in _CHATS_BY_ROLE if self._renders_only_text(role))

    def _renders_only_text(self, role: str) -> bool:
        """Return whether the template renders a content only if the content is a text.

        A content can also be a list of parts, such as [{"type": "text", "text": "Hello"}]. If the
        template prints "[{'type': 'text', 'text': 'Hello'}]" instead of "Hello", it does not render
        the list. `role` is the role of the message.
        """
        with_parts = self._rendered_with_content(role, as_parts(_TEST_TEXT))
        renders_parts = _TEST_TEXT in with_parts and not _PRINTED_PART.search(with_parts)
        return not renders_parts and _TEST_TEXT in self._rendered_with_content(role, _TEST_TEXT)

    def renders_medium(self, role: str, kind: str) -> bool:
        """Return whether the template renders a placeholder for an image, a video or an audio clip.

        If the template renders no message of this role in the test chat, return True, because the
        test then shows nothing.

        Args:
            role: the role of the message that contains the image, video or audio clip.
            kind: "image", "video" or "audio".
        """
        text_parts = as_parts(_TEST_TEXT)
        with_medium = self._rendered_with_content(role, [{"type": kind}, *text_parts])
        if not with_medium:
            return not self._rendered_with_content(role, _TEST_TEXT)
        without_medium = self._rendered_with_content(role, text_parts)
        return with_medium != without_medium and not _PRINTED_PART.search(with_medium)

    def _rendered_with_content(self, role: str, content: object) -> str:
        """Render the test chat of a role, with `content` in the message of this role."""
        *earlier, message = _CHATS_BY_ROLE[role]
        return self._rendered_test(
            [*earlier, {**message, "content": content}, _USER_WITH_PARTS], _TOOLS
        )

    @cached_property
    def replaced_roles(self) -> dict[str, str]:
        """The roles that the template does not render, and the roles that replace them.

        Example: a template that renders neither developer nor function has the value {"developer":
        "system", "function": "tool"}.
        """
        return {
            role: replacement
            for role, replacement in REPLACEABLE_ROLES.items()
            if not self._renders_test_text(self.with_expected_contents(_TEST_CHATS[role]))
        }

    def renders_later_role(self, role: str) -> bool:
        """Return whether the template renders system messages at the start and later in a chat.

        Some templates require that the roles user and assistant alternate, and others do not know
        the role assistant. Therefore, the template needs to render only one of two chats.

        Args:
            role: the role of the later message: "system" or "developer".
        """
        chats = (("system", "user", "assistant", role, "user"), ("system", "user", role))
        return any(self.renders_roles(*roles) for roles in chats)

    def renders_roles(self, *roles: str) -> bool:
        """Return whether the template renders every system and developer message of a test chat.

        One chat is rendered for each of these messages. The results are stored in
        `_rendered_roles`.

        Args:
            roles: the roles of the messages of the test chat.
        """
        if roles not in self._rendered_roles:
            tested = [index for index, role in enumerate(roles) if role in SYSTEM_ROLES]
            chats = [_chat_with_test_text(roles, index) for index in tested]
            self._rendered_roles[roles] = all(
                self._renders_test_text(self.with_expected_contents(chat)) for chat in chats
            )
        return self._rendered_roles[roles]

    @cached_property
    def reads_thinking_parts(self) -> bool:
        """Whether the template renders a message's reasoning only if a content part contains it.

        Such a template ignores the field `reasoning` of the message. Examples: the templates of
        Magistral and Ministral 3.
        """
        message = {**_ASSISTANT, "reasoning": _TEST_TEXT}
        with_part = self._rendered_test([_USER, with_thinking_part(message)])
        renders_part = _TEST_TEXT in with_part and not _PRINTED_PART.search(with_part)
        return renders_part and not self._renders_test_text([_USER, message])

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which the template renders tool calls.

        If the template renders tool calls in no form, the value is the first form.
        """
        return next((form for form in CALL_FORMS if self._renders_calls(form)), CALL_FORMS[0])

    def _renders_calls(self, form: CallForm) -> bool:
        """Return whether the template renders tool calls in this form.

        The template must render the name and the arguments of a call. If the form appends text to
        the reasoning, the template must also render the reasoning.
        """
        chats = [_chat_with_calls(argument=_TEST_TEXT), _chat_with_calls(name=_TEST_TEXT)]
        if form.joins_reasoning:
            chats.append(_chat_with_calls(reasoning=_TEST_TEXT))
        converted = [self.with_expected_contents(form.convert(chat)) for chat in chats]
        return all(self._renders_test_text(chat, _TOOLS) for chat in converted)

    def _renders_test_text(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> bool:
        """Return whether `_TEST_TEXT` occurs in the rendered messages.

        If the template cannot render the messages, return False.
        """
        return _TEST_TEXT in self._rendered_test(messages, tools)

    def _rendered_test(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Return the rendered messages; "" if the template cannot render the messages."""
        from nereid_parsers.template import LimitError, RenderRefused

        variables = {**self._default_variables, "messages": messages, "tools": tools}
        try:
            return self.template.render(variables, continue_final_message=False)
        except (LimitError, RenderRefused):
            # A chat with such messages would fail with the same error.
            return ""


def _chat_with_test_text(roles: Sequence[str], tested: int) -> list[dict[str, Any]]:
    """Return a chat with one message for each role.

    The message at the index `tested` contains `_TEST_TEXT`. All other messages have the content
    "Hi".
    """
    return [
        {"role": role, "content": _TEST_TEXT if index == tested else "Hi"}
        for index, role in enumerate(roles)
    ]


def _chat_with_calls(
    *, name: str = "f", argument: str = "1", reasoning: str = "Hm."
) -> list[dict[str, Any]]:
    """Return a chat with two tool calls and their results.

    `name` and `argument` belong to the second call. The results contain the name "f". Therefore, a
    rendered chat contains another `name` only if the template renders the name of the call.
    """
    calls = [_numbered_call(0, "f", "0"), _numbered_call(1, name, argument)]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "5"} for call in calls
    ]
    message = {"role": "assistant", "content": "Well.", "reasoning": reasoning, "tool_calls": calls}
    return [_USER, message, *results]


def _numbered_call(number: int, name: str, argument: str) -> dict[str, Any]:
    """Return a tool call of the function `name` with one argument. The id contains `number`."""
    function = {"name": name, "arguments": {"a": argument}}
    return {"id": f"call_nereid7_{number}", "type": "function", "function": function}
