# SPDX-License-Identifier: Apache-2.0
"""Reads the messages of a chat request, and converts the messages for the chat template."""

import itertools
import json
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.request_field_checks import shown
from nereid_backend.serving.tokenizer.request_limits import RequestLimits
from nereid_backend.serving.tokenizer.surrogate_pairs import has_surrogates
from nereid_backend.vision.refused_parts import refused_part

# One of these content parts replaces each image, video or audio file in a message before the
# message is rendered.
IMAGE_PLACEHOLDER = {"type": "image"}
VIDEO_PLACEHOLDER = {"type": "video"}
AUDIO_PLACEHOLDER = {"type": "audio"}
_PLACEHOLDERS = (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, AUDIO_PLACEHOLDER)
# A content part with text has a type and a field that contains the text. This dict maps the type to
# the name of the field. The types input_text and output_text come from the Responses API, and vLLM
# accepts them in a chat.
_TEXT_FIELDS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
_EXAMPLE_OF_PART = 'Send parts such as {"type": "text", "text": "..."}.'
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# In OpenAI's API, a message with one of these roles must have content, and the content must not be
# null. Other messages need no content: a message of the assistant may consist of tool calls alone,
# and a tool may return nothing.
_ROLES_WITH_CONTENT = ("system", "developer", "user")


def read_messages(body: Mapping[str, Any], limits: RequestLimits) -> list[dict[str, Any]]:
    """Convert the messages of a chat request to the form that the chat template expects.

    Args:
        body: the chat request.
        limits: the limits on the arguments of a tool call.

    Raises:
        RequestError: the field `messages` is not a list, is empty, or contains a malformed item.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise RequestError(
            "messages: the value must be a list of messages, but the request has "
            f"{shown(messages)}."
        )
    if not messages:
        raise RequestError("messages: the list is empty. Send at least one message.")
    converted = [_read_message(message, index, limits) for index, message in enumerate(messages)]
    return _with_names_of_functions(_with_results_in_order(_with_ids_of_calls(converted)))


def _with_ids_of_calls(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add an id to each tool call that has none, and to the result of such a call.

    Some chat templates fail without ids, but OpenAI's older field function_call and clients of
    other servers have none. The results without an id belong to the calls without an id of the last
    message with calls, in the order of these calls.

    Example: a call without an id in the second message, and the next result, get "call_1_0".
    """
    ids_for_results: deque[str] = deque()  # the added ids whose calls have no result yet
    completed = []
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            calls, added_ids = _add_call_ids(message["tool_calls"], index)
            ids_for_results = deque(added_ids)
            message = {**message, "tool_calls": calls}
        is_result = message["role"] in ("tool", "function")
        if is_result and not message.get("tool_call_id") and ids_for_results:
            message = {**message, "tool_call_id": ids_for_results.popleft()}
        completed.append(message)
    return completed


