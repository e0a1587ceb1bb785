"""Compare texts token by token. Markers, such as `<tool_call>`, and words are never split.

A marker is a piece of markup such as `<tool_call>`, `<|im_end|>` or `[TOOL_CALLS]`. All functions
here split text into tokens first (`tokens`), so that a difference starts and ends at the boundary
of a marker or a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from nereid_parsers.template.markup.markers import IN_BRACKETS

# The alternatives match, in order: `<...>`, `[[...]]`, `[/...]`, `[TOOL_CALLS]`, `[|...|]`, `]~b]`,
# `◁...▷`, a code fence, a word, one white-space character, and any other character.
_TOKEN = re.compile(
    r"<[^<>\s][^<>\n]*>?|\[\[/?[^\W\d]\w*\]\]|\[/\w+\]|\[/?[A-Z][A-Z_ ]*\]"
    r"|\[\|[^\[\]|\n]+\|\]|[\[\]]\w*~!?\w*[\[\]]|" + IN_BRACKETS + r"|```|\w+|\s|.",
    re.DOTALL,
)


Split = Callable[[str], list[str]]  # A function that splits a text into tokens.


class Difference(NamedTuple):
    """Two texts, split into their common prefix, the parts that differ, and their common suffix.

    Attributes:
        prefix: The text with which both texts start.
        left: The part that only the first text contains.
        right: The part that only the second text contains.
        suffix: The text with which both texts end.
    """

    prefix: str
    left: str
    right: str
    suffix: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two rendered conversations, and the conclusion that is drawn from their difference.

    Attributes:
        name: The label of the comparison, such as "R1 reasoning presence".
        changed: A sentence that describes the change between the two conversations, such as "The
            message has reasoning."
        left: The rendering of the conversation before the change.
        right: The rendering of the conversation after the change.
        finding: A sentence for the report with the conclusion from the difference.
    """

    name: str
    changed: str
    left: str
    right: str
    finding: str

    def parts(self) -> Difference:
        """Split the renderings into a common prefix, the differing parts and a common suffix."""
        return difference(self.left, self.right)


def tokens(text: str) -> list[str]:
    """Split `text` into tokens: markers such as `<think>`, words, and single characters.

    >>> tokens("<think>Two words")
    ['<think>', 'Two', ' ', 'words']
    """
    return _TOKEN.findall(text)


def common_prefix(text: str, other: str, split: Split = tokens) -> str:
    """Return the longest common prefix of two texts. The prefix never ends inside a token.

    A token is a marker such as `<tool_call>`, a word, or a single character. In this example, the
    prefix does not end inside a marker, although both texts continue with "<tool_":

    >>> common_prefix("<a><tool_call>", "<a><tool_result>")
    '<a>'
    """
    return "".join(_common_start(split(text), split(other)))


def common_suffix(text: str, other: str, split: Split = tokens) -> str:
    """Return the longest common suffix of two texts. The suffix never starts inside a token.

    A token is a marker such as `</call>`, a word, or a single character. In this example, the
    suffix does not start inside a marker, although "call>" precedes `</all>` in both texts:

    >>> common_suffix("yes</call></all>", "no</recall></all>")
    '</all>'
    """
    reversed_tokens = _common_start(split(text)[::-1], split(other)[::-1])
    return "".join(reversed(reversed_tokens))


def _common_start(sequence: list[str], other_sequence: list[str]) -> list[str]:
    """Return the longest common prefix of two lists of tokens.

    >>> _common_start(["<a>", "one"], ["<a>", "two"])
    ['<a>']
    """
    common: list[str] = []
    for token, other_token in zip(sequence, other_sequence, strict=False):
        if token != other_token:
            break
        common.append(token)
    return common


def difference(left: str, right: str, split: Split = tokens) -> Difference:
    """Split two texts into a common prefix, the parts that differ, and a common suffix.

    The texts are split only between tokens. A token is a marker such as `<a>`, a word, or a single
    character.

    >>> difference("<a>yes</a>", "<a>no</a>")
    Difference(prefix='<a>', left='yes', right='no', suffix='</a>')
    """
    prefix = common_prefix(left, right, split)
    left_rest = left.removeprefix(prefix)
    right_rest = right.removeprefix(prefix)
    suffix = common_suffix(left_rest, right_rest, split)
    return Difference(
        prefix,
        left=left_rest.removesuffix(suffix),
        right=right_rest.removesuffix(suffix),
        suffix=suffix,
    )


def drop_common_suffix(text: str, other: str) -> str:
    r"""Return `text` without the longest suffix that is also a suffix of `other`.

    The suffix consists of whole tokens: markers such as `<|im_end|>`, words and single characters.

    >>> drop_common_suffix("Hello<|im_end|>\n", "Go on.<|im_end|>\n")
    'Hello'
    """
    return text.removesuffix(common_suffix(text, other))


def text_after_last(text: str, word: str) -> str:
    """Return the part of `text` after the last occurrence of `word`.

    Return `text` unchanged if it does not contain `word`.

    >>> text_after_last("user: Hello. user: Bye.", "user: ")
    'Bye.'
    """
    return text[text.rfind(word) + len(word) :] if word in text else text


def text_between(text: str, first: str, last: str) -> str | None:
    """Return the text between the first occurrence of `first` and the last occurrence of `last`.

    Return None if `text` does not contain `first`, or if `last` does not occur after `first`.

    >>> text_between("<think>REASONING<call>f", "REASONING", "f")
    '<call>'
    """
    _, found_first, after = text.partition(first)
    between, found_last, _ = after.rpartition(last)
    return between if found_first and found_last else None
