"""Converts Python literals, and objects with unquoted keys such as `{a: 1}`, to JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.encoder import encode_basestring as quote_json

from nereid_parsers.stream.pattern_matching import skip_whitespace
from nereid_parsers.stream.status import BROKEN, DONE, MORE
from nereid_parsers.stream.values.argument_types import to_json, without_leading_zeros
from nereid_parsers.stream.values.literal_parts import (
    Container,
    Expected,
    KeyOrItem,
    OpenString,
    StringRole,
)
from nereid_parsers.stream.values.python_strings import Dialect, StringReader, matcher_after_string

_match_word = re.compile(r"""[^\s,:=\[\](){}'"<>|]*""").match
_match_unquoted_string = re.compile(r"""[^,\[\]{}"<>|]*""").match
# The closing bracket for each opening bracket.
_BRACKET_PAIRS = {"[": "]", "(": ")", "{": "}"}
_MAX_DEPTH = 200  # JSON parsers accept only a limited number of nested brackets.
# The maximum length of a word. An unfinished word is read again from its start whenever more text
# arrives. Without this limit, the total parsing time would not be linear.
_MAX_WORD_CHARS = 4096
_KEYS = (Expected.FIRST_KEY, Expected.KEY)


class LiteralReader:
    """Reads one value in pieces and converts the value to JSON text.

    A tuple or a set becomes an array. A key that is not a string becomes a string. Example:
    `{'a': (1, None)}` becomes `{"a": [1, null]}`, and `{'a', 'b'}` becomes `["a", "b"]`.

    A value may arrive in pieces: `read` of `{'a': (1, No` returns the position of `No`, because
    this word may continue, and `take_json` returns `{"a": [1`. The caller then passes `None)}` to
    `read`, and `take_json` returns `, null]}`. A StringReader reads the text of each string.

    Attributes:
        status: The state of the value.
    """

    def __init__(
        self,
        dialect: Dialect,
        types_of: Callable[[str], frozenset[str] | None] | None = None,
    ) -> None:
        """Create a reader for one value.

        `types_of` receives the key of a member of the outermost object, such as "city", and returns
        the JSON types that the schema allows for the value. It is None if there is no schema.
        """
        self._dialect = dialect
        self._types_of = types_of
        self.status = MORE
        self._json_parts: list[str] = []  # The JSON text that `take_json` has not returned yet.
        self._expected = Expected.VALUE
        self._containers: list[Container] = []  # The open containers, outermost first.
        # The key, such as `'a'`, whose colon has not arrived yet. Without a colon, it is the first
        # item of a set, as in `{'a', 'b'}`.
        self._key: KeyOrItem | None = None
        # The JSON types that the schema allows for the value after the last key, or None for all.
        self._value_types: frozenset[str] | None = None
        self._string: OpenString | None = None

    def take_json(self) -> str:
        """Return the JSON text that has been written since the last call of this method."""
        text = "".join(self._json_parts)
        self._json_parts.clear()
        return text

    def read(self, text: str, pos: int, is_final: bool) -> int:
        """Convert `text[pos:]`, the next piece of the value, to JSON text.

        `take_json` returns the JSON text. `status` becomes DONE at the end of the value, and BROKEN
        if the text is not valid. Example: for `{'a': True}`, the JSON text is `{"a": true}`.

        Return the position up to which the text was read. If this position is not the end of the
        text, the caller passes the rest again, together with more text.
        """
        size = len(text)
        while pos < size and self.status is MORE:
            string = self._string
            if string is not None:
                end = string.reader.read(text, pos, is_final)
                if string.reader.is_closed:
                    self._close_string(string)
            elif text[pos].isspace():
                end = skip_whitespace(text, pos)
            elif self._expected is Expected.COLON:
                end = self._read_colon(text, pos)
            elif self._expected is Expected.COMMA:
                end = self._read_comma_or_bracket(text, pos)
            else:
                end = self._read_value(text, pos, is_final)
            if end == pos:  # More text is required, or the text is not valid.
                return pos
            pos = end
        return pos

    def closing_text(self) -> str:
        """Return the JSON text that completes an unfinished value, for example closing brackets.

        The opening brace of an object is written together with the first key. Examples:

            `{"a": `        `null}`, where `null` replaces the missing value.
            `{"a": 1, 'b`   `}`, because the incomplete key is omitted.
            `{'a`           `{}`, because no brace has been written. The incomplete key is omitted.
            `{"a": 1`       `}`, because the last value is complete.
            `{"days": "3`   `3}`, if the schema allows only an integer for `days`.
            `{"a": ["x`     `"]}`, where `"` closes the string.
        """
        brackets = "".join(container.json_close for container in reversed(self._containers))
        if self._expected is Expected.VALUE:
            return "null" + brackets
        is_key_incomplete = self._expected in (Expected.FIRST_KEY, Expected.COLON)
        if is_key_incomplete:
            return brackets if self._containers[-1].has_written_key else "{" + brackets
        if self._string is None:  # The last value is complete.
            return brackets
        is_string_stored = self._string.role is StringRole.CONVERTED_VALUE
        return (self._convert_string(self._string) if is_string_stored else '"') + brackets

    def _reject(self, pos: int) -> int:
        """Set the status BROKEN and return `pos`."""
        self.status = BROKEN
        return pos

    # ---- punctuation -----------------------------------------------------------------------------

    def _read_colon(self, text: str, pos: int) -> int:
        """Read the colon after a key, and write the key. Return the position after the colon.

        Examples for the text after `{'a'`:

            `: 1}`   The colon is read, and `{"a": ` is written.
            `, 1}`   The braces enclose a set, and `'a'` is its first item. `["a"` is written, and
                     the comma is read.
            `1}`     The text is not valid. The status becomes BROKEN.
        """
        key = self._key
        assert key is not None  # The key has been stored before the colon is expected.
        self._key = None
        char = text[pos]
        if char == ":":
            self._write_key(key)
            return pos + 1
        is_first_key = not self._containers[-1].has_written_key
        if is_first_key and char in ",}":
            # The braces enclose a set, which becomes a JSON array.
            self._containers[-1].json_close = "]"
            self._json_parts.append("[" + key.item_json)
            return self._read_comma_or_bracket(text, pos)
        return self._reject(pos)

    def _write_key(self, key: KeyOrItem) -> None:
        """Write the key of an object's member, and store which JSON types the value may have.

        Example: in `{'a': 1}`, `{"a": ` is written. If the schema declares that `a` is an integer,
        `_value_types` becomes `{"integer"}`.
        """
        container = self._containers[-1]
        before_key = ", " if container.has_written_key else "{"
        self._json_parts.append(f"{before_key}{key.key_json}: ")
        container.has_written_key = True
        # The members of the outermost object are the arguments of the tool call. The schema
        # declares only the types of the arguments, so inner members may have any type.
        is_argument = len(self._containers) == 1
        if is_argument and self._types_of is not None:
            self._value_types = self._types_of(json.loads(key.key_json))
        else:
            self._value_types = None
        self._expected = Expected.VALUE

    def _read_comma_or_bracket(self, text: str, pos: int) -> int:
        """Read the comma or bracket after a value. Return the position after the comma or bracket.

        Any other text is not valid, so the status becomes BROKEN. If no bracket is open, the
        literal is complete, so the status becomes DONE and nothing is read.
        """
        if not self._containers:
            self.status = DONE
            return pos
        container = self._containers[-1]
        if text[pos] == container.close:
            self._close_container()
        elif text[pos] == ",":
            # The comma is not written here, but together with the next item or key. JSON allows no
            # comma before a closing bracket, so `[1,]` must become `[1]`.
            is_object = container.json_close == "}"
            self._expected = Expected.KEY if is_object else Expected.ITEM
        else:
            return self._reject(pos)
        return pos + 1

    def _close_container(self) -> None:
        """Write the closing bracket of the innermost container, and leave this container.

        A container is a list, tuple, set or object. If no container is open any more, the status
        becomes DONE.
        """
        if self._expected is Expected.FIRST_KEY:  # The first key would have written the `{`.
            self._json_parts.append("{")
        self._json_parts.append(self._containers.pop().json_close)
        self._expected = Expected.COMMA
        if not self._containers:
            self.status = DONE

    # ---- values and keys -------------------------------------------------------------------------

    def _read_value(self, text: str, pos: int, is_final: bool) -> int:
        """Read the start of a value or key: a quote, an opening bracket or a whole word.

        Instead of an item or key, a closing bracket may follow an opening bracket or a comma, as in
        `[]` and `{'a': 1,}`. Examples: for `(`, `[` is written, and for `None`, `null` is written.

        Return the position after the text that was read, or `pos` if more text is required.
        """
        char = text[pos]
        # An item or a key is expected only inside brackets, so `_containers` is not empty.
        is_item_or_key = self._expected is not Expected.VALUE
        if is_item_or_key and char == self._containers[-1].close:
            self._close_container()
            return pos + 1
        # A quote may have several characters, such as `'''` or a marker of the model.
        if not is_final and self._dialect.is_quote_incomplete(text, pos):
            return pos
        quote = self._dialect.quote_at(text, pos)
        if quote:
            self._open_string(quote)
            return pos + len(quote)
        if char in _BRACKET_PAIRS:
            return self._open_container(char, pos)
        return self._read_word(text, pos, is_final)

    def _open_container(self, bracket: str, pos: int) -> int:
        """Read an opening bracket: `[`, `(` or `{`. Return the position after the bracket.

        The first item or key of the opened container is expected next. Examples:

            `[` or `(`   The JSON text `[` is written.
            `{`          Nothing is written yet, because the brace may open an object or a set, and
                         a set becomes a JSON array. The text after the first key decides.

        An opening bracket is not valid if a key is expected, or if too many brackets are open. The
        status then becomes BROKEN, and the result is `pos`.
        """
        is_key_expected = self._expected in _KEYS
        if is_key_expected or len(self._containers) >= _MAX_DEPTH:
            return self._reject(pos)
        self._write_comma_before_item()
        if bracket == "{":
            self._containers.append(Container(close="}", json_close="}"))
            self._expected = Expected.FIRST_KEY
        else:
            self._containers.append(Container(_BRACKET_PAIRS[bracket], json_close="]"))
            self._json_parts.append("[")
            self._expected = Expected.FIRST_ITEM
        return pos + 1

    def _write_comma_before_item(self) -> None:
        """Write a comma if the next value is an item that follows another item.

        Example: in `[1, 2]`, the comma is written before `2`, but not before `1`. The value of an
        object's member, such as `1` in `{"a": 1}`, needs no comma.
        """
        if self._expected is Expected.ITEM:
            self._json_parts.append(", ")

    def _read_word(self, text: str, pos: int, is_final: bool) -> int:
        """Read a number, a constant, a key without quotes or a string without quotes.

        Examples: the constant `True` is written as `true`, the number `07` as `7`, and the string
        `New York` in `{city:New York}` as `"New York"`. The key `days` in `{days:3}` is stored.

        Return the position after the word. The result is `pos` if the word may continue after the
        end of the text, and also if the text is not valid. In the second case, the status becomes
        BROKEN.
        """
        is_key = self._expected in _KEYS
        may_contain_spaces = self._dialect.allows_unquoted_strings and not is_key
        match_word = _match_unquoted_string if may_contain_spaces else _match_word
        match = match_word(text, pos)
        assert match is not None  # Both regexes also match the empty text.
        end = match.end()
        may_continue = end == len(text) and not is_final
        if may_continue:
            return pos if end - pos <= _MAX_WORD_CHARS else self._reject(pos)
        if end == pos:
            return self._reject(pos)
        word = text[pos:end].rstrip()
        if is_key:
            # `1` in `{1` is stored as the key `"1"`, and as the number `1`, because it may turn out
            # to be the first item of a set, as in `{1, 2}`.
            self._key = KeyOrItem(quote_json(word), item_json=to_json(word, types=None))
            self._expected = Expected.COLON
        else:
            self._write_comma_before_item()
            self._json_parts.append(to_json(without_leading_zeros(word), types=None))
            self._expected = Expected.COMMA
        return end

    # ---- strings ---------------------------------------------------------------------------------

    def _open_string(self, quote: str) -> None:
        """Create a reader for a string whose opening quote, `quote`, has already been read.

        Examples: the string in `['a']` is a value, so each piece is written when it arrives. In
        `{'a': '1'}`, the key `'a'` is stored until its colon arrives. The value `'1'` is stored,
        too, if the schema requires a number.
        """
        is_key = self._expected in _KEYS
        is_member_value = self._expected is Expected.VALUE
        schema_forbids_string = self._value_types is not None and "string" not in self._value_types
        output: list[str] = []  # The text of a key, or of a value that will be converted.
        if is_key:
            role = StringRole.KEY
        elif is_member_value and schema_forbids_string:
            role = StringRole.CONVERTED_VALUE
        else:
            role = StringRole.VALUE
            self._write_comma_before_item()
            self._json_parts.append('"')
            output = self._json_parts  # The text of any other value is written as it arrives.
        # A colon must follow a key. A comma or a closing bracket must follow any other string.
        self._expected = Expected.COLON if is_key else Expected.COMMA
        # In `'it's'`, the second quote is a part of the string, because the text after this quote
        # cannot follow a string. If a string is outside all lists and objects, the string is the
        # whole value of an argument.
        match_text_after = matcher_after_string(is_key=is_key, is_argument=not self._containers)
        reader = StringReader(quote, self._dialect, match_text_after, output)
        self._string = OpenString(role, reader, output)

    def _close_string(self, string: OpenString) -> None:
        """Finish a string: write the rest of a value, or store a key until its colon is read.

        Examples: after `['a'`, only the closing quote is written. The string in `{'n': '1'` is
        written as the number `1` if the schema requires a number. The key in `{'a'` is stored.
        """
        self._string = None
        match string.role:
            case StringRole.VALUE:  # The text of the string has already been written.
                self._json_parts.append('"')
            case StringRole.CONVERTED_VALUE:
                self._json_parts.append(self._convert_string(string))
            case StringRole.KEY:
                json_text = string.whole_json()
                self._key = KeyOrItem(key_json=json_text, item_json=json_text)

    def _convert_string(self, string: OpenString) -> str:
        """Convert a stored string to a type that the schema allows. Return the result as JSON text.

        Example: the string `3` becomes the number `3` if the schema allows only an integer.
        """
        text: str = json.loads(string.whole_json())
        return to_json(text, self._value_types)
