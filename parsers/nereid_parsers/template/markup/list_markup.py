"""The markup of a rendered list, such as `<calls><call>ITEM</call></calls>`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nereid_parsers.template.markup.difference import common_prefix, common_suffix


@dataclass(frozen=True, slots=True)
class ListMarkup:
    """The markup of a rendered list, such as `<calls><call>ITEM</call></calls>`.

    A list with two items is written as

        open  item_open ITEM item_close  separator  item_open ITEM item_close  close

    Attributes:
        open: The text before the whole list, such as "<tool_calls>".
        item_open: The text before each item, such as "<call>".
        item_close: The text after each item, such as "</call>".
        separator: The text between two items, such as a line break.
        close: The text after the whole list, such as "</tool_calls>".
    """

    open: str = ""
    item_open: str = ""
    item_close: str = ""
    separator: str = ""
    close: str = ""


def list_markup(before: str, between: str, after: str) -> ListMarkup:
    """Infer the markup of a list with two items from the text around the items.

    The three texts around the items consist of these parts:

        before     open, item_open
        between    item_close, separator, item_open
        after      item_close, close

    >>> list_markup("<all><call>", "</call>, <call>", "</call></all>")
    ListMarkup(open='<all>', item_open='<call>', item_close='</call>', separator=', ',
               close='</all>')

    Args:
        before: The text before the first item.
        between: The text between the two items.
        after: The text after the second item.
    """
    item_close = common_prefix(between, after)  # Both texts start with `item_close`.
    separator_and_open = between.removeprefix(item_close)
    item_open = common_suffix(separator_and_open, before)  # Both texts end with `item_open`.
    return ListMarkup(
        open=before.removesuffix(item_open),
        item_open=item_open,
        item_close=item_close,
        separator=separator_and_open.removesuffix(item_open),
        close=after.removeprefix(item_close),
    )


def markup_of_calls(before: str, between: str, after: str) -> ListMarkup:
    r"""Infer the markup of a list of two tool calls from the text around the tool calls.

    The function does the same as `list_markup`, except that white space alone is not treated as the
    opening text of a tool call. Such white space becomes a part of `open` and of `separator`, and
    `item_open` is "":

    >>> markup_of_calls("<calls>\n", ";\n", "\n</calls>")
    ListMarkup(open='<calls>\n', item_open='', item_close='', separator=';\n', close='\n</calls>')
    """
    markup = list_markup(before, between, after)
    if markup.item_open.strip():
        return markup
    space = markup.item_open
    return replace(
        markup, open=markup.open + space, item_open="", separator=markup.separator + space
    )
