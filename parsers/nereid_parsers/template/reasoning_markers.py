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
    """The markers that one comparison of two rendered messages shows.

    Example: "<think>REASONING</think><|assistant|><answer>CONTENT</answer>" has the reasoning
    markers `<think>` and `</think>`, the wrapper `<answer>`, `</answer>`, and the inner header
    `<|assistant|>`.

    Attributes:
        part: The reasoning part of the format. It contains the markers around the reasoning.
        wrapper: The markers around the content, or None if the comparison shows no such markers.
        inner_headers: The headers between the reasoning and the content. A header is the text that
            opens an assistant message. The model writes an inner header itself.
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
    r"""Return the opening marker of reasoning, which is the last marker before the reasoning.

    A marker is a piece of markup such as `<think>`. The white space around the marker is a part of
    the result:

    >>> last_opening("Hello.\n<think>\n")
    '\n<think>\n'

    If markers and words are joined without white space, they open the reasoning together:

    >>> last_opening("Hello. <|open|>think<|sep|>")
    ' <|open|>think<|sep|>'

    If white space and words follow the last marker, these words open the reasoning. If there is no
    marker, the whole text opens the reasoning, without the line breaks at its start:

    >>> last_opening("<|start|>\nI think:\n"), last_opening("\nI think:\n")
    ('\nI think:\n', 'I think:\n')

    Args:
        before: The text of the rendered message before the reasoning.
    """
    matches = list(MARKER.finditer(before))
    if not matches:
        return before.lstrip("\n")
    last_marker = matches[-1]
    after_marker = before[last_marker.end() :]
    has_space_and_words = bool(after_marker.strip()) and after_marker[0].isspace()
    if has_space_and_words:
        return after_marker
    return _joined_opening(before, last_marker)


def _joined_opening(before: str, last_marker: re.Match[str]) -> str:
    r"""Return the markers and words that open reasoning and are joined without white space.

    The opening text starts after the last white space that precedes the end of `last_marker`. The
    white space around the opening text is a part of the result:

    >>> text = "Hi. <|open|>think<|sep|>\n"
    >>> _joined_opening(text, list(MARKER.finditer(text))[-1])
    ' <|open|>think<|sep|>\n'

    If the last marker itself contains white space, as `<start think>` does, the opening text starts
    with this marker.

    Args:
        before: The text of the rendered message before the reasoning.
        last_marker: The match of the last marker in `before`.
    """
    text_to_marker = before[: last_marker.end()]
    text_after_space = text_to_marker.split()[-1]
    start_after_space = len(text_to_marker) - len(text_after_space)
    # If the last marker contains white space, the marker starts before this white space.
    opening_start = min(start_after_space, last_marker.start())
    text_before_opening = before[:opening_start].rstrip()
    return before.removeprefix(text_before_opening)


def first_opening(after_header: str) -> str:
    r"""Return the opening marker of reasoning, such as `<think>`, at the end of a prompt.

    The end of a prompt opens the model's answer: the header `<|assistant|>`, and sometimes the
    start of the reasoning. The first marker after the header opens the reasoning. If words precede
    the first marker, these words open the reasoning instead:

    >>> first_opening("<think>\n</think>"), first_opening("I think:\n<end>")
    ('<think>\n', 'I think:\n')

    Args:
        after_header: The text of the prompt after the header. The result is "" if this text is
            blank.
    """
    opening = _words_or_marker_at_start(after_header)
    return opening if opening.strip() else ""


def closing_marker(between: str, opening: str) -> str:
    r"""Return the closing marker of reasoning, with the white space around the marker.

    Usually, the first marker after the reasoning is the closing marker:

    >>> closing_marker("\n</think>\n\n<response>", "<think>\n")
    '\n</think>\n\n'

    If several markers and words open the reasoning, several markers and words also close the
    reasoning:

    >>> closing_marker("<|close|>think<|sep|><|open|>", "<|open|>think<|sep|>")
    '<|close|>think<|sep|>'

    If words precede the first marker, these words close the reasoning:

    >>> closing_marker("I am done.\n<b>", "I think:\n")
    'I am done.\n'

    Args:
        between: The text between the reasoning and the next part of the message. If this text
            contains no marker, the result is the whole text.
        opening: The text that opens the reasoning, such as `<think>`.
    """
    markers_and_words = compound_closing(between, opening.strip())
    return markers_and_words or _words_or_marker_at_start(between)


def _words_or_marker_at_start(text: str) -> str:
    r"""Return the words or the marker at the start of `text`, with the white space around them.

    Most templates write a marker, such as `</think>`, before or after the reasoning. Some templates
    write words in the place of this marker. If `text` starts with words, return the words before
    the first marker. If `text` starts with a marker, return only the first marker:

    >>> _words_or_marker_at_start("I am done.\n<a><b>"), _words_or_marker_at_start("\n<a>\n<b>")
    ('I am done.\n', '\n<a>\n')

    A text without markers is returned unchanged.
    """
    first_marker = MARKER.search(text)
    if first_marker is None:
        return text
    words = text[: first_marker.start()]
    if words.strip():
        return words
    after_marker_and_space = text[first_marker.end() :].lstrip()
    return text.removesuffix(after_marker_and_space)


def declare_reasoning(
    opening: str, closing: str, header: str, after_reasoning: str
) -> ReasoningMarkup:
    """Declare the markers around the reasoning, and a header that follows the reasoning.

    A header is the text that opens an assistant message. Some templates write the header a second
    time, between the reasoning and the content. The model then writes the second header itself, and
    the parser must remove this header from the output:

    >>> text = "</think><|assistant|>"
    >>> declare_reasoning("<think>", "</think>", "<|assistant|>", text).inner_headers
    ('<|assistant|>',)

    Args:
        opening: The opening marker of reasoning.
        closing: The closing marker of reasoning.
        header: The header of the model's messages, or "".
        after_reasoning: The text between the reasoning and the next part of the message.
    """
    also_open = shorter_openings(opening, other_markup=closing + header)
    is_header_repeated = bool(header) and header in after_reasoning
    return ReasoningMarkup(
        Reasoning(opening, closing, also_open=also_open),
        inner_headers=(header,) if is_header_repeated else (),
    )


def shorter_openings(opening: str, other_markup: str) -> tuple[str, ...]:
    """Return a tuple with the last marker of `opening`, if a model may write this marker alone.

    If several markers open the reasoning, such as `<|message|><|thinking|>`, some models write only
    the last marker. The parser then accepts the last marker (`Reasoning.also_open`):

    >>> shorter_openings("<|message|><|thinking|>", other_markup="<|end|>")
    ('<|thinking|>',)

    Return () if only one marker opens the reasoning. Also return () if the other markup contains
    the last marker, because the last marker alone then does not show that reasoning starts. In this
    example, `<|sep|>` also occurs at the end of the reasoning:

    >>> shorter_openings("<|open|>think<|sep|>", other_markup="<|close|>think<|sep|>")
    ()

    Args:
        opening: The text that opens the reasoning.
        other_markup: The text that closes the reasoning, followed by the text that opens an
            assistant message.
    """
    has_several_markers = len(markers(opening)) > 1
    last_marker = trailing_marker(opening)  # "" if `opening` ends with words
    if not has_several_markers or not last_marker or last_marker in other_markup:
        return ()
    return (last_marker,)


def content_wrapper(before_content: str, after_content: str) -> Wrapper | None:
    r"""Return the markers around the content that follows the reasoning, or None.

    Some templates write a marker before and after the content, such as `<answer>` and `</answer>`:

    >>> content_wrapper("\n<answer>\n", "</answer><|im_end|>")
    Wrapper(open='<answer>\n', close='</answer>')

    If the first marker after the content is not the closing marker of `<answer>`, the content has
    no closing marker. `Wrapper.close` is then "":

    >>> content_wrapper("<answer>", "<|im_end|>")
    Wrapper(open='<answer>', close='')

    Args:
        before_content: The text between the closing marker of reasoning and the content. The result
            is None if this text is blank.
        after_content: The text after the content.
    """
    opening = before_content.strip()
    if not opening:
        return None
    first_after, _ = first_two(markers(after_content))  # A missing marker is "".
    closing = first_after if first_after in closing_spellings(opening) else ""
    # White space before the opening marker is removed, because it belongs to the end of the
    # reasoning. White space after the opening marker is a part of the wrapper.
    return Wrapper(before_content.lstrip(), closing)


def empty_pairs(text: str) -> list[MarkerPair]:
    """Return the opening and closing markers of each empty block in `text`.

    An empty block is, for example, `<think></think>`. Instructions in a prompt often contain empty
    blocks to tell the model which markers to write around the reasoning.

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
    """Return the two markers of reasoning that a string constant of the template contains.

    The names of the markers must refer to thinking, as in `<think>`. If the constant consists of
    the closing marker alone, the opening marker is derived from the closing marker:

    >>> named_pair("Write <think>your thoughts</think> first.")
    MarkerPair(opening='<think>', closing='</think>')
    >>> named_pair("</think>")
    MarkerPair(opening='<think>', closing='</think>')

    Return None if the constant contains no such markers.
    """
    return _thinking_pair_in(literal) or _pair_of_closing(literal.strip())


