"""Infer the format of tool calls that are written like source code.

The forms are Python calls, `f(a="x")`, and objects with unquoted keys, `f{a:<q>x<q>}`.
"""

from __future__ import annotations

import re
from dataclasses import replace

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
    """Infer the format of tool calls in Python syntax, such as `f(a="x")`.

    Return None for any other syntax. The markers are around each call or around all calls:

        around each call    `<call>f(a="x")</call><call>g(b="y")</call>`
        around all calls    `<calls>[f(a="x"), g(b="y")]</calls>`

    Args:
        texts: The rendered tool calls. `texts.two_calls` is "" if the template allows only one tool
            call in a message. In this case, the markers are assumed to be around all calls.
    """
    _, _, after_name = texts.one_call.partition(FIRST_TOOL)
    suffix, _, arguments = after_name.partition("(")  # The suffix of `f.call(a="x")` is `.call`.
    has_keyword = arguments.lstrip().startswith(f"{FIRST_KEY}=")
    if not has_keyword or _METHOD_SUFFIX.fullmatch(suffix) is None:
        return None
    markup = _markup_of_calls(texts, last_character=")")
    if not texts.two_calls:
        markup_of_list = ListMarkup(open=markup.item_open, separator=", ", close=markup.item_close)
        return _read_python_section(markup_of_list, suffix)
    is_each_marked = bool(markup.item_open.strip() or markup.item_close.strip())
    if not is_each_marked:
        return _read_python_section(markup, suffix)
    one_call = PythonCalls(open="", close="", separator="", suffix=suffix)
    call = Call(one_call, open=markup.item_open, close=markup.item_close)
    return CallFormat("Python calls, each marked", (call,), markup)


def _read_python_section(markup: ListMarkup, suffix: str) -> CallFormat:
    """Return the format of Python calls for a template whose markers enclose the list of all calls.

    The markers and the list together are called a section. Example: if `markup.open` is "<calls>["
    and `markup.close` is "]</calls>", the markers of the section are `<calls>` and `</calls>`, and
    the section contains a list in brackets.

    Args:
        markup: The texts before and after all calls, and the separator between two calls.
        suffix: The text between the function's name and its arguments, such as ".call".
    """
    opening = markup.open + markup.item_open
    closing = markup.close
    plain = PythonCalls(open="", close="", separator=markup.separator, suffix=suffix)
    bodies = [plain]
    has_brackets = opening.rstrip().endswith("[") and closing.lstrip().startswith("]")
    if has_brackets:
        # The brackets belong to the body. The text before `[` and the text after `]` are the
        # markers of the section.
        opening = opening.rstrip().removesuffix("[")
        closing = closing.lstrip().removeprefix("]")
        # Inside a section, some models write the calls without the brackets of the list.
        bodies = [replace(plain, open="[", close="]"), plain]
    has_closing_marker = bool(closing.strip())
    if has_closing_marker:
        calls = tuple(Call(body) for body in bodies)
        return CallFormat("Python calls", calls, ListMarkup(open=opening, close=closing))
    # A section needs a closing marker, but no marker follows the calls. So `opening` is declared as
    # the marker of a tool call.
    call = Call(bodies[0], open=opening)
    return CallFormat("Python calls", (call,), ListMarkup(close=closing))


def read_unquoted_keys(texts: CallTexts) -> CallFormat | None:
    """Infer the format of tool calls whose arguments have unquoted keys, as in `f{a:1}`.

    Return None if the keys are quoted, or if no quotes enclose the strings. A marker can replace
    the usual quotes. Example: in `<call>f{a:<q>x<q>}</call>`, the marker `<q>` encloses a string.
    """
    pieces = split_at_words(texts.one_call, FIRST_TOOL, FIRST_KEY, FIRST_VALUE)
    if pieces is None:
        return None
    # `<call>f{a:<q>x<q>}</call>` is split into `<call>`, `{`, `:<q>` and `<q>}</call>`.
    _, before_key, before_value, after_value = pieces
    colon_and_quote = before_value.strip()
    is_object = before_key.endswith("{") and colon_and_quote.startswith(":")
    quote = colon_and_quote.removeprefix(":").strip()
    is_quoted = bool(quote) and after_value.startswith(quote)
    if not is_object or not is_quoted:
        return None
    markup = _markup_of_calls(texts, last_character="}")
    after_name = before_key.removesuffix("{")
    calls = calls_with_head(markup, after_name, BareKeyArguments(quote))
    return CallFormat("bare keys", calls, markup)


def _markup_of_calls(texts: CallTexts, last_character: str) -> ListMarkup:
    """Return the markup before, between and after the tool calls of a message.

    A tool call ends at the first `last_character` that follows the value of its argument.

    Example: if the last character is ")", the calls `[f(a="x"), g(b="y")]` have `open` "[",
    `separator` ", " and `close` "]".

    Args:
        texts: The rendered tool calls. `texts.two_calls` is "" if the template allows only one tool
            call in a message.
        last_character: The last character of a tool call.
    """
    if not texts.two_calls:
        before, _, arguments = texts.one_call.partition(FIRST_TOOL)
        after = _text_after_call(arguments, FIRST_VALUE, last_character)
        return ListMarkup(item_open=before, item_close=after)
    before, _, after_first_name = texts.two_calls.partition(FIRST_TOOL)
    after_first_call = _text_after_call(after_first_name, FIRST_VALUE, last_character)
    between, _, after_second_name = after_first_call.partition(SECOND_TOOL)
    after = _text_after_call(after_second_name, SECOND_VALUE, last_character)
    return list_markup(before, between, after)


def _text_after_call(text: str, value: str, last_character: str) -> str:
    """Return the text after a tool call. The first `last_character` after `value` ends the call.

    >>> _text_after_call('(a="x"), g()]', "x", ")")
    ', g()]'
    """
    value_start = text.find(value)
    call_end = text.find(last_character, value_start) + 1
    return text[call_end:]
