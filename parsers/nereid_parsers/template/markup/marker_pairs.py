"""Derive closing markers from opening markers, such as `</think>` from `<think>`, or vice versa."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nereid_parsers.template.markup.markers import OPEN_BRACKETS

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
    (rf"([{OPEN_BRACKETS}])(?!/)(.*)", r"\1/\2"),  # `◁think▷` and `◁/think▷`
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
# These rules add "end" to the name of a marker: `<|think_end|>` closes `<|think|>`, and
# `<end_of_think>` closes `<think>`. They are used after all other rules, because few templates have
# such markers. Some of these markers contain the character `▁` instead of `_`.
_CLOSING_RULES_WITH_END = tuple(
    (r"(<[|｜]?)(\w+)([|｜]?>)", replacement.replace("_", space))
    for replacement in (r"\1end_\2\3", r"\1end_of_\2\3", r"\1\2_end\3")
    for space in "_▁"
)
_OPENING_RULES_WITH_END = (
    (r"(<[|｜]?)end[_▁](?:of[_▁])?(\w+)([|｜]?>)", r"\1\2\3"),
    (r"(<[|｜]?)(\w+)[_▁]end([|｜]?>)", r"\1\2\3"),
)


def closing_spellings(marker: str) -> list[str]:
    """Return the closing markers that may belong to an opening marker: `</think>` for `<think>`.

    Different templates derive the closing marker from the opening marker in different ways. The
    result contains the closing markers for all known ways, in this order: other punctuation, such
    as a slash; another word, such as END instead of START; the additional word "end". The result is
    [] if no closing marker can be derived.

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
    r"""Apply each rule that matches `marker`, and return the resulting markers.

    A rule consists of a regular expression and a replacement. The expression must match the whole
    marker. In this example, only the first rule matches:

    >>> _replace_by_rules("<think>", [(r"<(.*)", r"</\1"), (r"\[(.*)", r"[/\1")])
    ['</think>']
    """
    matches = [(re.fullmatch(regex, marker), replacement) for regex, replacement in rules]
    return [match.expand(replacement) for match, replacement in matches if match is not None]