def _add_call_ids(
    calls: Iterable[dict[str, Any]], message_index: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the calls of a message with an id for each call, and the list of the added ids.

    >>> _add_call_ids([{"id": "a"}, {"name": "f"}], message_index=3)
    ([{'id': 'a'}, {'name': 'f', 'id': 'call_3_1'}], ['call_3_1'])
    """
    completed_calls = []
    added_ids = []
    for call_index, call in enumerate(calls):
        if not call.get("id"):
            call = {**call, "id": f"call_{message_index}_{call_index}"}
            added_ids.append(call["id"])
        completed_calls.append(call)
    return completed_calls, added_ids


def _with_results_in_order(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the results of the tool calls of each message in the order of these calls.

    In OpenAI's API, the results may have any order, because each result contains the id of its
    call. Many chat templates do not render the ids, so the model assigns the results to the calls
    by their order.

    Example: after calls with the ids "a" and "b", the results of "b" and "a" are swapped.
    """
    ordered: list[dict[str, Any]] = []
    for is_result, group in itertools.groupby(messages, lambda each: each["role"] == "tool"):
        if is_result and ordered:
            ordered += _in_order_of_calls(list(group), ordered[-1].get("tool_calls") or [])
        else:
            ordered += group
    return ordered


def _in_order_of_calls(
    results: list[dict[str, Any]], calls: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the results of tool calls in the order of `calls`.

    The results are returned unchanged if the id of a call is missing, unknown or occurs twice. They
    are also returned unchanged if a result has images, because the images of a request are stored
    in the order of its messages.
    """
    call_ids = [call.get("id") for call in calls]
    result_ids = [result.get("tool_call_id") for result in results]
    if not all(isinstance(each, str) for each in (*call_ids, *result_ids)):
        return results
    occurs_twice = len(set(call_ids)) < len(call_ids) or len(set(result_ids)) < len(result_ids)
    is_unknown = not set(result_ids) <= set(call_ids)
    has_images = any(isinstance(result["content"], list) for result in results)
    if occurs_twice or is_unknown or has_images:
        return results
    positions = {call_id: position for position, call_id in enumerate(call_ids)}
    return sorted(results, key=lambda result: positions[result["tool_call_id"]])


def _with_names_of_functions(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the name of the called function to each message that contains the result of a tool.

    Some chat templates render this name, but in OpenAI's API the message contains only the id of
    the tool call. A name that the client has sent is not changed.

    Example: after a call of `f` with the id "a", the message `{"role": "tool", "tool_call_id": "a",
    "content": "5"}` also has `"name": "f"`.
    """
    names: dict[str, str] = {}  # maps the id of each tool call to the name of the function
    named = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and message.get("name") is None and isinstance(call_id, str):
            message = {**message, "name": names.get(call_id)}
        named.append(message)
    return named


def as_parts(content: Any) -> Any:  # noqa: ANN401 - the content of a message
    """Return the content of a message as a list of parts.

    Example: "Hi" becomes `[{"type": "text", "text": "Hi"}]`. Any other content is not changed.
    """
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _read_message(message: Any, index: int, limits: RequestLimits) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Convert a message for the chat template.

    The texts of several parts are joined, and the arguments of tool calls are parsed.

    Example: `{"role": "user", "content": [{"type": "text", "text": "Hi"}]}` becomes
    `{"role": "user", "content": "Hi"}`.
    """
    _check_message(message, index)
    converted = {**_with_thinking_as_reasoning(message, index)}
    content = converted.get("content")
    if content is None and isinstance(converted.get("refusal"), str):
        content = converted["refusal"]  # OpenAI's models write a refusal instead of the content
    converted["content"] = _read_content(content, index)
    calls = _read_tool_calls(converted, index, limits)
    if calls:
        converted["tool_calls"] = calls
    else:
        # Some chat templates fail if the list of tool calls is empty.
        converted.pop("tool_calls", None)
    return converted


def _read_tool_calls(
    message: Mapping[str, Any], index: int, limits: RequestLimits
) -> list[dict[str, Any]]:
    """Return the tool calls of the message at `index`, with parsed arguments.

    In OpenAI's older API, the field function_call contains the only call of a message.
    """
    calls = message.get("tool_calls")
    if not calls and message.get("function_call") is not None:
        calls = [{"type": "function", "function": message["function_call"]}]
    if not calls:
        return []
    if not isinstance(calls, list):
        raise RequestError(
            f"messages: the tool_calls of item {index} must be a list, but the request has "
            f"{shown(calls)}."
        )
    return [_read_tool_call(call, index, limits) for call in calls]


def _with_thinking_as_reasoning(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Move content parts of the type "thinking" to the reasoning of an assistant's message.

    Clients that switch from the APIs of Anthropic or Mistral send such parts, and vLLM accepts
    them. Parts of the type "redacted_thinking" are removed, because they are encrypted.

    Example: the content `[{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Hi"}]`
    becomes `[{"type": "text", "text": "Hi"}]`, and "Hm" becomes the reasoning.
    """
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, list):
        return message
    others: list[Any] = []
    reasoning = ""
    for part in content:
        part_type = part.get("type") if isinstance(part, dict) else None
        if part_type == "thinking":
            # The thinking is a string or, in Mistral's API, a list of text parts.
            thinking = part.get("thinking") or ""
            texts = thinking if isinstance(thinking, list) else [thinking]
            reasoning += "".join(_read_text_part(text, index) for text in texts)
        elif part_type != "redacted_thinking":
            others.append(part)
    if not reasoning:
        return {**message, "content": others}
    # Some chat templates read the field `reasoning`, others read `reasoning_content`. Fields that
    # the message already has take precedence.
    fields = {"reasoning": reasoning, "reasoning_content": reasoning}
    return {**fields, **message, "content": others}


def _check_message(message: Any, index: int) -> None:  # noqa: ANN401 - JSON
    """Raise a RequestError if a message has no valid role, or lacks content that its role needs."""
    if not isinstance(message, dict):
        raise RequestError(f"messages: item {index} must be an object, but it is {shown(message)}.")
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"messages: the role of item {index} must be one of {', '.join(_ROLES)}, but the "
            f"request has {shown(role)}."
        )
    if message.get("content") is None and role in _ROLES_WITH_CONTENT:
        raise RequestError(
            f"messages: the content of item {index} is missing or null, but a message of the role "
            f"{role} must have content. Send a string or a list of content parts."
        )


