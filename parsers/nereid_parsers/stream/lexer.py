"""Finds markers in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from nereid_parsers.stream.pattern_matching import tag_parts
from nereid_parsers.stream.text_buffer import TextBuffer

_Search = Callable[[str, int], re.Match[str] | None]


def marker_prefix_regex(marker: str) -> str:
    """Return a regex that matches any proper prefix of `marker` at the end of a text.

    Example: `marker_prefix_regex("<a>")` returns a regex that matches the last character of `x<`,
    and the last two characters of `x<a`.
    """
    regex = ""
    for char in reversed(marker[1:-1]):
        regex = f"(?:{re.escape(char)}{regex})?"
    return f"{re.escape(marker[0])}{regex}\\Z"


def spaced_marker_regex(marker: str) -> str:
    r"""Return a regex that matches a marker, with or without white space around its tags.

    Example: the regex of `<|close|>call<|sep|>` also matches `<|close|> call\n<|sep|>`.
    """
    return r"\s*".join(map(re.escape, tag_parts(marker)))


def spaced_marker_prefixes(marker: str, whitespace: str = "") -> list[str]:
    """Return regexes that match an incomplete marker at the end of a text.

    Example: for the marker `<a>b`, the regexes match the ends of `x<`, `x<a> ` and `x<a>`.

    Args:
        marker: The marker, see `spaced_marker_regex`.
        whitespace: White space before the marker, which is a part of the match.
    """
    first, *others = tag_parts(marker)
    regexes = [marker_prefix_regex(whitespace + first)]
    before = re.escape(whitespace + first)
    for part in others:
        regexes.append(rf"{before}\s*(?:\Z|{marker_prefix_regex(part)})")
        before += rf"\s*{re.escape(part)}"
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
    return regexes + [marker_prefix_regex(marker) for marker in longest_first if len(marker) > 1]


def _search_function(markers: list[str], regexes: list[str]) -> _Search | None:
    """Return a function that searches for the regexes of markers, or None without markers.

    Args:
        markers: The markers.
        regexes: Regexes that match the markers or beginnings of the markers.
    """
    if not markers:
        return None
    first_chars = "".join(re.escape(char) for char in sorted({marker[0] for marker in markers}))
    # Most characters cannot start a marker. The look-ahead skips such a character after one test of
    # a character class.
    return re.compile(f"(?=[{first_chars}])(?:{'|'.join(regexes)})").search


class Lexer:
    """Finds the next marker in a text. Each character is read a bounded number of times.

    If one marker is a prefix of another marker, the lexer prefers the longer marker. The lexer
    waits for the longer marker as long as more text can complete the longer marker.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        """Compile two regexes that find the markers.

        The first regex finds complete markers. The second regex also finds a prefix of a marker at
        the end of the text, because the next piece of text may complete the marker.
        """
        self._markers = frozenset(marker for marker in markers if marker)
        longest_first = sorted(self._markers, key=lambda marker: (-len(marker), marker))
        complete = [re.escape(marker) for marker in longest_first]
        self._find_complete = _search_function(longest_first, complete)
        self._find_possible = _search_function(longest_first, _possible_regexes(longest_first))

    def find(self, buffer: TextBuffer) -> tuple[int, str]:
        """Find the next marker in the unread text, and the end of the plain text before the marker.

        Example: a lexer for `<a>` returns `(1, "<a>")` for the text `"x<a>y"`, `(1, "")` for `"x<"`
        and `(2, "")` for `"xy"`.

        Returns:
            The end of the plain text, and the marker that starts there. The marker is "" if the
            plain text extends to the end of the text, or to a prefix of a marker at the end. If
            `buffer.is_final` is true, such a prefix is plain text.
        """
        text = buffer.text
        is_final = buffer.is_final
        search = self._find_complete if is_final else self._find_possible
        match = search(text, buffer.pos) if search is not None else None
        if match is None:
            return len(text), ""
        marker = match.group()
        if is_final or self._is_decided(marker, match.end(), text):
            return match.start(), marker
        return match.start(), ""

    def _is_decided(self, matched: str, end: int, text: str) -> bool:
        """Return whether `matched` is a complete marker that more text cannot make longer.

        Example: with the markers `<a>` and `<a><b>`, the text `<a>` may still become `<a><b>`, so
        the result is False. The text `<a>x` cannot, so the result is True.
        """
        if matched not in self._markers:
            return False
        if end < len(text):
            return True
        return not any(marker != matched and marker.startswith(matched) for marker in self._markers)
