"""Converts Python literals, and objects whose keys have no quotes, to JSON text in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from json.encoder import encode_basestring as quote_json

from nereid_parsers.stream.argument_types import to_json, without_leading_zeros
from nereid_parsers.stream.pattern_matching import skip_blanks
from nereid_parsers.stream.status import BROKEN, DONE, MORE

_WORD = re.compile(r"""[^\s,:=\[\](){}'"<>|]*""").match
_BARE_STRING = re.compile(r"""[^,\[\]{}"<>|]*""").match
# The texts that can follow the closing quote of a key, of an item or member, and of an argument of
# a call. Each regex also matches an incomplete text. A closing parenthesis does not end the call if
# another parenthesis or a quote follows.
_AFTER_KEY = re.compile(r"\s*(?:[:,}]|\Z)").match
_AFTER_ITEM = re.compile(r"\s*(?:[,\])}]|\Z)").match
_AFTER_ARGUMENT = re.compile(
    r"""\s*(?:\Z|,\s*(?:\Z|\)|[^\W\d]\w*\s*(?:\Z|=))|\)\s*(?:\Z|[^\s)"'`]))"""
).match
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
        nesting: The quotes that may also occur inside their own strings: `'sed 's/a/b/' f'`. Such a
            quote ends the string only if the text after the quote can follow a string.
        has_bare_strings: Whether a string without quotes is allowed: `{city:New York}`.
    """

    quotes: tuple[str, ...]
    escaping: tuple[str, ...]
    nesting: tuple[str, ...] = ()
    has_bare_strings: bool = False


_PYTHON_QUOTES = ('"""', "'''", '"', "'")
PYTHON = Dialect(_PYTHON_QUOTES, escaping=_PYTHON_QUOTES, nesting=('"', "'"))


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


@dataclass(slots=True)
class _Container:
    """An open list, tuple, set or object.

    Attributes:
        close: The bracket that closes the container in the model's text.
        json_close: The bracket that closes the container in the JSON text.
        num_items: The number of items or members that have been read.
    """

    close: str
    json_close: str
    num_items: int = 0


class LiteralReader:
    """Reads one value in pieces and converts the value to JSON text.

    A tuple or a set becomes an array. A key that is not a string becomes a string. Example:
    `{'a': (1, None)}` becomes `{"a": [1, null]}`, and `{'a', 'b'}` becomes `["a", "b"]`.
    """

    def __init__(
        self,
        dialect: Dialect,
        types_of: Callable[[str], frozenset[str] | None] | None = None,
    ) -> None:
        """Create a reader for one value.

        Args:
            dialect: The rules for strings.
            types_of: A function that returns the JSON types which the schema allows for a member of
                the outermost object. None if there is no schema.
        """
        self._dialect = dialect
        self._types_of = types_of
        self._expected = _Expected.VALUE
        self._containers: list[_Container] = []  # From the outermost to the innermost.
        self._quote = ""  # The quote of the open string, or "".
        self._string_end = re.compile("")
        # The JSON text of a key, which is written at the colon. None outside of keys. Without a
        # colon, the key is the first item of a set.
        self._key: list[str] | None = None
        self._key_word = ""  # The text of a key without quotes.
        # The types of a string that is converted to another type when it ends. None for all others.
        self._converted_types: frozenset[str] | None = None
        self._converted_text: list[str] = []
        self._types: frozenset[str] | None = None  # The types of the next value.
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
        """Return the text that completes the JSON text of the value, for example `"]}`.

        A key without a value is omitted, so after `{"a": 1, "b`, the result is `}`.
        """
        closing = "".join(container.json_close for container in reversed(self._containers))
        if self._key is not None:
            is_first = not self._containers[-1].num_items
            return "{" + closing if is_first else closing
        if self._converted_types is not None:
            return self._converted_value() + closing
        return '"' + closing if self._quote else closing

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
        """Read the colon after a key, and write the key. Without a colon, the key may be in a set.

        Examples: in `{'a': 1}`, the text `{"a": ` is written at the colon. In `{'a', 'b'}`, the
        text `["a"` is written at the first comma.
        """
        container = self._containers[-1]
        key = "".join(self._key or ())
        if text[pos] == ":":
            json_parts.append((", " if container.num_items else "{") + key + ": ")
            container.num_items += 1
            self._key = None
            if self._types_of is not None and len(self._containers) == 1:
                self._types = self._types_of(json.loads(key))
            self._expected = _Expected.VALUE
            return pos + 1
        if container.num_items or text[pos] not in ",}":
            return self._reject(pos)
        container.json_close = "]"
        first_item = to_json(self._key_word, None) if self._key_word else key
        json_parts.append("[" + first_item)
        self._key = None
        return self._read_comma_or_bracket(text, pos, json_parts)

    def _read_comma_or_bracket(self, text: str, pos: int, json_parts: list[str]) -> int:
        """Read the comma or the closing bracket after a value.

        If no bracket is open, the literal is complete, and nothing is read. The comma is written
        together with the next value, because no value follows a trailing comma.
        """
        if not self._containers:
            self.status = DONE
            return pos
        container = self._containers[-1]
        if text[pos] == container.close:
            self._close_container(json_parts)
        elif text[pos] == ",":
            self._expected = _Expected.KEY if container.json_close == "}" else _Expected.ITEM
        else:
            return self._reject(pos)
        return pos + 1

    def _close_container(self, json_parts: list[str]) -> None:
        """Write the closing bracket of the innermost list, tuple, set or object."""
        if self._expected is _Expected.FIRST_KEY:
            json_parts.append("{")
        json_parts.append(self._containers.pop().json_close)
        self._expected = _Expected.COMMA
        if not self._containers:
            self.status = DONE

    def _read_value(self, text: str, pos: int, is_final: bool, json_parts: list[str]) -> int:
        """Read a quote, an opening bracket, a whole word or a closing bracket.

        A closing bracket may follow an opening bracket or a trailing comma, as in `[]` and `(1,)`.
        Examples: for `(`, `[` is written, and for `None`, `null` is written.
        """
        char = text[pos]
        may_close = self._expected is not _Expected.VALUE
        if may_close and char == self._containers[-1].close:
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
        """Read the opening bracket of a list, tuple, set or object. Such a value cannot be a key.

        The text `{` is written later, because it opens an object or a set.
        """
        if self._expected in _KEYS or len(self._containers) >= _MAX_DEPTH:
            return self._reject(pos)
        self._begin_value(json_parts)
        is_object = bracket == "{"
        self._containers.append(_Container(_CLOSING_BRACKETS[bracket], "}" if is_object else "]"))
        if is_object:
            self._expected = _Expected.FIRST_KEY
        else:
            json_parts.append("[")
            self._expected = _Expected.FIRST_ITEM
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
        """Write the comma before a value, or start a key. Expect the token that follows."""
        if self._expected in _KEYS:
            self._key = []
            self._key_word = ""
            self._expected = _Expected.COLON
            return
        if self._expected is _Expected.ITEM:
            json_parts.append(", ")
        self._expected = _Expected.COMMA

    def _read_word(self, text: str, pos: int, is_final: bool, json_parts: list[str]) -> int:
        """Read a number, a constant, a key without quotes or a string without quotes.

        Examples: for `3`, `3` is written, for `07`, `7`, for `True`, `true`, and for the key
        `days`, `"days"`. A word at the end of the text is not read, because the word may continue.
        """
        is_key = self._expected in _KEYS
        is_string = self._dialect.has_bare_strings and not is_key
        match = (_BARE_STRING if is_string else _WORD)(text, pos)
        end = match.end() if match else pos
        if end == len(text) and not is_final:
            return self._reject(pos) if end - pos > _MAX_WORD_CHARS else pos
        if end == pos:
            return self._reject(pos)
        self._begin_value(json_parts)
        word = text[pos:end].rstrip()
        if self._key is None:
            json_parts.append(to_json(without_leading_zeros(word), None))
        else:
            self._key_word = word
            self._key.append(quote_json(word))
        return end

    # ---- strings ---------------------------------------------------------------------------------

    def _open_string(self, quote: str, json_parts: list[str]) -> None:
        """Start a string. Compile a regex that finds its closing quote or an escape sequence."""
        is_value = self._expected is _Expected.VALUE
        self._begin_value(json_parts)
        if is_value and self._types is not None and "string" not in self._types:
            self._converted_types = self._types
            self._converted_text = []
        self._output(json_parts).append('"')
        self._quote = quote
        options = [re.escape(quote)]
        if quote in self._dialect.escaping:
            options.append(r"\\")
        # More text may complete a quote of which only a prefix is at the end of the text.
        options += [f"{re.escape(quote[:size])}\\Z" for size in range(len(quote) - 1, 0, -1)]
        self._string_end = re.compile("|".join(options))

    def _output(self, json_parts: list[str]) -> list[str]:
        """Return the list to which the JSON text of the open string is appended."""
        if self._converted_types is not None:
            return self._converted_text
        return json_parts if self._key is None else self._key

    def _close_string(self, json_parts: list[str]) -> None:
        """End the open string. If the schema does not allow a string, write its value as JSON.

        Example: the string `3` becomes the number `3` if the schema allows only an integer.
        """
        self._quote = ""
        if self._converted_types is None:
            self._output(json_parts).append('"')
            return
        json_parts.append(self._converted_value())
        self._converted_types = None

    def _converted_value(self) -> str:
        """Return the JSON text of a string that is converted to the types of the schema."""
        text: str = json.loads("".join(self._converted_text) + '"')
        return to_json(text, self._converted_types)

    def _read_string(self, text: str, pos: int, is_final: bool, json_parts: list[str]) -> int:
        r"""Read a piece of the open string, up to the closing quote or the next escape sequence.

        Example: in a string between single quotes, for the text `it"s'`, `it\"s"` is written.
        """
        output = self._output(json_parts)
        match = self._string_end.search(text, pos)
        start = match.start() if match else len(text)
        if start > pos:
            output.append(escape_json(text[pos:start]))
        if match is None:
            return start
        if match.group() == self._quote:
            is_closing = self._is_closing_quote(text, match.end(), is_final)
            if is_closing is None:
                return start
            if is_closing:
                self._close_string(json_parts)
            else:
                output.append(escape_json(self._quote))
            return match.end()
        if match.group() == "\\":
            return self._read_escape(text, start, is_final, output)
        if is_final:
            output.append(escape_json(match.group()))
            return match.end()
        return start

    def _is_closing_quote(self, text: str, pos: int, is_final: bool) -> bool | None:
        """Return whether the quote before `pos` closes the string. None: more text is required.

        The quote does not close the string if the text after the quote cannot follow a value.
        Examples: in `f(a='sed 's/x/y/' b')`, only the last quote closes the string, because the
        text `)` follows. In `f(a='x', b=1)`, the text `, b=` follows the quote.
        """
        if self._quote not in self._dialect.nesting:
            return True
        if self._containers:
            can_follow = _AFTER_KEY if self._key is not None else _AFTER_ITEM
        else:
            can_follow = _AFTER_ARGUMENT
        end = pos + _MAX_LOOKAHEAD_CHARS
        match = can_follow(text, pos, end)
        if match is None:
            return False
        is_decided = match.end() < len(text) or is_final or len(text) >= end
        return True if is_decided else None

    def _read_escape(self, text: str, pos: int, is_final: bool, output: list[str]) -> int:
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
                output.append(_json_char(int(digits, 16)))
                return end
        output.append(escape_json(_ESCAPED_CHARS.get(char, "\\" + char)))
        return pos + 2


def _json_char(code_point: int) -> str:
    r"""Return the text that represents a character inside a JSON string.

    Examples: `_json_char(0x41)` returns `A`. `_json_char(0xD83D)` returns the six characters
    `\ud83d`, because a surrogate is only one half of a character.
    """
    if _FIRST_SURROGATE <= code_point <= _LAST_SURROGATE:
        return f"\\u{code_point:04x}"
    return escape_json(chr(code_point))
