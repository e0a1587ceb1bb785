# SPDX-License-Identifier: Apache-2.0
"""Renders chat messages with the chat template of a checkpoint."""

import contextlib
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nereid_parsers import TemplateError

from nereid_backend.errors import RequestError
from nereid_backend.serving.tokenizer.call_forms import CALL_FORMS, CallForm
from nereid_backend.serving.tokenizer.chat_messages import as_parts
from nereid_backend.serving.tokenizer.chat_tools import with_optional_fields
from nereid_backend.serving.tokenizer.message_reasoning import with_thinking_part
from nereid_backend.serving.tokenizer.system_messages import (
    SYSTEM_ROLES,
    count_first_system_messages,
    merge_first_system_messages,
    with_later_system_messages_as_user,
)

if TYPE_CHECKING:
    from nereid_parsers.template import RequestTemplate
    from transformers import PreTrainedTokenizerBase

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
# Tools that are offered if a chat with a tool call is rendered to test a chat template. Some
# templates render tool calls only if the request has tools.
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
# Maps roles that many chat templates do not render to the roles that replace them. Clients of
# OpenAI's API send instructions with the role developer, and older clients send the result of a
# tool with the role function.
_REPLACED_ROLES = {"developer": "system", "function": "tool"}
# Maps each role that `_REPLACED_ROLES` can replace to a test chat. Rendering the test chat shows
# whether a template renders the role.
_TEST_CHATS: dict[str, list[dict[str, Any]]] = {
    "developer": [{"role": "developer", "content": _TEST_TEXT}, _USER],
    "function": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "function", "name": "f", "content": _TEST_TEXT},
    ],
}


