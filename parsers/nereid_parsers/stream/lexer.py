"""Finds markers such as `<think>` in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from nereid_parsers.stream.pattern_matching import tag_parts
from nereid_parsers.stream.text_buffer import TextBuffer

_Search = Callable[[str, int], re.Match[str] | None]
# Python's `re` module raises a RecursionError for a regex with a few hundred nested groups.
_MAX_NESTED_GROUPS = 63


def marker_prefix_regex(marker: str) -> str:
    r"""Return a regex that matches an incomplete `marker`, such as `<th`, at the end of a text.

    Example: `marker_prefix_regex("<a>")` returns `"(?:<(?:a)?\Z)"`. This regex matches the last
    character of `x<`, and the last two characters of `x<a`. If the marker has only one character,
    the regex matches this character.
    """
    longest_prefix = marker[:-1] or marker
    regexes = []
    # One regex cannot match all prefixes of a long marker, because the number of nested groups is
    # limited. The first regex matches the prefixes of 1 to 64 characters, and the second regex
    # matches the prefixes of 65 to 128 characters.
    for start in range(0, len(longest_prefix), _MAX_NESTED_GROUPS + 1):
        optional_start = start + 1
        required_chars = longest_prefix[:optional_start]
        optional_chars = longest_prefix[optional_start : optional_start + _MAX_NESTED_GROUPS]
        optional_regex = ""  # For the optional characters `ab`: `(?:a(?:b)?)?`.
        for char in reversed(optional_chars):
            optional_regex = f"(?:{re.escape(char)}{optional_regex})?"
        regexes.append(rf"{re.escape(required_chars)}{optional_regex}\Z")
    return f"(?:{'|'.join(regexes)})"


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

    The matches include `whitespace`, which precedes the marker.
    """
    first_tag, *other_tags = tag_parts(marker)
    tags = [whitespace + first_tag, *other_tags]
    regexes = [marker_prefix_regex(tags[0])]
    for index, tag in enumerate(other_tags, start=1):
        complete_tags = r"\s*".join(map(re.escape, tags[:index]))
        # The text ends directly after the complete tags (`\Z`), or inside the next tag.
        regexes.append(rf"{complete_tags}\s*(?:\Z|{marker_prefix_regex(tag)})")
    return regexes


def _possible_regexes(longest_first: list[str]) -> list[str]:
    """Return regexes that match a marker, or an incomplete marker at the end of a text.

    In `longest_first`, longer markers precede shorter markers. The caller uses the first regex that
    matches. Example: for the markers `<a><b>` and `<a>`, the regexes match, in this order:

        1. `<a><b>`
        2. an incomplete `<a><b>` at the end of the text, for example `<a><`
        3. `<a>`
        4. an incomplete `<a>` at the end of the text, for example `<`

    In the text `x<a><`, the second regex matches, so the lexer waits until `b>` or other text
    arrives. If the third regex preceded the second, the lexer would find `<a>`.
    """
    regexes: list[str] = []
    for marker in longest_first:
        longer_markers = [
            longer for longer in longest_first if longer != marker and longer.startswith(marker)
        ]
        regexes += map(marker_prefix_regex, longer_markers)
        regexes.append(re.escape(marker))
    # A marker of one character cannot be incomplete.
    regexes += [marker_prefix_regex(marker) for marker in longest_first if len(marker) > 1]
    return list(dict.fromkeys(regexes))  # Several markers may have the same longer marker.


def _search_function(markers: list[str], regexes: list[str]) -> _Search | None:
    r"""Return a function that finds the first match of any of the `regexes` in a text.

    The function receives a text and the position at which the search starts, and returns the match
    or None. If there are no `markers`, the result is None instead of a function.

    Example: for the marker `<a>` and the regexes `<a>` and `(?:<(?:a)?\Z)`, the compiled regex is
    `(?=[<])(?:<a>|(?:<(?:a)?\Z))`. The look-ahead `(?=[<])` for the first characters of the markers
    makes the search faster, because it rejects most positions with one test of a character.
    """
    if not markers:
        return None
    first_chars = sorted({marker[0] for marker in markers})
    char_class = "".join(map(re.escape, first_chars))
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
        exact_regexes = [re.escape(marker) for marker in longest_first]
        possible_regexes = _possible_regexes(longest_first)
        # Two search functions, or None if there are no markers. The second one also finds an
        # incomplete marker at the end of the text, such as `<thi`.
        self._find_marker = _search_function(longest_first, exact_regexes)
        self._find_marker_or_prefix = _search_function(longest_first, possible_regexes)

    def find(self, buffer: TextBuffer) -> tuple[int, str]:
        """Return the position and the text of the next marker in the unread text.

        If no complete marker is found, return "" instead of the marker. The position is then the
        end of the text that cannot be a part of a marker. Examples for a lexer that finds `<a>`:

            unread text   result
            `x<a>y`       (1, "<a>")
            `xy`          (2, "")
            `x<`          (1, ""), because `<` may become `<a>`
            `x<`          (2, "") if `buffer.is_final` shows that no more text follows
        """
        text = buffer.text
        search = self._find_marker if buffer.is_final else self._find_marker_or_prefix
        if search is None:  # There are no markers.
            return len(text), ""
        match = search(text, buffer.pos)
        if match is None:
            return len(text), ""
        # A match at the end of the text may become a longer marker when more text arrives: `<` may
        # become `<a>`, and `<a>` may become `<a><b>`. The lexer then waits for more text.
        found = match.group()
        if not buffer.is_final and match.end() == len(text):
            is_proper_prefix = any(
                marker != found and marker.startswith(found) for marker in self._markers
            )
            if is_proper_prefix:
                return match.start(), ""
        return match.start(), found