def _read_content(content: Any, index: int) -> str | list[dict[str, Any]]:  # noqa: ANN401 - JSON
    """Convert the content of the message at position `index` for the chat template.

    Text parts are joined to one text. Exception: if the content has images, its parts are not
    joined, because the order of the texts and images matters. The function `take_media` has
    already replaced each image by a placeholder, such as `{"type": "image"}`.

    Examples: None becomes "", and `[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]`
    becomes "ab".
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"messages: the content of item {index} must be a string or a list of text parts, but "
            f"the request has {shown(content)}."
        )
    has_placeholder = any(part in _PLACEHOLDERS for part in content)
    if not has_placeholder:
        return "".join(_read_text_part(part, index) for part in content)
    return [
        part if part in _PLACEHOLDERS else {"type": "text", "text": _read_text_part(part, index)}
        for part in content
    ]


def _read_text_part(part: Any, index: int) -> str:  # noqa: ANN401 - any JSON value
    """Return the text of one content part of the message at position `index`.

    Examples: `{"type": "text", "text": "Hi"}` returns "Hi", and `{"type": "refusal", "refusal":
    "No."}` returns "No." A part can also be a string, as in vLLM's API.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError(
            f"messages: item {index} has the content part {shown(part)}, which is not an object. "
            f"{_EXAMPLE_OF_PART}"
        )
    field = _text_field(part)
    text = None if field is None else part.get(field)
    if not isinstance(text, str):
        raise _no_text_error(part, index)
    return text


def _text_field(part: dict[str, Any]) -> str | None:
    """Return the name of the field that contains the text of a part. None if there is no text."""
    part_type = part.get("type")
    return _TEXT_FIELDS.get(part_type) if isinstance(part_type, str) else None


def _no_text_error(part: dict[str, Any], index: int) -> RequestError:
    """Return the error for a content part that has no text.

    There are three cases:
    - The server knows the type of the part, such as "file", but refuses this type.
    - The part has a type with text, such as "text", but its text is not a string.
    - The type is unknown or missing.
    """
    item_has_part = f"messages: item {index} has a content part"
    type_and_reason = refused_part(part)
    if type_and_reason is not None:
        refused_type, reason = type_and_reason
        return RequestError(f"{item_has_part} of type {shown(refused_type)}, but {reason}")
    part_type = part.get("type")
    text_field = _text_field(part)
    if text_field is not None:
        return RequestError(
            f"{item_has_part} of type {shown(part_type)} whose field {text_field} must be a "
            f"string, but the request has {shown(part.get(text_field))}."
        )
    with_type = "without the field type" if part_type is None else f"of type {shown(part_type)}"
    return RequestError(
        f"{item_has_part} {with_type}, but this server supports only parts with text, images, "
        f"videos or audio. {_EXAMPLE_OF_PART}"
    )


def _read_tool_call(call: Any, index: int, limits: RequestLimits) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Convert a tool call of a chat message, so that the arguments of the call are an object.

    In the API, the arguments are JSON text, but chat templates expect an object. Example: the
    arguments `'{"city": "Oslo"}'` become `{"city": "Oslo"}`. A call without a type gets the type
    "function", because some chat templates read the type.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"messages: each tool call of item {index} must have function.name, but one call is "
            f"{shown(call)}."
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parse_arguments(arguments, index, limits)
    call_type = call.get("type") or "function"
    return {**call, "type": call_type, "function": {**function, "arguments": arguments}}


def _parse_arguments(text: str, index: int, limits: RequestLimits) -> dict[str, Any]:
    """Parse the arguments (JSON text) of a tool call in the message at position `index`.

    If the arguments are not a JSON object, or contain half of a surrogate pair, return an object
    that contains their text, as the frontend does for Anthropic's API. A model has written the
    arguments, for example until it reached max_tokens, and agents send them back in each later
    request of the conversation. An error would therefore end the conversation.

    The limits are checked before and after parsing. A short JSON text can contain very many values
    or very deeply nested values, and such values would need too much memory.

    Examples: `{"city": "Oslo"}` returns `{"city": "Oslo"}`, `null` returns `{}`, and `{"city": `
    returns `{"unparsed_arguments": '{"city": '}`.

    Raises:
        RequestError: the text exceeds a limit.
    """
    field = f"messages[{index}].tool_calls.function.arguments"
    limits.check_json(field, text)
    try:
        # `strict=False` accepts line breaks in strings, because models sometimes write a line break
        # instead of the escape sequence \n.
        arguments = json.loads(text, strict=False) if text.strip() else {}
    except ValueError:
        return {"unparsed_arguments": text}
    except RecursionError:
        raise limits.depth_error(field) from None
    limits.check_values_and_depth({field: arguments})
    if arguments is None:
        return {}
    is_valid = isinstance(arguments, dict) and not has_surrogates(text, arguments)
    return arguments if is_valid else {"unparsed_arguments": text}
