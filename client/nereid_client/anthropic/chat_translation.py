"""Translate requests of Anthropic's API to chat completions."""

from collections.abc import Mapping
from typing import Any

from nereid_client.anthropic.cache_control import cache_retention
from nereid_client.anthropic.messages_request import (
    REFUSED_IN_MESSAGES,
    CountTokensRequest,
    MessagesRequest,
)
from nereid_client.protocol.common_fields import MAX_CACHE_KEY_LENGTH
from nereid_client.streaming.field_names import FieldNames

Json = dict[str, Any]

ANTHROPIC_FIELD_NAMES = FieldNames(
    {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
    }
)
"""Maps the name of a field in a chat completion to the field's name in Anthropic's API."""

_SUPPORTED_EFFORTS = {"xhigh": "high", "max": "high"}
"""Maps each effort that chat templates do not support to the most similar supported effort."""
_SWITCHES = ("enable_thinking", "thinking")
"""The variables that turn reasoning on and off in chat templates."""


def chat_request(request: CountTokensRequest, body: Mapping[str, Any]) -> Json:
    """Translate a request of Anthropic's API to the request body of a chat completion.

    Example: {"model": "a", "max_tokens": 5, "stop_sequences": ["."], "messages": [...]} returns
    {"model": "a", "max_tokens": 5, "stop": ["."], "messages": [...]}.

    Args:
        request: the request of Anthropic's API.
        body: the request body as the client sent it. Fields that need no translation are copied
            from this body.
    """
    copied = {name: value for name, value in body.items() if name not in _TRANSLATED}
    translated: Json = {
        "response_format": request.response_format_of_config,
        "chat_template_kwargs": _template_variables(request) or None,
        "thinking_token_budget": request.thinking.budget_tokens if request.thinking else None,
    }
    if isinstance(request, MessagesRequest):
        translated |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences or None}
    # If a copied field and a translated field have the same name, the translated field replaces the
    # copied field, because the translated fields come later in the dictionary.
    return {
        **_without_nulls(copied),
        **_without_nulls(translated),
        **_message_fields(request.chat_messages),
        **_tool_fields(request),
        **_cache_fields(body),
    }


def _message_fields(messages: list[Json]) -> Json:
    """Return the field `messages` of a chat request, and the fields that continue a message.

    If the last message is from the assistant, the answer continues the text of this message.
    """
    if messages[-1]["role"] != "assistant":
        return {"messages": messages}
    return {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def _without_nulls(fields: Json) -> Json:
    """Return the fields whose value is not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _tool_fields(request: CountTokensRequest) -> Json:
    """Return the tool fields of the chat completion, or {} if the request has no tools."""
    if not (tools := request.chat_tools):
        return {}
    fields: Json = {"tools": tools, "tool_choice": request.chat_tool_choice}
    if request.tool_choice and request.tool_choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _cache_fields(body: Mapping[str, Any]) -> Json:
    """Return the fields that make the server retain the cached prefix of a request.

    Return an empty dict if the request has no cache_control.

    Requests with the same `metadata.user_id` belong to the same session. Agents send the id of the
    conversation in this field. The result does not contain a field that the body already contains.

    Example: {"cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "a"}, ...} returns
    {"prompt_cache_retention": "5m", "prompt_cache_key": "a"}.
    """
    retention = cache_retention(body)
    if retention is None:
        return {}
    fields: Json = {"prompt_cache_retention": retention}
    metadata = body.get("metadata")
    session_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    if isinstance(session_id, str) and len(session_id) <= MAX_CACHE_KEY_LENGTH:
        fields["prompt_cache_key"] = session_id
    return {name: value for name, value in fields.items() if body.get(name) is None}


_TRANSLATED = MessagesRequest.fields_of_frontend() | MessagesRequest.__annotations__.keys()
_TRANSLATED |= CountTokensRequest.__annotations__.keys() | REFUSED_IN_MESSAGES.keys()
"""Fields that are not copied to the chat completion.

The frontend itself evaluates these fields, or they have another name in a chat completion.
"""


def _template_variables(request: CountTokensRequest) -> Json:
    """Convert `thinking` and `output_config.effort` to variables for the chat template.

    A template ignores variables that it does not use. This is intended, because agents send both
    fields to every model. The field chat_template_kwargs takes precedence.

    Examples: `thinking` {"type": "disabled"} returns {"enable_thinking": False, "thinking": False}.
    The effort "max" returns {"reasoning_effort": "high"}.
    """
    variables: Json = {}
    if request.thinking is not None:
        variables |= dict.fromkeys(_SWITCHES, request.thinking.type != "disabled")
    if request.output_config is not None and request.output_config.effort is not None:
        effort = request.output_config.effort
        # Chat templates support "low", "medium" and "high". The efforts "xhigh" and "max" become
        # "high".
        variables["reasoning_effort"] = _SUPPORTED_EFFORTS.get(effort, effort)
    return variables | (request.chat_template_kwargs or {})
