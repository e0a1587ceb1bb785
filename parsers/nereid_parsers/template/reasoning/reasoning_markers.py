"""Extract the markers of reasoning, such as `<think>`, from rendered texts.

The functions take the text before or after the reasoning, and return the marker in this text. A
marker is returned with the white space around it, because the white space is a part of the format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from nereid_parsers.format import Reasoning, Wrapper
from nereid_parsers.template.markup.marker_pairs import closing_spellings, opening_spellings
from nereid_parsers.template.markup.markers import (
    MARKER,
    compound_closing,
    markers,
    trailing_marker,
)

_THINKING_WORDS = ("think", "thought", "reason", "inner")
# Matches a marker at the start of a text, and the white space around the marker.
_LEADING_MARKER = re.compile(rf"\s*(?:{MARKER.pattern})\s*")
_SPACE_AND_WORD = re.compile(r"\s+\S")  # Matches white space and the start of a word after it.


class MarkerPair(NamedTuple):
    """An opening marker and its closing marker, such as `<think>` and `</think>`."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class ReasoningMarkup:
    """The markers, such as `<think>`, that were found around the reasoning and the content.

    Example: "<think>REASONING</think><|assistant|><answer>CONTENT</answer>" has the reasoning
    markers `<think>` and `</think>`, the wrapper `<answer>`, `</answer>`, and the inner header
    `<|assistant|>`.

    Attributes:
        part: The reasoning part of the format. It contains the markers around the reasoning.
        wrapper: The markers around the content, or None if the search has found no such markers.
        inner_headers: The headers between the reasoning and the content. A header is the text that
            opens an assistant message. The model writes an inner header itself.
    """

    part: Reasoning
    wrapper: Wrapper | None = None
    inner_headers: tuple[str, ...] = ()


def is_thinking_marker(marker: str) -> bool:
    """Return whether the name of a marker, such as `<think>`, refers to thinking.

    >>> is_thinking_marker("<|START_THINKING|>"), is_thinking_marker("<response>")
    (True, False)
    """
    return any(word in marker.lower() for word in _THINKING_WORDS)


def first_marker(text: str) -> str:
    """Return the first marker in `text`, such as `<think>`. Return "" if there is no marker.

    >>> first_marker("Hello <think></think>"), first_marker("Hello")
    ('<think>', '')
    """
    return next(iter(markers(text)), "")


def opening_of_reasoning(before: str) -> str:
    r"""Return the text that opens the reasoning, with the white space around this text.

    `before` is the text before the reasoning, and the result is the last part of `before`. Usually,
    the last marker opens the reasoning. The result contains the white space around this marker:

    >>> opening_of_reasoning("Hello.\n<think>\n")
    '\n<think>\n'

    Text that directly precedes the last marker also belongs to the opening text:

    >>> opening_of_reasoning("Hello. <|open|>think<|sep|>")
    ' <|open|>think<|sep|>'

    If words follow the last marker, these words open the reasoning:

    >>> opening_of_reasoning("<|start|>\nI think:\n")
    '\nI think:\n'

    If there is no marker, the words of `before` open the reasoning. Line breaks before the words
    are dropped:

    >>> opening_of_reasoning("\nI think:\n")
    'I think:\n'
    """
    all_markers = list(MARKER.finditer(before))
    if not all_markers:
        return before.lstrip("\n")
    last_marker = all_markers[-1]
    after_marker = before[last_marker.end() :]
    starts_with_words = _SPACE_AND_WORD.match(after_marker) is not None
    if starts_with_words:
        return after_marker
    joined_text = _last_word_with_space(before[: last_marker.start()])
    return joined_text + last_marker.group() + after_marker


def _last_word_with_space(text: str) -> str:
    r"""Return the last word of `text`, and the white space before this word.

    A word is a text without white space. If `text` ends with white space, return only this white
    space.

    >>> _last_word_with_space("Hello.\n<|open|>think"), _last_word_with_space("Hello.\n")
    ('\n<|open|>think', '\n')
    """
    # Because of the group `(\s+)`, `split` also returns the white space. For the first example, the
    # list is ["Hello.", "\n", "<|open|>think"]. For the second example, it is ["Hello.", "\n", ""].
    words_and_spaces = re.split(r"(\s+)", text)
    last_space_and_word = words_and_spaces[-2:]
    return "".join(last_space_and_word)


