"""Infer how a template writes tool calls in Python syntax, such as `f(a="x")`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from nereid_parsers.format import Call, PythonCalls
from nereid_parsers.template.calls.call_texts import (
    CallFormat,
    CallTexts,
    markup_of_two_calls_until,
    text_around_call,
)
from nereid_parsers.template.conversation import FIRST_KEY, FIRST_TOOL, FIRST_VALUE
from nereid_parsers.template.markup.list_markup import ListMarkup

_METHOD_SUFFIX = re.compile(r"[.a-z]*")  # `.call` in `f.call(a="x")`, or ""


class _PythonSection(NamedTuple):
    """A list of Python calls and the markers around the list: `<calls>[f(a="x"), g()]</calls>`.

    Attributes:
        opening: The text before the list, such as `<calls>`.
        closing: The text after the list, such as `</calls>`.
        forms: The forms of the list that a model may write: `[f(a="x"), g()]` or `f(a="x"), g()`.
            The form that the template writes is first.
    """

    opening: str
    closing: str
    forms: list[PythonCalls]


def read_python(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes tool calls in Python syntax, such as `f(a="x")`.

    Return None if the tool calls have another syntax. There are two cases:

        markers around each call    `<call>f(a="x")</call><call>g(b="y")</call>`
        markers around all calls    `<calls>[f(a="x"), g(b="y")]</calls>`
    """
    name_suffix = _suffix_of_name(texts.one_call)  # `.call` in `f.call(a="x")`, but usually ""
    if name_suffix is None:
        return None
    markup = _markup_of_python_calls(texts)
    has_markers_around_each = bool(markup.item_open.strip() or markup.item_close.strip())
    if has_markers_around_each:
        return _declare_marked_python_calls(markup, name_suffix)
    return _declare_python_section(markup, name_suffix)


def _suffix_of_name(one_call: str) -> str | None:
    """Return the text between the function's name and the opening parenthesis of a Python call.

    `one_call` is a call of the function "zqFirstTool" with the argument "zqKeyOne". Most templates
    write no text between name and parenthesis, so the result is "". Return None if the tool call is
    not written in Python syntax.

    >>> _suffix_of_name('zqFirstTool.call(zqKeyOne="zqValueOne")')
    '.call'
    >>> _suffix_of_name('{"name": "zqFirstTool"}') is None
    True
    """
    _, _, after_name = one_call.partition(FIRST_TOOL)
    suffix, _, arguments = after_name.partition("(")
    has_keyword = arguments.lstrip().startswith(f"{FIRST_KEY}=")
    if not has_keyword or _METHOD_SUFFIX.fullmatch(suffix) is None:
        return None
    return suffix


def _markup_of_python_calls(texts: CallTexts) -> ListMarkup:
    """Return the texts before, between and after the Python calls of a message.

    If the template allows only one tool call in a message, the markers around this tool call are
    assumed to enclose all tool calls, and the separator is assumed to be ", ".
    """
    if texts.two_calls:
        return markup_of_two_calls_until(texts.two_calls, last_character=")")
    around = text_around_call(texts.one_call, FIRST_TOOL, FIRST_VALUE, last_character=")")
    return ListMarkup(open=around.before, separator=", ", close=around.after)


def _declare_marked_python_calls(markup: ListMarkup, name_suffix: str) -> CallFormat:
    """Declare the format of Python calls with markers around each, as in `<call>f(a="x")</call>`.

    `name_suffix` is the text after a function's name, such as `.call` in `f.call(a="x")`.
    """
    # Each pair of markers encloses a single call, so no list brackets and no separator are needed.
    one_call = PythonCalls(open="", close="", separator="", suffix=name_suffix)
    call = Call(one_call, open=markup.item_open, close=markup.item_close)
    return CallFormat("Python calls, each marked", (call,), markup)


def _declare_python_section(markup: ListMarkup, name_suffix: str) -> CallFormat:
    """Declare the format of a list of Python calls, as in `<calls>[f(a="x"), g()]</calls>`.

    The markers, such as `<calls>` and `</calls>`, enclose all calls. `name_suffix` is the text
    after a function's name, such as `.call` in `f.call(a="x")`.
    """
    section = _infer_python_section(markup, name_suffix)
    has_closing_marker = bool(section.closing.strip())
    if has_closing_marker:
        calls = tuple(Call(form) for form in section.forms)
        section_markup = ListMarkup(open=section.opening, close=section.closing)
        return CallFormat("Python calls", calls, section_markup)
    # In `<calls>f(a="x")`, no marker closes the list of tool calls. Therefore, `<calls>` is not
    # declared as a marker around all tool calls, but as the opening marker of one `Call`, whose
    # body is the list. Only the form that the template writes is declared.
    form_of_template = section.forms[0]
    call = Call(form_of_template, open=section.opening)
    return CallFormat("Python calls", (call,), ListMarkup())


def _infer_python_section(markup: ListMarkup, name_suffix: str) -> _PythonSection:
    """Divide the text around Python calls into markers, such as `<calls>`, and list brackets.

    A model may omit the brackets of the list. Therefore, the text that a template writes determines
    the forms of the list that a model may write:

        text of the template           forms in the result
        `<calls>[f(a="x")]</calls>`    `[f(a="x"), g()]` and `f(a="x"), g()`
        `<calls>f(a="x")</calls>`      `f(a="x"), g()`
    """
    # No markers enclose each call, so `item_open` and `item_close` are only white space. The three
    # texts below are the whole texts before the first call, between two calls, and after the last.
    opening = markup.open + markup.item_open
    separator = markup.item_close + markup.separator + markup.item_open
    closing = markup.item_close + markup.close
    bare_calls = PythonCalls(open="", close="", separator=separator, suffix=name_suffix)
    has_brackets = opening.rstrip().endswith("[") and closing.lstrip().startswith("]")
    if not has_brackets:
        return _PythonSection(opening=opening, closing=closing, forms=[bare_calls])
    return _PythonSection(
        opening=opening.rstrip().removesuffix("["),
        closing=closing.lstrip().removeprefix("]"),
        forms=[replace(bare_calls, open="[", close="]"), bare_calls],
    )
