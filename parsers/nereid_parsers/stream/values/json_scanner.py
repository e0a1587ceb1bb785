"""Finds the start and the end of a JSON value in a text that arrives in pieces. Decodes strings."""

from __future__ import annotations

import re
from collections.abc import Callable

from nereid_parsers.stream.pattern_matching import NEED_MORE, NO_MATCH, Mismatch, skip_whitespace
from nereid_parsers.stream.status import BROKEN, DONE, MORE
from nereid_parsers.stream.values.json_text import escape_surrogates, loads

_Matcher = Callable[[str, int], re.Match[str] | None]

# For each quote, the regex that matches the text of a string up to its closing quote. JSON allows
# only double quotes, but models sometimes write single quotes.
_MATCH_STRING_CHARS: dict[str, _Matcher] = {
    '"': re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL).match,
    "'": re.compile(r"[^'\\]*(?:\\.[^'\\]*)*", re.DOTALL).match,
}
# Inside an array or object, matches numbers, words, commas, colons and white space.
_match_chars_in_brackets: _Matcher = re.compile(r"[\s\w.,:+\-]*").match
# Matches a number or a word such as `true`.
_match_scalar: _Matcher = re.compile(r"[\w.+\-]*").match
_QUOTES = frozenset(_MATCH_STRING_CHARS)
_BRACKET_PAIRS = {"{": "}", "[": "]"}
_OPENING_CHARS = _QUOTES | frozenset(_BRACKET_PAIRS)


class JsonScanner:
    """Finds the end of one JSON value. The scanner stores the open brackets, but not the text.

    The scanner examines only brackets, strings and escape sequences. Therefore a marker inside a
    string does not end the value. The scanner also accepts some values that are not valid JSON.

    Example: for the pieces `{"a": "}` and `"} x`, the first call of `scan` returns 8, the end of
    the piece, with the status MORE. The second call returns 2 with the status DONE.
    """

    __slots__ = ("_closing_brackets", "_is_escaped", "_quote", "status")

    def __init__(self) -> None:
        """Create a scanner for one value."""
        # The closing brackets that are still missing, outermost first: `}` and `]` for `{"a": [`.
        self._closing_brackets: list[str] = []
        self._quote = ""  # The quote of the open string, or "".
        self._is_escaped = False  # Whether the last piece ended with a backslash in a string.
        self.status = MORE

    @property
    def has_open_brackets(self) -> bool:
        """Whether the text that was scanned ends inside an array or an object."""
        return bool(self._closing_brackets)

    def scan(self, text: str, pos: int) -> int:
        """Find the end of a JSON value, and set `status`.

        The value may arrive in several pieces. `text[pos:]` is the next piece, and is scanned once.
        Example: for the text `{"a": "}"} </call>` and the position 0, the result is 10 and the
        status is DONE. For the text `{"a": `, the result is 6 and the status is MORE.

        Return the position after the value, if the status is DONE. If the status is MORE, return
        the end of the text. If the status is BROKEN, return the position of the bracket that does
        not match.
        """
        size = len(text)
        if self._is_escaped and pos < size:
            # The previous piece ended with a backslash inside a string, so the first character of
            # this piece cannot close the string.
            self._is_escaped = False
            pos += 1
        while pos < size and self.status is MORE:
            char = text[pos]
            if self._quote:
                pos = self._scan_string(text, pos)
            elif char in _QUOTES:
                self._quote = char
                pos += 1
            elif char in _BRACKET_PAIRS:
                self._closing_brackets.append(_BRACKET_PAIRS[char])
                pos += 1
            elif self._closing_brackets:
                pos = self._scan_in_brackets(text, pos)
            else:
                pos = self._scan_scalar(text, pos)
        return pos

    def _scan_string(self, text: str, pos: int) -> int:
        """Scan the open string up to its closing quote, and return the position after this quote.

        If the closing quote has not arrived, the result is the end of the text. Example: for the
        text `a", 1` inside a string, the result is the position after the quote. If the string is
        the whole value, `status` becomes DONE.
        """
        match = _MATCH_STRING_CHARS[self._quote](text, pos)
        assert match is not None  # The regex also matches the empty text.
        end = match.end()
        if end == len(text):
            return end
        if text[end] == "\\":
            # The backslash is the last character of `text`. Otherwise, the regex would have matched
            # the backslash together with the next character.
            self._is_escaped = True
            return end + 1
        self._quote = ""  # The character at `end` closes the string.
        is_inside_brackets = bool(self._closing_brackets)
        if not is_inside_brackets:
            self.status = DONE  # The whole value is a string.
        return end + 1

    def _scan_in_brackets(self, text: str, pos: int) -> int:
        """Inside an array or object, scan up to the next bracket or quote.

        A closing bracket is read, too. A quote or an opening bracket stays unread, because `scan`
        reads these characters. If there is no such character, return the end of the text. Examples
        inside an array:

            `1, [2]`   Return the position of `[`.
            `1] x`     Return the position of ` x`. If no other bracket is open, the status becomes
                       DONE.
            `1} x`     Return the position of `}`. The status becomes BROKEN, because `}` does not
                       close an array.
            `1 <x`     Return the position of `<`. The status becomes BROKEN, because `<` is not
                       valid JSON.
        """
        match = _match_chars_in_brackets(text, pos)
        assert match is not None  # The regex also matches the empty text.
        end = match.end()
        if end == len(text) or text[end] in _OPENING_CHARS:
            return end
        if text[end] != self._closing_brackets[-1]:
            self.status = BROKEN
            return end
        self._closing_brackets.pop()
        if not self._closing_brackets:
            self.status = DONE
        return end + 1

    def _scan_scalar(self, text: str, pos: int) -> int:
        """Scan a value outside all brackets: a number or a word such as `true`. Return its end.

        Example: for `12 </call>`, the result is the position after `12`, and the status becomes
        DONE. At the end of the text, the status does not change, because more digits may arrive.
        """
        match = _match_scalar(text, pos)
        assert match is not None  # The regex also matches the empty text.
        end = match.end()
        if end < len(text) and text[end] not in _OPENING_CHARS:
            self.status = DONE
        return end


def match_object_start(text: str, pos: int) -> int | Mismatch:
    """Test whether a JSON object starts at `pos`. Return `pos`, NO_MATCH or NEED_MORE.

    The result is `pos` if an object starts at `pos`. Examples: `{"` and `{}` start an object, and
    `{x` does not. The text `{` gives NEED_MORE, because the next character decides.
    """
    if text[pos] != "{":
        return NO_MATCH
    inside = skip_whitespace(text, pos + 1)
    if inside == len(text):
        return NEED_MORE
    return pos if text[inside] in _QUOTES or text[inside] == "}" else NO_MATCH


def decode_string(quoted_text: str) -> str:
    r"""Decode a JSON string, and remove its quotes. Example: `"a\u0062"` gives `ab`.

    If the string is not valid JSON, for example because its quotes are single quotes, return the
    text between the quotes unchanged. Half of a surrogate pair stays an escape sequence.
    """
    try:
        text: str = loads(quoted_text)
    except ValueError:
        return quoted_text[1:-1]
    return escape_surrogates(text)
