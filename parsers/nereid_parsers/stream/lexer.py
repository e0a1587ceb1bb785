"""Finds markers in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from nereid_parsers.stream.pattern_matching import tag_parts
from nereid_parsers.stream.text_buffer import TextBuffer

_Search = Callable[[str, int], re.Match[str] | None]


def marker_prefix_regex(marker: str) -> str:
    """Return a regex that matches an incomplete marker at the end of a text.

    Example: `marker_prefix_regex("<a>")` returns a regex that matches the last character of `x<`,
    and the last two characters of `x<a`.
    """
    regex = ""
    for char in reversed(marker[1:-1]):
        regex = f"(?:{re.escape(char)}{regex})?"
    return f"{re.escape(marker[0])}{regex}\\Z"


def spaced_marker_regex(marker: str) -> str:
    r"""Return a regex that matches `marker`, and allows white space between the marker's parts.

    Example: the regex of `<|close|>call<|sep|>` also matches `<|close|> call\n<|sep|>`.
    """
    return r"\s*".join(map(re.escape, tag_parts(marker)))


def spaced_marker_prefixes(marker: str, whitespace: str = "") -> list[str]:
    """Return regexes that match an incomplete marker at the end of a text.

    Example: for the marker `<a>b`, the regexes match `<`, `<a`, `<a>` and `<a> ` at the end of a
    text.

    Args:
        marker: The marker, see `spaced_marker_regex`.
        whitespace: White space before the marker. The match includes this white space.
    """
    first_part, *other_parts = tag_parts(marker)
    regexes = [marker_prefix_regex(whitespace + first_part)]
    complete_parts = re.escape(whitespace + first_part)
    for part in other_parts:
        # The regex matches if the text ends after `complete_parts`, or if it ends inside `part`.
        regexes.append(rf"{complete_parts}\s*(?:\Z|{marker_prefix_regex(part)})")
        complete_parts += rf"\s*{re.escape(part)}"
    return regexes


def _possible_regexes(longest_first: list[str]) -> list[str]:
    """Return regexes that match a marker, or the beginning of a marker at the end of a text.

    The search uses the first regex that matches, so the order of the regexes matters. The regex for
    the beginning of a long marker must precede the regex for a shorter marker with the same
    beginning. Example: for the markers `<a>` and `<a><b>`, the first three regexes match

        1. `<a><b>`
        2. a beginning of `<a><b>` at the end of the text
        3. `<a>`

    In the text `x<a><`, the second regex matches `<a><`, so the lexer waits for more text. If the
    third regex were first, the lexer would find `<a>`, although the next text may be `b>`.

    Args:
        longest_first: The markers. Longer markers precede shorter markers.
    """
    regexes: list[str] = []
    for marker in longest_first:
        longer_markers = [
            longer for longer in longest_first if longer != marker and longer.startswith(marker)
        ]
        regexes += map(marker_prefix_regex, longer_markers)
        regexes.append(re.escape(marker))
    # A marker of one character has no incomplete form.
    regexes += [marker_prefix_regex(marker) for marker in longest_first if len(marker) > 1]
    return regexes


def _search_function(markers: list[str], regexes: list[str]) -> _Search | None:
    """Return a function that finds the first match of the regexes. Without markers, return None.

    The function receives a text and the position at which the search starts, and returns the first
    match.

    Args:
        markers: The markers.
        regexes: Regexes that match the markers or beginnings of the markers.
    """
    if not markers:
        return None
    first_chars = sorted({marker[0] for marker in markers})
    char_class = "".join(map(re.escape, first_chars))
    # The look-ahead makes the search faster, because it rejects most characters with one test.
    return re.compile(f"(?=[{char_class}])(?:{'|'.join(regexes)})").search


class Lexer:
    """Finds the next marker in a text. The search time is linear in the length of the text.

    If one marker is a prefix of another marker, the lexer prefers the longer marker. The lexer
    waits for the longer marker as long as more text can complete the longer marker.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        """Compile two functions that find the markers. Empty markers are ignored.

        The first function finds complete markers. The second function also finds a prefix of a
        marker at the end of the text, because the next piece of text may complete the marker.
        """
        self._markers = frozenset(marker for marker in markers if marker)
        # A regex finds the first alternative that matches, so long markers must come first.
        longest_first = sorted(sorted(self._markers), key=len, reverse=True)
        exact_regexes = [re.escape(marker) for marker in longest_first]
        self._find_marker = _search_function(longest_first, exact_regexes)
        possible_regexes = _possible_regexes(longest_first)
        self._find_marker_or_prefix = _search_function(longest_first, possible_regexes)

    def find(self, buffer: TextBuffer) -> tuple[int, str]:
        """Find the next marker in the unread text. Return its position and the marker itself.

        The marker is "" if no complete marker is found. The text before the returned position then
        contains no marker. Examples for a lexer that finds `<a>`:

            `"x<a>y"`   (1, "<a>")
            `"x<"`      (1, ""), because `<` may become `<a>`. (2, "") if `buffer.is_final` is true,
                        because no more text follows.
            `"xy"`      (2, "")
        """
        text = buffer.text
        search = self._find_marker if buffer.is_final else self._find_marker_or_prefix
        match = search(text, buffer.pos) if search is not None else None
        if match is None:
            return len(text), ""
        marker_or_prefix = match.group()
        # A longer marker is possible only if the match ends at the end of the text.
        is_at_text_end = match.end() == len(text)
        if is_at_text_end and not buffer.is_final and self._is_proper_prefix(marker_or_prefix):
            return match.start(), ""
        return match.start(), marker_or_prefix

    def _is_proper_prefix(self, text: str) -> bool:
        """Return whether `text` is the beginning of a marker that is longer than `text`.

        Example: with the markers `<a>` and `<a><b>`, the result is True for `<a` and `<a>`, and
        False for `<a><b>`.
        """
        return any(marker != text and marker.startswith(text) for marker in self._markers)
