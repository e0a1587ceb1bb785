"""Reads the body of one tool call, and classifies the text of the body."""

from __future__ import annotations

from enum import Enum

from nereid_parsers.stream.bodies.body_reader import BROKEN_ARGUMENTS, BodyReader
from nereid_parsers.stream.expected_call import MatchedCall
from nereid_parsers.stream.status import BROKEN, DONE, MORE
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.text_writer import TextWriter


class Outcome(Enum):
    """The result of reading the body of a tool call.

    ENDED    The tool call has ended. Closing markers may follow.
    BROKEN   The arguments are not valid JSON. `OpenCall.read_broken` reads the rest.
    NO_CALL  The text is not a tool call.
    """

    ENDED = "ended"
    BROKEN = "broken"
    NO_CALL = "no_call"


class OpenCall:
    """A tool call whose body is being read. The body can also be a list of tool calls.

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
        "_text_writer",
        "variant",
    )

    def __init__(
        self,
        match: MatchedCall,
        body: BodyReader,
        buffer: TextBuffer,
        text: TextWriter,
    ) -> None:
        """Create an open tool call.

        Args:
            match: The matched start of the tool call: its marker and its header.
            body: The reader of the body, which is the text after the header.
            buffer: The buffer that contains the text.
            text: The writer that classifies the text of the tool call for the trace.
        """
        self.variant = match.variant
        self._is_confirmed = match.is_confirmed
        self._body_reader = body
        self._buffer = buffer
        self._text_writer = text
        self._call_writer = body.writer

    def read(self) -> Outcome | None:
        """Read a part of the body from the buffer, and classify the text of this part.

        The body reader parses the text. The classification ("call", or "pending" if the text may
        still be content) is stored by the TextWriter.

        Returns:
            The outcome, or None if the body has not ended.
        """
        body_reader = self._body_reader
        buffer = self._buffer
        if buffer.is_final:
            body_reader.is_final = True
        was_open = self._call_writer.is_open
        part_start = buffer.pos
        buffer.pos = body_reader.read(buffer.text, part_start)
        if self._call_writer.is_open:  # The whole part belongs to the open tool call.
            part = buffer.text[part_start : buffer.pos]
            # `end_at_stored_marker` may remove text from the end of the stored arguments. The
            # parser then reads the removed text again.
            self._text_writer.write_call(part, may_be_reread=self._call_writer.stores_arguments)
        else:
            self._classify_outside_call(part_start, was_open)
        return None if body_reader.status is MORE else self._leave_body()

    def _classify_outside_call(self, start: int, was_open: bool) -> None:
        """Classify text after which no tool call is open. The body reader has just read this text.

        The text belongs to a tool call that has ended in this text, or the text is "pending".
        Pending text may be the start of a tool call, or content. Examples for a list of tool calls:

            text read        tool call         pending
            ` 1}}, {"na`     ` 1}}`            `, {"na`, which may start a second tool call
            `[{"na`                            `[{"na`, which may start the first tool call

        If the body is one tool call, all text up to its end belongs to the tool call.

        Args:
            start: The position in the buffer at which the text starts. The text ends at the
                buffer's current position.
            was_open: Whether a tool call was open before this text. The tool call has then ended in
                this text.
        """
        buffer_text = self._buffer.text
        text_end = self._buffer.pos
        # The end of a tool call in a list, or None if no member of a list has ended in this text.
        list_item_end = self._body_reader.last_call_end
        has_call_ended = was_open or self._body_reader.status is DONE
        if list_item_end is not None:
            self._write_ended_call(buffer_text[start:list_item_end])
            self._text_writer.store_pending(buffer_text[list_item_end:text_end])
        elif has_call_ended:
            self._write_ended_call(buffer_text[start:text_end])
        else:
            self._text_writer.store_pending(buffer_text[start:text_end])

    def _write_ended_call(self, text: str) -> None:
        """Classify the text of a tool call that has ended."""
        self._text_writer.write_call(text, may_be_reread=self._call_writer.stores_arguments)
        self._text_writer.end_call()

    def _leave_body(self) -> Outcome:
        """Stop reading the body, because it is complete or not valid. Return the outcome.

        If the arguments are not valid, the tool call ends if a valid end can be found. Otherwise
        the outcome is BROKEN, and `read_broken` reads the rest of the arguments.
        """
        if self._body_reader.status is DONE:
            if self._text_writer.pending:
                self._text_writer.drop_pending()
            return Outcome.ENDED
        if not self._call_writer.is_open:
            return Outcome.NO_CALL
        # The arguments are not valid. `abandon` may complete the JSON text of the arguments.
        if self._body_reader.abandon():
            return Outcome.ENDED
        # The arguments may contain the closing marker, because a quote is missing.
        return Outcome.ENDED if self.end_at_stored_marker() else Outcome.BROKEN

    def end_at_stored_marker(self) -> bool:
        """End the tool call if its stored arguments contain the closing marker.

        Example: in `{"a": "x}</call> Hi`, a quote is missing, so `</call> Hi` was read as a part of
        the string. Four objects are changed:

        - The CallWriter removes `</call> Hi` from the arguments, which become `{"a": "x}`.
        - The TextWriter no longer classifies `</call> Hi` as the text of a tool call.
        - The buffer gets `</call> Hi` back, so that the parser reads this text again.
        - The CallWriter ends the tool call with a fault.

        If the closing marker has several parts, the tool call ends at the first part.

        Returns:
            Whether the tool call has ended. False if the arguments are not stored, or are not the
            model's own text, or do not contain the marker.
        """
        closing_markers = self.variant.closing_markers
        if not closing_markers or not self._body_reader.is_verbatim:
            return False
        text_from_marker = self._call_writer.cut_arguments_at(closing_markers[0])
        if text_from_marker is None:
            return False
        self._text_writer.shorten_call(len(text_from_marker))
        self._buffer.push_back(text_from_marker)
        self._call_writer.end(BROKEN_ARGUMENTS)
        return True

    def read_broken(self) -> bool:
        """Read arguments that are not valid JSON up to the next marker, and write them unchanged.

        Example: for `{"a": x}</tool_call>`, the arguments are `{"a": x}`. The marker ends the tool
        call, and stays unread.

        Returns:
            Whether the tool call has ended, because a marker was found.
        """
        arguments_end, marker = self.variant.end_of_broken.find(self._buffer)
        if arguments_end > self._buffer.pos:
            piece = self._buffer.take_until(arguments_end)
            self._call_writer.write(piece)
            self._text_writer.write_call(piece, may_be_reread=self._call_writer.stores_arguments)
        if not marker:
            return False
        self._call_writer.end(BROKEN_ARGUMENTS)
        return True

    def finish(self) -> bool:
        """End the tool call, because the message has ended inside the body.

        Returns:
            Whether the text is a tool call. If not, the caller must treat the text as content.
            Examples: the text is a tool call if it ends inside the arguments, or between the
            members of a list, as in `[{"name": "f", "arguments": {}},`. The text `{"na` is not a
            tool call.
        """
        is_call = self._call_writer.is_open
        # `BodyReader.finish` ends the open tool call. If no tool call is open, `finish` sets the
        # status BROKEN, unless the text that has been read already contains a valid tool call.
        self._body_reader.finish()
        has_started_call = self._call_writer.num_started > 0
        is_list_of_calls = has_started_call and self._body_reader.status is not BROKEN
        if not is_call and not is_list_of_calls:
            return False
        self._text_writer.end_call()
        self._text_writer.drop_pending()
        return True

    def is_start_cut_off(self, section_closes: tuple[str, ...]) -> bool:
        """Return whether the message ends with an incomplete tool call start, as in `<call>{"na`.

        Text that contains a closing marker is not cut off. Such text is not a tool call.

        Args:
            section_closes: The markers that close the tool section.
        """
        # All text of the tool call is pending until the CallWriter has started the tool call.
        has_started = not self._text_writer.pending
        if has_started or not self._is_confirmed:
            return False
        text = self._text_writer.pending_text
        closing_markers = (*self.variant.closing_markers, *section_closes)
        return not any(marker in text for marker in closing_markers)

    def finish_broken(self) -> None:
        """At the end of the message, end a tool call whose arguments are not valid JSON."""
        if self._call_writer.is_open:
            self._call_writer.end(BROKEN_ARGUMENTS)
            self._text_writer.end_call()
