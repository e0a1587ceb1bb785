"""Reads tagged arguments such as `<parameter=city>Paris</parameter>` and writes a JSON object.

A value that can only be a string is written as it arrives. Any other value is stored until its
closing marker has been read, because the text `12` may continue as `12 Main Street`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from json.encoder import encode_basestring as quote_json

from nereid_parsers.pattern_syntax import pattern
from nereid_parsers.stream.argument_types import Tools, to_json
from nereid_parsers.stream.body_reader import Head, StepReader
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.lexer import marker_prefix_regex
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Pattern,
    compile_pattern,
    skip_blanks,
)
from nereid_parsers.stream.python_strings import escape_json
from nereid_parsers.stream.status import BROKEN, DONE
from nereid_parsers.tool_declarations import TaggedArguments

# JSON values, and the words True, False, None, NaN and Infinity, start with these characters. A
# value that starts with another character can only be a string.
_FIRST_CHARS_OF_JSON = frozenset('{["-+.0123456789tfnTFNI \t\r\n')
_STRING_ONLY = frozenset({"string"})
_STRING_OR_NULL = frozenset({"string", "null"})
_NOT_STRING = frozenset({"integer", "number", "boolean", "null", "object", "array"})
_NULL_WORDS = ("null", "None")
# A value may contain a marker that ends tool calls. The reader waits for at most this number of
# characters after such a marker, to see whether the value's own closing marker follows.
_MAX_UNDECIDED_CHARS = 2048
_MISSING_CLOSE = "the closing marker of an argument is missing"
# Values of the pattern fields {string} and {type} which declare that a value is a string.
_IS_STRING = "true"
_STRING_TYPE_NAMES = ("string", "str")


class TagPlan:
    """The compiled declaration of one form of a tagged value.

    Attributes:
        key: The pattern before the value.
        padding: The white space between the pattern and the value. It is not a part of the value.
        close: The closing marker, without white space.
        find_possible_end: A function that finds the closing marker, an early end, or a prefix of
            one of them at the end of the text.
        find_end: A function that finds the closing marker or an early end. The match includes the
            declared white space before the marker. The group "early" is the early end.
    """

    def __init__(self, part: TaggedArguments, early_ends: tuple[str, ...]) -> None:
        r"""Compile one form of a tagged value.

        Example: with the declaration `close="\n</p>\n"`, both `a\n</p>` and `a</p>` have the value
        `a`. With the early end `</call>`, `a</call>` has this value if `</p>` is missing.

        Args:
            part: The declaration.
            early_ends: The markers that follow the value if its closing marker is missing.
        """
        opening = part.open.rstrip()
        self.key: Pattern = compile_pattern(opening)
        self.padding = part.open[len(opening) :]
        self.close = part.close.strip()
        padding = part.close[: len(part.close) - len(part.close.lstrip())]
        markers = (self.close, *early_ends)
        prefixes = [marker_prefix_regex(padding + marker) for marker in markers if padding]
        prefixes += [marker_prefix_regex(marker) for marker in markers]
        early = "|".join(map(re.escape, early_ends)) or "(?!)"
        end = f"(?:{re.escape(padding)})?(?:{re.escape(self.close)}|(?P<early>{early}))"
        first_chars = "".join(re.escape(marker[0]) for marker in (*markers, padding) if marker)
        start = f"(?=[{first_chars}])"
        self.find_end = re.compile(start + end).search
        self.find_possible_end = re.compile(f"{start}(?:{end}|{'|'.join(prefixes)})").search


@dataclass(frozen=True, slots=True)
class TagOpening:
    """The matched opening of a tagged value, for example `<parameter=city>`.

    Attributes:
        form: The form of the tagged value.
        end: The position after the opening.
        fields: The values of the pattern's fields, for example `{"key": "city"}`.
    """

    form: TagPlan
    end: int
    fields: dict[str, str]


class TagsPlan:
    """The compiled declaration of tagged arguments.

    Attributes:
        forms: The forms of a tagged value, in the order in which they are tried.
        stop_markers: The markers that end the body. They do not belong to the body.
    """

    def __init__(
        self,
        part: TaggedArguments,
        head: Pattern,
        stop_markers: tuple[str, ...],
        markers_between_calls: tuple[str, ...],
    ) -> None:
        """Compile tagged arguments.

        Args:
            part: The declaration.
            head: The marker and the head of a tool call.
            stop_markers: The markers that end the body.
            markers_between_calls: The markers between the last value of a tool call and the head of
                the next tool call.
        """
        forms = (part, *part.also)
        openings = tuple(dict.fromkeys(_first_literal(form) for form in forms))
        self.stop_markers = stop_markers
        self.forms = tuple(TagPlan(form, (*stop_markers, *openings)) for form in forms)
        self._head = head
        closes = "|".join(re.escape(form.close) for form in self.forms)
        self._find_close_or_opening = re.compile(
            f"(?P<close>{closes})|{'|'.join(map(re.escape, openings))}"
        ).finditer
        markers = "|".join(map(re.escape, markers_between_calls)) or "(?!)"
        self._match_markers = re.compile(rf"(?:\s*(?:{markers}))*\s*").match

    def match(self, text: str, pos: int, is_final: bool) -> TagOpening | int:
        """Match the opening of a tagged value at `pos`, or return NEED_MORE or NO_MATCH.

        Example: `<parameter=city>` matches the form `<parameter={key}>` with the fields
        `{"key": "city"}`. The text `<param` gives NEED_MORE.
        """
        for form in self.forms:
            fields: dict[str, str] = {}
            end = form.key.match(text, pos, is_final, fields)
            if end == NEED_MORE:
                return NEED_MORE
            if end != NO_MATCH:
                return TagOpening(form, end, fields)
        return NO_MATCH

    def match_start(self, text: str, pos: int, is_final: bool) -> int:
        """Return `pos` if the body can start at `pos`, otherwise NEED_MORE or NO_MATCH.

        A marker that ends the body is accepted too, because a tool call may have no arguments.
        Example: with the values `<parameter={key}>`, the body can start with `<parameter=city>` or
        with `</function>`.
        """
        if pos == len(text) or self.is_at_stop_marker(text, pos):
            return pos
        opening = self.match(text, pos, is_final)
        if isinstance(opening, TagOpening):
            return pos
        is_possible = not is_final and self.may_become_stop_marker(text, pos)
        return NEED_MORE if is_possible else opening

    def is_close_missing(self, text: str, pos: int, is_final: bool, tools: Tools) -> bool | None:
        """Return whether a stop marker inside a value ends the value. None: more text is required.

        The stop marker is a part of the value if the value's closing marker follows before the next
        tool call. Examples: in `a</function>b</parameter>`, the stop marker `</function>` is a part
        of the value. In `a</function></call>` and `a</function></call><call><function=f>`, it ends
        the value.

        Args:
            text: The text.
            pos: The position of the stop marker.
            is_final: Whether no more text follows.
            tools: The tools that the request offers.
        """
        end = pos + _MAX_UNDECIDED_CHARS
        for match in self._find_close_or_opening(text, pos, end):
            if match.group("close") is not None:
                return False
            if self._is_next_call(text, pos, match.start(), tools):
                return True
        return True if is_final or len(text) >= end else None

    def _is_next_call(self, text: str, start: int, end: int, tools: Tools) -> bool:
        """Return whether the text contains only markers and the head of another tool call.

        Example: `</function></call><call><function=f>` contains the head of a call of f.
        """
        markers = self._match_markers(text, start, end)
        fields: dict[str, str] = {}
        head_end = self._head.match(text, markers.end() if markers else start, False, fields)
        is_offered = not tools.is_known or fields.get("name") in tools.parameters
        return head_end >= 0 and skip_blanks(text, head_end) == end and is_offered

    def is_at_stop_marker(self, text: str, pos: int) -> bool:
        """Return whether a marker that ends the body is at `pos`."""
        return any(text.startswith(marker, pos) for marker in self.stop_markers)

    def may_become_stop_marker(self, text: str, pos: int) -> bool:
        """Return whether `text[pos:]` is a prefix of a marker that ends the body.

        Example: `</fun` is a prefix of `</function>`.
        """
        return any(marker.startswith(text[pos:]) for marker in self.stop_markers)


class TaggedReader(StepReader):
    """Reads tagged values as the arguments of one tool call."""

    def __init__(self, writer: CallWriter, head: Head, plan: TagsPlan) -> None:
        super().__init__(writer, self._read_tag_or_end)
        self._head = head
        self._plan = plan
        self._keys: set[str] = set()  # The names of the arguments that have been read.
        # These attributes describe the current value. `_value_pieces` contains the text of the
        # value only if the value is not written as it arrives.
        self._form = plan.forms[0]
        self._types: frozenset[str] | None = None
        self._value_pieces: list[str] = []

    def begin(self) -> None:
        """Start the tool call, see `BodyReader.begin`."""
        if not self._start_named_call(self._head):
            self.status = BROKEN

    def _read_tag_or_end(self, text: str, pos: int) -> int:
        """Read the opening of the next value, or end the body at a stop marker.

        Examples: `<parameter=city>` starts a value. `</function>` ends the body. Any other text is
        not valid here.

        Returns:
            The position after the text that was read, or NEED_MORE.
        """
        pos = skip_blanks(text, pos)
        if pos == len(text):
            return pos
        plan = self._plan
        if plan.is_at_stop_marker(text, pos):
            self._close_arguments()
            self.writer.end()
            self.status = DONE
            return pos
        opening = plan.match(text, pos, self.is_final)
        if isinstance(opening, TagOpening):
            self._form = opening.form
            self._start_value(opening.fields)
            return opening.end
        if opening == NEED_MORE:
            return NEED_MORE
        if plan.may_become_stop_marker(text, pos):
            return len(text) if self.is_final else NEED_MORE
        if self.is_final and plan.match(text, pos, is_final=False) == NEED_MORE:
            return len(text)  # The message ends inside the opening of a value.
        return self._reject(pos)  # There is text between the arguments.

    def _start_value(self, fields: dict[str, str]) -> None:
        """Write the key of a value, and store the JSON types that the value may have.

        Example: for the second argument `<parameter=days>`, `, "days": ` is written.
        """
        key = fields["key"].strip()
        self._types = self._types_of(key, fields)
        separator = ", " if self._keys else "{"
        self._keys.add(key)
        self.writer.write(f"{separator}{quote_json(key)}: ")
        self._value_pieces = []
        self._step = self._skip_padding

    def _types_of(self, key: str, fields: dict[str, str]) -> frozenset[str] | None:
        """Return the JSON types that a value may have, from its opening and the tool's schema.

        Example: `<parameter name="days" string="true">` declares a string. If the declaration of
        the value contradicts the schema, the types of the schema are returned.
        """
        schema_types = self.writer.tools.argument_types(self._head.name, key)
        if "string" in fields:
            is_string = fields["string"] == _IS_STRING
        elif "type" in fields:
            is_string = fields["type"] in _STRING_TYPE_NAMES
        else:
            return schema_types
        if not is_string:
            demands_string = self.writer.tools.is_known and schema_types == _STRING_ONLY
            return _STRING_ONLY if demands_string else _NOT_STRING
        allows_string = schema_types is None or "string" in schema_types
        return _STRING_ONLY if allows_string else schema_types

    def _skip_padding(self, text: str, pos: int) -> int:
        r"""Skip the declared white space before a value, and select the step that reads the value.

        Example: for the declaration `"<parameter={key}>\n"`, one line break is skipped.
        """
        padding = self._form.padding
        if text.startswith(padding, pos):
            pos += len(padding)
        elif not self.is_final and padding.startswith(text[pos:]):
            return NEED_MORE
        if self._types == _STRING_ONLY:
            self.writer.write('"')
            self._step = self._pass_on_string
        else:
            self._step = self._keep_value
        return pos

    def _find_value_end(self, text: str, pos: int) -> tuple[int, int]:
        """Return the end of the value's text, and the position after the value's closing marker.

        The second position is -1 if the value does not end in this text. Examples, for the closing
        marker `</p>`: the text `a</p>` gives `(1, 5)`, `a</` gives `(1, -1)` and `ab` gives
        `(2, -1)`. If the closing marker is missing, the value ends before the next marker, so
        `a</call>` gives `(1, 1)`.
        """
        form = self._form
        find = form.find_end if self.is_final else form.find_possible_end
        match = find(text, pos)
        while match is not None:
            early_end = match.start("early")
            if early_end < 0:
                is_complete = text.endswith(form.close, match.start(), match.end())
                return match.start(), match.end() if is_complete else -1
            is_missing = self._is_close_missing(text, early_end)
            if is_missing is None:
                return match.start(), -1
            if is_missing:
                self.writer.report(_MISSING_CLOSE)
                return match.start(), early_end
            match = find(text, early_end + 1)
        return len(text), -1

    def _is_close_missing(self, text: str, pos: int) -> bool | None:
        """Return whether the marker at `pos` ends the value. None: more text is required.

        A stop marker or the opening of another argument is at `pos`. The opening ends the value if
        the tool declares this argument, and if the argument has not been read yet. Example:
        `A<parameter=days>3</parameter>` contains the value `A` if the tool declares `days`.
        """
        if self._plan.is_at_stop_marker(text, pos):
            return self._plan.is_close_missing(text, pos, self.is_final, self.writer.tools)
        opening = self._plan.match(text, pos, self.is_final)
        if opening == NEED_MORE:
            return None
        if not isinstance(opening, TagOpening):
            return False
        key = opening.fields["key"].strip()
        is_declared = self.writer.tools.may_have_argument(self._head.name, key)
        return is_declared and key not in self._keys

    def _pass_on_string(self, text: str, pos: int) -> int:
        """Write the text of a string as it arrives. Write a quote at the closing marker.

        Example: for the pieces `Pa` and `ris</parameter>`, `Pa` and `ris"` are written.
        """
        value_end, marker_end = self._find_value_end(text, pos)
        if value_end > pos:
            self.writer.write(escape_json(text[pos:value_end]))
        if marker_end >= 0:
            self.writer.write('"')
            self._step = self._read_tag_or_end
            return marker_end
        return value_end if value_end > pos else NEED_MORE

    def _keep_value(self, text: str, pos: int) -> int:
        """Store the text of a value, and write the whole value as JSON at the closing marker.

        Example: for the pieces `1` and `2</parameter>`, `12` is written. As soon as the stored text
        can only be a string, this text is written.
        """
        value_end, marker_end = self._find_value_end(text, pos)
        if value_end > pos:
            self._value_pieces.append(text[pos:value_end])
        if marker_end >= 0:
            self.writer.write(to_json("".join(self._value_pieces), self._types))
            self._step = self._read_tag_or_end
            return marker_end
        if value_end > pos and self._can_only_be_string():
            self.writer.write('"' + escape_json("".join(self._value_pieces)))
            self._step = self._pass_on_string
        return value_end if value_end > pos else NEED_MORE

    def _can_only_be_string(self) -> bool:
        """Return whether the value must be a string, based on its stored text.

        Example: if all types are allowed, `Par` can only be a string, but `12` can be a number.
        """
        types = self._types
        if types is not None and "string" not in types:
            return False
        if types == _STRING_OR_NULL:
            value = "".join(self._value_pieces)
            return not any(word.startswith(value) for word in _NULL_WORDS)
        return bool(self._value_pieces) and self._value_pieces[0][0] not in _FIRST_CHARS_OF_JSON

    def _close_arguments(self) -> None:
        """Write the closing brace of the arguments."""
        self.writer.write("}" if self._keys else "{}")

    def abandon(self) -> bool:
        """Complete the JSON text of the arguments, see `BodyReader.abandon`."""
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
            elif self._step == self._keep_value and self._value_pieces:
                self.writer.write(to_json("".join(self._value_pieces), self._types))
        super().finish()


def _first_literal(form: TaggedArguments) -> str:
    """Return the literal with which a tagged value starts. Example: `<parameter=`."""
    first_part = pattern(form.open)[0]
    return first_part.strip() if isinstance(first_part, str) else ""
