"""Derive the closing marker from an opening marker, and reverse: `</think>` from `<think>`."""

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
