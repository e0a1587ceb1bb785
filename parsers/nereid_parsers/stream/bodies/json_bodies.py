"""Reads arguments that are a JSON object, and tool calls that are the members of a JSON array.

The readers pass the text of the arguments to the CallWriter as soon as the text arrives. The
readers examine only brackets, strings and escape sequences, so a marker inside a string does not
end the tool call.
"""

from __future__ import annotations

from nereid_parsers.stream.bodies.body_reader import BodyReader, Head
from nereid_parsers.stream.bodies.json_object import ObjectReader
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.pattern_matching import skip_whitespace
from nereid_parsers.stream.status import BROKEN, DONE, MORE
from nereid_parsers.stream.values.json_scanner import JsonScanner
from nereid_parsers.tool_declarations import Keys, NameIsKey


class JsonArgumentsReader(BodyReader):
    """Reads arguments that are written as a JSON object, for example `{"city": "Paris"}`."""

    __slots__ = ("_head", "_scanner")

    is_verbatim = True

    def __init__(self, writer: CallWriter, head: Head) -> None:
        """Create a reader for the arguments of the function `head.name`."""
        super().__init__(writer)
        self._head = head
        self._scanner = JsonScanner()

    def read(self, text: str, pos: int) -> int:
        """Pass the next piece of the arguments to the writer. The first piece starts the tool call.

        `status` becomes DONE after the closing brace, and BROKEN if the text is not a JSON object.
        If the status is BROKEN, the text is content unless the tool call has started.

        Example: for the pieces `{"a": ` and `1}</call>`, the writer receives `{"a": ` and `1}`.

        Returns:
            The position up to which the text was read.
        """
        if not self.writer.is_open:
            pos = skip_whitespace(text, pos)
            if pos == len(text):
                return pos
            if not self._start_named_call(self._head):
                return self._reject(pos)
            # The tool call has started, so invalid text is now returned as broken arguments. Before
            # the start, invalid text would be returned as content.
            if text[pos] != "{":
                return self._reject(pos)
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

    def __init__(self, writer: CallWriter, keys: Keys | NameIsKey, *, is_confirmed: bool) -> None:
        """Create a reader for one array. For the parameters see `ObjectReader`."""
        super().__init__(writer)
        self._keys = keys
        self._is_confirmed = is_confirmed
        self._is_bracket_open = False
        self._member: ObjectReader | None = None

    def read(self, text: str, pos: int) -> int:
        """Read the next piece of the array. Set `status`, and `last_call_end` if a tool call ends.

        Each member of the array is a tool call. An `ObjectReader` reads the member, and passes the
        tool call to the writer.

        Returns:
            The position up to which the text was read. The caller passes the rest again, together
            with the text that follows.
        """
        self.last_call_end = None
        size = len(text)
        while pos < size and self.status is MORE:
            if self._member is None:
                pos = self._read_between_members(text, pos)
                continue
            pos = self._member.read(text, pos)
            if self._member.status is MORE:
                return pos
            if self._member.status is BROKEN:
                return self._reject(pos)
            self._member = None
            # If no other tool call follows, the text after `pos` is content. One complete
            # tool call confirms that the other members of the array are tool calls, too.
            self.last_call_end = pos
            self._is_confirmed = True
        return pos

    def _read_between_members(self, text: str, pos: int) -> int:
        """Read the character at `pos`, which is between two members of the array.

        A bracket, a comma and white space are skipped. At `{`, the reader of the next member is
        created. Any other character is not valid, so `status` becomes BROKEN. The array `[]` is
        valid only if a marker or an earlier tool call shows that it contains tool calls.

        Returns:
            The position after the character that was read. The result is `pos` if a member starts
            at `pos`, or if the character is not valid.
        """
        char = text[pos]
        if char.isspace():
            return pos + 1
        if not self._is_bracket_open:
            return self._read_opening_bracket(char, pos)
        if char == ",":
            return pos + 1
        if char == "]":
            is_call_list = self._is_confirmed or self.writer.num_started > 0
            self.status = DONE if is_call_list else BROKEN
            return pos + 1
        if char == "{":
            self._member = ObjectReader(self.writer, self._keys, is_confirmed=self._is_confirmed)
            return pos
        return self._reject(pos)

    def _read_opening_bracket(self, char: str, pos: int) -> int:
        """Read the character `char` at `pos`, which must be the opening bracket of the array."""
        if char != "[":
            return self._reject(pos)
        self._is_bracket_open = True
        return pos + 1

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
