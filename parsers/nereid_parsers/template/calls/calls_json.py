"""Infer the format of tool calls that are written as JSON.

There are two forms. In `{"name": "f", "arguments": {"a": 1}}`, the JSON contains the function's
name. In `f{"a": 1}`, the name precedes the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from nereid_parsers.format import Call, JsonArguments, JsonArray, JsonObject, Keys, NameIsKey
from nereid_parsers.template.calls.call_texts import CallFormat, CallTexts, calls_with_head
from nereid_parsers.template.conversation import FIRST_KEY, FIRST_TOOL, SECOND_KEY, SECOND_TOOL
from nereid_parsers.template.difference import ListMarkup, list_markup
from nereid_parsers.template.probe import ID_MARK

_DECODER = json.JSONDecoder(strict=False)


class _JsonSpan(NamedTuple):
    """A JSON value in a text, with the indices at which the value starts and ends."""

    start: int
    end: int
    value: Any


# ---- JSON that contains the name ----------------------------------------------------------------


def read_json(texts: CallTexts) -> CallFormat | None:
    """Infer the format of tool calls that are JSON objects, which may be in a JSON array.

    Return None if the text of one tool call contains no JSON with the function's name. Example: the
    two tool calls

        <call>{"name": "f", "arguments": {"a": 1}}</call>
        <call>{"name": "g", "arguments": {"b": 2}}</call>

    are two objects with the keys `name` and `arguments`, each between `<call>` and `</call>`.

    Args:
        texts: The rendered tool calls. `texts.two_calls` is "" if the template allows only one tool
            call in a message.
    """
    single = _find_json_call(texts.one_call, FIRST_TOOL)
    if single is None:
        return None
    if isinstance(single.value, list):  # `[{"name": "f", ..}]`
        keys = _infer_keys(single.value[0])
        return _read_arrays(texts, keys, single)
    keys = _infer_keys(single.value)
    if texts.two_calls:
        return _read_two_objects(texts, keys, single)
    markup = ListMarkup(
        item_open=texts.one_call[: single.start], item_close=texts.one_call[single.end :]
    )
    return CallFormat("JSON", (_call(JsonObject(keys), markup),), markup)


def _read_two_objects(
    texts: CallTexts, keys: Keys | NameIsKey, single: _JsonSpan
) -> CallFormat | None:
    """Infer the format of tool calls that are JSON objects, by comparing two calls of one message.

    Example: the two tool calls `<call>{..}</call>, <call>{..}</call>` are objects between `<call>`
    and `</call>`, with the separator ", ". Return None if the JSON of one of the two tool calls is
    not found.

    Args:
        texts: The renderings of tool calls.
        keys: The keys of the name and the arguments in the object.
        single: The object in a message with only one tool call.
    """
    first = _find_json_call(texts.two_calls, FIRST_TOOL)
    second = _find_json_call(texts.two_calls, SECOND_TOOL)
    if first is None or second is None:
        return None
    is_one_array = first.start == second.start and isinstance(first.value, list)
    if is_one_array:
        # The template writes two calls as one array, but a single call as an object.
        return _read_object_or_array(texts, keys, single, array_span=first)
    markup = _markup_of_two(texts.two_calls, first, second)
    object_call = _call(JsonObject(keys), markup)
    has_both_markers = bool(markup.item_open.strip() and markup.item_close.strip())
    if not has_both_markers:
        return CallFormat("JSON", (object_call,), markup)
    # Some models write an array of several tool calls between the markers of one tool call.
    array_call = _call(JsonArray(keys), markup)
    return CallFormat("JSON", (object_call, array_call), markup)


def _read_object_or_array(
    texts: CallTexts, keys: Keys | NameIsKey, object_span: _JsonSpan, array_span: _JsonSpan
) -> CallFormat:
    """Infer the format of a template that writes one call as an object, and two calls as an array.

    Example: one tool call is written as `<call>{..}</call>`, and two tool calls are written as
    `<call>[{..}, {..}]</call>`. The result declares two forms of a tool call: the array and the
    object.

    Args:
        texts: The renderings of tool calls.
        keys: The keys of the name and the arguments in an object.
        object_span: The object in `texts.one_call`.
        array_span: The array in `texts.two_calls`.
    """
    array_format = _read_one_array(texts.two_calls, keys, array_span)
    opening = texts.one_call[: object_span.start]
    closing = texts.one_call[object_span.end :]
    if opening.strip() == array_format.markup.open.strip():
        # The same marker precedes the object and the array. The markup of the array already
        # contains this marker, so the declaration of the object has no marker.
        object_call = Call(JsonObject(keys))
    else:
        object_call = Call(JsonObject(keys), open=opening, close=closing)
    return CallFormat(array_format.form, (*array_format.calls, object_call), array_format.markup)


def _read_arrays(texts: CallTexts, keys: Keys | NameIsKey, single: _JsonSpan) -> CallFormat:
    """Infer the format of tool calls in JSON arrays.

    A template writes one array that contains all tool calls, or an array for each tool call.
    Example: `<call>[{..}]</call><call>[{..}]</call>` has an array for each tool call.

    Args:
        texts: The renderings of tool calls.
        keys: The keys of the name and the arguments in an object of the array.
        single: The array in a message with only one tool call.
    """
    first = _find_json_call(texts.two_calls, FIRST_TOOL)
    second = _find_json_call(texts.two_calls, SECOND_TOOL)
    if first is None or second is None:  # The template renders only one tool call.
        return _read_one_array(texts.one_call, keys, single)
    is_one_array = first.start == second.start
    if is_one_array:
        return _read_one_array(texts.one_call, keys, single)
    markup = _markup_of_two(texts.two_calls, first, second)
    return CallFormat("JSON array", (_call(JsonArray(keys), markup),), markup)


def _read_one_array(text: str, keys: Keys | NameIsKey, array: _JsonSpan) -> CallFormat:
    """Return the format of tool calls that are the members of one JSON array.

    A section is the list of all tool calls with its markers. Example: `<calls>[{..}, {..}]</calls>`
    is a section between `<calls>` and `</calls>`, but `[TOOL_CALLS][{..}, {..}]` is declared as a
    tool call that `[TOOL_CALLS]` opens.

    Args:
        text: A rendering of tool calls.
        keys: The keys of the name and the arguments in an object of the array.
        array: The array in `text`.
    """
    opening = text[: array.start]
    closing = text[array.end :]
    has_only_opening = bool(opening.strip()) and not closing.strip()
    if has_only_opening:
        # The array has no closing marker, but a declared section needs one. So `opening` is
        # declared as the opening marker of a tool call.
        call = Call(JsonArray(keys), open=opening)
        return CallFormat("JSON array", (call,), ListMarkup())
    markup = ListMarkup(open=opening, separator=", ", close=closing)
    return CallFormat("JSON array", (Call(JsonArray(keys)),), markup)


def _markup_of_two(text: str, first: _JsonSpan, second: _JsonSpan) -> ListMarkup:
    """Return the markup around the JSON of two tool calls.

    Example: `<c>{..}</c>, <c>{..}</c>` has `item_open` "<c>", `item_close` "</c>" and `separator`
    ", ".
    """
    return list_markup(
        before=text[: first.start],
        between=text[first.end : second.start],
        after=text[second.end :],
    )


def _call(body: JsonObject | JsonArray, markup: ListMarkup) -> Call:
    """Declare a tool call with the markers `item_open` and `item_close` of `markup`."""
    return Call(body, open=markup.item_open, close=markup.item_close)


def _find_json_call(text: str, name: str) -> _JsonSpan | None:
    """Find the first JSON object or array that contains a tool call with the name `name`.

    >>> _find_json_call('<call>{"name": "f"}</call>', "f")
    _JsonSpan(start=6, end=19, value={'name': 'f'})
    """
    name_start = text.find(name)
    # A JSON value that contains the name starts with a bracket. The bracket precedes the name.
    possible_starts = [index for index in range(name_start) if text[index] in "{["]
    for start in possible_starts:
        span = _decode_json(text, start)
        if span is None or span.end <= name_start:
            continue  # This text is not JSON, or the name is not inside the JSON value.
        members = span.value if isinstance(span.value, list) else [span.value]
        if any(_is_call(member, name) for member in members):
            return span
    return None


def _decode_json(text: str, start: int) -> _JsonSpan | None:
    """Decode the JSON value that starts at `start`. Return None if the text there is not JSON.

    >>> _decode_json('<call>{"a": 1}</call>', 6)
    _JsonSpan(start=6, end=14, value={'a': 1})
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return _JsonSpan(start, end, value)


