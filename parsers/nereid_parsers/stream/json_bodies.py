"""Reads tool calls that are written as JSON: arguments alone, or an array of objects.

The arguments are passed on as they arrive. The readers examine only brackets, strings and escape
sequences, so a marker inside a string does not end the tool call.
"""

from __future__ import annotations

from nereid_parsers.stream.body_reader import (
    BROKEN,
    DONE,
    MORE,
    ArgumentsOnlyReader,
    BodyReader,
    Head,
)
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.json_object import ObjectReader
from nereid_parsers.stream.json_scanner import JsonScanner
from nereid_parsers.stream.pattern_matching import NEED_MORE, skip_blanks
from nereid_parsers.tool_declarations import Keys, NameIsKey


class JsonArgumentsReader(ArgumentsOnlyReader):
    """Reads arguments that are written as a JSON object, for example `{"city": "Paris"}`."""

    is_verbatim = True

    __slots__ = ("_scanner",)

    def __init__(self, writer: CallWriter, head: Head) -> None:
        super().__init__(writer, head, self._read_start)
        self._scanner = JsonScanner()

    def _read_start(self, text: str, pos: int) -> int:
        """Read white space, and start the tool call at the first other character."""
        pos = skip_blanks(text, pos)
        if pos == len(text):
            return pos
        if not self._start_call() or text[pos] != "{":
            return self._reject(pos)
        self._step = self._read_arguments
        return pos

    def _read_arguments(self, text: str, pos: int) -> int:
        """Write the next piece of the arguments, and end the tool call at their end."""
        end = self._scanner.scan(text, pos)
        if end > pos:
            self.writer.write(text[pos:end])
        self.status = self._scanner.status
        if self.status is DONE:
            self.writer.end()
        return end


class ArrayReader(BodyReader):
    """Reads tool calls from one JSON array, for example `[{"name": "f", "arguments": {}}]`."""

    is_verbatim = True

    __slots__ = ("_is_certain", "_keys", "_member")

    def __init__(self, writer: CallWriter, keys: Keys | NameIsKey, is_certain: bool) -> None:
        """Create a reader for one array. For the arguments see `ObjectReader`."""
        super().__init__(writer, self._read_opening_bracket)
        self._keys = keys
        self._is_certain = is_certain
        self._member: ObjectReader | None = None

    def read(self, text: str, pos: int) -> int:
        """Read the array in `text`, see `BodyReader.read`."""
        self.last_call_end = None
        return super().read(text, pos)

    def _read_opening_bracket(self, text: str, pos: int) -> int:
        """Read white space, or the opening bracket of the array."""
        if text[pos].isspace():
            return skip_blanks(text, pos)
        if text[pos] != "[":
            return self._reject(pos)
        self._step = self._read_between_members
        return pos + 1

    def _read_between_members(self, text: str, pos: int) -> int:
        """Read white space, a comma or `]`. If a member starts at `pos`, create its reader."""
        char = text[pos]
        if char.isspace() or char == ",":
            return pos + 1
        if char == "{":
            self._member = ObjectReader(self.writer, self._keys, self._is_certain)
            self._step = self._read_member
            return pos
        if char != "]":
            return self._reject(pos)
        # Only a marker, or a tool call, distinguishes an array of tool calls from other text.
        self.status = DONE if self.writer.num_started or self._is_certain else BROKEN
        return pos + 1

    def _read_member(self, text: str, pos: int) -> int:
        """Read a part of the current member of the array."""
        assert self._member is not None
        end = self._member.read(text, pos)
        if self._member.status is MORE:
            return end if end > pos else NEED_MORE
        if self._member.status is BROKEN:
            return self._reject(end)
        self._member = None
        self.last_call_end = end
        self._is_certain = True
        self._step = self._read_between_members
        return end

    def finish(self) -> None:
        """End the open tool call, because the message has ended."""
        if self._member is not None:
            self._member.finish()
            self.status = self._member.status
        else:
            has_call = self._step == self._read_between_members and self.writer.num_started
            self.status = DONE if has_call else BROKEN
