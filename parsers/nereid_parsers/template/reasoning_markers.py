"""Extract the markers of reasoning from rendered texts.

The functions take the text before or after the reasoning, and return the marker in this text. A
marker is returned with the white space around it, because the white space is a part of the format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from nereid_parsers.format import Reasoning, Wrapper
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


@dataclass(frozen=True, slots=True)
class ReasoningMarkup:
    """The markers that one comparison shows.

    Attributes:
        part: The reasoning part of the format.
        wrapper: The markers around the content, if the comparison shows them.
        inner_headers: Headers that the model itself writes between the reasoning and the content.
    """

    part: Reasoning
    wrapper: Wrapper | None = None
    inner_headers: tuple[str, ...] = ()


def is_thinking_marker(marker: str) -> bool:
    """Return whether the name of a marker refers to thinking.

    >>> is_thinking_marker("<|START_THINKING|>"), is_thinking_marker("<response>")
    (True, False)
    """
    return any(word in marker.lower() for word in _THINKING_WORDS)


def last_opening(before: str) -> str:
    r"""Return the marker that opens reasoning. `before` is the text before the reasoning.

    The white space around the marker is a part of the result. If markers and words are joined
    without white space, all of them are returned as one marker. If white space and words follow the
    last marker, these words open the reasoning instead.

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
    text_to_marker = before[: last_marker.end()]
    after_marker = before[last_marker.end() :]
    are_words_after_space = bool(after_marker.strip()) and after_marker[0].isspace()
    if are_words_after_space:
        return after_marker  # These words open the reasoning.
    # The opening usually starts after the last white space: `<|open|>think<|sep|>` in `Hello.
    # <|open|>think<|sep|>`. If the last marker contains white space, as in `<start think>`, the
    # opening starts with this marker.
    last_word = text_to_marker.split()[-1]
    word_start = len(text_to_marker) - len(last_word)
    opening_start = min(last_marker.start(), word_start)
    text_before_opening = before[:opening_start].rstrip()
    return before.removeprefix(text_before_opening)


def first_opening(after_header: str) -> str:
    r"""Return the marker with which a generation prompt opens reasoning.

    The marker is the first marker after the header, which is the text that opens an assistant
    message. If words precede the first marker, these words open the reasoning instead. The result
    is "" if `after_header`, the text of the prompt after the header, is blank.

    >>> first_opening("<think>\n</think>")
    '<think>\n'
    >>> first_opening("Here is my reasoning:\n<end>")
    'Here is my reasoning:\n'
    """
    first_marker = MARKER.search(after_header)
    if first_marker is not None:
        return _words_or_marker(after_header, first_marker)
    return after_header if after_header.strip() else ""


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


def _words_or_marker(text: str, first_marker: re.Match[str]) -> str:
    r"""Return the words before the first marker of `text`, or the marker if no words precede it.

    The marker is returned with the white space around the marker.

    >>> text = "I am done.\n<b>"
    >>> _words_or_marker(text, MARKER.search(text))
    'I am done.\n'
    >>> text = "\n<a>\n<b>"
    >>> _words_or_marker(text, MARKER.search(text))
    '\n<a>\n'

    Args:
        text: A text that contains a marker.
        first_marker: The match of the first marker in `text`.
    """
    before_marker = text[: first_marker.start()]
    if before_marker.strip():
        return before_marker  # These are the words.
    after_whitespace = text[first_marker.end() :].lstrip()
    return text.removesuffix(after_whitespace)


def last_marker_alone(opening: str, other_markup: str) -> tuple[str, ...]:
    """Return the last marker of `opening`, if this marker alone also shows that reasoning starts.

    A model may omit the other markers. The result is a tuple with the last marker. The tuple is
    empty if `opening` does not end with a marker, has only one marker, or ends with a marker that
    also occurs in other markup of the format.

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

    The closing marker of the result is "" if no marker after the content corresponds to the opening
    marker.

    >>> content_wrapper("<answer>", "</answer><|im_end|>")
    Wrapper(open='<answer>', close='</answer>')

    Args:
        before_content: The text between the closing marker of reasoning and the content.
        after_content: The text after the content.
    """
    opening = before_content.strip()
    if not opening:
        return None
    markers_after = markers(after_content)
    is_closed = bool(markers_after) and markers_after[0] in closing_spellings(opening)
    closing = markers_after[0] if is_closed else ""
    return Wrapper(before_content.lstrip(), closing)


def empty_pairs(text: str) -> list[MarkerPair]:
    """Return the markers of all empty blocks in `text`, such as `<think></think>`.

    The instructions in a prompt often name the markers of reasoning in this way.

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
    second case, the opening marker is derived from the closing marker. Return None if the constant
    has neither form, or if the names of the markers do not refer to thinking.

    >>> named_pair("Write <think>your thoughts</think> first.")
    MarkerPair(opening='<think>', closing='</think>')
    >>> named_pair("</think>")
    MarkerPair(opening='<think>', closing='</think>')
    """
    all_markers = markers(literal)
    thinking_markers = [marker for marker in all_markers if is_thinking_marker(marker)]
    for marker in thinking_markers:
        # If `closing` is actually an opening marker, such as `<think>`, the list
        # `possible_openings` is empty.
        possible_openings = [opening for opening in opening_spellings(marker) if opening != marker]
        for opening in possible_openings:
            if opening in all_markers:
                return MarkerPair(opening, closing=marker)
        is_alone = literal.strip() == marker
        if possible_openings and is_alone:
            return MarkerPair(possible_openings[0], closing=marker)
    return None


def markup_of_pairs(reasoning: MarkerPair, other_pairs: list[MarkerPair]) -> ReasoningMarkup:
    r"""Declare that a pair of markers encloses reasoning, and another pair encloses the content.

    The first of `other_pairs` encloses the content. The white space around the markers of reasoning
    is unknown. So the result assumes that each of these markers is on a line of its own, as in most
    templates.

    >>> thinking, answer = MarkerPair("<think>", "</think>"), MarkerPair("<answer>", "</answer>")
    >>> markup = markup_of_pairs(thinking, [answer])
    >>> markup.part.open, markup.part.close, markup.wrapper
    ('<think>\n', '\n</think>\n\n', Wrapper(open='<answer>', close='</answer>'))
    """
    return ReasoningMarkup(
        Reasoning(f"{reasoning.opening}\n", f"\n{reasoning.closing}\n\n"),
        wrapper=Wrapper(*other_pairs[0]) if other_pairs else None,
    )