class ChatTemplateRenderer:
    """Renders chats with the chat template of a tokenizer. The first call compiles the template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Store the tokenizer. A tokenizer without a chat template is allowed."""
        self._tokenizer = tokenizer
        # Maps a template and the roles of a chat to the result of `_renders_roles`.
        self._rendered_roles: dict[tuple[RequestTemplate, tuple[str, ...]], bool] = {}

    @cached_property
    def reserved_variables(self) -> frozenset[str]:
        """The names of the variables that the field chat_template_kwargs must not contain.

        These are the parameters of transformers' apply_chat_template, such as `chat_template`, and
        the variable `messages`. The server itself sets the variables with these names.
        """
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset({*parameters, "self", "messages"}) - {"documents", "kwargs"}

    def source(self) -> str:
        """Return the Jinja source of the chat template. Callers search it for variables.

        A checkpoint can have several named templates, such as "default" and "tool_use". In this
        case, return one text that contains all sources. This text is not a template.

        Raises:
            RequestError: the checkpoint has no chat template.
        """
        template = self._tokenizer.chat_template
        if not template:
            raise RequestError(
                "messages: this checkpoint has no chat template, so messages cannot be rendered. "
                "Send the prompt as text_input."
            )
        sources = template.values() if isinstance(template, dict) else [template]
        return "\n".join(sources)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,  # noqa: ANN401  # a template accepts any JSON value
    ) -> str:
        """Render chat messages, and return the text. Rendering has limits on time and on size.

        If the template does not render messages of the role developer, they become messages of the
        role system. In the same way, the role function becomes the role tool. If the template
        renders only the first system message, the system messages at the start are merged, and
        later system messages become messages of the user. Tool calls are converted to the form that
        the template expects.

        Example: the template `{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}`
        and the messages `[{"role": "user", "content": "Hi"}]` return "user: Hi;".

        Args:
            messages: the messages.
            tools: the tools that the model may call, or None.
            continue_final_message: whether the text ends with the content of the last message, so
                that the model continues this content.
            variables: the other variables of the template.

        Raises:
            RequestError: the template cannot render the messages, or exceeds a limit.
        """
        from jinja2.exceptions import TemplateError as RaisedByTemplate
        from nereid_parsers.template import ContinuationRefused, LimitError, RenderRefused

        given_messages = messages
        has_calls = any(each.get("tool_calls") for each in messages)
        template = self._template_for(for_tools=has_calls or tools is not None)
        if any(each.get("role") in _REPLACED_ROLES for each in messages):
            roles = self._replacements[template]
            messages = [
                {**each, "role": roles.get(each["role"], each["role"])} for each in messages
            ]
        if any(each.get("role") in SYSTEM_ROLES for each in messages[1:]):
            messages = self._convert_system_messages(template, messages)
        if has_calls:
            messages = self._call_forms[template].convert(messages)
        messages = self._with_content_for(template, messages)
        if template in self._templates_for_thinking_parts:
            messages = [with_thinking_part(each) for each in messages]
        template_variables = {
            **self._default_variables(),
            **variables,
            "messages": messages,
            "tools": tools,
        }
        try:
            return template.render(
                template_variables, continue_final_message=continue_final_message
            )
        except ContinuationRefused as error:
            raise RequestError(f"continue_final_message: {error}.") from error
        except LimitError as error:
            raise RequestError(f"messages: the chat template exceeds a limit: {error}.") from error
        except RenderRefused as error:
            given_arguments = {**variables, "tools": tools}
            for arguments in _alternatives(given_arguments, has_calls=has_calls):
                with contextlib.suppress(RequestError):
                    return self.render(
                        given_messages, continue_final_message=continue_final_message, **arguments
                    )
            problem = f"the chat template cannot render this chat: {error}"
            if isinstance(error.__cause__, RaisedByTemplate):
                problem = f"the chat template refuses this chat: {error.__cause__}"
            raise RequestError(f"messages: {problem}") from error

    def _template_for(self, *, for_tools: bool) -> "RequestTemplate":
        """Return the chat template for a request.

        Return the template "tool_use" if it exists and `for_tools` is true. Otherwise, return the
        template "default".

        Args:
            for_tools: whether the request has tools, or messages with tool calls.

        Raises:
            RequestError: no template can be used.
        """
        try:
            templates = self._templates  # The first access compiles the templates.
        except TemplateError as error:
            raise RequestError(f"messages: the chat template cannot be used: {error}") from error
        names = ("tool_use", "default") if for_tools else ("default",)
        for name in names:
            if name in templates:
                return templates[name]
        raise RequestError(
            "messages: this checkpoint has several chat templates, but none has the name default. "
            "Send the prompt as text_input."
        )

    @cached_property
    def _templates_for_parts(self) -> "list[RequestTemplate]":
        """The templates that render the content of a message only if it is a list of parts.

        Example: for a content that is a text, the templates of LLaVA render an empty message.
        """
        return [each for each in self._templates.values() if self._reads_only_parts(each)]

    def _reads_only_parts(self, template: "RequestTemplate") -> bool:
        """Return whether a template renders a list of parts, but not a text."""

        def renders(content: object) -> bool:
            return self._renders_test_text(template, [{"role": "user", "content": content}])

        return not renders(_TEST_TEXT) and renders(as_parts(_TEST_TEXT))

    def _with_content_for(
        self, template: "RequestTemplate", messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Convert texts to lists of parts if the template expects such lists.

        If one message has a list with an image, templates expect a list in each message. However,
        some templates render only a text in messages of certain roles, see `_roles_of_text`.
        """
        if any(isinstance(each.get("content"), list) for each in messages):
            self._check_media_roles(template, messages)
            roles_of_text = self._roles_of_text[template]
        elif template in self._templates_for_parts:
            roles_of_text = frozenset()
        else:
            return messages
        return [
            each
            if each["role"] in roles_of_text
            else {**each, "content": as_parts(each.get("content"))}
            for each in messages
        ]

    @cached_property
    def _roles_of_text(self) -> "dict[RequestTemplate, frozenset[str]]":
        """For each template, the roles whose content must be a text, even in a chat with images.

        Example: the template of GLM-4.1V renders a list in a message of the assistant as
        "[{'type': 'text', 'text': 'Hello'}]".
        """
        return {
            template: frozenset(
                role for role in _CHATS_BY_ROLE if self._renders_only_text(template, role)
            )
            for template in self._templates.values()
        }

    def _renders_only_text(self, template: "RequestTemplate", role: str) -> bool:
        """Return whether a template renders a text in a message of `role`, but no list of parts.

        A template does not render a list if it prints the list itself, such as "[{'type': 'text',
        'text': 'Hello'}]" instead of "Hello".
        """
        *earlier, message = _CHATS_BY_ROLE[role]

        def rendered(content: object) -> str:
            chat = [*earlier, {**message, "content": content}, _USER_WITH_PARTS]
            return self._rendered_test(template, chat, _TOOLS)

        with_parts = rendered(as_parts(_TEST_TEXT))
        renders_parts = _TEST_TEXT in with_parts and not _PRINTED_PART.search(with_parts)
        return not renders_parts and _TEST_TEXT in rendered(_TEST_TEXT)

    def _check_media_roles(
        self, template: "RequestTemplate", messages: list[dict[str, Any]]
    ) -> None:
        """Raise a RequestError if the template leaves out the media of a message.

        Some templates render images only in messages of the user, and leave out or print the image
        parts of other messages, such as the result of a tool.
        """
        used = {
            (each["role"], part["type"])
            for each in messages
            if isinstance(each.get("content"), list) and each["role"] in _CHATS_BY_ROLE
            for part in each["content"]
        }
        for role, kind in sorted(used - {(role, "text") for role in _CHATS_BY_ROLE}):
            # If the template renders no placeholders at all, the processor inserts them.
            if self._renders_medium(template, "user", kind) and not self._renders_medium(
                template, role, kind
            ):
                raise RequestError(
                    f"messages: a message of the role {role} has a content part of the type "
                    f"{kind}, but the checkpoint's chat template does not render such parts in "
                    f"messages of this role. Send the {kind} in a message of the role user."
                )

    def _renders_medium(self, template: "RequestTemplate", role: str, kind: str) -> bool:
        """Return whether a template renders a placeholder for a medium in a message of `role`.

        Return True if the template renders no message of this role in the test chat, because
        nothing is known then. `kind` is "image", "video" or "audio".
        """
        *earlier, message = _CHATS_BY_ROLE[role]

        def rendered(content: object) -> str:
            chat = [*earlier, {**message, "content": content}, _USER_WITH_PARTS]
            return self._rendered_test(template, chat, _TOOLS)

        text_parts = as_parts(_TEST_TEXT)
        with_medium = rendered([{"type": kind}, *text_parts])
        if not with_medium:
            return not rendered(_TEST_TEXT)
        return with_medium != rendered(text_parts) and not _PRINTED_PART.search(with_medium)

    @cached_property
    def _replacements(self) -> "dict[RequestTemplate, dict[str, str]]":
        """For each template, the roles that it does not render, and the roles that replace them.

        Example: a template that renders neither developer nor function has the value {"developer":
        "system", "function": "tool"}.
        """
        return {
            template: {
                role: replacement
                for role, replacement in _REPLACED_ROLES.items()
                if not self._renders_role(template, role)
            }
            for template in self._templates.values()
        }

    def _renders_role(self, template: "RequestTemplate", role: str) -> bool:
        """Return whether a template renders the messages of a role in `_REPLACED_ROLES`."""
        chat = self._with_content_for(template, _TEST_CHATS[role])
        return self._renders_test_text(template, chat)

    def _convert_system_messages(
        self, template: "RequestTemplate", messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Change the system and developer messages that the template leaves out or refuses.

        Such messages at the start of the chat are merged into one message. Such messages later in
        the chat become user messages.
        """
        num_first = count_first_system_messages(messages)
        first_roles = [message["role"] for message in messages[:num_first]]
        later_roles = {message["role"] for message in messages[num_first:]} & SYSTEM_ROLES
        # Two messages suffice for the test, because a template renders either the first message
        # only or all messages at the start.
        if num_first > 1 and not self._renders_roles(template, *first_roles[:2], "user"):
            messages = merge_first_system_messages(messages)
        if not all(self._renders_later_role(template, role) for role in later_roles):
            messages = with_later_system_messages_as_user(messages)
        return messages

    def _renders_later_role(self, template: "RequestTemplate", role: str) -> bool:
        """Return whether a template renders system messages at the start and later in a chat.

        Some templates require that the roles user and assistant alternate, and others do not know
        the role assistant. Therefore, the template needs to render only one of two chats.

        Args:
            template: the template.
            role: the role of the later message: "system" or "developer".
        """
        chats = (("system", "user", "assistant", role, "user"), ("system", "user", role))
        return any(self._renders_roles(template, *roles) for roles in chats)

    def _renders_roles(self, template: "RequestTemplate", *roles: str) -> bool:
        """Return whether a template renders every system and developer message of a test chat.

        One chat is rendered for each of these messages. The results are stored in
        `_rendered_roles`.

        Args:
            template: the template.
            roles: the roles of the messages of the test chat.
        """
        key = (template, roles)
        if key not in self._rendered_roles:
            tested = [index for index, role in enumerate(roles) if role in SYSTEM_ROLES]
            self._rendered_roles[key] = all(
                self._renders_test_text(
                    template, self._with_content_for(template, _chat_with_test_text(roles, index))
                )
                for index in tested
            )
        return self._rendered_roles[key]

    @cached_property
    def _templates_for_thinking_parts(self) -> "list[RequestTemplate]":
        """The templates that render reasoning only if it is a part of the content.

        Example: the templates of Magistral and Ministral 3.
        """
        message = {**_ASSISTANT, "reasoning": _TEST_TEXT}
        templates = []
        for template in self._templates.values():
            with_part = self._rendered_test(template, [_USER, with_thinking_part(message)])
            renders_part = _TEST_TEXT in with_part and not _PRINTED_PART.search(with_part)
            if renders_part and not self._renders_test_text(template, [_USER, message]):
                templates.append(template)
        return templates

    @cached_property
    def _call_forms(self) -> "dict[RequestTemplate, CallForm]":
        """For each template, the form in which it renders tool calls.

        If a template renders tool calls in no form, the value is the first form.
        """
        return {
            template: next(
                (form for form in CALL_FORMS if self._renders_calls(template, form)), CALL_FORMS[0]
            )
            for template in self._templates.values()
        }

    def _renders_calls(self, template: "RequestTemplate", form: CallForm) -> bool:
        """Return whether a template renders tool calls in this form.

        The template must render the name and the arguments of a call. If the form appends text to
        the reasoning, the template must also render the reasoning.
        """
        chats = [_chat_with_calls(argument=_TEST_TEXT), _chat_with_calls(name=_TEST_TEXT)]
        if form.joins_reasoning:
            chats.append(_chat_with_calls(reasoning=_TEST_TEXT))
        converted = [self._with_content_for(template, form.convert(chat)) for chat in chats]
        return all(self._renders_test_text(template, chat, _TOOLS) for chat in converted)

    def _renders_test_text(
        self,
        template: "RequestTemplate",
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
    ) -> bool:
        """Return whether a template renders messages, and the result contains `_TEST_TEXT`."""
        return _TEST_TEXT in self._rendered_test(template, messages, tools)

    def _rendered_test(
        self,
        template: "RequestTemplate",
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Render messages that test a template. Return "" if the template cannot render them."""
        from nereid_parsers.template import LimitError, RenderRefused

        variables = {**self._default_variables(), "messages": messages, "tools": tools}
        try:
            return template.render(variables, continue_final_message=False)
        except (LimitError, RenderRefused):
            # A chat with such messages would fail with the same error.
            return ""

    def _default_variables(self) -> dict[str, Any]:
        """Return the variables that every chat template gets, such as "bos_token" and "tools"."""
        return {
            "documents": None,
            "add_generation_prompt": False,
            **self._tokenizer.special_tokens_map,
            "tools": None,
        }

    @cached_property
    def _templates(self) -> "dict[str, RequestTemplate]":
        """The compiled chat templates by name. A single template has the name "default".

        Raises:
            TemplateError: a template cannot be compiled, or exceeds a limit.
        """
        # The module is imported here, because only chat requests need jinja2.
        from nereid_parsers.template import RequestTemplate

        source = self._tokenizer.chat_template or ""
        sources = source if isinstance(source, dict) else {"default": source}
        return {name: RequestTemplate(source) for name, source in sources.items()}


def _alternatives(arguments: dict[str, Any], *, has_calls: bool) -> Iterator[dict[str, Any]]:
    """Yield changed copies of the arguments of `render`, with which the template may succeed.

    Each copy has one change. `render` calls this function again with a copy that the template
    refuses, so that several changes are combined.

    Args:
        arguments: the tools and the template variables with which the template has failed.
        has_calls: whether a message has tool calls.
    """
    tools = arguments["tools"]
    # Some templates fail if a tool has no description or no parameters, although both are optional
    # in OpenAI's API.
    completed_tools = with_optional_fields(tools)
    if completed_tools != tools:
        yield {**arguments, "tools": completed_tools}
    # Some templates fail if a request has earlier tool calls but no tools.
    if tools is None and has_calls:
        yield {**arguments, "tools": []}
    # Some templates refuse the reasoning effort "high" and call it "xhigh".
    if arguments.get("reasoning_effort") == "high":
        yield {**arguments, "reasoning_effort": "xhigh"}


def _chat_with_test_text(roles: Sequence[str], tested: int) -> list[dict[str, Any]]:
    """Return a chat with one message for each role. Message `tested` contains `_TEST_TEXT`."""
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
