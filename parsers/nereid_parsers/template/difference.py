"""Compare texts token by token. Markers, such as `<tool_call>`, and words are never split.

A marker is a piece of markup such as `<tool_call>`, `<|im_end|>` or `[TOOL_CALLS]`. All functions
here split text into tokens first (`tokens`), so that a difference starts and ends at the boundary
of a marker or a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

# Brackets that rarely occur in other text. Some templates write markers such as `◁think▷`.
_OPEN_BRACKETS = "◁«《【〔〖｟⟦⟨⟪"
_CLOSE_BRACKETS = "▷»》】〕〗｠⟧⟩⟫"
_IN_BRACKETS = f"[{_OPEN_BRACKETS}][^{_OPEN_BRACKETS}{_CLOSE_BRACKETS}\n]*[{_CLOSE_BRACKETS}]"
# The alternatives match, in order: `<...>`, `[[...]]`, `[/...]`, `[TOOL_CALLS]`, `[|...|]`, `]~b]`,
# `◁...▷`, a code fence, a word, one white-space character, and any other character.
_TOKEN = re.compile(
    r"<[^<>\s][^<>\n]*>?|\[\[/?[^\W\d]\w*\]\]|\[/\w+\]|\[/?[A-Z][A-Z_ ]*\]"
    r"|\[\|[^\[\]|\n]+\|\]|[\[\]]\w*~!?\w*[\[\]]|" + _IN_BRACKETS + r"|```|\w+|\s|.",
    re.DOTALL,
)
# Matches a marker, such as `<think>` or `[TOOL_CALLS]`. Unlike `_TOKEN`, this expression does not
# match an unclosed `<tag` or a short `[A]`, because these texts are not markers.
MARKER = re.compile(
    r"<[^<>\s][^<>\n]*>|\[\[/?[^\W\d]\w*\]\]|\[/\w+\]|\[/?[A-Z][A-Z_ ]{2,}\]"
    r"|\[\|[^\[\]|\n]+\|\]|[\[\]]\w*~!?\w*[\[\]]|" + _IN_BRACKETS
)
# Each rule derives a closing marker from an opening marker. The first string is a regular
# expression that matches the opening marker. The second string is the closing marker.
_CLOSING_RULES = (
    (r"<(?![/|｜])(.*)", r"</\1"),  # `<think>` and `</think>`
    (r"<([^\s/|｜]+)\s.*>", r"</\1>"),  # `<think mode="deep">` and `</think>`
    (r"<\|(.*)(?<!\|)>", r"<\1|>"),  # `<|channel>` and `<channel|>`
    (r"(\[\[?)(?!\[)(.*)", r"\1/\2"),  # `[THINK]` and `[/THINK]`, `[[x]]` and `[[/x]]`
    (r"\[\|(.*)", r"[|/\1"),  # `[|think|]` and `[|/think|]`
    (r"(<[|｜])(.*)", r"\1/\2"),  # `<|think|>` and `<|/think|>`
    (r"<([|｜].*)", r"</\1"),  # `<|think|>` and `</|think|>`
    (rf"([{_OPEN_BRACKETS}])(?!/)(.*)", r"\1/\2"),  # `◁think▷` and `◁/think▷`
)
# Each rule derives an opening marker from a closing marker. The first string is a regular
# expression that matches the closing marker. The second string is the opening marker.
_OPENING_RULES = (
    (r"([^/]{0,2})/(.*)", r"\1\2"),  # `</think>` and `<think>`, `[|/think|]` and `[|think|]`
    (r"(?!<\|).(.*)\|>", r"<|\1>"),  # `<channel|>` and `<|channel>`
)
# Pairs of words that distinguish an opening marker, such as `<|START_THINKING|>`, from its closing
# marker, `<|END_THINKING|>`.
_OPEN_CLOSE_WORDS = (
    ("START", "END"), ("BEGIN", "END"), ("begin", "end"), ("start", "end"),
    ("prefix", "suffix"), ("open", "close"),
)  # fmt: skip
_CLOSE_OPEN_WORDS = tuple((close_word, open_word) for open_word, close_word in _OPEN_CLOSE_WORDS)
# These rules are used after all others, because few templates add "end" to the name of a marker, as
# in `<|think|>` and `<|think_end|>`, or `<think>` and `<end_of_think>`. Some markers contain the
# character `▁` instead of `_`.
_CLOSING_RULES_WITH_END = tuple(
    (r"(<[|｜]?)(\w+)([|｜]?>)", replacement.replace("_", space))
    for replacement in (r"\1end_\2\3", r"\1end_of_\2\3", r"\1\2_end\3")
    for space in "_▁"
)
_OPENING_RULES_WITH_END = (
    (r"(<[|｜]?)end[_▁](?:of[_▁])?(\w+)([|｜]?>)", r"\1\2\3"),
    (r"(<[|｜]?)(\w+)[_▁]end([|｜]?>)", r"\1\2\3"),
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


def markers(text: str) -> list[str]:
    """Return the markers in `text`, in order.

    A marker is a piece of markup such as `<think>`, `<|im_end|>` or `[END]`.

    >>> markers("<think>one two</think>[END]")
    ['<think>', '</think>', '[END]']
    """
    return MARKER.findall(text)


def leading_markers(text: str) -> list[str]:
    r"""Return the markers, such as `<think>`, that precede the first word of `text`.

    A marker is a piece of markup such as `<think>`. White space may precede each marker.

    >>> leading_markers("<|eom|>\n<|start|>user<|message|>")
    ['<|eom|>', '<|start|>']
    """
    leading: list[str] = []
    rest = text.lstrip()
    match = MARKER.match(rest)
    while match is not None:
        leading.append(match.group())
        rest = rest[match.end() :].lstrip()
        match = MARKER.match(rest)
    return leading


def first_two(found_markers: list[str]) -> tuple[str, str]:
    """Return the first and the second marker of a list. A missing marker is "" in the result.

    >>> first_two(["<think>"]), first_two(["<think>", "</think>", "<answer>"])
    (('<think>', ''), ('<think>', '</think>'))
    """
    first = found_markers[0] if found_markers else ""
    second = found_markers[1] if len(found_markers) > 1 else ""
    return first, second


def leading_marker(text: str) -> str:
    r"""Return the marker at the start of `text`, or "" if `text` does not start with a marker.

    A marker is a piece of markup such as `<think>`. White space before the marker is ignored.

    >>> leading_marker("\n<think>Hello"), leading_marker("Hello<think>")
    ('<think>', '')
    """
    return next(iter(leading_markers(text)), "")


def trailing_marker(text: str) -> str:
    r"""Return the marker at the end of `text`, or "" if `text` does not end with a marker.

    A marker is a piece of markup such as `<think>`. White space after the marker is ignored.

    >>> trailing_marker("Hello<|start|><think>\n"), trailing_marker("<think>Hello")
    ('<think>', '')
    """
    all_markers = markers(text)
    if not all_markers:
        return ""
    last = all_markers[-1]
    return last if text.rstrip().endswith(last) else ""


def closing_spellings(marker: str) -> list[str]:
    """Return the closing markers that may belong to an opening marker: `</think>` for `<think>`.

    For some opening markers, templates spell the closing marker in several ways. The result then
    contains all these spellings: first the spellings with other punctuation, such as a slash, then
    the spellings with another word, and then the spellings with the additional word "end". The
    result is [] if there is no such spelling.

    >>> closing_spellings("<think>")[:3]
    ['</think>', '<end_think>', '<end▁think>']
    >>> closing_spellings("<|START_THINKING|>")[:3]
    ['<|/START_THINKING|>', '</|START_THINKING|>', '<|END_THINKING|>']
    """
    spellings = _markers_of_pair(marker, _CLOSING_RULES, _OPEN_CLOSE_WORDS)
    return spellings + _replace_by_rules(marker, _CLOSING_RULES_WITH_END)


def opening_spellings(marker: str) -> list[str]:
    """Return the opening markers that may belong to a closing marker: `<think>` for `</think>`.

    The order of the result is that of `closing_spellings`.

    >>> opening_spellings("</think>")
    ['<think>']
    >>> opening_spellings("<|END_THINKING|>")
    ['<|START_THINKING|>', '<|BEGIN_THINKING|>']
    """
    spellings = _markers_of_pair(marker, _OPENING_RULES, _CLOSE_OPEN_WORDS)
    return spellings + _replace_by_rules(marker, _OPENING_RULES_WITH_END)


def _markers_of_pair(
    marker: str, rules: Iterable[tuple[str, str]], word_pairs: Iterable[tuple[str, str]]
) -> list[str]:
    r"""Return the markers that may form a pair with `marker`, such as `</think>` for `<think>`.

    Args:
        marker: An opening or a closing marker.
        rules: Pairs of a regular expression that matches `marker`, and its replacement.
        word_pairs: Pairs of a word in `marker`, and the word that replaces it in the result.

    In this example, only the first rule and the first word pair apply:

    >>> rules = [(r"<(.*)", r"</\1"), (r"\[(.*)", r"[/\1")]
    >>> _markers_of_pair("<|START|>", rules, [("START", "END"), ("open", "close")])
    ['</|START|>', '<|END|>']
    """
    by_words = [marker.replace(word, other) for word, other in word_pairs if word in marker]
    return _replace_by_rules(marker, rules) + by_words


def _replace_by_rules(marker: str, rules: Iterable[tuple[str, str]]) -> list[str]:
    r"""Return the replacement of each rule whose regular expression matches `marker`.

    >>> _replace_by_rules("<think>", [(r"<(.*)", r"</\1"), (r"\[(.*)", r"[/\1")])
    ['</think>']
    """
    matches = [(re.fullmatch(regex, marker), replacement) for regex, replacement in rules]
    return [match.expand(replacement) for match, replacement in matches if match is not None]


def compound_closing(text: str, opening: str) -> str:
    """Return the closing text of a block, if several markers open the block.

    A block is a part of a message, such as the reasoning. In the example, the opening text is
    `<|open|>think<|sep|>`. The closing text differs from the opening text only in the first marker:

    >>> compound_closing("<|close|>think<|sep|>Hello", opening="<|open|>think<|sep|>")
    '<|close|>think<|sep|>'

    If only one marker opens the block, or if `text` does not start with a closing text, return "".

    >>> compound_closing("</think>Hello", opening="<think>")
    ''
    """
    first_marker = MARKER.match(opening)
    if first_marker is None:
        return ""
    after_first_marker = opening[first_marker.end() :]
    if not markers(after_first_marker):
        return ""  # Only one marker opens the block.
    closing = re.match(rf"\s*(?:{MARKER.pattern}){re.escape(after_first_marker)}", text)
    return "" if closing is None else closing.group()
