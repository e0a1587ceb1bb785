"""Converts Python literals, and objects with unquoted keys such as `{a: 1}`, to JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from nereid_parsers.stream.pattern_matching import NEED_MORE, NO_MATCH, Mismatch, skip_whitespace
from nereid_parsers.stream.status import BROKEN, DONE, MORE
from nereid_parsers.stream.values.json_text import to_json, without_leading_zeros
from nereid_parsers.stream.values.literal_parts import (
    Container,
    Expected,
    KeyOrItem,
    OpenString,
    StringRole,
)
from nereid_parsers.stream.values.python_strings import Dialect, StringContext, StringReader

_match_word = re.compile(r"""[^\s,:=\[\](){}'"<>|]*""").match
_match_unquoted_string = re.compile(r"""[^,\[\]{}"<>|]*""").match
# The closing bracket for each opening bracket.
_BRACKET_PAIRS = {"[": "]", "(": ")", "{": "}"}
_MAX_DEPTH = 200  # JSON parsers accept only a limited number of nested brackets.
# The maximum length of a word. An unfinished word is read again from its start whenever more text
# arrives. Without this limit, the total parsing time would not be linear.
_MAX_WORD_CHARS = 4096
_KEYS = (Expected.FIRST_KEY, Expected.KEY)
# Instead of an item or a key, the closing bracket may follow.
_ITEMS_AND_KEYS = (Expected.FIRST_ITEM, Expected.ITEM, *_KEYS)


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
        # The key that has been read, or None if its colon has been read, too. Example: `'a'` in
        # `{'a'`. If a comma follows instead of the colon, as in `{'a', 'b'}`, `'a'` is not a key,
        # but the first item of a set.
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
            else:
                end = self._read_token(text, pos, is_final)
            if end == pos:  # More text is required, or the text is not valid.
                return pos
            pos = end
        return pos

    def _read_token(self, text: str, pos: int, is_final: bool) -> int:
        """Read one token outside a string: punctuation, a bracket, a quote or a word.

        `_expected` decides which tokens are valid. Return the position after the token, or `pos` if
        more text is required or if the text is not valid.
        """
        if self._expected is Expected.COLON:
            return self._read_after_key(text, pos)
        if self._expected is Expected.COMMA:
            return self._read_comma_or_bracket(text, pos)
        # Where an item or a key is expected, the container may end instead: `[]`, or `{'a': 1,}`.
        may_close_container = self._expected in _ITEMS_AND_KEYS
        if may_close_container and text[pos] == self._containers[-1].close:
            return self._close_container(pos)
        return self._read_value_or_key(text, pos, is_final)

    def closing_text(self) -> str:
        """Return the JSON text that completes an unfinished value, for example closing brackets.

        The opening brace of an object is written together with the first key. Examples:

            `{"a": `        `null}`, where `null` replaces the missing value.
            `{"a": ["x`     `"]}`, where `"` closes the string.
            `{"a": 1, 'b`   `}`, because the incomplete key is omitted.
            `{'a`           `{}`, because neither the key nor its brace has been written.
        """
        closing_brackets = "".join(container.json_close for container in reversed(self._containers))
        is_before_first_key = bool(self._containers) and self._containers[-1].lacks_opening_brace
        if is_before_first_key:
            return "{" + closing_brackets
        return self._rest_of_value() + closing_brackets

    def _rest_of_value(self) -> str:
        """Return the JSON text that completes the innermost unfinished value. Close no brackets.

        Examples: a missing value gives `null`, and the open string in `["x` gives `"`. If the
        schema allows only an integer for `days`, the stored string in `{"days": "3` gives `3`. The
        result is "" if no value is unfinished. An unfinished key is not written at all.
        """
        if self._expected is Expected.VALUE:
            return "null"
        if self._string is None:
            return ""
        match self._string.role:
            case StringRole.KEY:
                return ""
            case StringRole.VALUE:  # The text of the string has already been written.
                return '"'
            case StringRole.CONVERTED_VALUE:  # No text has been written, because "3" becomes 3.
                return self._convert_string(self._string)

    def _reject(self, pos: int) -> int:
        """Set the status BROKEN and return `pos`."""
        self.status = BROKEN
        return pos

    # ---- punctuation -----------------------------------------------------------------------------

    def _read_after_key(self, text: str, pos: int) -> int:
        """Read the character after the key at the start of an object or set: `:`, `,` or `}`.

        The character shows whether the braces enclose an object or a set. Examples for the text
        after `{'a'`:

            `: 1}`   The braces enclose an object. The colon is read, and `{"a": ` is written.
            `, 1}`   The braces enclose a set. The comma is read, and `["a"` is written.
            `1}`     The text is not valid. The status becomes BROKEN.

        Return the position after the character, or `pos` if the text is not valid.
        """
        key = self._key
        assert key is not None  # The key has been stored before the colon is expected.
        self._key = None
        if text[pos] == ":":
            self._write_key(key)
            return pos + 1
        # After `{'a': 1, 'b'`, the braces are known to enclose an object, so `,` is not valid.
        is_first_key = self._containers[-1].lacks_opening_brace
        if is_first_key and text[pos] in ",}":
            self._start_set(key)
            return self._read_comma_or_bracket(text, pos)
        return self._reject(pos)

    def _start_set(self, first_item: KeyOrItem) -> None:
        """Treat the innermost open braces as a set, and write the first item of the set.

        A set becomes a JSON array. Example: in `{'a', 'b'}`, `["a"` is written.
        """
        self._containers[-1].json_close = "]"
        self._json_parts.append("[" + first_item.item_json)

    def _write_key(self, key: KeyOrItem) -> None:
        """Write the key of an object's member. The value of the member is expected next.

        Examples: in `{'a': 1, 'b': 2}`, `{"a": ` is written for the key `'a'`, and `, "b": ` for
        the key `'b'`.
        """
        container = self._containers[-1]
        before_key = "{" if container.lacks_opening_brace else ", "
        self._json_parts.append(f"{before_key}{key.key_json}: ")
        container.has_written_key = True
        self._value_types = self._types_of_value(key)
        self._expected = Expected.VALUE

    def _types_of_value(self, key: KeyOrItem) -> frozenset[str] | None:
        """Return the JSON types that the schema allows for the value of `key`, or None for all.

        The members of the outermost object are the arguments of the tool call. The schema declares
        only the types of the arguments, so the values of inner members may have any type.
        """
        is_argument = len(self._containers) == 1
        if self._types_of is None or not is_argument:
            return None
        return self._types_of(key.decoded_key())

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
            return self._close_container(pos)
        if text[pos] != ",":
            return self._reject(pos)
        # The comma is not written here, but together with the next item or key. JSON allows no
        # comma before a closing bracket, so `[1,]` must become `[1]`.
        is_object = container.json_close == "}"
        self._expected = Expected.KEY if is_object else Expected.ITEM
        return pos + 1

    def _close_container(self, pos: int) -> int:
        """Read the closing bracket at `pos`, and leave the innermost container.

        A container is a list, tuple, set or object. If no container is open any more, the status
        becomes DONE. Example: for the `)` of `(1, 2)`, `]` is written.

        Return the position after the bracket.
        """
        container = self._containers.pop()
        if container.lacks_opening_brace:  # The object is empty, so no key has written the brace.
            self._json_parts.append("{")
        self._json_parts.append(container.json_close)
        self._expected = Expected.COMMA
        if not self._containers:
            self.status = DONE
        return pos + 1

    # ---- values and keys -------------------------------------------------------------------------

    def _read_value_or_key(self, text: str, pos: int, is_final: bool) -> int:
        """Read the start of a value, item or key: a quote, an opening bracket or a whole word.

        Examples: for `(`, `[` is written, and for `None`, `null` is written.

        Return the position after the text that was read, or `pos` if more text is required. If
        `is_final` is true, no more text will arrive.
        """
        # A quote may have several characters, such as `'''` or a marker of the model.
        if not is_final and self._dialect.is_quote_incomplete(text, pos):
            return pos
        quote = self._dialect.quote_at(text, pos)
        if quote:
            return self._open_string(quote, pos)
        if text[pos] in _BRACKET_PAIRS:
            return self._open_container(text[pos], pos)
        if self._expected in _KEYS:
            return self._read_unquoted_key(text, pos, is_final)
        return self._read_unquoted_value(text, pos, is_final)

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

    def _read_unquoted_key(self, text: str, pos: int, is_final: bool) -> int:
        """Read a key without quotes, such as `days` in `{days: 3}`. Store the key until its colon.

        The word may also turn out to be the first item of a set, such as `1` in `{1, 2}`. Return
        the position after the word, or `pos` if no complete word was read.
        """
        match = _match_word(text, pos)
        assert match is not None  # The regex also matches the empty text.
        word = _complete_word(match, is_final)
        if word is NEED_MORE:
            return pos
        if word is NO_MATCH:
            return self._reject(pos)
        self._key = KeyOrItem.from_word(word)
        self._expected = Expected.COLON
        return match.end()

    def _read_unquoted_value(self, text: str, pos: int, is_final: bool) -> int:
        """Read a number, a constant or a string without quotes, and write its JSON text.

        Examples: the constant `True` is written as `true`, the number `07` as `7`, and the string
        `New York` in `{city:New York}` as `"New York"`. Return the position after the word, or
        `pos` if no complete word was read.
        """
        may_be_string = self._dialect.allows_unquoted_strings
        match_word = _match_unquoted_string if may_be_string else _match_word
        match = match_word(text, pos)
        assert match is not None  # Both regexes also match the empty text.
        word = _complete_word(match, is_final)
        if word is NEED_MORE:
            return pos
        if word is NO_MATCH:
            return self._reject(pos)
        self._write_comma_before_item()
        self._json_parts.append(to_json(without_leading_zeros(word), types=None))
        self._expected = Expected.COMMA
        return match.end()

    # ---- strings ---------------------------------------------------------------------------------

    def _open_string(self, quote: str, pos: int) -> int:
        """Read the opening quote of a string at `pos`. Return the position after the quote.

        Examples: for the value in `['a']`, `"` is written. The key in `{'a': '1'}` is stored until
        its colon arrives, so nothing is written yet. The value `'1'` is stored, too, if the schema
        requires a number, because `1` is written when the whole string has arrived.
        """
        role = self._role_of_next_string()
        stored_parts: list[str] = []
        if role is StringRole.VALUE:
            self._write_comma_before_item()
            self._json_parts.append('"')
            output = self._json_parts
        else:  # A key, or a value that must be converted to a number.
            output = stored_parts
        reader = StringReader(quote, self._dialect, self._context_of_next_string(), output)
        self._string = OpenString(role, reader, stored_parts)
        # A colon must follow a key. A comma or a closing bracket must follow any other string.
        self._expected = Expected.COLON if role is StringRole.KEY else Expected.COMMA
        return pos + len(quote)

    def _role_of_next_string(self) -> StringRole:
        """Return the role of a string that starts now: a key, a value or a converted value.

        Example: if the schema requires a number for `n`, the string in `{'n': '1'}` is converted.
        """
        if self._expected in _KEYS:
            return StringRole.KEY
        is_member_value = self._expected is Expected.VALUE
        schema_forbids_string = self._value_types is not None and "string" not in self._value_types
        must_be_converted = is_member_value and schema_forbids_string
        return StringRole.CONVERTED_VALUE if must_be_converted else StringRole.VALUE

    def _context_of_next_string(self) -> StringContext:
        """Return whether a string that starts now is a key, an item or a whole argument.

        The result determines which text can follow the closing quote. A string outside all lists
        and objects is a whole argument.
        """
        if self._expected in _KEYS:
            return StringContext.KEY
        return StringContext.ITEM if self._containers else StringContext.ARGUMENT

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
                self._key = KeyOrItem.from_string(string.whole_json())

    def _convert_string(self, string: OpenString) -> str:
        """Convert a stored string to a type that the schema allows. Return the result as JSON text.

        Example: the string `3` becomes the number `3` if the schema allows only an integer.
        """
        text: str = json.loads(string.whole_json())
        return to_json(text, self._value_types)


def _complete_word(match: re.Match[str], is_final: bool) -> str | Mismatch:
    """Return the matched word without the white space after it, or NEED_MORE or NO_MATCH.

    The result is NEED_MORE if the match ends at the end of the text, because `Tru` may become
    `True`, and `New ` may become `New York`. If `is_final` is true, no more text will arrive, so
    each word is complete. The result is NO_MATCH if the word is empty, or is incomplete and already
    too long.
    """
    word = match.group()
    is_incomplete = match.end() == len(match.string) and not is_final
    is_too_long = is_incomplete and len(word) > _MAX_WORD_CHARS
    if not word or is_too_long:
        return NO_MATCH
    return NEED_MORE if is_incomplete else word.rstrip()
