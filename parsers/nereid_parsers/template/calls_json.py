"""Calls as JSON: one that holds the name, or a name and then its arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nereid_parsers.format import Call, JsonArguments, JsonArray, JsonObject, Keys, NameIsKey
from nereid_parsers.template.call_texts import CallTexts, FoundCalls, headed
from nereid_parsers.template.difference import Row, row
from nereid_parsers.template.probe import (
    FIRST,
    ID_MARK,
    KEY,
    OTHER_KEY,
    SECOND,
)

_DECODER = json.JSONDecoder(strict=False)


# ---- JSON that holds the name -------------------------------------------------------------------


def read_json(texts: CallTexts) -> FoundCalls | None:
    """`{"name": .., "arguments": ..}`, alone or in an array; `{NAME: {..}}`."""
    found = _json_with(texts.one, FIRST)
    if found is None:
        return None
    start, end, value = found
    keys = _keys(value[0] if isinstance(value, list) else value)
    if isinstance(value, list):
        return _arrays(texts, keys, (start, end))
    if not texts.two:
        around = Row("", texts.one[:start], texts.one[end:], "", "")
        return FoundCalls("JSON", (_object(keys, around),), around)
    first = _json_with(texts.two, FIRST)
    second = _json_with(texts.two, SECOND)
    if first is None or second is None:
        return None
    if first[0] == second[0] and isinstance(first[2], list):  # one call stands alone, two in a list
        around = Row(texts.two[: first[0]], "", "", ", ", texts.two[first[1] :])
        inner = _array(keys, around)
        opened, closed = texts.one[:start], texts.one[end:]
        if inner.row.open.strip() == opened.strip():  # the section's marks, not the call's
            opened = closed = ""
        single = Call(JsonObject(keys), open=opened, close=closed)
        return FoundCalls(inner.form, (*inner.calls, single), inner.row)
    around = row(texts.two[: first[0]], texts.two[first[1] : second[0]], texts.two[second[1] :])
    spelled = [_object(keys, around)]
    if around.item_open.strip() and around.item_close.strip():  # models put several in one, too
        several = Call(JsonArray(keys), open=around.item_open, close=around.item_close)
        spelled.append(several)
    return FoundCalls("JSON", tuple(spelled), around)


def _arrays(texts: CallTexts, keys: Keys | NameIsKey, first: tuple[int, int]) -> FoundCalls:
    """One array of all calls, or an array for each."""
    whole = _json_with(texts.two, FIRST) if texts.two else None
    other = _json_with(texts.two, SECOND) if texts.two else None
    if whole is None or other is None or whole[0] == other[0]:
        around = Row(texts.one[: first[0]], "", "", ", ", texts.one[first[1] :])
        return _array(keys, around)
    around = row(texts.two[: whole[0]], texts.two[whole[1] : other[0]], texts.two[other[1] :])
    call = Call(JsonArray(keys), open=around.item_open, close=around.item_close)
    return FoundCalls("JSON array", (call,), around)


def _object(keys: Keys | NameIsKey, around: Row) -> Call:
    return Call(JsonObject(keys), open=around.item_open, close=around.item_close)


def _array(keys: Keys | NameIsKey, around: Row) -> FoundCalls:
    if around.open.strip() and not around.close.strip():  # the array's end is the section's
        call = Call(JsonArray(keys), open=around.open)
        return FoundCalls("JSON array", (call,), Row("", "", "", "", ""))
    return FoundCalls("JSON array", (Call(JsonArray(keys)),), around)


def _json_with(text: str, name: str) -> tuple[int, int, Any] | None:
    """(start, end, value) of the JSON that holds a call of `name`: an object, or a list of them."""
    limit = text.find(name)
    for start in _starts(text, limit):
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        members = value if isinstance(value, list) else [value]
        if end > limit and any(_names(member, name) for member in members):
            return start, end, value
    return None


def _starts(text: str, limit: int) -> Iterator[int]:
    return (at for at in range(max(limit, 0)) if text[at] in "{[")


def _names(member: object, name: str) -> bool:
    if not isinstance(member, dict):
        return False
    if name in member and isinstance(member[name], dict):
        return True
    return _path(member, lambda value: value == name) is not None


def _path(value: dict[str, Any], wanted: Any) -> tuple[str, ...] | None:  # noqa: ANN401  # a predicate
    for key, inner in value.items():
        if wanted(inner):
            return (key,)
        if isinstance(inner, dict) and (rest := _path(inner, wanted)) is not None:
            return (key, *rest)
    return None


def _keys(member: dict[str, Any]) -> Keys | NameIsKey:
    """Which key of a call's object holds what."""
    name = _path(member, lambda value: value == FIRST)
    if name is None:
        return NameIsKey()
    arguments = _path(member, _are_arguments) or ("arguments",)
    identity = _path(member, lambda value: isinstance(value, str) and ID_MARK in value)
    identity = identity or next(
        ((key,) for key in member if "id" in key.lower().split("_") and (key,) != name), None
    )
    roles = {name[0]: "name", arguments[0]: "arguments"}
    if identity is not None:
        roles.setdefault(identity[0], "id")
    order = tuple(dict.fromkeys(roles[key] for key in member if key in roles))
    extra = tuple(key for key in member if key not in roles)
    nested = name[0] == arguments[0]  # both inside one object
    if order[-1:] == ("id",):  # a constraint cannot make up an id once the arguments are written
        order = order[:-1]
    return Keys(
        ".".join(name), ".".join(arguments),
        id=".".join(identity) if identity else None,
        extra=tuple(dict.fromkeys((*extra, "type"))),
        order=("name", "arguments") if nested else order,
    )  # fmt: skip


def _are_arguments(value: object) -> bool:
    if isinstance(value, str) and KEY in value:  # JSON in a string
        return True
    return isinstance(value, dict) and KEY in value


# ---- a name, then JSON --------------------------------------------------------------------------


def read_json_arguments(texts: CallTexts) -> FoundCalls | None:
    """`NAME{"key": "value"}`, with whatever marks around."""
    first = _arguments_after(texts.one, FIRST)
    if first is None:
        return None
    start, end = first
    name_at = texts.one.find(FIRST)
    between = texts.one[name_at + len(FIRST) : start]
    around = Row("", texts.one[:name_at], texts.one[end:], "", "")
    if texts.two:
        one, other = _arguments_after(texts.two, FIRST), _arguments_after(texts.two, SECOND)
        if one is None or other is None:
            return None
        first_at, second_at = texts.two.find(FIRST), texts.two.find(SECOND)
        around = row(texts.two[:first_at], texts.two[one[1] : second_at], texts.two[other[1] :])
    return FoundCalls("name, then JSON", headed(around, between, JsonArguments()), around)


def _arguments_after(text: str, name: str) -> tuple[int, int] | None:
    key = KEY if name == FIRST else OTHER_KEY
    at = text.find("{", text.find(name))
    if at < 0 or name not in text:
        return None
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return (at, end) if isinstance(value, dict) and key in value else None
