"""Validate the items in the input of a response, and convert them to the stored format.

The accepted forms are those of OpenAI's API reference of November 2026 (ResponseInputItem). Each
converted item has a type and an id, and contains only fields that were validated here. The items
are stored, returned by the route `input_items`, and translated to chat messages.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nereid_client.errors import ApiError, shown
from nereid_client.protocol.refused import AUDIO_PARTS, VIDEO_PARTS

Json = dict[str, Any]
FindItem = Callable[[str], Json | None]
"""The type of a function that returns the stored output item with a given id, or None."""

_ROLES = ("user", "assistant", "system", "developer")
_REMEDIES = {
    **dict.fromkeys(
        AUDIO_PARTS, "Only /v1/chat/completions reads audio. Send a transcript as input_text."
    ),
    **dict.fromkeys(
        VIDEO_PARTS, "Only /v1/chat/completions reads videos. Send frames as input_image."
    ),
    "input_file": "Nereid reads no files. Send the text of the file as input_text.",
}
"""Maps the type of a refused part to sentences with the reason and with an alternative."""
_TEXTS = ("input_text", "output_text", "text")
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
CALL_OF_OUTPUT = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
}
"""Maps the type of an item with the output of a tool to the type of the item with the call."""


def new_id(kind: str) -> str:
    """Return a random id that starts with the item's type, such as "msg_..." for a message."""
    return f"{_ID_PREFIXES.get(kind, 'rs')}_{secrets.token_hex(16)}"


