"""Infer how a template writes XML elements as arguments if a marker precedes every tag.

Example: in `#<city>Rome#</city>`, the marker `#` precedes the tags `<city>` and `</city>`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from nereid_parsers.format import NestedTags
from nereid_parsers.template.calls.call_heads import calls_with_head
from nereid_parsers.template.calls.call_texts import (
    CallFormat,
    CallTexts,
    markup_of_two_calls,
    split_at_words,
)
from nereid_parsers.template.conversation import (
    FIRST_KEY,
    FIRST_TOOL,
    FIRST_VALUE,
    SECOND_KEY,
    SECOND_TOOL,
)
from nereid_parsers.template.list_markup import ListMarkup

# The XML tags of two arguments. The name of a tag is the key of the argument, such as `city` in
# `<city>Paris</city>`.
_FIRST_OPENING_TAG = f"<{FIRST_KEY}>"
_FIRST_CLOSING_TAG = f"</{FIRST_KEY}>"
_SECOND_CLOSING_TAG = f"</{SECOND_KEY}>"


class _NestedCall(NamedTuple):
    """The texts around the arguments of a tool call, such as `<c>f #<a>1#</a>#<b>2#</b></c>`.

    Attributes:
        before_name: The text before the function's name, such as `<c>`.
        before_arguments: The text between the name and the first tag, such as ` #`.
        tag_marker: The marker before every tag, such as `#`.
        after_arguments: The text after the last tag, such as `</c>`.
    """

    before_name: str
    before_arguments: str
    tag_marker: str
    after_arguments: str


def read_nested(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes XML elements as arguments if a marker precedes every tag.

    Example: in the tool call `f #<city>Rome#</city>`, the marker is `#`. Return None if the
    arguments have another form, or if no marker precedes every tag.
    """
    call = _split_nested_call(texts.two_arguments)
    if call is None:
        return None
    calls_markup = _markup_of_calls(texts.two_calls, call)
    if calls_markup is None:
        return None
    markup = _move_marker_to_next_tag(calls_markup, call.tag_marker)
    calls = calls_with_head(
        before_name=markup.item_open,
        after_name=call.before_arguments.removesuffix(call.tag_marker),
        body=NestedTags(call.tag_marker),
        close=markup.item_close,
    )
    return CallFormat("nested elements", calls, markup)


def _split_nested_call(two_arguments: str) -> _NestedCall | None:
    """Find the texts around the arguments of a tool call. The two arguments are XML elements.

    Return None if the arguments are not XML elements, or if no marker precedes the tags.
    """
    # In `<c>f #<a>1#</a>#<b>2#</b></c>`, the words are `f`, `<a>`, `1`, `</a>` and `</b>`.
    first_argument = (_FIRST_OPENING_TAG, FIRST_VALUE, _FIRST_CLOSING_TAG)
    pieces = split_at_words(two_arguments, FIRST_TOOL, *first_argument, _SECOND_CLOSING_TAG)
    if pieces is None:
        return None
    before_name, before_tag, _before_value, after_value, _second_argument, after_arguments = pieces
    # Only the marker is between the value `1` and the closing tag `</a>`.
    tag_marker = after_value.strip()
    if not tag_marker:  # `read_tagged` reads tags without a marker.
        return None
    return _NestedCall(before_name, before_tag, tag_marker, after_arguments)


def _markup_of_calls(two_calls: str, call: _NestedCall) -> ListMarkup | None:
    """Return the markup of a list of tool calls whose arguments are XML elements.

    `two_calls` is the text of two tool calls. If it is "", a message can have only one tool call,
    and the markup consists of the texts around the single tool call `call`. Return None if one of
    two tool calls has no XML elements as arguments.
    """
    if not two_calls:
        return ListMarkup(item_open=call.before_name, item_close=call.after_arguments)
    # In `<c>f #<a>1#</a></c>; <c>g #<b>2#</b></c>`, the words are `f` and `</a>`, `g` and `</b>`.
    return markup_of_two_calls(
        two_calls,
        first_words=(FIRST_TOOL, _FIRST_CLOSING_TAG),
        second_words=(SECOND_TOOL, _SECOND_CLOSING_TAG),
    )


def _move_marker_to_next_tag(markup: ListMarkup, marker: str) -> ListMarkup:
    """Move the marker at the end of `item_close` to the start of the tags that follow the marker.

    Example: in `#<call>..#</call>#<call>..#</call>#</all>`, the marker `#` precedes every tag. So
    the same text, `#</call>#`, follows both tool calls, and `list_markup` returns this text as
    `item_close`. But the last `#` belongs to the tags `<call>` and `</all>`:

    >>> markup = ListMarkup("#", item_open="<call>", item_close="#</call>#", close="</all>")
    >>> _move_marker_to_next_tag(markup, "#")
    ListMarkup(open='', item_open='#<call>', item_close='#</call>', separator='', close='#</all>')

    Return `markup` unchanged if `item_close` does not end with the marker.
    """
    if not markup.item_close.endswith(marker):
        return markup
    return replace(
        markup,
        open=markup.open.removesuffix(marker),
        item_open=marker + markup.item_open,
        item_close=markup.item_close.removesuffix(marker),
        close=marker + markup.close,
    )
