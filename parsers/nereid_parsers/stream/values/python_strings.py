"""Reads one string of a Python literal in pieces, and converts its text to JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from json.encoder import encode_basestring as quote_json

_Matcher = Callable[[str, int, int], re.Match[str] | None]

# A quote may be a part of the string. The quote closes the string only if a text such as `,` or `)`
# follows the quote. The reader examines at most `_MAX_LOOKAHEAD_CHARS` characters after the quote.
_MAX_LOOKAHEAD_CHARS = 256
_ESCAPED_CHARS = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\n": "", "/": "/", "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip
# The number of hexadecimal digits after \x, \u and \U.
_NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_MAX_CODE_POINT = 0x10FFFF
_FIRST_SURROGATE = 0xD800
_LAST_SURROGATE = 0xDFFF
# A regex for the name of an argument. The name need not be valid in Python: a tool may have an
# argument with a name such as `Content-Type` or `$filter`.
KEYWORD = r"[\w$@][\w.\-:/$@]*"
# Each of these regexes matches a text that can follow the closing quote of a string, such as `,`.
# The regexes also match at the end of the received text (`\Z`), because the missing characters may
# still arrive.
_match_after_key = re.compile(r"\s*(?:[:,}]|\Z)").match
_match_after_item = re.compile(r"\s*(?:[,\])}]|\Z)").match
# If a quote is followed by `)` and then by a quote or another `)`, the first quote is a part of the
# string. Example: in `f(a='g('x')')`, the quote after `x` is followed by `)'`, so this quote does
# not end the argument. If three backticks follow the `)`, the quote ends the argument, because the
# backticks close a code fence around the tool call.
_match_after_argument = re.compile(
    rf"""\s*(?:\Z|,\s*(?:\Z|\)|{KEYWORD}\s*(?:\Z|=))|\)\s*(?:\Z|`{{1,2}}\Z|```|[^\s)"'`]))"""
).match


def escape_json(text: str) -> str:
    r"""Escape `text` for use inside a JSON string. Return the result without enclosing quotes.

    Example: `escape_json('a"b')` returns `a\"b`.
    """
    return quote_json(text)[1:-1]


class StringContext(Enum):
    """The context of a string, which determines the text that can follow the closing quote.

    KEY       The key of an object. In `{'a': 1}`, `:` follows.
    ITEM      An item of a list, or the value of an object's member. In `['x', 'y']`, `,` follows.
    ARGUMENT  An argument of a Python call. In `f(a='x', b=1)`, `, b=` follows.
    """

    KEY = "key"
    ITEM = "item"
    ARGUMENT = "argument"


