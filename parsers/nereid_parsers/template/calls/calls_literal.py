"""Infer how a template writes tool calls that look like source code, such as `f(a="x")`.

The forms are Python calls, `f(a="x")`, and objects with unquoted keys, `f{a:<q>x<q>}`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from nereid_parsers.format import BareKeyArguments, Call, PythonCalls
from nereid_parsers.template.calls.call_heads import calls_with_head
from nereid_parsers.template.calls.call_texts import (
    CallFormat,
    CallTexts,
    split_at_words,
)
from nereid_parsers.template.conversation import (
    FIRST_KEY,
    FIRST_TOOL,
    FIRST_VALUE,
    SECOND_TOOL,
    SECOND_VALUE,
)
from nereid_parsers.template.list_markup import ListMarkup, list_markup

_METHOD_SUFFIX = re.compile(r"[.a-z]*")  # `.call` in `f.call(a="x")`


def read_python(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes tool calls in Python syntax, such as `f(a="x")`.

    Return None if the tool calls have another syntax. There are two cases:

        markers around each call    `<call>f(a="x")</call><call>g(b="y")</call>`
        markers around all calls    `<calls>[f(a="x"), g(b="y")]</calls>`

    The second case is assumed if the template allows only one tool call in a message.
    """
    suffix = _suffix_of_name(texts.one_call)
    if suffix is None:
        return None
    if texts.two_calls:
        markup = _markup_of_two_calls(texts.two_calls, last_character=")")
    else:
        before, after = _text_around_call(texts.one_call, FIRST_TOOL, FIRST_VALUE, ")")
        # A single tool call shows no separator, so the separator is assumed to be ", ".
        markup = ListMarkup(open=before, separator=", ", close=after)
    has_markers_around_each = bool(markup.item_open.strip() or markup.item_close.strip())
    if not has_markers_around_each:
        return _declare_python_section(markup, suffix)
    # Each pair of markers encloses a single call, so no list brackets and no separator are needed.
    one_call = PythonCalls(open="", close="", separator="", suffix=suffix)
    call = Call(one_call, open=markup.item_open, close=markup.item_close)
    return CallFormat("Python calls, each marked", (call,), markup)


def _suffix_of_name(one_call: str) -> str | None:
    """Return the text between the function's name and the opening parenthesis of a Python call.

    Most templates write no text there, so the result is "". Return None if the tool call is not
    written in Python syntax.

    >>> _suffix_of_name('zqFirstTool.call(zqKeyOne="zqValueOne")')
    '.call'
    >>> _suffix_of_name('{"name": "zqFirstTool"}') is None
    True
    """
    _, _, after_name = one_call.partition(FIRST_TOOL)
    suffix, _, arguments = after_name.partition("(")
    has_keyword = arguments.lstrip().startswith(f"{FIRST_KEY}=")
    is_python = has_keyword and _METHOD_SUFFIX.fullmatch(suffix) is not None
    return suffix if is_python else None


def _declare_python_section(markup: ListMarkup, suffix: str) -> CallFormat:
    """Declare the format of a list of Python calls, as in `<calls>[f(a="x"), g()]</calls>`.

    The markers `<calls>` and `</calls>` enclose all calls. The template decides which forms of the
    list a model may write between the markers:

        text of the template           declared forms
        `<calls>[f(a="x")]</calls>`    `[f(a="x"), g()]` and `f(a="x"), g()`
        `<calls>f(a="x")</calls>`      `f(a="x"), g()`

    The texts before and after each call, `item_open` and `item_close`, are only white space.
    """
    opening, closing = markup.open + markup.item_open, markup.item_close + markup.close
    separator = markup.item_close + markup.separator + markup.item_open
    bare_calls = PythonCalls(open="", close="", separator=separator, suffix=suffix)
    bodies = [bare_calls]  # The form that the template writes is first.
    has_brackets = opening.rstrip().endswith("[") and closing.lstrip().startswith("]")
    if has_brackets:
        calls_in_brackets = replace(bare_calls, open="[", close="]")
        bodies = [calls_in_brackets, bare_calls]
        opening = opening.rstrip().removesuffix("[")
        closing = closing.lstrip().removeprefix("]")
    has_closing_marker = bool(closing.strip())
    if has_closing_marker:
        calls = tuple(Call(body) for body in bodies)
        return CallFormat("Python calls", calls, ListMarkup(open=opening, close=closing))
    # In `<calls>f(a="x")`, no marker closes the list of tool calls. Therefore, `<calls>` is
    # declared as the opening marker of a tool call. Only the form that the template writes is
    # declared.
    call = Call(bodies[0], open=opening)
    return CallFormat("Python calls", (call,), ListMarkup())


def read_unquoted_keys(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes tool calls with unquoted keys, as in `f{a:"x"}`.

    Some templates write a marker instead of the quotes around a string. Example: the result for
    `<call>f{a:<q>x<q>}</call>` declares the quote `<q>` and the markers `<call>` and `</call>`.
    Return None if the keys have quotes, or if the strings have no quotes.
    """
    pieces = split_at_words(texts.one_call, FIRST_TOOL, FIRST_KEY, FIRST_VALUE)
    if pieces is None:
        return None
    # The pieces of `<call>f{a:<q>x<q>}</call>` are `<call>`, `{`, `:<q>` and `<q>}</call>`.
    before_name, before_key, before_value, after_value = pieces
    has_unquoted_key = before_key.endswith("{")
    quote = _quote_after_colon(before_value)
    has_quoted_value = bool(quote) and after_value.startswith(quote)
    if not has_unquoted_key or not has_quoted_value:
        return None
    if texts.two_calls:
        # A tool call ends with the first `}` after its value.
        markup = _markup_of_two_calls(texts.two_calls, last_character="}")
    else:
        _, _, after_call = after_value.partition("}")
        markup = ListMarkup(item_open=before_name, item_close=after_call)
    after_name = before_key.removesuffix("{")  # the text between the name and the object
    calls = calls_with_head(markup, after_name, BareKeyArguments(quote))
    return CallFormat("bare keys", calls, markup)


def _quote_after_colon(text: str) -> str:
    """Return the quote after a colon. Return "" if `text` is not a colon with a quote after it.

    >>> _quote_after_colon(": <q>"), _quote_after_colon(":"), _quote_after_colon('": "')
    ('<q>', '', '')
    """
    before_colon, _, quote = text.partition(":")
    return "" if before_colon.strip() else quote.strip()


def _markup_of_two_calls(two_calls: str, last_character: str) -> ListMarkup:
    """Return the texts before, between and after the two tool calls of a message.

    Example: for `[f(a="x"), g(b="y")]`, in which ")" is the last character of a tool call, `open`
    is "[", `separator` is ", " and `close` is "]".
    """
    before, after_first = _text_around_call(two_calls, FIRST_TOOL, FIRST_VALUE, last_character)
    between, after = _text_around_call(after_first, SECOND_TOOL, SECOND_VALUE, last_character)
    return list_markup(before, between, after)


def _text_around_call(text: str, name: str, value: str, last_character: str) -> tuple[str, str]:
    """Return the texts before and after the tool call that contains `name` and then `value`.

    The tool call starts with the name, and ends with the first `last_character` after the value.

    >>> _text_around_call('[f(a="x"), g()]', "f", "x", ")")
    ('[', ', g()]')
    """
    before, _, after_name = text.partition(name)
    _, _, after_value = after_name.partition(value)
    _, _, after = after_value.partition(last_character)
    return before, after
