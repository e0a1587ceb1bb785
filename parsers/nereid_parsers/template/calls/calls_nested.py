"""Infer how a template writes XML elements as arguments if a marker precedes every tag.

Example: in `~<a>1~</a>`, the marker `~` precedes the tags `<a>` and `</a>`.
"""

from __future__ import annotations

from dataclasses import replace

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


def read_nested(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes XML elements as arguments if a marker precedes every tag.

    Example: in the tool call `f ~<a>1~</a>~<b>2~</b>`, the marker is `~`, and the arguments are `a`
    and `b`. Return None if the arguments have another form, or if no marker precedes every tag.
    """
    # In the call `<c>f ~<a>1~</a>~<b>2~</b></c>`, the words are `f`, `<a>`, `1`, `</a>` and `</b>`,
    # and the pieces are `<c>`, ` ~`, "", `~`, `~<b>2~` and `</c>`.
    argument = (_FIRST_OPENING_TAG, FIRST_VALUE, _FIRST_CLOSING_TAG)
    pieces = split_at_words(texts.two_arguments, FIRST_TOOL, *argument, _SECOND_CLOSING_TAG)
    if pieces is None:
        return None
    before_name, before_tag, _before_value, after_value, _second_argument, after_call = pieces
    tag_marker = after_value.strip()  # Nothing else is between a value and its closing tag.
    if not tag_marker:  # `read_tagged` reads tags without a marker.
        return None
    if texts.two_calls:
        markup = _markup_of_two_calls(texts.two_calls)
    else:
        markup = ListMarkup(item_open=before_name, item_close=after_call)
    if markup is None:
        return None
    markup = _move_marker_to_next_tag(markup, tag_marker)
    after_name = before_tag.removesuffix(tag_marker)
    calls = calls_with_head(markup, after_name, NestedTags(tag_marker))
    return CallFormat("nested elements", calls, markup)


def _markup_of_two_calls(two_calls: str) -> ListMarkup | None:
    """Return the texts around two tool calls whose arguments are XML elements, such as `<a>1</a>`.

    Example: for the two tool calls `<c>f<a>1</a></c>;<c>g<b>2</b></c>`, `item_open` is `<c>`,
    `item_close` is `</c>` and `separator` is `;`. Return None unless an element follows the name in
    each of the two tool calls.
    """
    # In the example, the words are `f`, `</a>`, `g` and `</b>`.
    words = (FIRST_TOOL, _FIRST_CLOSING_TAG, SECOND_TOOL, _SECOND_CLOSING_TAG)
    pieces = split_at_words(two_calls, *words)
    if pieces is None:
        return None
    before_calls, _, between_calls, _, after_calls = pieces
    return list_markup(before_calls, between_calls, after_calls)


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
