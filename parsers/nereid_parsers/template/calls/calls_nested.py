"""Infer how a template writes arguments as XML elements with a marker: `~<a>1~</a>`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from nereid_parsers.format import NestedTags
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
    SECOND_KEY,
    SECOND_TOOL,
)
from nereid_parsers.template.list_markup import ListMarkup, list_markup

# The XML tags of two arguments. The name of a tag is the key of the argument, such as `city` in
# `<city>Paris</city>`.
_FIRST_OPENING_TAG = f"<{FIRST_KEY}>"
_FIRST_CLOSING_TAG = f"</{FIRST_KEY}>"
_SECOND_CLOSING_TAG = f"</{SECOND_KEY}>"


class _NestedCall(NamedTuple):
    """The pieces of a tool call that remain after its name and its XML arguments are removed.

    The examples are the texts of `<c>f ~<a>1~</a>~<b>2~</b></c>`, in which the marker `~` precedes
    every tag.

    Attributes:
        before_name: The text before the function's name: `<c>`.
        after_name: The text between the name and the first tag, without the marker: " ".
        tag_marker: The marker before every tag: `~`. "" if there is no such marker.
        after: The text after the last argument: `</c>`.
    """

    before_name: str
    after_name: str
    tag_marker: str
    after: str


def read_nested(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes arguments as XML elements with a marker: `~<a>1~</a>`.

    Return None if the arguments have another form, or if no marker precedes every tag. Example: in
    `f ~<a>1~</a>~<b>2~</b>`, the marker is `~`, and the arguments are `a` and `b`.

    Args:
        texts: The rendered tool calls. `texts.two_calls` is "" if the template allows only one tool
            call in a message.
    """
    call = _cut_at_elements(texts.two_arguments)  # The texts around the name and the arguments.
    if call is None or not call.tag_marker:  # `read_tagged` reads tags without a marker.
        return None
    markup = _markup_of_calls(texts, call)  # The texts around and between tool calls.
    if markup is None:
        return None
    calls = calls_with_head(markup, call.after_name, NestedTags(call.tag_marker))
    return CallFormat("nested elements", calls, markup)


def _cut_at_elements(call: str) -> _NestedCall | None:
    """Remove the name and the XML arguments from a tool call. Return the texts that remain.

    A template may write a marker before every tag. Example: the result for
    `<c>f ~<a>1~</a>~<b>2~</b></c>` is `_NestedCall("<c>", " ", "~", "</c>")`. Return None if the
    arguments are not XML elements.

    Args:
        call: A rendered tool call with two arguments.
    """
    # In the example, the words are `f`, `<a>`, `1`, `</a>` and `</b>`, and the pieces are `<c>`,
    # ` ~`, "", `~`, `~<b>2~` and `</c>`.
    argument = (_FIRST_OPENING_TAG, FIRST_VALUE, _FIRST_CLOSING_TAG)
    pieces = split_at_words(call, FIRST_TOOL, *argument, _SECOND_CLOSING_TAG)
    if pieces is None:
        return None
    before_name, before_tag, _before_value, after_value, _second_argument, after_call = pieces
    tag_marker = after_value.strip()  # Nothing else is between a value and its closing tag.
    return _NestedCall(before_name, before_tag.removesuffix(tag_marker), tag_marker, after_call)


def _markup_of_calls(texts: CallTexts, call: _NestedCall) -> ListMarkup | None:
    """Return the texts around tool calls whose arguments are XML elements, such as `<a>1</a>`.

    Example: for the two tool calls `<c>f<a>1</a></c>;<c>g<b>2</b></c>`, `item_open` is `<c>`,
    `item_close` is `</c>` and `separator` is `;`. Return None unless an element follows the name in
    each of the two tool calls.

    Args:
        texts: The rendered tool calls. `texts.two_calls` is "" if the template allows only one tool
            call in a message.
        call: The texts of a single tool call, such as `<c>` before the name and `</c>` at the end.
            They are the result if there are no two tool calls.
    """
    if texts.two_calls:
        # In the example, the words are `f`, `</a>`, `g` and `</b>`.
        words = (FIRST_TOOL, _FIRST_CLOSING_TAG, SECOND_TOOL, _SECOND_CLOSING_TAG)
        pieces = split_at_words(texts.two_calls, *words)
        if pieces is None:
            return None
        before_calls, _, between_calls, _, after_calls = pieces
        markup = list_markup(before_calls, between_calls, after_calls)
    else:
        markup = ListMarkup(item_open=call.before_name, item_close=call.after)
    return _move_marker_to_next_tag(markup, call.tag_marker)


def _move_marker_to_next_tag(calls: ListMarkup, marker: str) -> ListMarkup:
    """Store a marker, such as `~` in `~<f>`, in the same field as the tag that follows the marker.

    Some templates write a marker before every tag. Example: in `~<f>..~</f>~<f>..~</f>~</all>`,
    each tool call is between `~<f>` and `~</f>`. But `list_markup` assigns the first marker to
    `open`, and the marker after a tool call to `item_close`:

    >>> markup = ListMarkup(open="~", item_open="<f>", item_close="~</f>~", close="</all>")
    >>> _move_marker_to_next_tag(markup, "~")
    ListMarkup(open='', item_open='~<f>', item_close='~</f>', separator='', close='~</all>')
    """
    if not calls.item_close.endswith(marker):
        return calls
    return replace(
        calls,
        open=calls.open.removesuffix(marker),
        item_open=marker + calls.item_open,
        item_close=calls.item_close.removesuffix(marker),
        close=marker + calls.close,
    )
