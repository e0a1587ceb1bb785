"""Reads one tool call, or a list of tool calls, after a marker such as `<tool_call>`."""

from __future__ import annotations

from enum import Enum

from nereid_parsers.stream.bodies.body_reader import (
    BROKEN_AFTER_ARGUMENTS,
    BodyReader,
)
from nereid_parsers.stream.call_writer import BROKEN_ARGUMENTS
from nereid_parsers.stream.expected_call import MatchedCall
from nereid_parsers.stream.status import BROKEN, DONE, MORE
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.text_writer import TextWriter


class Outcome(Enum):
    """The result of reading one tool call or one list of tool calls.

    ENDED    The tool call has ended. Closing markers may follow.
    BROKEN   The arguments are not valid JSON. `OpenCall.write_invalid_rest` writes their rest.
    NO_CALL  The text is not a tool call, so it is content.
    """

    ENDED = "ended"
    BROKEN = "broken"
    NO_CALL = "no_call"


class OpenCall:
    """One tool call, or one list of tool calls, that is being read.

    Four other objects take part:

    - The TextBuffer contains the text that has arrived from the model.
    - The BodyReader parses the body, and calls the methods of the CallWriter.
    - The CallWriter appends the events of the tool call. If the policy may repair the arguments,
      the CallWriter stores the arguments until the tool call ends.
    - The TextWriter classifies the text of the body for the trace. Until a tool call has started,
      the text is "pending", because it may turn out to be content.

    Example: the opening marker of `<call>{"name": "f", "arguments": {"a": 1}}</call>` has been
    read. `read` then passes the object to the BodyReader, and the CallWriter appends
    `ToolCallStart`, `ArgumentsDelta` and `ToolCallEnd`. The result is `Outcome.ENDED`, and
    `</call>` stays unread in the buffer.

    Attributes:
        variant: The variant of the tool call.
    """

    __slots__ = (
        "_body_reader",
        "_buffer",
        "_call_writer",
        "_is_confirmed",
        "_may_reread_arguments",
        "_text_writer",
        "variant",
    )

    def __init__(
        self,
        match: MatchedCall,
        body_reader: BodyReader,
        buffer: TextBuffer,
        text_writer: TextWriter,
    ) -> None:
        """Create an object that reads one tool call or one list of tool calls.

        `match` is the start of the tool call, which has been read. The unread text of `buffer`
        starts with the body, such as `{"name": "f", "arguments": {}}`. `body_reader` parses the
        body. `text_writer` receives the text of the body, and classifies the text for the trace.
        """
        self.variant = match.variant
        self._is_confirmed = match.is_confirmed
        self._body_reader = body_reader
        self._buffer = buffer
        self._text_writer = text_writer
        self._call_writer = body_reader.writer
        # Whether the parser may later read the end of the arguments again, as the text after the
        # tool call. Example: in `{"a": "x}</call> Hi`, the closing quote is missing. The parser
        # first reads `</call> Hi` as a part of the string, and later as a marker and content. Text
        # can be removed from the arguments only if the CallWriter stores the arguments until the
        # tool call ends.
        self._may_reread_arguments = body_reader.writer.stores_arguments

    def read(self) -> Outcome | None:
        """Read the next part of the body. Return the outcome, or None if the body has not ended.

        The body reader parses the part. The TextWriter then receives the text of the part: as text
        of a tool call if a tool call has started, otherwise as pending text, which may be content.
        Examples of three parts of one body:

            `{"na`                        pending text, because no tool call has started
            `me": "f", "arguments": {`    text of the tool call, which has started and is open
            `}}`                          text of the tool call, which has ended
        """
        buffer = self._buffer
        self._body_reader.is_final = buffer.is_final
        was_call_open = self._call_writer.is_open
        start = buffer.pos
        buffer.pos = self._body_reader.read(buffer.text, start)
        # The part is text of a tool call if a tool call is open after the part, or has ended in it.
        # If a tool call has ended, then a tool call was open before the part, or the whole body has
        # ended, or a member of a list has ended.
        if self._call_writer.is_open:
            self._trace_as_call(buffer.text[start : buffer.pos])
        elif (
            was_call_open
            or self._body_reader.status is DONE
            or self._body_reader.last_call_end is not None
        ):
            self._pass_ended_call(start)
        else:
            self._text_writer.store_pending(buffer.text[start : buffer.pos])
        return None if self._body_reader.status is MORE else self._leave_body()

    def _trace_as_call(self, text: str) -> None:
        """Pass a part of the tool call's text to the TextWriter, which classifies it as a call."""
        self._text_writer.accept_call_text(text, may_be_reread=self._may_reread_arguments)

    def _pass_ended_call(self, part_start: int) -> None:
        """Pass a part of the body to the TextWriter. The part contains the end of a tool call.

        The part starts at `part_start`, and ends at the position of the buffer. In a list of tool
        calls, text may follow the ended tool call. This text becomes pending text, because it is
        not certain that another tool call follows. Examples:

            part            text of the tool call   pending text
            ` 1}}`          ` 1}}`                  none
            ` 1}}, {"na`    ` 1}}`                  `, {"na`
        """
        text, part_end = self._buffer.text, self._buffer.pos
        last_call_end = self._body_reader.last_call_end  # None if the body is not a list.
        call_end = part_end if last_call_end is None else last_call_end
        self._trace_as_call(text[part_start:call_end])
        self._text_writer.end_traced_call()
        if call_end < part_end:
            self._text_writer.store_pending(text[call_end:part_end])

    def _leave_body(self) -> Outcome:
        """Stop reading a body that is complete or not valid. Return the outcome.

        Example: `{"name": "f", "arguments": {}}` is a complete body, so the outcome is ENDED.
        """
        if self._body_reader.status is not DONE:
            return self._leave_invalid_body()
        # The text after the last tool call of a list, such as `]`, was stored as pending text,
        # because another tool call could have followed. It is markup, so it is removed.
        if self._text_writer.pending_text:
            self._text_writer.drop_pending()
        return Outcome.ENDED

    def _leave_invalid_body(self) -> Outcome:
        """Stop reading a body that is not valid. End the tool call if possible.

        Examples of JSON objects after the marker `<call>`:

            `{"x": 1}`                                NO_CALL, because the name is missing
            `{"name": "f", "arguments": {"a": [1}}`   BROKEN, because `]` is missing

        If the invalid arguments are stored and contain `</call>`, because a quote is missing, the
        tool call ends at this marker, and the outcome is ENDED.
        """
        if not self._call_writer.is_open:
            return Outcome.NO_CALL  # The caller writes the pending text as content.
        if not self._body_reader.writes_model_text:
            # The body reader has created the JSON text of the arguments, so it can also complete
            # this JSON text, for example with closing brackets.
            self._body_reader.end_invalid_call()
            return Outcome.ENDED
        if self._body_reader.has_all_arguments and not self.variant.closing_markers:
            # No marker shows where the tool call ends, so the rest of the text may be content.
            self._call_writer.end(BROKEN_AFTER_ARGUMENTS)
            return Outcome.ENDED
        has_ended = self.end_at_marker_in_arguments()
        return Outcome.ENDED if has_ended else Outcome.BROKEN

    def end_at_marker_in_arguments(self) -> bool:
        """Cut the tool call's stored arguments at their first closing marker, and end the call.

        Example: in `{"a": "x}</call> Hi`, a quote is missing, so `</call> Hi` was read as a part of
        the string. The arguments become `{"a": "x}`, and the tool call ends with a fault. The text
        `</call> Hi` is put back into the buffer, so that the parser reads it again.

        Return whether the tool call has ended. It has not ended if the stored arguments do not
        contain the marker, if the arguments are not stored or are complete, or if the reader has
        converted the arguments to JSON.
        """
        closing_markers = self.variant.closing_markers
        # In complete arguments, a marker is a part of a value.
        are_arguments_incomplete = not self._body_reader.has_all_arguments
        may_cut = self._body_reader.writes_model_text and are_arguments_incomplete
        if not closing_markers or not may_cut:
            return False
        first_tag = closing_markers[0]  # Such as `</f>` in `</f></call>`.
        text_to_reread = self._call_writer.cut_arguments_at(first_tag)
        if text_to_reread is None:
            return False
        self._text_writer.shorten_traced_call(len(text_to_reread))
        self._buffer.push_back(text_to_reread)
        self._call_writer.end(BROKEN_ARGUMENTS)
        return True

    def write_invalid_rest(self) -> bool:
        """Write the rest of invalid arguments unchanged, up to the next marker.

        Example: in `{"a": [1}</tool_call>`, `]` is missing. The arguments up to `[1` have been
        written, so `}` is read and written, and the tool call ends. The marker stays unread. If no
        marker has arrived yet, all text is read and written, and the tool call stays open.

        In `{"name": "f", "arguments": {}]`, the arguments are complete, and only the text after
        them is invalid. Then the rest, `]`, is read, but not written, because it is no argument.

        Return whether the tool call has ended, because a marker was found.
        """
        arguments_end, marker = self.variant.end_of_invalid_arguments.find(self._buffer)
        if arguments_end > self._buffer.pos:
            piece = self._buffer.take_until(arguments_end)
            if not self._body_reader.has_all_arguments:
                self._call_writer.write(piece)
            self._trace_as_call(piece)
        if not marker:
            return False
        self._call_writer.end(self._description_of_fault())
        return True

    def _description_of_fault(self) -> str:
        """Return the description of the fault in a tool call that is not valid JSON."""
        return BROKEN_AFTER_ARGUMENTS if self._body_reader.has_all_arguments else BROKEN_ARGUMENTS

    def finish(self) -> bool:
        """If the message ends inside a tool call, end this tool call.

        Examples of bodies at the end of the message:

            `{"name": "f", "arguments": {"a"`     True: the open tool call is ended.
            `[{"name": "f", "arguments": {}},`    True: the list contains a complete tool call.
            `{"na`                                False: no tool call has started.

        Return whether the text is a tool call. If not, the caller decides whether to remove the
        text or to write it as content.
        """
        was_open = self._call_writer.is_open
        self._body_reader.finish()  # This method ends the open tool call, and sets `status`.
        # The status is now BROKEN, unless a tool call was open, or the body is a list of tool calls
        # that lacks only its closing bracket, or a tool call without arguments.
        has_calls = self._call_writer.num_started > 0
        is_call = was_open or (self._body_reader.status is not BROKEN and has_calls)
        if is_call:
            self._text_writer.end_traced_call()
            self._text_writer.drop_pending()  # Such as `,` after the last tool call of a list.
        return is_call

    def is_start_cut_off(self, section_closes: tuple[str, ...]) -> bool:
        """Return whether the message ends before the tool call has started, as in `<call>{"na`.

        The caller removes such text from the output. The message has ended, and the text is
        pending, because the name of the function has not been read. Examples:

            `<call>{"na`          True
            `{"na`                False: no marker shows that the text is a tool call.
            `<call>{"na</call>`   False: the text is not cut off, because it has a closing marker.

        `section_closes` are the markers that close the list of all tool calls, such as `</calls>`.
        """
        text = self._text_writer.pending_text
        closing_markers = (*self.variant.closing_markers, *section_closes)
        is_closed = any(marker in text for marker in closing_markers)
        return self._is_confirmed and bool(text) and not is_closed

    def finish_broken(self) -> None:
        """At the end of the message, end an open tool call whose arguments are not valid JSON."""
        if self._call_writer.is_open:
            self._call_writer.end(self._description_of_fault())
            self._text_writer.end_traced_call()
