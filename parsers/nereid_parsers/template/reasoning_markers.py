"""Extract the markers of reasoning from rendered texts.

The functions take the text before or after the reasoning, and return the marker in this text. A
marker is returned with the white space around it, because the white space is a part of the format.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from nereid_parsers.format import Wrapper
from nereid_parsers.template.difference import (
    MARKER,
    closing_spellings,
    compound_closing,
    markers,
    opening_spellings,
    trailing_marker,
)

_THINKING_WORDS = ("think", "thought", "reason", "inner")


class MarkerPair(NamedTuple):
    """An opening marker and its closing marker, such as `<think>` and `</think>`."""

    opening: str
    closing: str


def is_thinking_marker(marker: str) -> bool:
    """Return whether the name of a marker refers to thinking.

    >>> is_thinking_marker("<|START_THINKING|>"), is_thinking_marker("<response>")
    (True, False)
    """
    return any(word in marker.lower() for word in _THINKING_WORDS)


def last_opening(before: str) -> str:
    r"""Return the marker that opens reasoning. `before` is the text before the reasoning.

    If markers and words are joined without white space, all of them are returned as one marker. If
    white space and words follow the last marker, these words open the reasoning instead.

    >>> last_opening("Hello.\n<think>\n")
    '\n<think>\n'
    >>> last_opening("Hello. <|open|>think<|sep|>")
    ' <|open|>think<|sep|>'
    >>> last_opening("<|start|>\nHere is my reasoning:\n")
    '\nHere is my reasoning:\n'
    """
    matches = list(MARKER.finditer(before))
    if not matches:
        return before.lstrip("\n")
    last_marker = matches[-1]
    after_marker = before[last_marker.end() :]
    if after_marker.strip() and after_marker[0].isspace():
        return after_marker  # These words open the reasoning.
    # The opening starts after the last white space, as in `Hello. <|open|>think<|sep|>`, unless the
    # last marker itself contains white space, as in `<start think>`.
    text_to_marker = before[: last_marker.end()]
    last_word = text_to_marker.split()[-1]
    start = min(last_marker.start(), len(text_to_marker) - len(last_word))
    start_of_whitespace = len(before[:start].rstrip())
    return before[start_of_whitespace:]


def first_opening(after_header: str) -> str:
    r"""Return the marker with which a generation prompt opens reasoning.

    If words precede the first marker, these words open the reasoning instead. The result is "" if
    `after_header`, the text of the prompt after the header, is blank.

    >>> first_opening("<think>\n</think>")
    '<think>\n'
    >>> first_opening("Here is my reasoning:\n<end>")
    'Here is my reasoning:\n'
    """
    first = MARKER.search(after_header)
    if first is None:
        return after_header if after_header.strip() else ""
    return _words_or_marker(after_header, first)


def closing_marker(between: str, opening: str) -> str:
    r"""Return the closing marker of reasoning, with the white space around the marker.

    The first marker closes the reasoning:

    >>> closing_marker("\n</think>\n\n<response>", "<think>\n")
    '\n</think>\n\n'

    If several markers and words open the reasoning, several markers and words also close the
    reasoning:

    >>> closing_marker("<|close|>think<|sep|><|open|>", "<|open|>think<|sep|>")
    '<|close|>think<|sep|>'

    If words precede the first marker, these words close the reasoning instead. If there is no
    marker, the whole text closes the reasoning:

    >>> closing_marker("I am done.\n<b>", "I think:\n"), closing_marker("Done.\n", "I think:\n")
    ('I am done.\n', 'Done.\n')

    Args:
        between: The text between the reasoning and the next part of the message.
        opening: The marker that opens reasoning.
    """
    compound = compound_closing(between, opening.strip())
    if compound:
        return compound
    first_marker = MARKER.search(between)
    return between if first_marker is None else _words_or_marker(between, first_marker)


def _words_or_marker(text: str, first: re.Match[str]) -> str:
    r"""Return the words before the first marker of `text`, or else the marker itself.

    The marker is returned with the white space before and after it.

    >>> text = "I am done.\n<b>"
    >>> _words_or_marker(text, MARKER.search(text))
    'I am done.\n'
    >>> text = "\n<a>\n<b>"
    >>> _words_or_marker(text, MARKER.search(text))
    '\n<a>\n'

    Args:
        text: The text.
        first: The match of the first marker in `text`.
    """
    words = text[: first.start()]
    if words.strip():
        return words
    text_after_whitespace = text[first.end() :].lstrip()
    return text.removesuffix(text_after_whitespace)


def last_marker_alone(opening: str, other_markup: str) -> tuple[str, ...]:
    """Return the last marker of `opening`, if a model may write this marker alone.

    The result is a tuple with this marker. The tuple is empty if `opening` does not end with a
    marker, has only one marker, or ends with a marker that also occurs in other markup of the
    format.

    >>> last_marker_alone("<|message|><|thinking|>", "<|end|>")
    ('<|thinking|>',)
    >>> last_marker_alone("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    ()
    """
    if len(markers(opening)) < 2:
        return ()
    last = trailing_marker(opening)
    return (last,) if last and last not in other_markup else ()


def content_wrapper(before_content: str, after_content: str) -> Wrapper | None:
    """Return the markers around content that follows reasoning, or None if there are no markers.

    >>> content_wrapper("<answer>", "</answer><|im_end|>")
    Wrapper(open='<answer>', close='</answer>')

    Args:
        before_content: The text between the closing marker of reasoning and the content.
        after_content: The text after the content.
    """
    opening = before_content.strip()
    if not opening:
        return None
    first_marker = next(iter(markers(after_content)), "")
    closing = first_marker if first_marker in closing_spellings(opening) else ""
    return Wrapper(before_content.lstrip(), closing)


def empty_pairs(text: str) -> list[MarkerPair]:
    """Return the markers of all empty blocks in `text`, such as `<think></think>`.

    >>> empty_pairs("Write <think></think>, then <answer> </answer>.")
    [MarkerPair(opening='<think>', closing='</think>'),
     MarkerPair(opening='<answer>', closing='</answer>')]
    """
    pairs = []
    for first, second in pairwise(MARKER.finditer(text)):
        is_empty = not text[first.end() : second.start()].strip()
        if is_empty and second.group() in closing_spellings(first.group()):
            pairs.append(MarkerPair(first.group(), second.group()))
    return pairs


def named_pair(literal: str) -> MarkerPair | None:
    """Find the two markers of reasoning in a string constant of the template.

    The constant must contain both markers, or it must consist of the closing marker alone. In the
    second case, the opening marker is derived from the closing marker. Otherwise return None.

    >>> named_pair("Write <think>your thoughts</think> first.")
    MarkerPair(opening='<think>', closing='</think>')
    >>> named_pair("</think>")
    MarkerPair(opening='<think>', closing='</think>')
    """
    literal_markers = markers(literal)
    for closing in filter(is_thinking_marker, literal_markers):
        # For an opening marker, such as `<think>`, this list is empty.
        possible_openings = [
            opening for opening in opening_spellings(closing) if opening != closing
        ]
        for opening in possible_openings:
            if opening in literal_markers:
                return MarkerPair(opening, closing)
        is_closing_alone = literal.strip() == closing
        if possible_openings and is_closing_alone:
            return MarkerPair(possible_openings[0], closing)
    return None
