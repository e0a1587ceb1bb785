"""Finds markers such as `<think>` in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from nereid_parsers.stream.pattern_matching import tag_parts
from nereid_parsers.stream.text_buffer import TextBuffer

_Search = Callable[[str, int], re.Match[str] | None]
# The maximum number of prefixes that one regex matches.
_MAX_PREFIXES_IN_REGEX = 64


def marker_prefix_regex(marker: str) -> str:
    r"""Return a regex that matches an incomplete `marker`, such as `<th`, at the end of a text.

    Example: `marker_prefix_regex("<a>")` returns `"(?:<(?:a)?\Z)"`. This regex matches the last
    character of `x<`, and the last two characters of `x<a`. If the marker has only one character,
    the regex matches this character.
    """
    longest_prefix = marker[:-1] or marker  # A marker of one character has no shorter prefix.
    # Each prefix needs a nested group, and Python's `re` module raises a RecursionError for a regex
    # with a few hundred nested groups. Therefore, the first regex matches the prefixes of 1 to 64
    # characters, the second regex matches the prefixes of 65 to 128 characters, and so on.
    lengths_before_group = range(0, len(longest_prefix), _MAX_PREFIXES_IN_REGEX)
    regexes = [_prefix_group_regex(longest_prefix, length) for length in lengths_before_group]
    return f"(?:{'|'.join(regexes)})"


def _prefix_group_regex(text: str, length_before: int) -> str:
    r"""Return a regex for one group of prefixes: those with more than `length_before` characters.

    Example: for the text `<ab` and the length 1, the regex is `<a(?:b)?\Z`. This regex matches `<a`
    and `<ab` at the end of a text. The group contains `_MAX_PREFIXES_IN_REGEX` prefixes at most.
    """
    shortest_prefix = text[: length_before + 1]
    longest_prefix = text[: length_before + _MAX_PREFIXES_IN_REGEX]
    optional_chars = longest_prefix[len(shortest_prefix) :]
    return rf"{re.escape(shortest_prefix)}{_optional_regex(optional_chars)}\Z"


def _optional_regex(text: str) -> str:
    """Return a regex that matches `text`, the first characters of `text`, or the empty text.

    Example: `ab` gives `(?:a(?:b)?)?`, which matches `ab`, `a` and the empty text.
    """
    regex = ""
    for char in reversed(text):
        regex = f"(?:{re.escape(char)}{regex})?"
    return regex


def spaced_marker_regex(marker: str) -> str:
    r"""Return a regex for `marker` that allows white space between its tags and words.

    Example: the regex of `<|close|>call<|sep|>` also matches `<|close|> call\n<|sep|>`.
    """
    return r"\s*".join(map(re.escape, tag_parts(marker)))


def spaced_marker_prefixes(marker: str, whitespace: str = "") -> list[str]:
    r"""Return regexes that match an incomplete marker, such as `<th`, at the end of a text.

    A marker may consist of several tags, and a model may write white space between the tags.
    Example: the marker `<a><b>` gives two regexes, which match these ends of a text:

        1. `<`, `<a`: the text ends inside the first tag.
        2. `<a>`, `<a> `, `<a><`, `<a> <b`: the text ends before or inside the second tag.

    `whitespace` is a fixed text that precedes the marker, and is treated as the start of the first
    tag. Example: if it is a line break, the first regex matches a line break, or a line break and
    `<` or `<a`. Each regex matches only at the end of the text.
    """
    first_tag, *other_tags = tag_parts(whitespace + marker)
    regexes = [marker_prefix_regex(first_tag)]
    complete_tags_regex = re.escape(first_tag)
    for next_tag in other_tags:
        # The text ends directly after the complete tags (`\Z`), or inside the next tag.
        text_end_regex = rf"(?:\Z|{marker_prefix_regex(next_tag)})"
        regexes.append(rf"{complete_tags_regex}\s*{text_end_regex}")
        complete_tags_regex += r"\s*" + re.escape(next_tag)
    return regexes


def _regexes_with_prefixes(longest_first: list[str]) -> list[str]:
    """Return regexes that match a marker, or an incomplete marker at the end of a text.

    In `longest_first`, longer markers precede shorter markers. The caller uses the first regex that
    matches. Example: for the markers `<a><b>` and `<a>`, the regexes match, in this order:

        1. `<a><b>`
        2. an incomplete `<a><b>` at the end of the text, for example `<a><`
        3. `<a>`
        4. an incomplete `<a>` at the end of the text, for example `<`

    The second regex must precede the third. In the text `x<a><`, the lexer then finds `<a><`, and
    waits, because `b>` may follow. Otherwise, the lexer would find the marker `<a>`.
    """
    regexes = []
    for marker in longest_first:
        regexes.append(re.escape(marker))
        if len(marker) > 1:  # A marker of one character cannot be incomplete.
            regexes.append(marker_prefix_regex(marker))
    return regexes


def _search_function(regexes: list[str], first_chars: set[str]) -> _Search | None:
    r"""Return a function that finds the first match of any of the `regexes` in a text.

    The function receives a text and the position at which the search starts, and returns the match
    or None. If there are no `regexes`, the result is None instead of a function.

    Each match must start with one of the `first_chars`. A look-ahead for these characters makes the
    search faster, because it rejects most positions with one test. Example: for the regexes `<a>`
    and `#b`, and the characters `<` and `#`, the compiled regex is `(?=[\#<])(?:<a>|#b)`.
    """
    if not regexes:
        return None
    char_class = "".join(map(re.escape, sorted(first_chars)))
    return re.compile(f"(?=[{char_class}])(?:{'|'.join(regexes)})").search


class Lexer:
    """Finds the next marker, such as `<think>`, in a text that arrives in pieces.

    If one marker is a prefix of another marker, as `<a>` is a prefix of `<a><b>`, the lexer prefers
    the longer marker. If the text ends with `<a><`, the lexer waits, because `b>` may follow. The
    search time is linear in the length of the text.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        """Create a lexer that finds markers such as `<think>`. Empty markers are ignored."""
        self._markers = frozenset(marker for marker in markers if marker)
        # A regex uses the first alternative that matches, so longer markers must precede shorter
        # markers. Markers of the same length are sorted by their text, so that the regex is always
        # the same.
        longest_first = sorted(self._markers, key=lambda marker: (-len(marker), marker))
        first_chars = {marker[0] for marker in longest_first}
        # Two search functions, or None if there are no markers. The second one also finds an
        # incomplete marker at the end of the text, such as `<thi`.
        exact_regexes = [re.escape(marker) for marker in longest_first]
        self._find_marker = _search_function(exact_regexes, first_chars)
        regexes_with_prefixes = _regexes_with_prefixes(longest_first)
        self._find_marker_or_prefix = _search_function(regexes_with_prefixes, first_chars)

    def find(self, buffer: TextBuffer) -> tuple[int, str]:
        """Return the end of the text before the next marker, and the text of this marker.

        If no complete marker has arrived, the returned marker is "". The returned end then excludes
        an incomplete marker at the end of the text. Examples for a lexer that finds `<a>`:

            unread text   result
            `x<a>y`       (1, "<a>")
            `xy`          (2, "")
            `x<`          (1, ""), because `<` may become `<a>`
            `x<`          (2, "") if `buffer.is_final` shows that no more text follows
        """
        text = buffer.text
        search = self._find_marker if buffer.is_final else self._find_marker_or_prefix
        match = search(text, buffer.pos) if search is not None else None
        if match is None:
            return len(text), ""
        marker = match.group()
        may_continue = match.end() == len(text) and not buffer.is_final
        # `<` may become the marker `<a>`, and the complete marker `<a>` may become `<a><b>`.
        if may_continue and self._may_become_longer(marker):
            return match.start(), ""
        return match.start(), marker

    def _may_become_longer(self, text: str) -> bool:
        """Return whether `text` is the start of a longer marker. Example: `<a>` starts `<a><b>`."""
        return any(marker != text and marker.startswith(text) for marker in self._markers)
