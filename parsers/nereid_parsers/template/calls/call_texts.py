"""Types and helper functions for inferring the syntax of tool calls.

A reader is a function that infers a `CallFormat` from `CallTexts`, for example `read_json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nereid_parsers.format import Call
from nereid_parsers.template.conversation import FIRST_TOOL, SECOND_TOOL
from nereid_parsers.template.difference import MARKER, markers
from nereid_parsers.template.list_markup import ListMarkup
from nereid_parsers.template.probe import COUNTER_MARK


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


def split_text_after_calls(markup: ListMarkup) -> tuple[str, list[str]]:
    """Divide the text that follows the tool calls, such as `</calls><|end|>`, into two parts.

    The first part is the text that closes the list of tool calls. The second part consists of the
    markers that end the message:

    >>> split_text_after_calls(ListMarkup(open="<calls>", close="</calls><|end|>"))
    ('</calls>', ['<|end|>'])
    """
    # Each marker that opens the list has one closing marker. If words without a marker open the
    # list, one marker closes the list. If no text opens the list, no marker closes the list.
    num_closing_markers = len(markers(markup.open)) or (1 if markup.open.strip() else 0)
    # The first markers close the list of tool calls. All later markers end the message.
    turn_ends = list(MARKER.finditer(markup.close))[num_closing_markers:]
    if not turn_ends:
        return markup.close, []
    section_close = markup.close[: turn_ends[0].start()]
    return section_close, [match.group() for match in turn_ends]


# ---- the digits that number the tool calls ------------------------------------------------------

# Some templates number the tool calls: "0 zqFirstTool" and "1 zqSecondTool", or "zqFirstTool
# index=0" and "zqSecondTool index=1". Comparing the two tool calls of one message shows the digits.


def mask_call_numbers(texts: CallTexts) -> CallTexts:
    r"""Replace the number of each tool call, such as `0` in `0 zqFirstTool`, with a placeholder.

    Some templates number the tool calls of a message: "0 zqFirstTool, 1 zqSecondTool". The
    placeholder COUNTER_MARK ("\ufdd0") replaces these digits, so that two tool calls differ only in
    their names and arguments. Markup such as `<h1>` may contain other digits. Therefore, a digit is
    replaced only if it has the same distance (gap) from the function's name in each tool call.

    >>> texts = CallTexts("0 zqFirstTool", "", "", two_calls="0 zqFirstTool, 1 zqSecondTool")
    >>> mask_call_numbers(texts).one_call
    '\ufdd0 zqFirstTool'
    """
    if SECOND_TOOL not in texts.two_calls:
        return texts  # A message can have only one tool call.
    gap_before_name, gap_after_name = _find_number_gaps(texts.two_calls)
    return CallTexts._make(_mask_numbers(text, gap_before_name, gap_after_name) for text in texts)


def _find_number_gaps(two_calls: str) -> tuple[int | None, int | None]:
    """Return the distances between a function's name and the number of its tool call.

    The first member of the result is the number of characters between a digit before the name and
    the name. The second member is the number of characters between the name and a digit after the
    name. A member is None if there is no such digit.

    >>> _find_number_gaps("0 zqFirstTool, 1 zqSecondTool")
    (1, None)
    >>> _find_number_gaps("zqFirstTool:0, zqSecondTool:1")
    (None, 1)

    To find the digits, the texts around the two names are compared, from each name outwards. At the
    first difference, the second tool call must have the next higher digit.
    """
    before_first_name, _, after_first_name = two_calls.partition(FIRST_TOOL)
    before_second_name, _, after_second_name = two_calls.partition(SECOND_TOOL)
    # The text before each name is reversed, so that an index counts from the name. Example: the
    # text before the name in `0 f` becomes ` 0`, in which the digit has the index 1.
    gap_before_name = _index_of_number(before_first_name[::-1], before_second_name[::-1])
    gap_after_name = _index_of_number(after_first_name, after_second_name)
    return gap_before_name, gap_after_name


def _index_of_number(first: str, second: str) -> int | None:
    """Return the index at which a digit in `first` becomes the next higher digit in `second`.

    The texts are from a first and a second tool call, and both start at the function's name. Return
    None if the first differing characters are anything else, or if no characters differ.

    >>> _index_of_number(" index=0>", " index=1>")
    7
    >>> _index_of_number(" index=0>", " index=5>") is None
    True
    """
    pairs = enumerate(zip(first, second, strict=False))  # The texts may have different lengths.
    differences = ((index, char, other) for index, (char, other) in pairs if char != other)
    index, number, next_number = next(differences, (0, "", ""))
    are_digits = number.isdecimal() and next_number.isdecimal()
    return index if are_digits and int(next_number) == int(number) + 1 else None


def _mask_numbers(text: str, gap_before_name: int | None, gap_after_name: int | None) -> str:
    r"""In `text`, replace the one-digit number of each tool call with COUNTER_MARK.

    The gaps are the numbers of characters between the function's name and a digit before or after
    the name. A gap is None if there is no such digit. If the character at this distance is no
    digit, the text remains unchanged.

    >>> _mask_numbers("0 zqFirstTool, 1 zqSecondTool", gap_before_name=1, gap_after_name=None)
    '\ufdd0 zqFirstTool, \ufdd0 zqSecondTool'
    """
    for name in (FIRST_TOOL, SECOND_TOOL):
        name_start = text.find(name)
        if name_start < 0:
            continue
        if gap_before_name is not None:
            text = _mask_digit(text, name_start - 1 - gap_before_name)
        if gap_after_name is not None:
            text = _mask_digit(text, name_start + len(name) + gap_after_name)
    return text


def _mask_digit(text: str, index: int) -> str:
    r"""If the character at the given index is a digit, replace the digit with COUNTER_MARK.

    Return `text` unchanged if the character is no digit, or if the index is outside the text.

    >>> _mask_digit("0 zqFirstTool", 0)
    '\ufdd0 zqFirstTool'
    """
    is_outside = not 0 <= index < len(text)
    if is_outside or not text[index].isdigit():
        return text
    return text[:index] + COUNTER_MARK + text[index + 1 :]
