"""Calls as Python writes them, and arguments as an object with bare keys."""

from __future__ import annotations

from nereid_parsers.format import BareKeyArguments, Call, PythonCalls
from nereid_parsers.template.call_texts import CallTexts, FoundCalls, cut, headed
from nereid_parsers.template.difference import Row, row
from nereid_parsers.template.probe import (
    FIRST,
    KEY,
    OTHER_VALUE,
    SECOND,
    VALUE,
)


def read_python(texts: CallTexts) -> FoundCalls | None:
    """`NAME(key="value")`, alone or between brackets."""
    before, rest = cut(texts.one, FIRST)
    suffix, inside = cut(rest, "(")
    if not inside.lstrip().startswith(f"{KEY}=") or suffix.strip(".abcdefghijklmnopqrstuvwxyz"):
        return None
    around = Row(before, "", "", ", ", _behind_paren(rest, VALUE))
    if texts.two:
        before, rest = cut(texts.two, FIRST)
        between, rest = cut(_behind_paren(rest, VALUE), SECOND)
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
    if not closed.strip():
        return FoundCalls("Python calls", (Call(calls, open=opened),), Row("", "", "", "", closed))
    spelled = [Call(calls)]
    if calls.open:  # the section's marks show calls without brackets, too
        spelled.append(Call(PythonCalls("", "", separator, suffix)))
    return FoundCalls("Python calls", tuple(spelled), Row(opened, "", "", "", closed))


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
    calls = headed(around, behind_name[:-1], BareKeyArguments(quote))
    return FoundCalls("bare keys", calls, around)


def _behind_brace(text: str, value: str) -> str:
    return text[text.find("}", text.find(value)) + 1 :]