def read_items(given: str | Sequence[Json], find: FindItem) -> list[Json]:
    """Validate the items in the field `input`, and convert each item to the stored format.

    Args:
        given: the value of `input`: a text of the user, or a list of items.
        find: returns the item for an `item_reference`.

    Raises: ApiError 400 that names the wrong field and its value, or 404 if an `item_reference`
        names an item that is not stored.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"input[{at}]", find) for at, item in enumerate(given)]


def ids_of_references(given: str | Sequence[Json]) -> list[str]:
    """Return the ids of the stored items to which the field `input` refers.

    Ids that are not strings are skipped. Example: [{"type": "item_reference", "id": "msg_1"}]
    returns ["msg_1"].
    """
    if isinstance(given, str):
        return []
    ids = [item.get("id") for item in given if _is_reference(item)]
    return [item_id for item_id in ids if isinstance(item_id, str)]


def with_unique_ids(items: Sequence[Json]) -> list[Json]:
    """Return the items with unique ids. If two items have the same id, the second gets a new id.

    An item occurs twice in a conversation if a client sends the output of the previous response as
    input again. Ids must be unique, because a client that reads the items page by page sends the id
    of the last item on a page to get the next page.
    """
    ids: set[str] = set()
    unique = []
    for item in items:
        if item["id"] in ids:
            item = {**item, "id": new_id(item["type"])}
        ids.add(item["id"])
        unique.append(item)
    return unique


def check_calls(context: Sequence[Json], items: Sequence[Json]) -> None:
    """Check that each tool output comes after a call with the same `call_id`.

    The output of a function must follow a call of a function, and the output of a custom tool must
    follow a call of a custom tool.

    Args:
        context: the items of the earlier responses.
        items: the items of this request, as returned by `read_items`.

    Raises: ApiError 400.
    """
    call_types = frozenset(CALL_OF_OUTPUT.values())
    calls = {(item["type"], item["call_id"]) for item in context if item["type"] in call_types}
    for at, item in enumerate(items):
        if item["type"] in call_types:
            calls.add((item["type"], item["call_id"]))
            continue
        call_type = CALL_OF_OUTPUT.get(item["type"])
        if call_type is not None and (call_type, item["call_id"]) not in calls:
            raise _wrong(
                f"input[{at}].call_id",
                f"the call_id of an earlier {call_type}",
                item["call_id"],
                f"Send the {call_type} too, or previous_response_id.",
            )


def _wrong(place: str, requirement: str, value: object, remedy: str = "") -> ApiError:
    """Return an ApiError 400 for a wrong value inside the field `input`.

    Example of a message: 'input[0].role must be one of user, assistant, but the request has "tool"'
    """
    message = f"{place} must be {requirement}, but the request has {shown(value)}"
    return ApiError(400, f"{message}. {remedy}" if remedy else message, param=place)


def _item(item: Mapping[str, Any], place: str, find: FindItem) -> Json:
    """Convert one item of the field `input` to the format in which items are stored.

    Example: {"role": "user", "content": "Hi"} returns {"id": "msg_...", "type": "message",
    "role": "user", "status": "completed", "content": [{"type": "input_text", "text": "Hi"}]}.
    """
    if _is_reference(item):
        return _referenced(item, place, find)
    kind = item.get("type")
    if not kind and "role" in item:
        kind = "message"  # OpenAI's API allows messages without a type
    if not isinstance(kind, str) or kind not in _READERS:
        raise _wrong(f"{place}.type", f"one of {', '.join(_READERS)}, item_reference", kind)
    has_id = item.get("id") is not None
    item_id = _string(item, "id", place) if has_id else new_id(kind)
    read_fields = _READERS[kind]
    return {"id": item_id, "type": kind, **read_fields(item, place)}


def _is_reference(item: Mapping[str, Any]) -> bool:
    """Return whether an item is an `item_reference`. The field `type` of such an item is optional.

    Examples: {"type": "item_reference", "id": "msg_1"} and {"id": "msg_1"} are references.
    """
    kind = item.get("type")
    return kind == "item_reference" or (not kind and item.keys() - {"type"} == {"id"})


def _referenced(item: Mapping[str, Any], place: str, find: FindItem) -> Json:
    """Return the stored item with the id that an `item_reference` contains."""
    item_id = _string(item, "id", place)
    stored_item = find(item_id)
    if stored_item is None:
        raise ApiError(
            404,
            f"{place}.id must be the id of an item of a stored response, but no stored response "
            f"has the item {shown(item_id)}. Send the item itself.",
            param=f"{place}.id",
            code="item_not_found",
        )
    return stored_item


def _message(item: Mapping[str, Any], place: str) -> Json:
    """Return the fields of a message item."""
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(
            f"{place}.role",
            f"one of {', '.join(_ROLES)}",
            role,
            "The output of a tool is an item of the type function_call_output or "
            "custom_tool_call_output.",
        )
    content = _message_content(item.get("content"), role, f"{place}.content")
    return {"role": role, "status": _status(item, place), "content": content}


def _message_content(content: object, role: str, place: str) -> list[Json]:
    """Return the content parts of a message. Only messages of the user may contain images.

    Example: "Hi" and the role "user" return [{"type": "input_text", "text": "Hi"}].
    """
    if role == "user" and isinstance(content, list):
        return [_user_part(part, f"{place}[{at}]") for at, part in enumerate(content)]
    texts = _texts(content, place)
    if role == "assistant":
        fields = {"type": "output_text", "annotations": [], "logprobs": []}
        return [{**fields, "text": text} for text in texts]
    return [{"type": "input_text", "text": text} for text in texts]


def _user_part(part: object, place: str) -> Json:
    """Return one content part of a user's message or of a tool's output: a text or an image.

    Example: {"type": "input_image", "image_url": "data:image/png;base64,iVBO"} is returned with
    "detail": "auto".
    """
    if not isinstance(part, Mapping) or part.get("type") != "input_image":
        return {"type": "input_text", "text": _text(part, place)}
    if part.get("file_id") is not None:
        raise _wrong(f"{place}.file_id", "null", part["file_id"], "Send image_url, a data URL.")
    url = _string(part, "image_url", place)
    return {"type": "input_image", "image_url": url, "detail": part.get("detail") or "auto"}


def _call(item: Mapping[str, Any], place: str) -> Json:
    """Return the fields of a function_call item. The model may have written invalid arguments."""
    arguments = _string(item, "arguments", place, may_be_empty=True)
    return {**_call_names(item, place), "arguments": arguments, "status": _status(item, place)}


def _custom_call(item: Mapping[str, Any], place: str) -> Json:
    """Return the fields of a custom_tool_call item. The input of the tool may be any text."""
    text = _string(item, "input", place, may_be_empty=True)
    return {**_call_names(item, place), "input": text, "status": _status(item, place)}


def _call_names(item: Mapping[str, Any], place: str) -> Json:
    """Return the fields that identify a call and the called tool.

    Example: {"call_id": "a", "name": "read", "namespace": "files"}.
    """
    fields = {
        "call_id": _string(item, "call_id", place),
        "name": _string(item, "name", place),
    }
    if item.get("namespace") is not None:
        fields["namespace"] = _string(item, "namespace", place)
    return fields


def _call_output(item: Mapping[str, Any], place: str) -> Json:
    """Return the fields of a function_call_output or custom_tool_call_output item.

    Example: {"call_id": "a", "output": "5"} returns {"call_id": "a", "output": "5", "status":
    "completed"}.
    """
    output = item.get("output")
    if not isinstance(output, str):  # a list of texts and images, as in a message of the user
        output = _message_content(output, "user", f"{place}.output")
    fields: Json = {
        "call_id": _string(item, "call_id", place),
        "output": output,
        "status": _status(item, place),
    }
    if item.get("name") is not None:
        fields["name"] = _string(item, "name", place)
    return fields


def _reasoning(item: Mapping[str, Any], place: str) -> Json:
    """Return the fields of a reasoning item.

    The field `encrypted_content` is ignored, because only the server that has encrypted this field
    can read it. An agent may send an item with this field if the user has switched from another
    server to Nereid during a conversation.
    """
    content = _text_parts(item.get("content"), f"{place}.content", ("reasoning_text", "text"))
    summary = _text_parts(item.get("summary"), f"{place}.summary", ("summary_text",))
    return {
        "summary": [{"type": "summary_text", "text": text} for text in summary],
        "content": [{"type": "reasoning_text", "text": text} for text in content],
        "status": _status(item, place),
    }


_READERS: dict[str, Callable[[Mapping[str, Any], str], Json]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output,
    "reasoning": _reasoning,
}


def _texts(content: object, place: str) -> list[str]:
    """Convert a string or a list of content parts to a list of texts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _wrong(place, "a string or a list of parts", content)
    return [_text(part, f"{place}[{at}]") for at, part in enumerate(content)]