def _is_call(member: object, name: str) -> bool:
    """Return whether a JSON value is an object that contains `name` as a string or as a key."""
    if not isinstance(member, dict):
        return False
    if isinstance(member.get(name), dict):
        return True
    return _find_path(member, lambda value: value == name) is not None


def _find_path(
    value: dict[str, Any], is_wanted: Callable[[object], bool]
) -> tuple[str, ...] | None:
    """Return the keys that lead to the first value for which `is_wanted` returns True.

    The function also searches the inner objects of the JSON object `value`. It returns None if it
    finds no value.

    >>> _find_path({"id": 1, "function": {"name": "f"}}, lambda value: value == "f")
    ('function', 'name')
    """
    for key, member in value.items():
        if is_wanted(member):
            return (key,)
        path_in_member = _find_path(member, is_wanted) if isinstance(member, dict) else None
        if path_in_member is not None:
            return (key, *path_in_member)
    return None


def _infer_keys(call: dict[str, Any]) -> Keys | NameIsKey:
    """Find the keys of the name, the arguments and the id in the JSON object of a tool call.

    The object is a rendered tool call with a known name and argument. Example:
    `{"function": "zqFirstTool", "args": {"zqKeyOne": ..}}` gives
    `Keys(name="function", arguments="args")`, and `{"zqFirstTool": {..}}` gives `NameIsKey()`.
    """
    name_path = _find_path(call, lambda value: value == FIRST_TOOL)
    if name_path is None:
        return NameIsKey()
    arguments_path = _find_path(call, _has_first_argument) or ("arguments",)
    id_path = _find_id_path(call, name_path)
    # The value of an outer key may be an inner object that contains the name, the arguments or the
    # id.
    name_key = name_path[0]
    arguments_key = arguments_path[0]
    id_key = None if id_path is None else id_path[0]
    other_keys = [key for key in call if key not in (name_key, arguments_key, id_key)]
    return Keys(
        name=".".join(name_path),
        arguments=".".join(arguments_path),
        id=".".join(id_path) if id_path else None,
        # Models may add the key "type" even if the template does not write this key.
        extra=tuple(dict.fromkeys((*other_keys, "type"))),
        order=_order_of_members(call, name_key, arguments_key, id_key),
    )


