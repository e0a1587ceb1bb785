"""What one call looks like: from two rendered calls, the parts of a format that say so.

Each reader takes a `CallTexts` and gives a `FoundCalls`, or None if calls are not of its form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nereid_parsers.format import (
    BareKeyArguments,
    Call,
    JsonArguments,
    JsonArray,
    JsonObject,
    Keys,
    NameIsKey,
    NestedTags,
    PythonCalls,
    TaggedArguments,
)
from nereid_parsers.template.difference import MARKER, Row, row
from nereid_parsers.template.probe import (
    FIRST,
    ID_MARK,
    KEY,
    NUMBER_MARK,
    OTHER_KEY,
    OTHER_VALUE,
    SECOND,
    VALUE,
)

NamedBody = JsonArguments | TaggedArguments | BareKeyArguments | NestedTags

_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class CallTexts:
    """Renderings of calls, each from where the calls begin.

    one         one call of one argument.
    arguments   one call of two arguments.
    number      one call whose argument is the number 41.
    two         two calls of one argument each; "" where only one can be made.
    """

    one: str
    arguments: str
    number: str
    two: str


@dataclass(frozen=True, slots=True)
class FoundCalls:
    """Spellings of a call, and what stands around all of them (`row.open`, `.close`)."""

    form: str
    calls: tuple[Call, ...]
    row: Row


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
        single = Row("", texts.one[:start], texts.one[end:], "", "")
        return FoundCalls(inner.form, (*inner.calls, _object(keys, single)), inner.row)
    around = row(texts.two[: first[0]], texts.two[first[1] : second[0]], texts.two[second[1] :])
    return FoundCalls("JSON", (_object(keys, around),), around)


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
    return FoundCalls("name, then JSON", _headed(around, between, JsonArguments()), around)


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


def _headed(around: Row, behind_name: str, body: NamedBody) -> tuple[Call, ...]:
    """Calls that are named by a head: `around.item_open`, NAME, `behind_name`."""
    opened, lead = _split_open(around.item_open)
    if (
        isinstance(body, TaggedArguments)
        and opened.strip()
        and body.open.startswith(opened.strip())
    ):
        opened, lead = "", opened + lead  # the marker opens arguments too, so it ends no arguments
    head = f"{escaped(lead)}{{name}}{escaped(behind_name)}"
    marks = {NUMBER_MARK: "{number}", ID_MARK: "{id}"}
    for mark, slot in marks.items():
        head = head.replace(mark, slot)
    if "functions.{name}:{number}" not in head:
        return (Call(body, open=opened, head=head, close=around.item_close),)
    # The template prints the id that it is given: "functions." was ours, and may be missing.
    identity = "functions.{name}:{number}"
    heads = dict.fromkeys((head, head.replace("functions.{name}", "{name}", 1)))
    heads[head.replace(identity, "{name}", 1)] = None
    ids = [identity, "{name}:{number}", "{id}"]
    return tuple(
        Call(body, open=opened, head=one, close=around.item_close, id=spelled)
        for one, spelled in zip(heads, ids, strict=False)
    )


def _split_open(opened: str) -> tuple[str, str]:
    """(marker before the call, what of the head stands before the name)."""
    match = MARKER.match(opened.lstrip())
    if match is None:
        return "", opened.lstrip() if opened.strip() else ""
    lead = len(opened) - len(opened.lstrip()) + match.end()
    rest = opened[lead:]
    end = lead + len(rest) - len(rest.lstrip())
    return opened[:end], opened[end:]


def escaped(text: str) -> str:
    """Text as a literal of a pattern."""
    return text.replace("{", "{{").replace("}", "}}")


# ---- tagged arguments ---------------------------------------------------------------------------


def read_tagged(texts: CallTexts) -> FoundCalls | None:
    """`NAME <key>KEY</key> <value>VALUE</value>`, strings unquoted."""
    if not _in_order(texts.arguments, FIRST, KEY, VALUE, OTHER_KEY, OTHER_VALUE):
        return None
    before_name, rest = _cut(texts.arguments, FIRST)
    before_key, rest = _cut(rest, KEY)
    before_value, rest = _cut(rest, VALUE)
    between, rest = _cut(rest, OTHER_KEY)
    if KEY in between:  # elements named after the arguments, with no mark before their tags
        return None
    _, behind = _cut(rest, OTHER_VALUE)
    around = Row("", before_name, behind, "", "")
    if texts.two:
        if not _in_order(texts.two, FIRST, KEY, VALUE, SECOND, OTHER_KEY, OTHER_VALUE):
            return None
        before, rest = _cut(texts.two, FIRST)
        _, rest = _cut(rest, VALUE)
        separating, rest = _cut(rest, SECOND)
        _, ending = _cut(rest, OTHER_VALUE)
        around = row(before, separating, ending)
    inner = row(before_key, between, around.item_close)
    values = _value_tags(texts, inner, before_value)
    around = Row(around.open, around.item_open, inner.close, around.separator, around.close)
    return FoundCalls("tagged arguments", _headed(around, inner.open, values), around)


def _value_tags(texts: CallTexts, inner: Row, before_value: str) -> TaggedArguments:
    """How a value is tagged; strings and numbers may be tagged in different words."""
    close = inner.item_close + inner.separator
    opened = escaped(inner.item_open) + "{key}"
    plain = opened + escaped(before_value)
    _, rest = _cut(texts.number, KEY)
    before_number, _ = _cut(rest, "41")
    if before_number == before_value or not before_number:
        return TaggedArguments(plain, close)
    words = _differing_word(before_value, before_number)
    if words is not None:
        lead, text_word, number_word, tail = words
        slot = _slot(text_word, number_word)
        if slot:
            return TaggedArguments(f"{opened}{escaped(lead)}{slot}{escaped(tail)}", close)
    other = TaggedArguments(opened + escaped(before_number), close)
    return TaggedArguments(plain, close, also=(other,))


def _slot(text_word: str, number_word: str) -> str:
    if (text_word, number_word) == ("true", "false"):
        return "{string}"
    return "{type}" if text_word in ("string", "str") else ""


def _differing_word(one: str, other: str) -> tuple[str, str, str, str] | None:
    around = row_of_words(one, other)
    return around if around[1].isalnum() and around[2].isalnum() else None


def row_of_words(one: str, other: str) -> tuple[str, str, str, str]:
    """(common start, what differs in each, common end), cut between words."""
    size = 0
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    while size and one[size - 1].isalnum():
        size -= 1
    end = 0
    while end < min(len(one), len(other)) - size and one[-1 - end] == other[-1 - end]:
        end += 1
    while end and one[len(one) - end].isalnum():
        end -= 1
    tail = one[len(one) - end :]
    return one[:size], one[size : len(one) - end], other[size : len(other) - end], tail


def _in_order(text: str, *words: str) -> bool:
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


def _cut(text: str, word: str) -> tuple[str, str]:
    before, _, behind = text.partition(word)
    return before, behind


# ---- Python calls, bare keys --------------------------------------------------------------------


def read_python(texts: CallTexts) -> FoundCalls | None:
    """`NAME(key="value")`, alone or between brackets."""
    before, rest = _cut(texts.one, FIRST)
    suffix, inside = _cut(rest, "(")
    if not inside.lstrip().startswith(f"{KEY}=") or suffix.strip(".abcdefghijklmnopqrstuvwxyz"):
        return None
    around = Row(before, "", "", ", ", _behind_paren(rest, VALUE))
    if texts.two:
        before, rest = _cut(texts.two, FIRST)
        between, rest = _cut(_behind_paren(rest, VALUE), SECOND)
        around = row(before, between, _behind_paren(rest, OTHER_VALUE))
    opened, closed, separator = around.open + around.item_open, around.close, around.separator
    if around.item_open.strip() or around.item_close.strip():
        call = Call(PythonCalls("", "", "", suffix), around.item_open, close=around.item_close)
        return FoundCalls("Python calls, each marked", (call,), around)
    if opened.rstrip().endswith("[") and closed.lstrip().startswith("]"):
        calls = PythonCalls("[", "]", separator, suffix)
        opened, closed = opened.rstrip()[:-1], closed.lstrip()[1:]
    else:
        calls = PythonCalls("", "", separator, suffix)
    call = Call(calls) if closed.strip() else Call(calls, open=opened)
    return FoundCalls(
        "Python calls", (call,), Row(opened if closed.strip() else "", "", "", "", closed)
    )


def _behind_paren(text: str, value: str) -> str:
    return text[text.find(")", text.find(value)) + 1 :]


def read_bare_keys(texts: CallTexts) -> FoundCalls | None:
    """`NAME{key:<quote>value<quote>}`: unquoted keys, strings between marks of their own."""
    name_end = texts.one.find(FIRST) + len(FIRST)
    key_at = texts.one.find(KEY, name_end)
    behind_name = texts.one[name_end:key_at]
    value_at = texts.one.find(VALUE, key_at)
    mark = texts.one[key_at + len(KEY) : value_at].strip()
    quote = mark[1:].strip()
    if not behind_name.endswith("{") or not mark.startswith(":") or not quote:
        return None
    if not texts.one.startswith(quote, value_at + len(VALUE)):
        return None
    around = Row("", texts.one[: name_end - len(FIRST)], _behind_brace(texts.one, VALUE), "", "")
    if texts.two:
        first_at, second_at = texts.two.find(FIRST), texts.two.find(SECOND)
        end = texts.two.find("}", texts.two.find(VALUE)) + 1
        around = row(
            texts.two[:first_at], texts.two[end:second_at], _behind_brace(texts.two, OTHER_VALUE)
        )
    calls = _headed(around, behind_name[:-1], BareKeyArguments(quote))
    return FoundCalls("bare keys", calls, around)


def _behind_brace(text: str, value: str) -> str:
    return text[text.find("}", text.find(value)) + 1 :]


# ---- elements named after the arguments ---------------------------------------------------------


def read_nested(texts: CallTexts) -> FoundCalls | None:
    """`NAME ~<KEY>VALUE~</KEY>`: elements, each tag behind a mark (`~`)."""
    text = texts.arguments
    if not _in_order(text, FIRST, f"<{KEY}>", VALUE, f"</{KEY}>", OTHER_VALUE):
        return None
    before_name, rest = _cut(text, FIRST)
    before_key, rest = _cut(rest, f"<{KEY}>")
    _, rest = _cut(rest, VALUE)
    mark = _cut(rest, f"</{KEY}>")[0].strip()
    _, behind = _cut(rest, f"</{OTHER_KEY}>")
    around = Row("", before_name, behind, "", "")
    if texts.two:
        before, rest = _cut(texts.two, FIRST)
        _, rest = _cut(rest, f"</{KEY}>")
        between, rest = _cut(rest, SECOND)
        around = row(before, between, _cut(rest, f"</{OTHER_KEY}>")[1])
    around = _mark_first(around, mark)
    between_name_and_key = before_key.removesuffix(mark)
    return FoundCalls(
        "nested elements", _headed(around, between_name_and_key, NestedTags(mark)), around
    )


def _mark_first(around: Row, mark: str) -> Row:
    """The same row with the mark before each tag, not behind the tag before it."""
    if not mark or not around.item_close.endswith(mark):
        return around
    return Row(
        open=around.open.removesuffix(mark),
        item_open=mark + around.item_open,
        item_close=around.item_close.removesuffix(mark),
        separator=around.separator,
        close=mark + around.close,
    )


READERS = (
    read_json, read_json_arguments, read_python, read_bare_keys, read_nested, read_tagged,
)  # fmt: skip
