"""Find the numbers that some templates write beside tool calls, and replace the numbers.

Some templates number the tool calls: "0 zqFirstTool" and "1 zqSecondTool", or "zqFirstTool index=0"
and "zqSecondTool index=1". Comparing the two tool calls of one message shows the digits.
"""

from __future__ import annotations

from typing import NamedTuple

from nereid_parsers.template.calls.call_texts import CallTexts
from nereid_parsers.template.conversation import FIRST_TOOL, SECOND_TOOL
from nereid_parsers.template.probe import COUNTER_MARK


class _NumberGaps(NamedTuple):
    """The distances, in characters, of a tool call's number from the name of the function.

    Attributes:
        before_name: How many characters are between a digit and the name after it: 1 in `0 f`.
            None if no such digit precedes the name.
        after_name: How many characters are between the name and a digit after it: 7 in
            `f index=0`. None if no such digit follows the name.
    """

    before_name: int | None
    after_name: int | None


def mask_call_numbers(texts: CallTexts) -> CallTexts:
    r"""Replace the number of each tool call, such as `0` in `0 zqFirstTool`, with a placeholder.

    The placeholder is COUNTER_MARK ("\ufdd0"). After the replacement, the texts of two tool calls
    differ only in their names and arguments:

    >>> two_calls = "0 zqFirstTool, 1 zqSecondTool"
    >>> texts = CallTexts("0 zqFirstTool", two_arguments="", number="", two_calls=two_calls)
    >>> mask_call_numbers(texts).one_call
    '\ufdd0 zqFirstTool'

    Other digits, as in the tag `<h1>`, remain unchanged. If a message can have only one tool call,
    the numbers cannot be found, so `texts` is returned unchanged.
    """
    if SECOND_TOOL not in texts.two_calls:
        return texts  # A message can have only one tool call.
    # The number and the function's name have the same distance (the gap) in all texts. The gap is
    # measured in the text with two tool calls, in which the numbers differ (0 and 1). Other digits,
    # such as the 1 in the tag `<h1>`, are equal in both tool calls.
    gaps = _find_number_gaps(texts.two_calls)
    return CallTexts._make(_mask_numbers(text, gaps) for text in texts)


def _find_number_gaps(two_calls: str) -> _NumberGaps:
    """Measure the distances between the name of a function and the number of its tool call.

    The number of the second tool call is the number of the first tool call plus one. The text
    before the first name is compared with all text before the second name, character by character,
    starting at the names. The texts after the names are compared in the same way. If the first
    characters that differ are two such digits, these digits are the numbers.

    >>> _find_number_gaps("0 zqFirstTool, 1 zqSecondTool")
    _NumberGaps(before_name=1, after_name=None)
    >>> _find_number_gaps("zqFirstTool:0, zqSecondTool:1")
    _NumberGaps(before_name=None, after_name=1)
    """
    before_first_name, _, after_first_name = two_calls.partition(FIRST_TOOL)
    before_second_name, _, after_second_name = two_calls.partition(SECOND_TOOL)
    # `_index_of_next_digit` compares two texts from left to right, so the texts before the names
    # are reversed. Example: `0 f` and `1 g` give ` 0` and ` 1`, and the digits have the index 1.
    return _NumberGaps(
        before_name=_index_of_next_digit(before_first_name[::-1], before_second_name[::-1]),
        after_name=_index_of_next_digit(after_first_name, after_second_name),
    )


def _index_of_next_digit(first: str, second: str) -> int | None:
    """Return the index at which `first` contains a digit, and `second` contains the next digit.

    Example: `first` contains 0, and `second` contains 1. All characters before this index must be
    equal. Return None if the first different characters are not such digits, or if there are none.

    >>> _index_of_next_digit(" index=0>", " index=1>")
    7
    >>> _index_of_next_digit(" index=0>", " index=5>") is None
    True
    """
    # The texts may have different lengths.
    for index, (char, other_char) in enumerate(zip(first, second, strict=False)):
        if char != other_char:
            return index if _is_next_digit(char, other_char) else None
    return None


def _is_next_digit(char: str, next_char: str) -> bool:
    """Return whether `next_char` is a digit that is greater by one than the digit `char`.

    >>> _is_next_digit("0", "1"), _is_next_digit("0", "5"), _is_next_digit("a", "b")
    (True, False, False)
    """
    are_digits = char.isdecimal() and next_char.isdecimal()
    return are_digits and int(next_char) == int(char) + 1


def _mask_numbers(text: str, gaps: _NumberGaps) -> str:
    r"""In rendered tool calls, replace the number of each tool call with COUNTER_MARK.

    A message contains at most two tool calls, so each number is a single digit. `gaps` contains the
    distances between a function's name and the digits before and after the name. A distance is None
    if there is no such digit. A character at this distance that is no digit remains unchanged.

    >>> _mask_numbers("0 zqFirstTool, 1 zqSecondTool", _NumberGaps(before_name=1, after_name=None))
    '\ufdd0 zqFirstTool, \ufdd0 zqSecondTool'
    """
    masked = text
    for name in (FIRST_TOOL, SECOND_TOOL):
        if name in masked:
            before_name, _, after_name = masked.partition(name)
            # The number of characters between a digit and the name is an index of the reversed
            # text. Example: the text before the name is `:0 `. In the reversed text ` 0:`, the
            # digit has the index 1.
            masked_before = _mask_digit(before_name[::-1], gaps.before_name)[::-1]
            masked_after = _mask_digit(after_name, gaps.after_name)
            masked = masked_before + name + masked_after
    return masked


def _mask_digit(text: str, index: int | None) -> str:
    r"""If the character at the given index is a digit, replace the digit with COUNTER_MARK.

    Return `text` unchanged if the character is no digit, or if the index is None or outside the
    text.

    >>> _mask_digit("0 zqFirstTool", 0)
    '\ufdd0 zqFirstTool'
    """
    if index is None or index >= len(text) or not text[index].isdigit():
        return text
    return text[:index] + COUNTER_MARK + text[index + 1 :]