def _text(part: object, place: str) -> str:
    """Return the text of one content part."""
    if not isinstance(part, Mapping):
        raise _wrong(place, "an object", part)
    kind = part.get("type")
    if kind == "refusal":
        return _string(part, "refusal", place, may_be_empty=True)
    if kind not in _TEXTS:
        remedy = _REMEDIES.get(
            str(kind), "Only messages of the user and outputs of tools may contain images."
        )
        raise _wrong(f"{place}.type", "input_text, output_text, text or refusal", kind, remedy)
    return _string(part, "text", place, may_be_empty=True)


def _text_parts(content: object, place: str, kinds: Sequence[str]) -> list[str]:
    """Return the texts of the parts in a list. If `content` is None, return an empty list.

    Example: [{"type": "text", "text": "a"}] returns ["a"].

    Args:
        content: the list of parts, as the client sent it.
        place: the path of the list in the request body, such as "input[0].content".
        kinds: the accepted types of a part. The error message names only the recommended first one.
    """
    if content is None:
        return []
    if not isinstance(content, list):
        raise _wrong(place, "a list of parts", content)
    texts = []
    for index, part in enumerate(content):
        part_place = f"{place}[{index}]"
        if not isinstance(part, Mapping) or part.get("type") not in kinds:
            raise _wrong(part_place, f"an object with the type {kinds[0]}", part)
        texts.append(_string(part, "text", part_place, may_be_empty=True))
    return texts


def _status(item: Mapping[str, Any], place: str) -> str:
    """Return the field `status` of an item. The default is "completed"."""
    status = item.get("status") or "completed"
    if status not in ("in_progress", "completed", "incomplete"):
        raise _wrong(f"{place}.status", "in_progress, completed or incomplete", status)
    return str(status)


def _string(item: Mapping[str, Any], name: str, place: str, *, may_be_empty: bool = False) -> str:
    """Return the value of a field that must be a string."""
    value = item.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        requirement = "a string" if may_be_empty else "a string that is not empty"
        raise _wrong(f"{place}.{name}", requirement, value)
    return value
