# SPDX-License-Identifier: Apache-2.0
"""Renders chat messages with the chat template of a checkpoint."""

import contextlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nereid_parsers import TemplateError

from nereid_backend.errors import RequestError
from nereid_backend.serving.tokenizer.chat.alternating_roles import alternating_messages
from nereid_backend.serving.tokenizer.chat.chat_tools import with_optional_fields
from nereid_backend.serving.tokenizer.chat.message_reasoning import with_thinking_part
from nereid_backend.serving.tokenizer.chat.system_messages import (
    SYSTEM_ROLES,
    count_first_system_messages,
    merge_first_system_messages,
    with_later_system_messages_as_user,
)
from nereid_backend.serving.tokenizer.chat.template_features import (
    REPLACEABLE_ROLES,
    TESTED_ROLES,
    TemplateFeatures,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The types of the placeholders for media in the content of a message.
_MEDIA_TYPES = frozenset({"image", "video", "audio"})


class ChatTemplateRenderer:
    """Renders chats with the chat template of a tokenizer. The first call compiles the template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Store the tokenizer. A tokenizer without a chat template is allowed."""
        self._tokenizer = tokenizer

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

        has_calls = any(each.get("tool_calls") for each in messages)
        features = self._features_for(for_tools=has_calls or tools is not None)
        adapted_messages = _adapt_messages(messages, features)
        _check_media_roles(adapted_messages, features)
        template_variables = {
            **self._default_variables(),
            **variables,
            "messages": adapted_messages,
            "tools": tools,
        }
        try:
            return features.template.render(
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
                        messages, continue_final_message=continue_final_message, **arguments
                    )
            for other_messages in alternating_messages(adapted_messages):
                with contextlib.suppress(ContinuationRefused, LimitError, RenderRefused):
                    return features.template.render(
                        template_variables | {"messages": other_messages},
                        continue_final_message=continue_final_message,
                    )
            problem = f"the chat template cannot render this chat: {error}"
            if isinstance(error.__cause__, RaisedByTemplate):
                problem = f"the chat template refuses this chat: {error.__cause__}"
            raise RequestError(f"messages: {problem}") from error

    def _features_for(self, *, for_tools: bool) -> TemplateFeatures:
        """Return the features of the chat template for a request.

        Use the template "tool_use" if it exists and `for_tools` is true. Otherwise, use the
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

    def _default_variables(self) -> dict[str, Any]:
        """Return the variables that every chat template gets, such as "bos_token" and "tools"."""
        return {
            "documents": None,
            "add_generation_prompt": False,
            **self._tokenizer.special_tokens_map,
            "tools": None,
        }

    @cached_property
    def _templates(self) -> dict[str, TemplateFeatures]:
        """The compiled chat templates by name, each with its features.

        A single template has the name "default".

        Raises:
            TemplateError: a template cannot be compiled, or exceeds a limit.
        """
        # The module is imported here, because only chat requests need jinja2.
        from nereid_parsers.template import RequestTemplate

        template = self._tokenizer.chat_template or ""  # A checkpoint can have no template.
        sources = template if isinstance(template, dict) else {"default": template}
        return {
            name: TemplateFeatures(RequestTemplate(source), self._default_variables())
            for name, source in sources.items()
        }


def _adapt_messages(
    messages: list[dict[str, Any]], features: TemplateFeatures
) -> list[dict[str, Any]]:
    """Convert messages to the roles, tool calls and contents that a template renders.

    Example: for a template that does not render the role developer, the message `{"role":
    "developer", "content": "Be brief."}` gets the role system.
    """
    # Reading `features.replaced_roles` or `features.call_form` for the first time renders test
    # chats, which takes time. Therefore, these properties are read only if the chat contains roles
    # in `REPLACEABLE_ROLES` or tool calls.
    if any(message["role"] in REPLACEABLE_ROLES for message in messages):
        messages = _replace_roles(messages, features.replaced_roles)
    messages = _convert_system_messages(messages, features)
    if any(message.get("tool_calls") for message in messages):
        messages = features.call_form.convert(messages)
    messages = features.with_expected_contents(messages)
    if features.reads_thinking_parts:
        messages = [with_thinking_part(message) for message in messages]
    return messages


def _replace_roles(
    messages: list[dict[str, Any]], replacements: dict[str, str]
) -> list[dict[str, Any]]:
    """Replace the roles of messages. `replacements` maps each replaced role to its new role."""
    return [
        {**message, "role": replacements.get(message["role"], message["role"])}
        for message in messages
    ]


def _convert_system_messages(
    messages: list[dict[str, Any]], features: TemplateFeatures
) -> list[dict[str, Any]]:
    """Change the system and developer messages that a template leaves out or refuses.

    Such messages at the start of the chat are merged into one message. Such messages later in the
    chat become user messages.
    """
    num_first = count_first_system_messages(messages)
    first_roles = [message["role"] for message in messages[:num_first]]
    later_roles = {message["role"] for message in messages[num_first:]} & SYSTEM_ROLES
    # A template renders either all system messages at the start of a chat, or only the first one.
    # Therefore, a test with two messages suffices.
    if num_first > 1 and not features.renders_roles(*first_roles[:2], "user"):
        messages = merge_first_system_messages(messages)
    if not all(features.renders_later_role(role) for role in later_roles):
        messages = with_later_system_messages_as_user(messages)
    return messages


def _check_media_roles(messages: list[dict[str, Any]], features: TemplateFeatures) -> None:
    """Raise a RequestError if a template leaves out the media of a message.

    Some templates render images only in messages of the user, and leave out or print the image
    parts of other messages, such as the result of a tool.
    """
    for role, kind in sorted(set(_media_by_role(messages))):
        # If the template renders no placeholders at all, the processor inserts them.
        if features.renders_medium("user", kind) and not features.renders_medium(role, kind):
            raise RequestError(
                f"messages: a message of the role {role} has a content part of the type {kind}, "
                "but the checkpoint's chat template does not render such parts in messages of this "
                f"role. Send the {kind} in a message of the role user."
            )


def _media_by_role(messages: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """For each medium in a chat, yield the role of its message and the type of the medium.

    Example: an image in a message of the user yields ("user", "image"). Messages whose role is not
    in `TESTED_ROLES` are skipped.
    """
    for message in messages:
        content = message.get("content")
        if message["role"] in TESTED_ROLES and isinstance(content, list):
            for part in content:
                if part["type"] in _MEDIA_TYPES:
                    yield message["role"], part["type"]


def _alternatives(arguments: dict[str, Any], *, has_calls: bool) -> Iterator[dict[str, Any]]:
    """Yield changed copies of `arguments`. The template may render a changed copy without an error.

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