def first_opening(after_header: str) -> str:
    r"""Return the text that opens the reasoning, such as `<think>`. Return "" if there is none.

    A prompt ends with the header of the model's answer, such as `<|assistant|>`. After the header,
    some prompts contain the start of the reasoning. Usually, the first marker after the header
    opens the reasoning. If words precede this marker, the words open the reasoning:

    >>> first_opening("<think>\n</think>"), first_opening("I think:\n<end>")
    ('<think>\n', 'I think:\n')
    """
    opening = _leading_markup(after_header)
    return opening if opening.strip() else ""


def closing_marker(after_reasoning: str, opening: str) -> str:
    r"""Return the marker that closes the reasoning, with the white space around this marker.

    Usually, the result is the first marker of `after_reasoning`, the text after the reasoning:

    >>> closing_marker("\n</think>\n\n<response>", opening="<think>\n")
    '\n</think>\n\n'

    If several markers open the reasoning, several markers also close the reasoning. After the first
    marker, both texts continue in the same way. In this example, they continue with `think<|sep|>`:

    >>> closing_marker("<|close|>think<|sep|><|open|>", opening="<|open|>think<|sep|>")
    '<|close|>think<|sep|>'

    If `after_reasoning` starts with words, the text before the first marker closes the reasoning:

    >>> closing_marker("I am done.\n<b>", opening="I think:\n")
    'I am done.\n'
    """
    # `compound_closing` returns "" unless several markers open and close the reasoning.
    several_markers = compound_closing(after_reasoning, opening.strip())
    return several_markers or _leading_markup(after_reasoning)


def _leading_markup(text: str) -> str:
    r"""Return the markup at the start of `text`, which opens or closes reasoning.

    If `text` starts with a marker, the markup is this marker and the white space around it:

    >>> _leading_markup("\n</think>\n<answer>")
    '\n</think>\n'

    Some templates write words instead of a marker. The markup is then the text before the first
    marker, or the whole text if there is no marker:

    >>> _leading_markup("I am done.\n<answer>")
    'I am done.\n'
    """
    marker_at_start = _LEADING_MARKER.match(text)
    if marker_at_start is not None:
        return marker_at_start.group()
    next_marker = MARKER.search(text)
    return text if next_marker is None else text[: next_marker.start()]


def declare_reasoning(pair: MarkerPair, header: str, after_reasoning: str) -> ReasoningMarkup:
    """Describe the markers of reasoning, and a header between the reasoning and the next part.

    A header is the text that opens an assistant message. Some templates write the header a second
    time in `after_reasoning`, the text after the reasoning. The model then writes the second header
    itself, so the parser must remove this "inner header" from the output:

    >>> pair = MarkerPair("<think>", "</think>")
    >>> declare_reasoning(pair, "<|assistant|>", "</think><|assistant|>").inner_headers
    ('<|assistant|>',)

    If several markers open the reasoning, as in `<|message|><|thinking|>`, some models write only
    the last marker. `Reasoning.also_open` declares this marker, unless the marker also occurs
    elsewhere. Then the marker alone does not show that reasoning starts.
    """
    texts_elsewhere = (pair.closing, header, after_reasoning)
    last_marker = _last_opening_marker(pair.opening, other_texts=texts_elsewhere)
    also_open = () if last_marker is None else (last_marker,)
    part = Reasoning(pair.opening, pair.closing, also_open=also_open)
    is_header_repeated = bool(header) and header in after_reasoning
    return ReasoningMarkup(part, inner_headers=(header,) if is_header_repeated else ())


def _last_opening_marker(opening: str, other_texts: tuple[str, ...]) -> str | None:
    """Return the last of several markers that open the reasoning, or None.

    `opening` contains all these markers:

    >>> _last_opening_marker("<|message|><|thinking|>", other_texts=("<|end|>",))
    '<|thinking|>'

    Return None if `opening` contains only one marker, or ends with words. Also return None if one
    of the `other_texts` contains the last marker, because this marker alone would then not show
    that the reasoning starts:

    >>> _last_opening_marker("<|open|>think<|sep|>", other_texts=("<|close|>think<|sep|>",)) is None
    True
    """
    last_marker = trailing_marker(opening)  # "" if `opening` ends with words
    if not last_marker or len(markers(opening)) == 1:
        return None
    is_ambiguous = any(last_marker in text for text in other_texts)
    return None if is_ambiguous else last_marker


