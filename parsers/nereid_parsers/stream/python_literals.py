"""Converts Python literals, and objects whose keys have no quotes, to JSON text in pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from json.encoder import encode_basestring as quote_json

from nereid_parsers.stream.argument_types import to_json
from nereid_parsers.stream.body_reader import BROKEN, DONE, MORE
from nereid_parsers.stream.pattern_matching import skip_blanks

_WORD = re.compile(r"""[^\s,:=\[\](){}'"<>|]*""").match
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
_CLOSING_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_MAX_DEPTH = 200
_MAX_WORD_CHARS = 4096


def escape_json(text: str) -> str:
    r"""Return `text` with the escape sequences of a JSON string, but without enclosing quotes.

    Example: `escape_json('a"b')` returns `a\"b`.
    """
    return quote_json(text)[1:-1]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The rules for strings in the text of a model.

    Attributes:
        quotes: The markers around strings. The same marker opens and closes a string. Longer
            markers precede their own prefixes.
        escaping: The quotes that enclose strings with backslash escape sequences.
    """

    quotes: tuple[str, ...]
    escaping: tuple[str, ...]


_PYTHON_QUOTES = ('"""', "'''", '"', "'")
PYTHON = Dialect(_PYTHON_QUOTES, escaping=_PYTHON_QUOTES)


class _Expected(Enum):
    """The token that may follow the text that has been read.

    VALUE       A value: the whole literal, or the value after a key and a colon.
    FIRST_ITEM  The first item of a list or tuple, or the closing bracket.
    ITEM        An item after a comma, or the closing bracket after a trailing comma.
    FIRST_KEY   The first key of an object, or the closing brace.
    KEY         A key after a comma, or the closing brace after a trailing comma.
    COLON       The colon after a key.
    COMMA       A comma or a closing bracket. Outside all brackets, the literal is complete.
    """

    VALUE = "value"
    FIRST_ITEM = "first_item"
    ITEM = "item"
    FIRST_KEY = "first_key"
    KEY = "key"
    COLON = "colon"
    COMMA = "comma"


_KEYS = (_Expected.FIRST_KEY, _Expected.KEY)
_AFTER_COMMA = (_Expected.ITEM, _Expected.KEY)


class LiteralReader:
    """Reads one value in pieces and converts the value to JSON text.

    A tuple becomes an array. A key that is not a string becomes a string. Example:
    `{'a': (1, None)}` becomes `{"a": [1, null]}`.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._expected = _Expected.VALUE
        # The brackets that close the open lists, tuples and objects. The last one closes first.
        self._closing_brackets: list[str] = []
        self._quote = ""  # The quote of the open string, or "".
        self._string_end = re.compile("")
        self.status = MORE

    def read(self, text: str, pos: int, is_final: bool, json_parts: list[str]) -> int:
        """Read `text` from `pos` on, append JSON text to `json_parts`, and set `status`.

        Args:
            text: The text.
            pos: The position at which reading starts.
            is_final: Whether no more text follows.
            json_parts: The list to which JSON text is appended.

        Returns:
            The position up to which the text was read.
        """
        size = len(text)
        while pos < size and self.status is MORE:
            if self._quote:
                end = self._read_string(text, pos, is_final, json_parts)
            else:
                end = self._read_token(text, pos, is_final, json_parts)
            if end == pos:
                return pos
            pos = end
        return pos

    def closing_text(self) -> str:
        """Return the text that completes the JSON text of the value, for example `"]}`."""
        quote = '"' if self._quote else ""
        return quote + "".join(map(_json_bracket, reversed(self._closing_brackets)))

    def _read_token(self, text: str, pos: int, is_final: bool, json_parts: list[str]) -> int:
        """Read white space, a value, or the punctuation after a value.

        Example: in `[1, 2]`, the tokens are `[`, `1`, `,`, ` `, `2` and `]`.
        """
        if text[pos].isspace():
            return skip_blanks(text, pos)
        if self._expected is _Expected.COLON:
            return self._read_colon(text, pos, json_parts)
        if self._expected is _Expected.COMMA:
            return self._read_comma_or_bracket(text, pos, json_parts)
        return self._read_value(text, pos, is_final, json_parts)

    def _reject(self, pos: int) -> int:
        """Set the status BROKEN and return `pos`."""
        self.status = BROKEN
        return pos

    def _read_colon(self, text: str, pos: int, json_parts: list[str]) -> int:
        """Read the colon between a key and a value. For `:`, the text `: ` is written."""
        if text[pos] != ":":
            return self._reject(pos)
        json_parts.append(": ")
        self._expected = _Expected.VALUE
        return pos + 1

    def _read_comma_or_bracket(self, text: str, pos: int, json_parts: list[str]) -> int:
        """Read the comma or the closing bracket after a value.

        If no bracket is open, the literal is complete, and nothing is read. The comma is written
        together with the next value, because no value follows a trailing comma.
        """
        if not self._closing_brackets:
            self.status = DONE
            return pos
        closing_bracket = self._closing_brackets[-1]
        if text[pos] == closing_bracket:
            self._close_container(json_parts)
        elif text[pos] == ",":
            self._expected = _Expected.KEY if closing_bracket == "}" else _Expected.ITEM
        else:
            return self._reject(pos)
        return pos + 1

    def _close_container(self, json_parts: list[str]) -> None:
        """Write the closing bracket of the innermost list, tuple or object."""
        json_parts.append(_json_bracket(self._closing_brackets.pop()))
        self._expected = _Expected.COMMA
        if not self._closing_brackets:
            self.status = DONE

    def _read_value(self, text: str, pos: int, is_final: bool, json_parts: list[str]) -> int:
        """Read a quote, an opening bracket, a whole word or a closing bracket.

        A closing bracket may follow an opening bracket or a trailing comma, as in `[]` and `(1,)`.
        Examples: for `(`, `[` is written, and for `None`, `null` is written.
        """
        char = text[pos]
        may_close = self._expected is not _Expected.VALUE
        if may_close and char == self._closing_brackets[-1]:
            self._close_container(json_parts)
            return pos + 1
        quote = self._find_quote(text, pos, is_final)
        if quote is None:
            return pos
        if quote:
            self._open_string(quote, json_parts)
            return pos + len(quote)
        if char in _CLOSING_BRACKETS:
            return self._open_container(char, pos, json_parts)
        return self._read_word(text, pos, is_final, json_parts)

    def _open_container(self, bracket: str, pos: int, json_parts: list[str]) -> int:
        """Read the opening bracket of a list, tuple or object, which cannot be a key."""
        if self._expected in _KEYS or len(self._closing_brackets) >= _MAX_DEPTH:
            return self._reject(pos)
        self._begin_value(json_parts)
        self._closing_brackets.append(_CLOSING_BRACKETS[bracket])
        json_parts.append("{" if bracket == "{" else "[")
        self._expected = _Expected.FIRST_KEY if bracket == "{" else _Expected.FIRST_ITEM
        return pos + 1

    def _find_quote(self, text: str, pos: int, is_final: bool) -> str | None:
        """Return the quote at `pos`, "" if there is no quote, or None if more text is required.

        Example: the text `""` may be an empty string, or the start of a string in triple quotes.
        """
        for quote in self._dialect.quotes:
            if text.startswith(quote, pos):
                return quote
            if not is_final and len(text) - pos < len(quote) and quote.startswith(text[pos:]):
                return None
        return ""

    def _begin_value(self, json_parts: list[str]) -> None:
        """Write the comma before a value or key, and expect the token after the value or key."""
        if self._expected in _AFTER_COMMA:
            json_parts.append(", ")
        self._expected = _Expected.COLON if self._expected in _KEYS else _Expected.COMMA

    def _read_word(self, text: str, pos: int, is_final: bool, json_parts: list[str]) -> int:
        """Read a number, a constant or a key without quotes.

        Examples: for `3`, `3` is written, for `True`, `true`, and for the key `days`, `"days"`. A
        word at the end of the text is not read, because the word may continue.
        """
        match = _WORD(text, pos)
        end = match.end() if match else pos
        if end == len(text) and not is_final:
            return self._reject(pos) if end - pos > _MAX_WORD_CHARS else pos
        if end == pos:
            return self._reject(pos)
        is_key = self._expected in _KEYS
        self._begin_value(json_parts)
        word = text[pos:end]
        json_parts.append(quote_json(word) if is_key else to_json(word, None))
        return end

    # ---- strings ---------------------------------------------------------------------------------

    def _open_string(self, quote: str, json_parts: list[str]) -> None:
        """Start a string. Compile a regex that finds its closing quote or an escape sequence."""
        self._begin_value(json_parts)
        json_parts.append('"')
        self._quote = quote
        options = [re.escape(quote)]
        if quote in self._dialect.escaping:
            options.append(r"\\")
        # More text may complete a quote of which only a prefix is at the end of the text.
        options += [f"{re.escape(quote[:size])}\\Z" for size in range(len(quote) - 1, 0, -1)]
        self._string_end = re.compile("|".join(options))

    def _read_string(self, text: str, pos: int, is_final: bool, json_parts: list[str]) -> int:
        r"""Read a piece of the open string, up to the closing quote or the next escape sequence.

        Example: in a string between single quotes, for the text `it"s'`, `it\"s"` is written.
        """
        match = self._string_end.search(text, pos)
        start = match.start() if match else len(text)
        if start > pos:
            json_parts.append(escape_json(text[pos:start]))
        if match is None:
            return start
        if match.group() == self._quote:
            json_parts.append('"')
            self._quote = ""
            return match.end()
        if match.group() == "\\":
            return self._read_escape(text, start, is_final, json_parts)
        if is_final:
            json_parts.append(escape_json(match.group()))
            return match.end()
        return start

    def _read_escape(self, text: str, pos: int, is_final: bool, json_parts: list[str]) -> int:
        r"""Read the escape sequence at `pos`.

        Examples: for `\n`, `\n` is written, for `\x41`, `A`, and for the unknown sequence `\d`,
        `\\d`.
        """
        if pos + 1 == len(text):
            return len(text) if is_final else pos
        char = text[pos + 1]
        num_digits = _NUM_HEX_DIGITS.get(char, 0)
        if num_digits:
            end = pos + 2 + num_digits
            digits = text[pos + 2 : end]
            is_hex = _HEX_DIGITS.issuperset(digits)
            if len(digits) < num_digits and not is_final and is_hex:
                return pos
            if len(digits) == num_digits and is_hex and int(digits, 16) <= _MAX_CODE_POINT:
                json_parts.append(_json_char(int(digits, 16)))
                return end
        json_parts.append(escape_json(_ESCAPED_CHARS.get(char, "\\" + char)))
        return pos + 2


def _json_bracket(closing_bracket: str) -> str:
    """Return the JSON bracket for a closing bracket. A tuple becomes an array: `)` gives `]`."""
    return "}" if closing_bracket == "}" else "]"


def _json_char(code_point: int) -> str:
    r"""Return the text that represents a character inside a JSON string.

    Examples: `_json_char(0x41)` returns `A`. `_json_char(0xD83D)` returns the six characters
    `\ud83d`, because a surrogate is only one half of a character.
    """
    if _FIRST_SURROGATE <= code_point <= _LAST_SURROGATE:
        return f"\\u{code_point:04x}"
    return escape_json(chr(code_point))