# For each context, the function that matches the text after the closing quote.
_MATCH_TEXT_AFTER: dict[StringContext, _Matcher] = {
    StringContext.KEY: _match_after_key,
    StringContext.ITEM: _match_after_item,
    StringContext.ARGUMENT: _match_after_argument,
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The rules for strings in a model's output: quotes, escape sequences and unquoted strings.

    Attributes:
        quotes: The markers around strings. The same marker opens and closes a string. If one
            marker is a prefix of another marker, the longer marker comes first.
        quotes_with_escapes: The quotes whose strings may contain backslash escape sequences.
        quotes_allowed_inside: The quotes that may also occur, without a backslash, inside their own
            strings: `'sed 's/a/b/' f'`. Such a quote ends the string only if a text such as `,` or
            `)` follows the quote.
        allows_unquoted_strings: Whether a string without quotes is allowed: `{city:New York}`.
    """

    quotes: tuple[str, ...]
    quotes_with_escapes: tuple[str, ...]
    quotes_allowed_inside: tuple[str, ...] = ()
    allows_unquoted_strings: bool = False

    def quote_at(self, text: str, pos: int) -> str:
        """Return the quote with which `text[pos:]` starts, or "" if there is none."""
        if not text.startswith(self.quotes, pos):
            return ""  # In most cases. One test of all quotes is faster than the loop.
        for quote in self.quotes:
            if text.startswith(quote, pos):
                return quote
        return ""

    def is_quote_incomplete(self, text: str, pos: int) -> bool:
        r"""Return whether `text[pos:]` may be only the first part of a longer quote, such as `'''`.

        Example: the text `""` may be an empty string, or the start of a string in triple quotes.
        """
        num_chars = len(text) - pos
        return any(num_chars < len(quote) and quote.startswith(text[pos:]) for quote in self.quotes)


_PYTHON_QUOTES = ('"""', "'''", '"', "'")
PYTHON = Dialect(
    _PYTHON_QUOTES, quotes_with_escapes=_PYTHON_QUOTES, quotes_allowed_inside=('"', "'")
)


class StringReader:
    """Reads one string, from the text after the opening quote to the closing quote.

    Attributes:
        is_closed: Whether the closing quote has been read.
    """

    __slots__ = (
        "_find_end", "_match_text_after", "_may_occur_inside", "_output", "_quote", "is_closed",
    )  # fmt: skip

    def __init__(
        self, quote: str, dialect: Dialect, context: StringContext, output: list[str]
    ) -> None:
        """Create a reader for the string that `quote` has opened.

        `dialect` contains the rules for strings in the model's output. `context` determines which
        text can follow the closing quote, for example `:` after a key. The JSON text of the string
        is appended to `output`, without quotes.
        """
        self.is_closed = False
        self._quote = quote
        # Whether the quote may also occur inside the string without a backslash, as in `'it's'`.
        self._may_occur_inside = quote in dialect.quotes_allowed_inside
        self._match_text_after = _MATCH_TEXT_AFTER[context]
        # Finds the closing quote or an escape sequence, whichever comes first.
        has_escapes = quote in dialect.quotes_with_escapes
        self._find_end = _string_end_regex(quote, has_escapes).search
        self._output = output

    def read(self, text: str, pos: int, is_final: bool) -> int:
        r"""Read a piece of the string, and append the piece as JSON text to `_output`.

        A piece ends at the closing quote, after an escape sequence, or at the end of `text`.
        Example: in a string between single quotes, the text `it"s'` adds the JSON text `it\"s`.

        If `is_final` is true, no more text will arrive. A part of a quote at the end of `text`,
        such as `''` of `'''`, then belongs to the string.

        Returns:
            The position after the piece. It is `pos` if more text is required. After the closing
            quote, `is_closed` is true.
        """
        match = self._find_end(text, pos)
        end = match.start() if match else len(text)
        if end > pos:
            self._output.append(escape_json(text[pos:end]))
        if match is None:
            return end
        matched_text = match.group()
        if matched_text == self._quote:
            return self._read_quote(text, end, is_final)
        if matched_text == "\\":
            return self._read_escape(text, end, is_final)
        # The match is an incomplete quote at the end of `text`, such as `''` of `'''`.
        incomplete_quote = matched_text
        if not is_final:
            return end  # More text may complete the quote.
        self._output.append(escape_json(incomplete_quote))
        return match.end()

    def _read_quote(self, text: str, pos: int, is_final: bool) -> int:
        """Read the quote at `pos`, which may close the string or be a part of the string.

        Return the position after the quote, or `pos` if more text is required to decide. Examples:

            `f(a='x', b=1)`           The quote after `x` closes the string, because the text `, b=`
                                      can follow an argument.
            `f(a='sed 's/x/y/' b')`   The text `s/` cannot follow an argument, so the second quote
                                      is a part of the string.
            `f(a='x',`                More text is required, because only `,` has arrived.

        If `is_final` is true, no more text will arrive.
        """
        quote_end = pos + len(self._quote)
        if self._may_occur_inside:
            max_end = quote_end + _MAX_LOOKAHEAD_CHARS
            text_after = self._match_text_after(text, quote_end, max_end)
            if text_after is None:  # The quote is a part of the string.
                self._output.append(escape_json(self._quote))
                return quote_end
            # After `'x',` at the end of the text, later characters may still show that the quote is
            # a part of the string.
            is_cut_off = text_after.end() == len(text) and len(text) < max_end
            if is_cut_off and not is_final:
                return pos
        self.is_closed = True
        return quote_end

    def _read_escape(self, text: str, pos: int, is_final: bool) -> int:
        r"""Read the escape sequence at `pos`, and convert the escape sequence to JSON text.

        Examples: `\'` is written as `'`, `\x41` as `A`, and the unknown sequence `\d` as `\\d`.

        Return the position after the escape sequence, or `pos` if more text is required.
        """
        is_cut_off = pos + 1 == len(text)  # Only the backslash has arrived.
        if is_cut_off:
            # If the model's output ends with this backslash, the backslash is dropped, because it
            # has no meaning alone.
            return len(text) if is_final else pos
        letter = text[pos + 1]
        if letter in _NUM_HEX_DIGITS:
            return self._read_hex_escape(text, pos, is_final)
        unknown_sequence = "\\" + letter
        self._output.append(escape_json(_ESCAPED_CHARS.get(letter, unknown_sequence)))
        return pos + 2

    def _read_hex_escape(self, text: str, pos: int, is_final: bool) -> int:
        r"""Read an escape sequence such as `\x41` at `pos`, and write the encoded character.

        Example: `\x41` is written as `A`. If the digits are missing, or are not the number of a
        character, only the backslash and the letter are read, and are written as two characters.
        Example: of `\xyz`, `\x` is read and written as the JSON text `\\x`.

        Return the position after the text that was read, or `pos` if more digits may follow.
        """
        letter_end = pos + 2
        num_digits = _NUM_HEX_DIGITS[text[pos + 1]]
        digits = text[letter_end : letter_end + num_digits]
        is_hex = _HEX_DIGITS.issuperset(digits)  # True also if no digit has arrived.
        if is_hex and len(digits) < num_digits and not is_final:
            return pos
        is_complete = is_hex and len(digits) == num_digits
        if is_complete and int(digits, 16) <= _MAX_CODE_POINT:
            self._output.append(_json_char(int(digits, 16)))
            return letter_end + num_digits
        self._output.append(escape_json(text[pos:letter_end]))
        return letter_end


@lru_cache(maxsize=64)
def _string_end_regex(quote: str, has_escapes: bool) -> re.Pattern[str]:
    """Return a regex that finds `quote`, or a part of `quote` at the end of the text.

    Example: for the quote `<q>`, the regex finds `<q>` in `a<q>b`, and `<` in `a<`. If
    `has_escapes` is true, the regex also finds a backslash.
    """
    options = [re.escape(quote)]
    if has_escapes:
        options.append(r"\\")
    for num_chars in reversed(range(1, len(quote))):  # Longer beginnings are tried first.
        options.append(rf"{re.escape(quote[:num_chars])}\Z")
    return re.compile("|".join(options))


def _json_char(code_point: int) -> str:
    r"""Return the text that represents a character inside a JSON string.

    Examples: `_json_char(0x41)` returns `A`. `_json_char(0xD83D)` returns the six characters
    `\ud83d`, because a surrogate is only one half of a character.
    """
    if _FIRST_SURROGATE <= code_point <= _LAST_SURROGATE:
        return f"\\u{code_point:04x}"
    return escape_json(chr(code_point))
