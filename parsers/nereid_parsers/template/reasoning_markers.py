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
    first_two,
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
    last marker, these words open the reasoning instead. If there is no marker, the whole text opens
    the reasoning.

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
    has_space_and_words = bool(after_marker.strip()) and after_marker[0].isspace()
    if has_space_and_words:
        return after_marker
    opening_start = _start_of_opening(before, last_marker)
    # The white space before the opening marker is a part of the result.
    text_before_opening = before[:opening_start].rstrip()
    return before.removeprefix(text_before_opening)


def _start_of_opening(before: str, last_marker: re.Match[str]) -> int:
    """Return the start index of the markers and words that directly precede reasoning.

    The markers and words are joined without white space, so they usually start after the last white
    space. Exception: a marker such as `<start think>` contains white space.

    >>> text = "Hi. <|open|>think<|sep|>"
    >>> _start_of_opening(text, list(MARKER.finditer(text))[-1])
    4

    Args:
        before: The text before the reasoning.
        last_marker: The match of the last marker in `before`.
    """
    text_to_marker = before[: last_marker.end()]
    text_after_space = text_to_marker.split()[-1]
    start_after_space = len(text_to_marker) - len(text_after_space)
    # If the marker contains white space, the start of the marker is the smaller index.
    return min(start_after_space, last_marker.start())


def first_opening(after_header: str) -> str:
    r"""Find the opening marker of reasoning, such as `<think>`, in the text of a generation prompt.

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
    markers_and_words = compound_closing(between, opening.strip())
    if markers_and_words:
        return markers_and_words
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


def declare_reasoning(
    opening: str, closing: str, header: str, after_reasoning: str
) -> ReasoningMarkup:
    """Declare the markers of reasoning, and the header that the model writes after the reasoning.

    >>> text = "</think><|assistant|>"
    >>> declare_reasoning("<think>", "</think>", "<|assistant|>", text).inner_headers
    ('<|assistant|>',)

    Args:
        opening: The opening marker of reasoning.
        closing: The closing marker of reasoning.
        header: The text that opens the model's turn. Some templates repeat the header between the
            reasoning and the content. The model then writes this second header itself.
        after_reasoning: The text between the reasoning and the next part of the message.
    """
    also_open = shorter_openings(opening, other_markup=closing + header)
    is_header_repeated = bool(header) and header in after_reasoning
    return ReasoningMarkup(
        Reasoning(opening, closing, also_open=also_open),
        inner_headers=(header,) if is_header_repeated else (),
    )


def shorter_openings(opening: str, other_markup: str) -> tuple[str, ...]:
    """Return the shorter forms of `opening` that a model may write at the start of reasoning.

    If several markers open reasoning, a model may write only the last marker. The result contains
    this marker, or is empty.

    >>> shorter_openings("<|message|><|thinking|>", "<|end|>")
    ('<|thinking|>',)

    The last marker must not occur in the other markup around reasoning, because the marker then
    does not show that reasoning starts:

    >>> shorter_openings("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    ()

    Args:
        opening: The text that opens reasoning.
        other_markup: The closing marker of reasoning and the header of the model's turn.
    """
    has_several_markers = len(markers(opening)) > 1
    last_marker = trailing_marker(opening)  # "" if `opening` ends with words
    if not has_several_markers or not last_marker or last_marker in other_markup:
        return ()
    return (last_marker,)


def content_wrapper(before_content: str, after_content: str) -> Wrapper | None:
    r"""Return the markers around content that follows reasoning, or None if there are no markers.

    The closing marker of the result is "" if no marker after the content corresponds to the opening
    marker.

    >>> content_wrapper("\n<answer>\n", "</answer><|im_end|>")
    Wrapper(open='<answer>\n', close='</answer>')

    Args:
        before_content: The text between the closing marker of reasoning and the content.
        after_content: The text after the content.
    """
    opening = before_content.strip()
    if not opening:
        return None
    first_after, _ = first_two(markers(after_content))  # A missing marker is "".
    closing = first_after if first_after in closing_spellings(opening) else ""
    # White space before the opening marker is removed, because it belongs to the end of the
    # reasoning. White space after the opening marker is kept as a part of the opening marker.
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
        text_between = text[first.end() : second.start()]
        is_pair = second.group() in closing_spellings(first.group())
        if is_pair and not text_between.strip():
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
        openings_in_literal = [
            opening for opening in _possible_openings(marker) if opening in all_markers
        ]
        if openings_in_literal:
            return MarkerPair(openings_in_literal[0], closing=marker)
    text = literal.strip()
    is_marker_alone = text in thinking_markers
    derived_openings = _possible_openings(text) if is_marker_alone else []
    return MarkerPair(derived_openings[0], closing=text) if derived_openings else None


def _possible_openings(marker: str) -> list[str]:
    """Return the possible opening markers of a closing marker. Return [] for an opening marker.

    >>> _possible_openings("</think>"), _possible_openings("<think>")
    (['<think>'], [])
    """
    return [opening for opening in opening_spellings(marker) if opening != marker]


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
    part = Reasoning(open=f"{reasoning.opening}\n", close=f"\n{reasoning.closing}\n\n")
    if not other_pairs:
        return ReasoningMarkup(part)
    content = other_pairs[0]
    return ReasoningMarkup(part, wrapper=Wrapper(content.opening, content.closing))
