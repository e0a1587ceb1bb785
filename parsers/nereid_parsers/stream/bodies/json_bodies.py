"""Reads JSON objects that contain arguments, and JSON arrays that contain tool calls.

The readers pass the text of the arguments to the CallWriter as soon as the text arrives. The
readers examine only brackets, strings and escape sequences, so a marker inside a string does not
end the tool call.
"""

from __future__ import annotations

from nereid_parsers.stream.bodies.body_reader import BodyReader, Head
from nereid_parsers.stream.bodies.json_object import ObjectReader
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.pattern_matching import skip_whitespace
from nereid_parsers.stream.status import BROKEN, DONE, MORE, Status
from nereid_parsers.stream.values.json_scanner import JsonScanner
from nereid_parsers.tool_declarations import Keys, NameIsKey


class JsonArgumentsReader(BodyReader):
    """Reads arguments that are written as a JSON object, for example `{"city": "Paris"}`."""

    __slots__ = ("_head", "_scanner")

    writes_model_text = True

    def __init__(self, writer: CallWriter, head: Head) -> None:
        """Create a reader for the arguments of the function `head.name`."""
        super().__init__(writer)
        self._head = head
        self._scanner = JsonScanner()

    def read(self, text: str, pos: int) -> int:
        """Pass the next piece of the arguments to the writer. The first piece starts the tool call.

        The arguments start at `text[pos]`, or continue there. Example: for the pieces `{"a": ` and
        `1}</call>`, the writer receives `{"a": ` and `1}`. `status` becomes DONE after the closing
        brace, and BROKEN in three cases:

            case                          effect of the status BROKEN
            the function is not offered   The text is content, because no tool call has started.
            `1` instead of `{"a": 1}`     The tool call, which has started, ends with a fault.
            `{"a": ]`                     The tool call, which has started, ends with a fault.

        Return the position up to which the text was read.
        """
        if not self.writer.is_open:
            pos = skip_whitespace(text, pos)
            if pos == len(text):
                return pos
            has_started = self._start_named_call(self._head)
            if not has_started:
                return self._reject(pos)
            if text[pos] != "{":
                return self._reject(pos)
        # The JSON object may arrive in several pieces. The scanner finds the end of the object.
        end = self._scanner.scan(text, pos)
        if end > pos:
            self.writer.write(text[pos:end])
        self.status = self._scanner.status
        if self.status is DONE:
            self.writer.end()
        return end


class ArrayReader(BodyReader):
    """Reads tool calls from one JSON array, for example `[{"name": "f", "arguments": {}}]`."""

    writes_model_text = True

    def __init__(self, writer: CallWriter, keys: Keys | NameIsKey, *, is_confirmed: bool) -> None:
        """Create a reader for one array, in which each object is a tool call.

        `is_confirmed` is true if a marker shows that the array contains tool calls.
        """
        super().__init__(writer)
        self._keys = keys
        self._is_confirmed = is_confirmed
        self._is_bracket_open = False  # Whether the opening bracket has been read.
        self._member: ObjectReader | None = None  # The reader of the member that is being read.

    def read(self, text: str, pos: int) -> int:
        """Read the next piece of the array, which starts at `text[pos]`. Set `status`.

        Each member of the array is a tool call, which an `ObjectReader` passes to the writer. The
        position after the last complete member becomes `last_call_end`. Example: the text
        `[{"name": "f"}, {"na` contains one complete member, so `last_call_end` becomes 14. If no
        member ends in the piece, `last_call_end` becomes None.

        Return the position up to which the text was read.
        """
        self.last_call_end = None
        size = len(text)
        while pos < size and self.status is MORE:
            if self._member is None:
                pos = self._read_between_members(text, pos)
            else:
                pos = self._member.read(text, pos)
                if self._member.status is MORE:
                    return pos
                self._end_member(self._member.status, pos)
        return pos

    def _end_member(self, member_status: Status, end: int) -> None:
        """Update the state of the array, because the current member has ended at `end`.

        If the member is not a valid tool call (BROKEN), the array is not valid either. If the
        member is complete (DONE), all further members are treated as tool calls, too.
        """
        if member_status is BROKEN:
            self.status = BROKEN
            return
        self._member = None
        self._is_confirmed = True
        self.last_call_end = end

    def _read_between_members(self, text: str, pos: int) -> int:
        """Read one character that does not belong to a member of the array.

        White space, commas and the brackets of the array are read. The character `{` starts the
        next member. The reader of the member will read this character. Any other character is not
        valid, so the status becomes BROKEN.

        Return the position after the character, or `pos` if the character stays unread.
        """
        char = text[pos]
        if char.isspace():
            return pos + 1
        if not self._is_bracket_open:
            return self._read_opening_bracket(text, pos)
        if char == "{":
            self._member = ObjectReader(self.writer, self._keys, is_confirmed=self._is_confirmed)
            return pos
        if char == "]":
            self.status = DONE if self._contains_calls() else BROKEN
            return pos + 1
        if char == ",":  # Several commas in succession are accepted.
            return pos + 1
        return self._reject(pos)

    def _read_opening_bracket(self, text: str, pos: int) -> int:
        """Read the `[` at the start of the array. Any other character sets the status BROKEN.

        Return the position after the bracket, or `pos` if there is no bracket.
        """
        if text[pos] != "[":
            return self._reject(pos)
        self._is_bracket_open = True
        return pos + 1

    def _contains_calls(self) -> bool:
        """Return whether the complete array is known to contain tool calls, and not content.

        A marker before the array shows this, or a member that has started a tool call. Without a
        marker, the empty array `[]` is content.
        """
        return self._is_confirmed or self.writer.num_started > 0

    @property
    def has_all_arguments(self) -> bool:
        """Whether the arguments of the open member have been read, but not its closing brace."""
        return self._member is not None and self._member.has_all_arguments

    def finish(self) -> None:
        """End the open tool call and set `status`, because the message has ended.

        If at least one tool call has started, and the message ends between two members of the
        array, the missing `]` is ignored, so the status becomes DONE.
        """
        if self._member is not None:
            self._member.finish()
            self.status = self._member.status
            return
        has_started_call = self._is_bracket_open and self.writer.num_started > 0
        self.status = DONE if has_started_call else BROKEN