def content_wrapper(before_content: str, after_content: str) -> Wrapper | None:
    r"""Return the markers around the content that follows the reasoning, or None if there are none.

    `before_content` is the text between the closing marker of reasoning and the content, and
    `after_content` is the text after the content. If `before_content` is blank, return None.

    >>> content_wrapper("\n<answer>\n", "</answer><|im_end|>")
    Wrapper(open='<answer>\n', close='</answer>')

    In the next example, no marker closes the content, because `<|im_end|>` is not the closing
    marker of `<answer>`:

    >>> content_wrapper("<answer>", "<|im_end|>")
    Wrapper(open='<answer>', close='')
    """
    opening = before_content.lstrip()  # White space at the start belongs to the reasoning.
    if not opening:
        return None
    next_marker = first_marker(after_content)
    closes_content = next_marker in closing_spellings(opening.strip())
    return Wrapper(opening, close=next_marker if closes_content else "")


def empty_pairs(text: str) -> list[MarkerPair]:
    """Return the markers of each empty block in `text`, such as `<think></think>`.

    The instructions of a prompt often contain empty blocks, to show the markers that the model must
    write around the reasoning.

    >>> empty_pairs("Write <think></think>, then <answer> </answer>.")
    [MarkerPair(opening='<think>', closing='</think>'),
     MarkerPair(opening='<answer>', closing='</answer>')]
    """
    pairs = []
    for opening, closing in pairwise(MARKER.finditer(text)):
        text_between = text[opening.end() : closing.start()]
        is_pair = closing.group() in closing_spellings(opening.group())
        if is_pair and not text_between.strip():
            pairs.append(MarkerPair(opening.group(), closing.group()))
    return pairs


def thinking_pair(literal: str) -> MarkerPair | None:
    """Find the markers of reasoning, such as `<think>` and `</think>`, in a string constant.

    The name of such a marker refers to thinking. The constant may contain both markers:

    >>> thinking_pair("Write <think>your thoughts</think> first.")
    MarkerPair(opening='<think>', closing='</think>')

    If the constant is a closing marker, the opening marker is derived from the closing marker:

    >>> thinking_pair("</think>")
    MarkerPair(opening='<think>', closing='</think>')

    Return None for any other constant.
    """
    return _contained_thinking_pair(literal) or _pair_of_closing_marker(literal.strip())


def _contained_thinking_pair(text: str) -> MarkerPair | None:
    """Return the first opening marker and closing marker of reasoning in `text`, or None.

    >>> _contained_thinking_pair("Write <think>your thoughts</think> first.")
    MarkerPair(opening='<think>', closing='</think>')
    """
    all_markers = markers(text)
    for marker in filter(is_thinking_marker, all_markers):
        for opening in _possible_openings(marker):  # no openings if `marker` is itself an opening
            if opening in all_markers:
                return MarkerPair(opening, closing=marker)
    return None


def _pair_of_closing_marker(text: str) -> MarkerPair | None:
    """If `text` is the closing marker of reasoning, return this marker and its opening marker.

    >>> _pair_of_closing_marker("</think>"), _pair_of_closing_marker("<think>")
    (MarkerPair(opening='<think>', closing='</think>'), None)
    """
    is_one_marker = markers(text) == [text]
    if not is_one_marker or not is_thinking_marker(text):
        return None
    openings = _possible_openings(text)
    return MarkerPair(openings[0], closing=text) if openings else None


def _possible_openings(marker: str) -> list[str]:
    """Return the opening markers that may belong to a closing marker: `<think>` for `</think>`.

    Return [] for a marker that is itself an opening marker.

    >>> _possible_openings("</think>"), _possible_openings("<think>")
    (['<think>'], [])
    """
    return [opening for opening in opening_spellings(marker) if opening != marker]


def markup_of_pairs(reasoning_pair: MarkerPair, content_pair: MarkerPair | None) -> ReasoningMarkup:
    r"""Describe the markers around the reasoning and, if known, the markers around the content.

    The pairs come from a text such as "Write <think></think> and <answer></answer>", which does not
    show the white space around the markers. The function assumes that each marker of reasoning is
    on a line of its own, as in most templates. It assumes no white space around the content.

    >>> thinking, answer = MarkerPair("<think>", "</think>"), MarkerPair("<answer>", "</answer>")
    >>> markup = markup_of_pairs(thinking, answer)
    >>> markup.part.open, markup.part.close, markup.wrapper
    ('<think>\n', '\n</think>\n\n', Wrapper(open='<answer>', close='</answer>'))
    """
    part = Reasoning(open=f"{reasoning_pair.opening}\n", close=f"\n{reasoning_pair.closing}\n\n")
    if content_pair is None:
        return ReasoningMarkup(part)
    wrapper = Wrapper(open=content_pair.opening, close=content_pair.closing)
    return ReasoningMarkup(part, wrapper)