def _thinking_pair_in(literal: str) -> MarkerPair | None:
    """Return the first pair of markers in `literal` whose closing marker refers to thinking.

    >>> _thinking_pair_in("Write <think>your thoughts</think> first.")
    MarkerPair(opening='<think>', closing='</think>')

    Return None if `literal` does not contain both markers of a pair.
    """
    all_markers = markers(literal)
    for closing in filter(is_thinking_marker, all_markers):
        for opening in _possible_openings(closing):
            if opening in all_markers:
                return MarkerPair(opening, closing)
    return None


def _pair_of_closing(text: str) -> MarkerPair | None:
    """Derive the opening marker if `text` is a closing marker whose name refers to thinking.

    >>> _pair_of_closing("</think>")
    MarkerPair(opening='<think>', closing='</think>')

    Return None if `text` is anything else, such as an opening marker or a sentence.
    """
    is_closing_alone = text in markers(text) and is_thinking_marker(text)
    openings = _possible_openings(text) if is_closing_alone else []
    return MarkerPair(openings[0], closing=text) if openings else None


def _possible_openings(marker: str) -> list[str]:
    """Return the opening markers that may belong to a closing marker.

    Return [] for a marker that is itself an opening marker.

    >>> _possible_openings("</think>"), _possible_openings("<think>")
    (['<think>'], [])
    """
    return [opening for opening in opening_spellings(marker) if opening != marker]


