"""Stores the value of a tagged argument, and determines which JSON types the value may have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import unescape as unescape_html
from typing import Any, NamedTuple

from nereid_parsers.stream.bodies.compiled_tag import CompiledTag
from nereid_parsers.stream.status import MORE
from nereid_parsers.stream.values.argument_types import Tools
from nereid_parsers.stream.values.json_scanner import JsonScanner
from nereid_parsers.stream.values.json_text import escape_surrogates, to_json
from nereid_parsers.stream.values.nested_values import nested_tags_to_json

# The first characters of JSON values, and of the words True, False, None, NaN and Infinity. If the
# text of a value starts with another character that is not white space, the value is a string.
_FIRST_CHARS_OF_JSON = frozenset('{["-+.0123456789tfnTFNI')
_STRING_ONLY = frozenset({"string"})
_STRING_OR_NULL = frozenset({"string", "null"})
_NOT_STRING = frozenset({"integer", "number", "boolean", "null", "object", "array"})
_NULL_WORDS = ("null", "None")
# An opening tag can declare that its argument is a string, as `<p name="city" string="true">` does.
# The field {string} of the tag then has the text "true", or the field {type} has one of the texts
# in _STRING_TYPE_NAMES.
_STRING_TYPE_NAMES = ("string", "str")


class OpenPiece(NamedTuple):
    """A piece of a value's text, after which the value may continue.

    Example: if the unread text is `ab</`, the piece is `OpenPiece(end=2)`, because `</` may be the
    start of the closing marker `</p>`, or a part of the value.

    Attributes:
        end: The position after the piece. The piece starts at the first unread character.
    """

    end: int


class LastPiece(NamedTuple):
    """The last piece of a value's text.

    Example: if the unread text is `ab</p>`, and `</p>` is the closing marker of the value, the
    piece is `LastPiece(end=2, next_pos=6)`.

    Attributes:
        end: The position after the piece. The piece starts at the first unread character.
        next_pos: The position after the closing marker, at which the next argument may start.
        lacks_closing_marker: Whether the closing marker is missing, as in `a</call>`. `next_pos` is
            then the position of the marker that follows the value.
    """

    end: int
    next_pos: int
    lacks_closing_marker: bool = False


Piece = OpenPiece | LastPiece


@dataclass(slots=True)
class TaggedValue:
    """The value of a tagged argument, for example `Paris` in `<parameter=city>Paris</parameter>`.

    Attributes:
        tag: The compiled declaration of the tags around the value.
        types: The JSON types that the value may have, or None if the types are not known.
        schema: The JSON schema of the value, or None.
        root: The JSON schema of all arguments, which contains the definitions.
        pieces: The text of the value that has arrived and has not been passed on yet.

    If the value can only be JSON without quotes, such as an array, a scanner follows its brackets,
    so that a marker inside the array does not end the value.
    """

    tag: CompiledTag
    types: frozenset[str] | None
    schema: object
    root: Mapping[str, Any]
    pieces: list[str] = field(default_factory=list)
    _scanner: JsonScanner = field(default_factory=JsonScanner)
    _scan_pos: int = 0  # The position up to which the scanner has read the text of the parser.

    @property
    def text(self) -> str:
        """The stored text of the value."""
        return "".join(self.pieces)

    def to_json(self) -> str:
        """Convert the stored text to JSON. If possible, the value has one of the allowed types.

        Example: for the text `12`, the result is `12` if a number is allowed, and `"12"` if only a
        string is allowed.
        """
        text = self.text
        match self.tag.escapes:
            case "html":
                return self._text_to_json(unescape_html(text))
            case "json":
                return self._quoted_text_to_json(text)
            case _:  # The text contains no escapes.
                return self._text_to_json(text)

    def _text_to_json(self, text: str) -> str:
        """Convert text without escapes to JSON. An object may be written as tags: `<x>1</x>`."""
        nested = nested_tags_to_json(text, self.schema, self.root)
        return to_json(text, self.types) if nested is None else nested

    def _quoted_text_to_json(self, text: str) -> str:
        r"""Convert the text between two quotes to JSON. The text may contain escapes, such as `\n`.

        The result is a string if the schema allows a string. Otherwise the quotes are ignored.
        Example: for `"12"`, the result is `"12"` if a string is allowed, and `12` if only a number
        is allowed.
        """
        allows_string = self.types is None or "string" in self.types
        types = _STRING_ONLY if allows_string else self.types
        # An escape sequence may decode to half of a surrogate pair, which cannot be sent as text.
        return escape_surrogates(to_json(_unescape_json(text), types))

    def is_escaped(self, text: str, start: int, end: int) -> bool:
        r"""Return whether a backslash before `text[end]` makes this character a part of the value.

        The stored text of the value continues with `text[start:end]`. Example: the quote in `a\"b`
        is escaped, but the quote in `a\\"` is not.
        """
        if not self.tag.may_be_escaped:
            return False
        num_backslashes = _count_last_backslashes(text, start, end)
        has_only_backslashes = num_backslashes == end - start
        if has_only_backslashes:  # The stored text before them may end with backslashes, too.
            num_backslashes += self._count_stored_backslashes()
        return num_backslashes % 2 == 1

    def start_piece(self, pos: int) -> None:
        """Start the search for the end of the value at `pos`. The text before `pos` is stored."""
        self._scan_pos = pos

    def is_inside_json(self, text: str, end: int) -> bool:
        """Return whether `text[end]` is inside an array or an object, such as `["a, b", 1]`.

        Every call with the same text must have a larger `end`, because the scanner reads each
        character once. The result is False if the value may be a string without quotes.
        """
        if not self._is_json():
            return False
        self._scan_to(text, end)
        return self._scanner.status is MORE and self._scanner.has_open_brackets

    def append(self, text: str, start: int, end: int) -> None:
        """Store the next part of the value, which is `text[start:end]`."""
        self.pieces.append(text[start:end])
        if self._is_json():
            self._scan_to(text, end)

    def _is_json(self) -> bool:
        """Return whether the value is JSON in which strings have quotes."""
        if not self.tag.is_closed_by_separator or self.tag.escapes:
            return False
        return self.tag.is_json or (self.types is not None and "string" not in self.types)

    def _scan_to(self, text: str, end: int) -> None:
        """Let the scanner read the text from the last scanned position to `end`."""
        if self._scanner.status is MORE and end > self._scan_pos:
            self._scanner.scan(text[self._scan_pos : end], 0)
            self._scan_pos = end

    def _count_stored_backslashes(self) -> int:
        """Return the number of backslashes at the end of the stored text."""
        total = 0
        for piece in reversed(self.pieces):
            num_backslashes = _count_last_backslashes(piece, 0, len(piece))
            total += num_backslashes
            if num_backslashes < len(piece):  # Another character precedes the backslashes.
                break
        return total

    def is_declared_as_string(self) -> bool:
        """Return whether the value is a string whose text needs no conversion.

        "string" must be the only type that is allowed, and the text must not contain escapes.
        """
        return self.types == _STRING_ONLY and not self.tag.escapes

    def can_only_be_string(self) -> bool:
        """Return whether the value must be a string, regardless of the text that may still follow.

        At least one character of the value must be stored. Examples:

            allowed types       stored text   result
            not known           `Par`         True
            not known           `12`          False: the value may be a number.
            string or integer   `Par`         True
            integer             `Par`         False: no string is allowed.
            string or null      `12`          True: no number is allowed.
            string or null      `nu`          False: the value may become `null`.

        The result is also False for a text with escapes, because an escape may be incomplete. If
        only a string is allowed, the caller does not store the value, see `is_declared_as_string`.
        """
        if self.tag.escapes:
            return False
        if self.types == _STRING_OR_NULL:
            return not self._may_become_null()
        allows_string = self.types is None or "string" in self.types
        return allows_string and not self._may_become_json()

    def _may_become_json(self) -> bool:
        """Return whether the stored text may be the start of JSON, such as `12` or ` tr`.

        Only the first character is examined. To examine the whole text, all pieces would have to be
        joined after each new piece, which would be slow.
        """
        first_char = self.pieces[0][0]
        return first_char in _FIRST_CHARS_OF_JSON or first_char.isspace()

    def _may_become_null(self) -> bool:
        """Return whether the stored text is `null` or `None`, or a prefix of one of these words.

        White space at both ends of the text is ignored, because `to_json` ignores this white space,
        too.
        """
        if self.pieces[-1].isspace():  # It would be slow to join the pieces for each space.
            return True
        text = self.text.lstrip()
        return any(word.startswith(text) or word == text.rstrip() for word in _NULL_WORDS)


def _count_last_backslashes(text: str, start: int, end: int) -> int:
    r"""Return the number of backslashes at the end of `text[start:end]`: 2 for `a\\`."""
    run_start = end
    while run_start > start and text[run_start - 1] == "\\":
        run_start -= 1
    return end - run_start


def _unescape_json(text: str) -> str:
    r"""Replace each JSON escape sequence, such as `\n`, with the character that it represents.

    `text` is the text between the quotes of a JSON string. If a sequence is not valid, as in
    `C:\dir`, return the text unchanged.
    """
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def types_of_value(fields: dict[str, str], function: str, tools: Tools) -> frozenset[str] | None:
    """Return the JSON types that a value may have, or None if the types are not known.

    Both the opening tag of the value and the schema of the function may declare the types. The
    types of the tag are returned, unless the schema contradicts the tag. Examples:

        opening tag                        types of the schema   result
        `<p name="days">`                  integer               integer
        `<p name="days" string="true">`    string or null        string
        `<p name="days" string="true">`    integer               integer, because the schema allows
                                                                 no string
        `<p name="days" string="false">`   string                string, because the schema allows
                                                                 only a string

    `fields` are the fields of the opening tag. `fields["key"]` is the name of the argument.
    """
    schema_types = tools.argument_types(function, fields["key"].strip())
    tag_types = _types_of_tag(fields)
    if tag_types is None:
        return schema_types
    if not tools.is_known:  # There is no schema, so only the tag declares types.
        return tag_types
    return schema_types if _contradicts(schema_types, tag_types) else tag_types


def _contradicts(schema_types: frozenset[str] | None, tag_types: frozenset[str]) -> bool:
    """Return whether the schema of an argument contradicts the types that its opening tag declares.

    A tag declares either a string, or any type except a string (see `_types_of_tag`). The schema
    contradicts the first if it allows no string, and the second if it allows only a string. If the
    types of the schema are not known, `schema_types` is None, and there is no contradiction.
    """
    if schema_types is None:
        return False
    if tag_types == _STRING_ONLY:
        return "string" not in schema_types
    return schema_types == _STRING_ONLY


def _types_of_tag(fields: dict[str, str]) -> frozenset[str] | None:
    """Return the JSON types that an opening tag declares, or None if the tag declares no type.

    Examples: `<p name="days" string="true">` declares a string, `<p name="days" type="integer">`
    declares any type except a string, and `<p name="days">` declares nothing. The declared type
    `integer` is not used more precisely, because some templates declare the type "number" for
    every value that is not a string.
    """
    if "string" in fields:
        is_string = fields["string"] == "true"
    elif "type" in fields:
        is_string = fields["type"] in _STRING_TYPE_NAMES
    else:
        return None
    return _STRING_ONLY if is_string else _NOT_STRING
