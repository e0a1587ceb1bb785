"""Find the digits that number the tool calls of a message, and mask them.

Some templates number the tool calls: "0 zqFirstTool" and "1 zqSecondTool", or "zqFirstTool index=0"
and "zqSecondTool index=1". The digits are found by comparing the two tool calls of one message.
"""

from __future__ import annotations

from nereid_parsers.template.calls.call_texts import CallTexts
from nereid_parsers.template.conversation import FIRST_TOOL, SECOND_TOOL
from nereid_parsers.template.probe import COUNTER_MARK


def mask_call_numbers(texts: CallTexts) -> CallTexts:
    r"""Return `texts` with COUNTER_MARK in place of the digits that number the tool calls.

    >>> texts = CallTexts("0 zqFirstTool", "", "", two_calls="0 zqFirstTool, 1 zqSecondTool")
    >>> mask_call_numbers(texts).one_call
    '\ue010 zqFirstTool'
    """
    before_first, _, after_first = texts.two_calls.partition(FIRST_TOOL)
    before_second, name, after_second = texts.two_calls.partition(SECOND_TOOL)
    if not name:
        return texts
    before = _distance_to_number(before_first[::-1], before_second[::-1])
    after = _distance_to_number(after_first, after_second)
    return CallTexts(*(_mask_numbers(text, before, after) for text in texts))


def _distance_to_number(first: str, second: str) -> int:
    """Return the position of the digit that is one higher in `second` than in `first`.

    The first character has position 1. The digit must be the first difference between the two
    texts. The result is 0 if the first difference is not such a digit.

    >>> _distance_to_number(" index=0>", " index=1>")
    8
    """
    for position, (one, other) in enumerate(zip(first, second, strict=False), start=1):
        if one != other:
            is_next = one.isdigit() and other.isdigit() and int(other) == int(one) + 1
            return position if is_next else 0
    return 0


def _mask_numbers(text: str, before: int, after: int) -> str:
    r"""Return `text` with COUNTER_MARK in place of the number of each tool call.

    >>> _mask_numbers("0 zqFirstTool, 1 zqSecondTool", 2, 0)
    '\ue010 zqFirstTool, \ue010 zqSecondTool'

    Args:
        text: A rendering of tool calls.
        before: The distance, in characters, from the name to the number before it, or 0.
        after: The distance from the name to the number after it, or 0.
    """
    for name in (FIRST_TOOL, SECOND_TOOL):
        name_at = text.find(name)
        if name_at >= 0 and before:
            text = _mask_digit(text, name_at - before)
        if name_at >= 0 and after:
            text = _mask_digit(text, name_at + len(name) + after - 1)
    return text


def _mask_digit(text: str, at: int) -> str:
    r"""Return `text` with COUNTER_MARK in place of the character at index `at`, if it is a digit.

    >>> _mask_digit("0 zqFirstTool", 0)
    '\ue010 zqFirstTool'
    """
    if not text[at : at + 1].isdigit():
        return text
    return text[:at] + COUNTER_MARK + text[at + 1 :]
