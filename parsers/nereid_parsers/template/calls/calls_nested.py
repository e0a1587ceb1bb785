"""Infer how a template writes XML elements as arguments if a marker precedes every tag."""

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
from nereid_parsers.template.markup.difference import text_between
from nereid_parsers.template.markup.list_markup import ListMarkup

# The XML tags of two arguments. The name of a tag is the key of the argument, such as `city` in
# `<city>Paris</city>`.
_FIRST_OPENING_TAG = f"<{FIRST_KEY}>"
_FIRST_CLOSING_TAG = f"</{FIRST_KEY}>"
_SECOND_CLOSING_TAG = f"</{SECOND_KEY}>"


class _NestedCall(NamedTuple):
    """The texts around the arguments of a tool call, such as `<c>f #<a>1#</a>#<b>2#</b></c>`.

    Attributes:
        before_name: The text before the function's name, such as `<c>`.
        after_name: The text between the name and the marker of the first tag, such as a space.
        tag_marker: The marker before every tag, such as `#`.
        after_arguments: The text after the last tag, such as `</c>`.
    """

    before_name: str
    after_name: str
    tag_marker: str
    after_arguments: str


def read_nested(texts: CallTexts) -> CallFormat | None:
    """Infer how a template writes tool calls whose arguments are XML elements with a marker.

    The marker precedes every tag. Example: in the tool call `<c>f #<city>Rome#</city></c>`, the
    marker is `#`. Return None if the arguments have another form, or if no marker precedes every
    tag.
    """
    call = _split_nested_call(texts.two_arguments)
    if call is None:
        return None
    if texts.two_calls:
        calls_markup = _markup_of_two_calls(texts.two_calls)
    else:  # A message can have only one tool call.
        calls_markup = ListMarkup(item_open=call.before_name, item_close=call.after_arguments)
    if calls_markup is None:
        return None
    # Example: the template writes `#<c>f..#</c>#<c>g..#</c>`, where `#` is the marker of each tag.
    # Then `calls_markup.item_close` is `#</c>#`. The second `#` must be removed from this text,
    # because it belongs to the next tag, `<c>`.
    markup = _move_marker_to_next_tag(calls_markup, call.tag_marker)
    calls = calls_with_head(
        before_name=markup.item_open,  # `<c>`
        after_name=call.after_name,  # the space before `#`
        body=NestedTags(call.tag_marker),
        close=markup.item_close,  # `</c>`
    )
    return CallFormat("nested elements", calls, markup)


def _split_nested_call(two_arguments: str) -> _NestedCall | None:
    """Find the texts around the arguments of a tool call with two XML elements as arguments.

    Example: in `<call>f #<city>Rome#</city>#<days>3#</days></call>`, `before_name` is `<call>`,
    `after_name` is a space, `tag_marker` is `#`, and `after_arguments` is `</call>`.

    Return None if the arguments are not XML elements, or if no marker precedes the tags.
    """
    # In the example, these words are `f`, `<city>` and `</days>`.
    pieces = split_at_words(two_arguments, FIRST_TOOL, _FIRST_OPENING_TAG, _SECOND_CLOSING_TAG)
    if pieces is None:
        return None
    before_name, space_and_marker, arguments, after_arguments = pieces
    # Only the marker is between the first value, `Rome`, and its closing tag, `</city>`.
    tag_marker = (text_between(arguments, FIRST_VALUE, _FIRST_CLOSING_TAG) or "").strip()
    if not tag_marker:  # `read_tagged` reads tags without a marker.
        return None
    after_name = space_and_marker.removesuffix(tag_marker)
    return _NestedCall(before_name, after_name, tag_marker, after_arguments)


def _markup_of_two_calls(two_calls: str) -> ListMarkup | None:
    """Return the texts before, between and after two tool calls with XML elements as arguments.

    Example: in `<c>f #<a>1#</a></c>; <c>g #<b>2#</b></c>`, `item_open` is `<c>`, `item_close` is
    `</c>`, and `separator` is "; ". Return None if one of the tool calls has other arguments.
    """
    return markup_of_two_calls(
        two_calls,
        first_words=(FIRST_TOOL, _FIRST_CLOSING_TAG),
        second_words=(SECOND_TOOL, _SECOND_CLOSING_TAG),
    )


def _move_marker_to_next_tag(markup: ListMarkup, marker: str) -> ListMarkup:
    """Remove the marker at the end of `item_close`, and add the marker to the tags that follow.

    Example: in `@@<all>@@<c>f..@@</c>@@<c>g..@@</c>@@</all>`, the marker `@@` precedes every tag.
    Because `@@</c>@@` follows each of the two calls, `markup.item_close` is `@@</c>@@`. But the
    second `@@` of this text belongs to the tag that follows, which is `<c>` or `</all>`. For the
    same reason, the second `@@` of `markup.open` belongs to the first `<c>`:

    >>> markup = ListMarkup("@@<all>@@", item_open="<c>", item_close="@@</c>@@", close="</all>")
    >>> fixed = _move_marker_to_next_tag(markup, "@@")
    >>> fixed.open, fixed.item_open, fixed.item_close, fixed.close
    ('@@<all>', '@@<c>', '@@</c>', '@@</all>')

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