def _order_of_members(
    call: dict[str, Any], name_key: str, arguments_key: str, id_key: str | None
) -> tuple[str, ...]:
    """Return the order of the name, the arguments and the id in the JSON object of a tool call.

    Constrained output uses this order. If the id is the last member, the id is omitted, because a
    constraint cannot choose an id after the arguments.

    >>> call = {"function": "f", "args": {}, "call_id": "1"}
    >>> _order_of_members(call, "function", "args", "call_id")
    ('name', 'arguments')

    Args:
        call: The JSON object.
        name_key: The key of the name, or of an inner object that contains the name.
        arguments_key: The key of the arguments, or of an inner object that contains them.
        id_key: The key of the id, or of an inner object that contains the id. None if there is no
            id.
    """
    if name_key == arguments_key:  # One inner object contains the name and the arguments.
        return ("name", "arguments")
    member_by_key = {id_key: "id", name_key: "name", arguments_key: "arguments"}
    order = [member_by_key[key] for key in call if key in member_by_key]
    if order and order[-1] == "id":
        order.pop()
    return tuple(order)


def _find_id_path(call: dict[str, Any], name_path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the keys that lead to the tool call's id, or None if the object has no id.

    `call` is the JSON object of a rendered tool call. In a rendering, the character ID_MARK
    replaces the id. A value is an id if it contains this character, or if its key has a name such
    as `call_id`. The key of the function's name, `name_path`, is not the key of an id.

    >>> _find_id_path({"name": "f", "call_id": 1}, ("name",))
    ('call_id',)
    """
    path = _find_path(call, lambda value: isinstance(value, str) and ID_MARK in value)
    if path is not None:
        return path
    for key in call:
        has_id_in_name = "id" in key.lower().split("_")
        if has_id_in_name and (key,) != name_path:
            return (key,)
    return None


def _has_first_argument(value: object) -> bool:
    """Return whether the key `FIRST_KEY` occurs in `value`, which may be an object or JSON text."""
    return isinstance(value, str | dict) and FIRST_KEY in value


# ---- a name, then JSON --------------------------------------------------------------------------


def read_json_arguments(texts: CallTexts) -> CallFormat | None:
    """Infer the format of tool calls that consist of a name and JSON, such as `f{"a": 1}`.

    Return None if no JSON follows the name. Example: `<call>f<args>{"a": 1}</call>` has the header
    `{name}<args>` between the markers `<call>` and `</call>`.
    """
    text = texts.one_call
    single = _find_json_arguments(text, FIRST_TOOL, FIRST_KEY)
    if single is None:
        return None
    before_name, _, after_name = text[: single.start].partition(FIRST_TOOL)
    if texts.two_calls:
        markup = _markup_of_two_named(texts.two_calls)
    else:
        markup = ListMarkup(item_open=before_name, item_close=text[single.end :])
    if markup is None:
        return None
    calls = calls_with_head(markup, after_name, JsonArguments())
    return CallFormat("name, then JSON", calls, markup)


def _markup_of_two_named(text: str) -> ListMarkup | None:
    """Return the markup around two tool calls. Each call is a name, followed by JSON.

    Return None if no JSON follows one of the two names. Example: `<c>f{..}</c>, <c>g{..}</c>` has
    `item_open` "<c>", `item_close` "</c>" and `separator` ", ".
    """
    first = _find_json_arguments(text, FIRST_TOOL, FIRST_KEY)
    second = _find_json_arguments(text, SECOND_TOOL, SECOND_KEY)
    if first is None or second is None:
        return None
    return list_markup(
        before=text[: text.find(FIRST_TOOL)],
        between=text[first.end : text.find(SECOND_TOOL)],
        after=text[second.end :],
    )


def _find_json_arguments(text: str, name: str, key: str) -> _JsonSpan | None:
    """Return the first JSON object after a function's name: the arguments of a tool call.

    Return None if no JSON object follows the name, or if the object does not contain `key`.

    >>> _find_json_arguments('f<args>{"a": 1}', "f", "a")
    _JsonSpan(start=7, end=15, value={'a': 1})
    """
    name_start = text.find(name)
    object_start = text.find("{", name_start)
    if name_start < 0 or object_start < 0:
        return None
    span = _decode_json(text, object_start)
    if span is None or key not in span.value:
        return None
    return span