def markup_of_pairs(reasoning: MarkerPair, other_pairs: list[MarkerPair]) -> ReasoningMarkup:
    r"""Declare that the pair `reasoning` encloses reasoning, and another pair encloses the content.

    An instruction, such as "Write <think></think> and <answer></answer>", contains the pairs. The
    instruction does not show the white space around the markers of reasoning. Therefore, the result
    assumes that each marker of reasoning is on a line of its own, as in most templates.

    >>> thinking, answer = MarkerPair("<think>", "</think>"), MarkerPair("<answer>", "</answer>")
    >>> markup = markup_of_pairs(thinking, [answer])
    >>> markup.part.open, markup.part.close, markup.wrapper
    ('<think>\n', '\n</think>\n\n', Wrapper(open='<answer>', close='</answer>'))

    Args:
        reasoning: The markers of reasoning.
        other_pairs: The other pairs of the instruction. The first of these pairs encloses the
            content. If the list is empty, the result declares no markers around the content.
    """
    part = Reasoning(open=f"{reasoning.opening}\n", close=f"\n{reasoning.closing}\n\n")
    if not other_pairs:
        return ReasoningMarkup(part)
    content = other_pairs[0]
    return ReasoningMarkup(part, wrapper=Wrapper(content.opening, content.closing))
