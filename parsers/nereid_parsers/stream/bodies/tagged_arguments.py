"""Reads tagged arguments such as `<parameter=city>Paris</parameter>` and writes a JSON object.

A value that can only be a string is written as it arrives. Any other value is stored until its
closing marker has been read, because the text `12` may continue as `12 Main Street`.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring as quote_json
from typing import NamedTuple

from nereid_parsers.stream.bodies.body_reader import Head, StepReader
from nereid_parsers.stream.bodies.compiled_tags import CompiledTags, MarkerRole, TagOpening
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.pattern_matching import NEED_MORE, skip_whitespace
from nereid_parsers.stream.status import BROKEN, DONE
from nereid_parsers.stream.values.argument_types import to_json
from nereid_parsers.stream.values.python_strings import escape_json

# A JSON value, or one of the words True, False, None, NaN and Infinity, starts with one of these
# characters. A value that starts with any other character can only be a string.
_FIRST_CHARS_OF_JSON = frozenset('{["-+.0123456789tfnTFNI \t\r\n')
_STRING_ONLY = frozenset({"string"})
_STRING_OR_NULL = frozenset({"string", "null"})
_NOT_STRING = frozenset({"integer", "number", "boolean", "null", "object", "array"})
_NULL_WORDS = ("null", "None")
_MISSING_CLOSE = "the closing marker of an argument is missing"
# The opening tag of an argument declares a string in one of two ways: the field {string} has the
# value _IS_STRING, or the field {type} has one of the values in _STRING_TYPE_NAMES.
_IS_STRING = "true"
_STRING_TYPE_NAMES = ("string", "str")


class _ValueEnd(NamedTuple):
    """The position at which a value ends, and the position at which the reader continues.

    Attributes:
        text_end: The position up to which the text belongs to the value.
        next_pos: The position at which the body continues after the value and its closing marker.
            None if the value may continue in the next piece of text.
    """

    text_end: int
    next_pos: int | None


def _declares_string(fields: dict[str, str]) -> bool | None:
    """Return whether an opening tag declares that its value is a string.

    Examples: the result is True for `string="true"`, False for `type="integer"`, and None for a tag
    that declares nothing. `fields` contains the fields of the opening tag.
    """
    if "string" in fields:
        return fields["string"] == _IS_STRING
    if "type" in fields:
        return fields["type"] in _STRING_TYPE_NAMES
    return None


class TaggedReader(StepReader):
    """Reads tagged values as the arguments of one tool call.

    The matched header contains the function's name. Example: if the header names the function `f`
    and `city` is a string, the text `<parameter=city>Paris</parameter></function>` causes these
    calls of the CallWriter: `start("f", "")` in `begin`, `write('{"city": ')` at the opening tag,
    `write('"')`, `write("Paris")` and `write('"')` for the value, and `write("}")` and `end()` at
    `</function>`.
    """

    def __init__(self, writer: CallWriter, head: Head, tags: CompiledTags) -> None:
        """Create a reader for the arguments of `head.name`. `tags` matches the arguments' tags."""
        super().__init__(writer, self._read_tag_or_end)
        self._head = head
        self._tags = tags
        self._keys: set[str] = set()  # The names of the arguments that have been read.
        # These attributes describe the current value. A string is written as it arrives. The text
        # of any other value is stored in `_value_pieces` until the closing marker of the value.
        self._variant = tags.variants[0]  # The variant of the tags around the value.
        self._types: frozenset[str] | None = None  # The JSON types that the value may have.
        self._value_pieces: list[str] = []

    def begin(self) -> None:
        """Start the tool call. The matched header already shows that the text is a tool call.

        If the tool call cannot start, set the status BROKEN.
        """
        if not self._start_named_call(self._head):
            self.status = BROKEN

    def _read_tag_or_end(self, text: str, pos: int) -> int:
        """Read the opening tag of the next value, or end the tool call at a stop marker.

        Examples: `<parameter=city>` starts a value. The stop marker `</function>` ends the tool
        call, and stays unread. Any other text is not valid here, so the status becomes BROKEN. An
        incomplete tag at the end of the message is ignored.

        Returns:
            The position after the text that was read, or NEED_MORE.
        """
        pos = skip_whitespace(text, pos)
        if pos == len(text):
            return pos
        if self._tags.is_at_stop_marker(text, pos):
            self._end_call()
            return pos
        opening = self._tags.match(text, pos, self.is_final)
        if isinstance(opening, TagOpening):
            self._variant = opening.variant
            self._start_value(opening.fields)
            return opening.end
        if opening == NEED_MORE:
            return NEED_MORE
        if not self._may_become_tag(text, pos):
            return self._reject(pos)  # There is text between the arguments.
        if self.is_final:
            return len(text)  # The incomplete tag is ignored.
        return NEED_MORE

    def _may_become_tag(self, text: str, pos: int) -> bool:
        """Return whether more text could complete a stop marker or an opening tag at `pos`.

        At the end of the message, such a text is an incomplete tag, and not a text between the
        arguments. Example: `</func`.
        """
        if self._tags.may_become_stop_marker(text, pos):
            return True
        return self._tags.match(text, pos, is_final=False) == NEED_MORE

    def _start_value(self, fields: dict[str, str]) -> None:
        """Write the key of a value, and prepare to read the value.

        The JSON types that the value may have are stored, because the value is converted to one of
        these types. Example: for the second argument `<parameter=days>`, `, "days": ` is written.

        Args:
            fields: The fields of the opening tag. `fields["key"]` is the name of the argument.
        """
        key = fields["key"].strip()
        self._types = self._types_of(key, fields)
        separator = ", " if self._keys else "{"
        self._keys.add(key)
        self.writer.write(f"{separator}{quote_json(key)}: ")
        self._value_pieces = []
        self._step = self._skip_padding

    def _types_of(self, key: str, fields: dict[str, str]) -> frozenset[str] | None:
        """Return the JSON types that a value may have, or None if the types are not known.

        The opening tag of a value may declare whether the value is a string, for example
        `<parameter name="days" string="true">` or `<parameter name="days" type="integer">`. If this
        declaration contradicts the tool's schema, the types of the schema are returned. Example:
        `string="true"` gives `{"integer"}` if the schema allows only an integer.

        Args:
            key: The name of the argument.
            fields: The fields of the opening tag.
        """
        schema_types = self.writer.tools.argument_types(self._head.name, key)
        tag_declares_string = _declares_string(fields)
        if tag_declares_string is None:  # The tag declares nothing.
            return schema_types
        if not self.writer.tools.is_known:  # Only the tag declares the type.
            return _STRING_ONLY if tag_declares_string else _NOT_STRING
        if tag_declares_string:
            schema_allows_string = schema_types is None or "string" in schema_types
            return _STRING_ONLY if schema_allows_string else schema_types
        return _STRING_ONLY if schema_types == _STRING_ONLY else _NOT_STRING

    def _skip_padding(self, text: str, pos: int) -> int:
        r"""Skip the declared white space before a value, and select the step that reads the value.

        Example: for the declaration `"<parameter={key}>\n"`, one line break is skipped. The model
        may omit this white space.

        Returns:
            The position where the value starts, or NEED_MORE.
        """
        padding = self._variant.padding
        has_padding = text.startswith(padding, pos)
        is_cut_off = not self.is_final and padding.startswith(text[pos:])
        if is_cut_off and not has_padding:
            return NEED_MORE
        if self._types == _STRING_ONLY:
            self.writer.write('"')
            self._step = self._pass_on_string
        else:
            self._step = self._store_value
        return pos + len(padding) if has_padding else pos

    def _find_value_end(self, text: str, pos: int) -> _ValueEnd:
        """Find the end of the value whose text continues at `pos`.

        The result contains the position up to which the text belongs to the value, and the position
        at which the body continues, or None if the value may continue. Examples, for the closing
        marker `</p>`: the text `a</p>` gives `_ValueEnd(1, 5)`, `a</` gives `_ValueEnd(1, None)`,
        and `ab` gives `_ValueEnd(2, None)`. If the closing marker is missing, the value ends before
        the next marker, so `a</call>` gives `_ValueEnd(1, 1)`. The description of this deviation
        from the format is added to the writer.
        """
        variant = self._variant
        find_marker = variant.find_end if self.is_final else variant.find_possible_end
        match = find_marker(text, pos)
        while match is not None:
            value_end = self._value_end_at(match, text)
            if value_end is not None:
                return value_end
            # The marker is a part of the value. Another marker may start inside this marker, so the
            # search continues at the second character of the marker.
            match = find_marker(text, match.start("early") + 1)
        return _ValueEnd(len(text), None)

    def _value_end_at(self, match: re.Match[str], text: str) -> _ValueEnd | None:
        """Return the end of the value before a marker, or None if the value contains the marker.

        If the closing marker of the value is missing, this deviation is added to the writer.

        Args:
            match: The marker that was found in `text`. The group "close" is the closing marker of
                the value. The group "early" is another marker, such as `</call>`, which is a part
                of the value or follows a value without a closing marker. If both groups are empty,
                only the beginning of a marker has arrived.
            text: The text.
        """
        text_end = match.start()  # The match starts with the white space before the marker.
        needs_more_text = _ValueEnd(text_end, None)
        is_closing_marker = match.group("close") is not None
        if is_closing_marker:
            return _ValueEnd(text_end, match.end())
        is_cut_off = match.group("early") is None
        if is_cut_off:
            return needs_more_text
        marker_start = match.start("early")
        match self._role_of_marker(text, marker_start):
            case MarkerRole.PART_OF_VALUE:
                return None
            case MarkerRole.UNDECIDED:
                return needs_more_text
        self.writer.add_deviation(_MISSING_CLOSE)
        return _ValueEnd(text_end, marker_start)

    def _role_of_marker(self, text: str, pos: int) -> MarkerRole:
        """Decide whether the marker at `pos` is a part of a value or follows the value.

        The closing marker of the value has not been found before `pos`. The marker at `pos` is a
        stop marker (`</function>`) or the opening tag of an argument (`<parameter=days>`). The
        opening tag of an argument ends the value if the tool declares this argument and the
        argument has not been read yet. Example: in `A<parameter=days>3</parameter>`, the value ends
        after `A` if the tool declares `days`.
        """
        if self._tags.is_at_stop_marker(text, pos):
            return self._tags.role_of_stop_marker(text, pos, self.is_final, self.writer.tools)
        opening = self._tags.match(text, pos, self.is_final)
        if opening == NEED_MORE:
            return MarkerRole.UNDECIDED
        if not isinstance(opening, TagOpening):
            return MarkerRole.PART_OF_VALUE
        key = opening.fields["key"].strip()
        is_declared = self.writer.tools.may_have_argument(self._head.name, key)
        is_next_argument = is_declared and key not in self._keys
        return MarkerRole.AFTER_VALUE if is_next_argument else MarkerRole.PART_OF_VALUE

    def _pass_on_string(self, text: str, pos: int) -> int:
        """Write the text of a string as it arrives. Write the closing quote at the closing marker.

        Example: for the pieces `Pa` and `ris</parameter>`, `Pa` and `ris"` are written. After the
        closing marker, the next step reads the next tag.

        Returns:
            The position after the text that was read, or NEED_MORE if no text could be read.
        """
        text_end, next_pos = self._find_value_end(text, pos)
        has_new_text = text_end > pos
        if has_new_text:
            self.writer.write(escape_json(text[pos:text_end]))
        if next_pos is not None:
            self.writer.write('"')
            self._step = self._read_tag_or_end
            return next_pos
        return text_end if has_new_text else NEED_MORE

    def _store_value(self, text: str, pos: int) -> int:
        """Store the text of a value. At the closing marker, write the whole value as JSON.

        The text is stored because `12` may be a number, but `12 Main Street` is a string. Example:
        for the pieces `1` and `2</parameter>`, `12` is written. As soon as the stored text can only
        be a string, this text is written, and `_pass_on_string` reads the rest.

        Returns:
            The position after the text that was read, or NEED_MORE if no text could be read.
        """
        text_end, next_pos = self._find_value_end(text, pos)
        has_new_text = text_end > pos
        if has_new_text:
            self._value_pieces.append(text[pos:text_end])
        if next_pos is not None:  # The value is complete.
            self.writer.write(to_json("".join(self._value_pieces), self._types))
            self._step = self._read_tag_or_end
            return next_pos
        if not has_new_text:
            return NEED_MORE
        if self._can_only_be_string():
            self.writer.write('"' + escape_json("".join(self._value_pieces)))
            self._step = self._pass_on_string
        return text_end

    def _can_only_be_string(self) -> bool:
        """Return whether the value is certainly a string, no matter how the stored text continues.

        Example: if all types are allowed, `Par` can only be a string, but `12` can be a number. If
        only strings and null are allowed, `nu` can still become `null`, but `12` is a string.
        """
        types = self._types
        if types is not None and "string" not in types:
            return False
        value_start = "".join(self._value_pieces)
        if types == _STRING_OR_NULL:
            may_become_null = any(word.startswith(value_start) for word in _NULL_WORDS)
            return not may_become_null
        return value_start != "" and value_start[0] not in _FIRST_CHARS_OF_JSON

    def _end_call(self) -> None:
        """Write the closing brace of the arguments, and end the tool call."""
        self._close_arguments()
        self.writer.end()
        self.status = DONE

    def _close_arguments(self) -> None:
        """Write the closing brace of the arguments."""
        self.writer.write("}" if self._keys else "{}")

    def abandon(self) -> bool:
        """Complete the JSON text of the arguments. See `BodyReader.abandon`."""
        self._close_arguments()
        self.writer.end("there is text between the arguments")
        return True

    def finish(self) -> None:
        """End the open tool call, because the message has ended inside the tool call.

        If the message ends inside a string, the string is not closed.
        """
        if self.writer.is_open:
            if self._step == self._read_tag_or_end:
                self._close_arguments()
            elif self._step == self._store_value and self._value_pieces:
                self.writer.write(to_json("".join(self._value_pieces), self._types))
        super().finish()
