"""Types and helper functions for inferring the syntax of tool calls.

A reader is a function that infers a `CallFormat` from `CallTexts`, for example `read_json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nereid_parsers.format import Call
from nereid_parsers.template.conversation import FIRST_TOOL, FIRST_VALUE, SECOND_TOOL, SECOND_VALUE
from nereid_parsers.template.markup.list_markup import ListMarkup, markup_of_calls
from nereid_parsers.template.markup.markers import MARKER, markers


class CallTexts(NamedTuple):
    """The rendered tool calls of six messages.

    Each text starts where the tool calls start. A text is "" if the template fails to render the
    message.

    Attributes:
        one_call: One tool call with one argument, which is a string.
        two_arguments: One tool call with two arguments.
        number: One tool call whose argument is NUMBER_VALUE.
        two_calls: Two tool calls with one argument each, or "" if a message can have only one tool
            call.
        special_value: One tool call whose argument is SPECIAL_VALUE, a string that contains markup.
        no_arguments: One tool call without arguments.
    """

    one_call: str
    two_arguments: str
    number: str
    two_calls: str
    special_value: str = ""
    no_arguments: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The inferred description of how a template writes the tool calls of a message.

    Attributes:
        form: The name of the form for the report, such as "JSON".
        calls: The forms in which the model may write one tool call.
        markup: The markup around all tool calls (`open`, `close`) and between them (`separator`).
    """

    form: str
    calls: tuple[Call, ...]
    markup: ListMarkup


def split_at_words(text: str, *words: str) -> list[str] | None:
    """Split `text` at each of the given words. The words must occur in the given order.

    Return the pieces before, between and after the words. Return None if a word does not occur
    after the previous word.

    >>> split_at_words("<f><k>a</k>1</f>", "f", "a", "1")
    ['<', '><k>', '</k>', '</f>']
    >>> split_at_words("<k>a</k><f>", "f", "a") is None
    True
    """
    pieces = []
    rest = text
    for word in words:
        if word not in rest:
            return None
        piece, _, rest = rest.partition(word)
        pieces.append(piece)
    return [*pieces, rest]


def markup_of_two_calls(
    two_calls: str, first_words: Sequence[str], second_words: Sequence[str]
) -> ListMarkup | None:
    """Return the texts before, between and after the two tool calls of a message.

    Each tool call extends from the first to the last of its words. Return None if a word is
    missing, or if the words occur in another order.

    >>> markup_of_two_calls("<c>f 1</c>; <c>g 2</c>", ("f", "1"), ("g", "2"))
    ListMarkup(open='', item_open='<c>', item_close='</c>', separator='; ', close='')
    """
    pieces = split_at_words(two_calls, *first_words, *second_words)
    if pieces is None:
        return None
    before_first_call = pieces[0]
    after_first_call = pieces[len(first_words)]  # the piece after the last of the first words
    after_second_call = pieces[-1]
    return markup_of_calls(before_first_call, after_first_call, after_second_call)


class _TextAfterCalls(NamedTuple):
    """The text after the tool calls of a message, such as `</calls><|end|>`, in two parts.

    Attributes:
        section_close: The text that closes the list of tool calls, such as `</calls>`.
        turn_ends: The markers that end the message, such as `<|end|>`.
    """

    section_close: str
    turn_ends: list[str]


def split_text_after_calls(markup: ListMarkup) -> _TextAfterCalls:
    """Split the text after the tool calls: find the end of the list and the end of the turn.

    `markup` is the markup of the list of tool calls. Each marker that opens the list has a marker
    that closes the list. All later markers end the message. In this example, one marker opens the
    list, so `<|end|>` ends the message:

    >>> split_text_after_calls(ListMarkup(open="<calls>", close="</calls><|end|>"))
    _TextAfterCalls(section_close='</calls>', turn_ends=['<|end|>'])

    Other text between the end markers, such as a line break, is omitted from the result.
    """
    num_closing_markers = _num_closing_markers(markup.open)
    turn_ends = list(MARKER.finditer(markup.close))[num_closing_markers:]
    if not turn_ends:
        return _TextAfterCalls(markup.close, turn_ends=[])
    section_close = markup.close[: turn_ends[0].start()]
    return _TextAfterCalls(section_close, [match.group() for match in turn_ends])


def _num_closing_markers(opening: str) -> int:
    """Return how many markers close a list of tool calls. `opening` is the text before the list.

    >>> _num_closing_markers("<turn><calls>"), _num_closing_markers("Calls:")
    (2, 1)
    """
    num_opening_markers = len(markers(opening))
    if num_opening_markers > 0:
        return num_opening_markers  # Each marker that opens the list has one closing marker.
    if opening.strip():
        return 1  # Words open the list, and one marker closes the list.
    return 0  # No text opens the list, so no marker closes the list.


class TextAroundCall(NamedTuple):
    """The texts before and after a tool call, such as `<call>` and `</call>`."""

    before: str
    after: str


def markup_of_two_calls_until(two_calls: str, last_character: str) -> ListMarkup:
    """Return the texts before, between and after the two tool calls of a message.

    Example: for `[f(a="x"), g(b="y")]`, in which ")" is the last character of a tool call, `open`
    is "[", `separator` is ", " and `close` is "]".
    """
    first = text_around_call(two_calls, FIRST_TOOL, FIRST_VALUE, last_character)
    second = text_around_call(first.after, SECOND_TOOL, SECOND_VALUE, last_character)
    return markup_of_calls(before=first.before, between=second.before, after=second.after)


def text_around_call(text: str, name: str, value: str, last_character: str) -> TextAroundCall:
    """Return the texts before and after the tool call that contains `name` and then `value`.

    The tool call starts with the name, and ends with the first `last_character` after the value.

    >>> text_around_call('[f(a="x"), g()]', "f", "x", ")")
    TextAroundCall(before='[', after=', g()]')
    """
    before, _, after_name = text.partition(name)
    _, _, after_value = after_name.partition(value)
    _, _, after = after_value.partition(last_character)
    return TextAroundCall(before, after)
