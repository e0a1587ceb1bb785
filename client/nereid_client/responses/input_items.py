"""The input of a response as items: checked, each with a type and an id, in one form.

Shapes: OpenAI's API reference (ResponseInputItem), 2026-11. What comes out is stored, listed by
`input_items`, and translated; so it holds nothing that was not read here.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nereid_client.errors import ApiError, shown

Json = dict[str, Any]
FindItem = Callable[[str], Json | None]
"""The output item of a stored response that has this id."""

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


def new_id(kind: str) -> str:
    """An id for an item of this type."""
    return f"{_PREFIXES.get(kind, 'rs')}_{secrets.token_hex(16)}"


def read_items(given: str | Sequence[Json], find: FindItem) -> list[Json]:
    """The items of `input`, in order, one for each that was sent.

    Args:
        given: a text of the user, or items.
        find: where `item_reference` looks.

    Raises: ApiError 400 that names the item, the field, its value and the remedy; 404 for a
        reference to what is not there.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"input[{at}]", find) for at, item in enumerate(given)]


def check_calls(context: Sequence[Json], items: Sequence[Json]) -> None:
    """Each output of a function belongs to a call before it.

    Args:
        context: what went before, of earlier responses.
        items: what `read_items` gave.

    Raises: ApiError 400.
    """
    calls = {item["call_id"] for item in context if item["type"] == "function_call"}
    for at, item in enumerate(items):
        if item["type"] == "function_call":
            calls.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in calls:
            raise bad(
                f"input[{at}].call_id",
                f"{shown(item['call_id'])} answers no function_call before it; send the call too, "
                "or previous_response_id",
            )


def bad(place: str, reason: str) -> ApiError:
    """A 400 that blames a place in the body."""
    return ApiError(400, f"{place}: {reason}", param=place)


def _item(item: Mapping[str, Any], place: str, find: FindItem) -> Json:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "item_reference":
        return _referenced(item, place, find)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise bad(
            f"{place}.type",
            f"{shown(kind)} is not offered; send {', '.join(_READERS)} or item_reference",
        )
    given = _string(item, "id", place) if item.get("id") is not None else new_id(str(kind))
    return {"id": given, "type": kind, **read(item, place)}


def _referenced(item: Mapping[str, Any], place: str, find: FindItem) -> Json:
    name = _string(item, "id", place)
    found = find(name)
    if found is None:
        raise ApiError(
            404,
            f"{place}.id: there is no item {shown(name)} in a stored response; send the item "
            "itself",
            param=f"{place}.id",
            code="item_not_found",
        )
    return found


def _message(item: Mapping[str, Any], place: str) -> Json:
    role = item.get("role")
    if role not in _ROLES:
        raise bad(
            f"{place}.role",
            f"must be one of {', '.join(_ROLES)}, got {shown(role)}; what a function gave back is "
            "an item of type function_call_output",
        )
    part: Json = {"type": "input_text"}
    if role == "assistant":
        part = {"type": "output_text", "annotations": [], "logprobs": []}
    texts = _texts(item.get("content"), f"{place}.content")
    content = [part | {"text": text} for text in texts]
    return {"role": role, "status": _status(item, place), "content": content}


def _call(item: Mapping[str, Any], place: str) -> Json:
    arguments = _string(item, "arguments", place, may_be_empty=True)
    status = _status(item, place)
    if arguments and status == "completed":
        try:
            json.loads(arguments)
        except ValueError as error:
            raise bad(f"{place}.arguments", f"must be JSON: {error}") from None
        except RecursionError:
            raise bad(f"{place}.arguments", "is nested too deeply") from None
    read = {
        "call_id": _string(item, "call_id", place),
        "name": _string(item, "name", place),
        "arguments": arguments,
        "status": status,
    }
    if item.get("namespace") is not None:
        read["namespace"] = _string(item, "namespace", place)
    return read


def _call_output(item: Mapping[str, Any], place: str) -> Json:
    output = item.get("output")
    texts = _texts(output, f"{place}.output")
    parts = [{"type": "input_text", "text": text} for text in texts]
    read: Json = {
        "call_id": _string(item, "call_id", place),
        "output": output if isinstance(output, str) else parts,
        "status": _status(item, place),
    }
    if item.get("name") is not None:
        read["name"] = _string(item, "name", place)
    return read


def _reasoning(item: Mapping[str, Any], place: str) -> Json:
    content = _text_parts(item.get("content"), f"{place}.content", ("reasoning_text", "text"))
    summary = _text_parts(item.get("summary"), f"{place}.summary", ("summary_text",))
    if item.get("encrypted_content") is not None and not content and not summary:
        raise bad(
            f"{place}.encrypted_content",
            "was made elsewhere and cannot be read here, where reasoning is in content; leave the "
            "item out",
        )
    return {
        "summary": [{"type": "summary_text", "text": text} for text in summary],
        "content": [{"type": "reasoning_text", "text": text} for text in content],
        "status": _status(item, place),
    }


_READERS: dict[str, Callable[[Mapping[str, Any], str], Json]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}


def _texts(content: object, place: str) -> list[str]:
    """The texts of content that is a string or parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad(place, f"must be a string or a list of parts, got {shown(content)}")
    return [_text(part, f"{place}[{at}]") for at, part in enumerate(content)]


def _text(part: object, place: str) -> str:
    if not isinstance(part, Mapping):
        raise bad(place, f"must be an object, got {shown(part)}")
    kind = part.get("type")
    if kind == "refusal":
        return _string(part, "refusal", place, may_be_empty=True)
    if kind not in _TEXTS:
        raise bad(f"{place}.type", f"the served model reads text only, got {shown(kind)}")
    return _string(part, "text", place, may_be_empty=True)


def _text_parts(content: object, place: str, kinds: Sequence[str]) -> list[str]:
    if content is None:
        return []
    if not isinstance(content, list):
        raise bad(place, f"must be a list of parts, got {shown(content)}")
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in kinds:
            raise bad(f"{place}[{at}]", f"must be a part of type {kinds[0]}, got {shown(part)}")
    return [
        _string(part, "text", f"{place}[{at}]", may_be_empty=True)
        for at, part in enumerate(content)
    ]


def _status(item: Mapping[str, Any], place: str) -> str:
    status = item.get("status") or "completed"
    if status not in ("in_progress", "completed", "incomplete"):
        raise bad(
            f"{place}.status",
            f"must be in_progress, completed or incomplete, got {shown(status)}",
        )
    return str(status)


def _string(item: Mapping[str, Any], name: str, place: str, *, may_be_empty: bool = False) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise bad(f"{place}.{name}", f"must be a string, got {shown(value)}")
    return value
