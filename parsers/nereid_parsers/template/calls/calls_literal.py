"""Infer the format of tool calls that are written like source code.

The forms are Python calls, `f(a="x")`, and objects with unquoted keys, `f{a:<q>x<q>}`.
"""

from __future__ import annotations

import re

from nereid_parsers.format import BareKeyArguments, Call, PythonCalls
from nereid_parsers.template.calls.call_texts import (
    CallFormat,
    CallTexts,
    calls_with_head,
    split_at_words,
)
from nereid_parsers.template.conversation import (
    FIRST_KEY,
    FIRST_TOOL,
    FIRST_VALUE,
    SECOND_TOOL,
    SECOND_VALUE,
)
from nereid_parsers.template.difference import ListMarkup, list_markup

_METHOD_SUFFIX = re.compile(r"[.a-z]*")  # `.call` in `f.call(a="x")`


def read_python(texts: CallTexts) -> CallFormat | None:
    """Infer the format of tool calls in Python syntax, alone or in a list.

    Return None if the tool calls are not in Python syntax. Examples: `<call>f(a="x")</call>` has
    markers around each tool call, and `<calls>[f(a="x"), g(b="y")]</calls>` has markers around all
    calls.
    """
    _, after_name = split_at_words(texts.one_call, FIRST_TOOL)
    suffix, arguments = split_at_words(after_name, "(")
    if not arguments.lstrip().startswith(f"{FIRST_KEY}="):
        return None
    if _METHOD_SUFFIX.fullmatch(suffix) is None:
        return None
    markup = _python_markup(texts)
    if markup.item_open.strip() or markup.item_close.strip():
        body = PythonCalls("", "", "", suffix)
        call = Call(body, open=markup.item_open, close=markup.item_close)
        return CallFormat("Python calls, each marked", (call,), markup)
    return _read_python_section(markup, suffix)


def _read_python_section(markup: ListMarkup, suffix: str) -> CallFormat:
    """Return the format of Python calls that have no markers around each tool call.

    Example: the markup `open` "<calls>[" and `close` "]</calls>" is a section between `<calls>` and
    `</calls>` that contains a list in brackets.
    """
    opening = markup.open + markup.item_open
    closing = markup.close
    bodies = [PythonCalls("", "", markup.separator, suffix)]
    if opening.rstrip().endswith("[") and closing.lstrip().startswith("]"):
        opening = opening.rstrip()[:-1]
        closing = closing.lstrip()[1:]
        # In a section, models also write calls without the brackets.
        bodies.insert(0, PythonCalls("[", "]", markup.separator, suffix))
    if not closing.strip():
        # Without a closing marker there is no section, so the marker opens the tool calls.
        call = Call(bodies[0], open=opening)
        return CallFormat("Python calls", (call,), ListMarkup(close=closing))
    calls = tuple(Call(body) for body in bodies)
    return CallFormat("Python calls", calls, ListMarkup(open=opening, close=closing))


def _python_markup(texts: CallTexts) -> ListMarkup:
    """Return the markup of Python calls.

    Example: `[f(a="x"), g(b="y")]` has `open` "[", `separator` ", " and `close` "]".
    """
    if not texts.two_calls:
        before, call = split_at_words(texts.one_call, FIRST_TOOL)
        after = _text_after_call(call, FIRST_VALUE, ")")
        return ListMarkup(open=before, separator=", ", close=after)
    before, calls = split_at_words(texts.two_calls, FIRST_TOOL)
    after_first = _text_after_call(calls, FIRST_VALUE, ")")
    between, second_call = split_at_words(after_first, SECOND_TOOL)
    return list_markup(before, between, _text_after_call(second_call, SECOND_VALUE, ")"))


def _text_after_call(text: str, value: str, closing: str) -> str:
    """Return what follows the first `closing` character after the argument `value`.

    >>> _text_after_call('(a="x"), g()]', "x", ")")
    ', g()]'
    """
    return text[text.find(closing, text.find(value)) + 1 :]


def read_bare_keys(texts: CallTexts) -> CallFormat | None:
    """Infer the format of tool calls whose arguments are an object with unquoted keys.

    Return None if the keys are quoted, or the strings have no quotes. Example:
    `<call>f{a:<q>x<q>}</call>` has strings between quotes `<q>`.
    """
    before_name, before_key, before_value, after_value = split_at_words(
        texts.one_call, FIRST_TOOL, FIRST_KEY, FIRST_VALUE
    )
    colon_and_quote = before_value.strip()
    quote = colon_and_quote[1:].strip()
    if not before_key.endswith("{") or not colon_and_quote.startswith(":"):
        return None
    if not quote or not after_value.startswith(quote):
        return None
    after_call = _text_after_call(texts.one_call, FIRST_VALUE, "}")
    markup = ListMarkup(item_open=before_name, item_close=after_call)
    if texts.two_calls:
        before, calls = split_at_words(texts.two_calls, FIRST_TOOL)
        after_first = _text_after_call(calls, FIRST_VALUE, "}")
        between, second_call = split_at_words(after_first, SECOND_TOOL)
        markup = list_markup(before, between, _text_after_call(second_call, SECOND_VALUE, "}"))
    spellings = calls_with_head(markup, before_key[:-1], BareKeyArguments(quote))
    return CallFormat("bare keys", spellings, markup)
