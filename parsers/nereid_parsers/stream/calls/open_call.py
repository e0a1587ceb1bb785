"""Reads one tool call, or a list of tool calls, after a marker such as `<tool_call>`."""

from __future__ import annotations

from enum import Enum

from nereid_parsers.stream.bodies.body_reader import (
    BROKEN_AFTER_ARGUMENTS,
    BodyReader,
)
from nereid_parsers.stream.call_writer import BROKEN_ARGUMENTS
from nereid_parsers.stream.calls.expected_call import MatchedCall
from nereid_parsers.stream.status import DONE, MORE
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.text_writer import TextWriter


class Outcome(Enum):
    """The result of reading one tool call or one list of tool calls.

    ENDED    The tool call has ended. Closing markers may follow.
    BROKEN   The arguments are not valid JSON. `OpenCall.read_invalid_rest` reads their rest.
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
        "_body_reader", "_buffer", "_call_writer", "_is_confirmed", "_text_writer", "variant",
    )  # fmt: skip

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

    def read(self) -> Outcome | None:
        """Read the next part of the body. Return the outcome, or None if the body has not ended.

        The body reader parses this part of the body. It passes the arguments to the CallWriter,
        which appends events. Afterwards, the TextWriter receives the text that was parsed.
        """
        buffer = self._buffer
        self._body_reader.is_final = buffer.is_final
        was_call_open = self._call_writer.is_open  # The body reader may end this tool call.
        part_start = buffer.pos
        buffer.pos = self._body_reader.read(buffer.text, part_start)
        self._pass_to_text_writer(part_start, was_call_open)
        return None if self._body_reader.status is MORE else self._leave_body()

    def _pass_to_text_writer(self, part_start: int, was_call_open: bool) -> None:
        """Pass the part of the body that was just read to the TextWriter.

        The TextWriter removes the text of a tool call from the output. It stores other text as
        pending text, because later text decides whether a tool call starts. Examples of parts:

            `{"name": "f", "arguments": {`   text of a tool call, which has started and is open
            `}}`                             text of a tool call, which has ended
            `{"na`                           pending text, because no tool call has started
            `}}, {"na`                       text of a tool call up to `}}`, then pending text

        The part starts at `part_start`, and ends at the position of the buffer. `was_call_open` is
        true if a tool call was open before the part. If so, and if no tool call is open now, the
        tool call has ended in the part.
        """
        part = self._buffer.text[part_start : self._buffer.pos]
        if self._call_writer.is_open:
            self._text_writer.drop_call_text(part)
            return
        call_end = self._call_end_in_part(was_call_open)
        if call_end is None:
            self._text_writer.store_pending(part)
        else:
            self._split_part_at(call_end, part_start)

    def _call_end_in_part(self, was_call_open: bool) -> int | None:
        """Return the position at which a tool call has ended in the part that was just read.

        Return None if no tool call has ended there. The caller has checked that no tool call is
        open after the part. `was_call_open` is true if a tool call was open before the part, so
        that it must have ended inside the part. Examples:

            part                               result
            ` 1}}, {"na`                       the position after `}}`, where a member of a list of
                                               tool calls has ended. The next member has not started
                                               a tool call yet, because its name is incomplete.
            ` 1}}`                             the end of the part, where the open call has ended
            `{"name": "f", "arguments": {}}`   the end of the part, which is a whole tool call
            `{"na`                             None
        """
        end_of_list_member = self._body_reader.last_call_end
        if end_of_list_member is not None:
            return end_of_list_member
        contains_whole_call = not was_call_open and self._body_reader.status is DONE
        has_call_ended = was_call_open or contains_whole_call
        return self._buffer.pos if has_call_ended else None

    def _split_part_at(self, call_end: int, part_start: int) -> None:
        """Pass a part of the body, in which a tool call ends at `call_end`, to the TextWriter.

        The part starts at `part_start`, and ends at the position of the buffer. Example: the part
        ` 1}}, {"na` of a list of tool calls is split after `}}`:

            ` 1}}`     is text of the ended tool call, so the content does not contain this text.
            `, {"na`   becomes pending text, because the next member may turn out to be content.
        """
        text, part_end = self._buffer.text, self._buffer.pos
        self._text_writer.drop_call_text(text[part_start:call_end])
        self._text_writer.end_traced_call()  # The trace function receives the text of the call.
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
        """Stop reading a body that is not valid. End the tool call if its end is known.

        The first case that applies decides:

            case                                          outcome
            no tool call is open                          NO_CALL: the text is content
            the reader converts the arguments to JSON     ENDED: the reader completes the JSON text
            complete arguments, no closing marker         ENDED: the rest may be content
            stored arguments that contain `</call>`       ENDED at the marker: a quote is missing
            any other                                     BROKEN: the rest must be read
        """
        if not self._call_writer.is_open:
            return Outcome.NO_CALL
        if not self._body_reader.writes_model_text:  # The reader converts the arguments.
            self._body_reader.end_invalid_call()
            return Outcome.ENDED
        if self._body_reader.has_all_arguments and not self.variant.closing_markers:
            self._call_writer.end(BROKEN_AFTER_ARGUMENTS)
            return Outcome.ENDED
        has_ended_at_marker = self.end_at_marker_in_arguments()
        return Outcome.ENDED if has_ended_at_marker else Outcome.BROKEN

    def end_at_marker_in_arguments(self) -> bool:
        """End the tool call at a closing marker that was read as a part of incomplete arguments.

        Example: in `{"a": "x}</call> Hi`, a quote is missing, so `</call> Hi` was read as a part of
        the string. The arguments become `{"a": "x}`, and the tool call ends with a fault. The text
        `</call> Hi` is put back into the buffer, so that the parser reads this text again.

        Return whether the tool call has ended. If the stored arguments contain no closing marker,
        the tool call stays open.
        """
        if not self._may_cut_arguments():
            return False
        first_tag = self.variant.closing_markers[0]  # Such as `</f>` in `</f></call>`.
        text_to_reread = self._call_writer.cut_arguments_at(first_tag)
        if text_to_reread is None:
            return False
        self._text_writer.shorten_traced_call(len(text_to_reread))
        self._buffer.push_back(text_to_reread)
        self._call_writer.end(BROKEN_ARGUMENTS)
        return True

    def _may_cut_arguments(self) -> bool:
        """Return whether the arguments may be cut at a closing marker, such as `</call>`.

        In complete arguments, a marker is a part of a value. If the reader has converted the
        arguments to JSON, the text after the marker is not the model's text, so the parser cannot
        read this text again.
        """
        has_marker = bool(self.variant.closing_markers)
        is_incomplete = not self._body_reader.has_all_arguments
        return has_marker and is_incomplete and self._body_reader.writes_model_text

    def read_invalid_rest(self) -> bool:
        """Read the rest of a tool call that is not valid, up to the next marker.

        The rest starts at the first character that is not valid. Examples:

            text of the tool call                     rest   effect on the rest
            `{"a": [1}</call>`                        `}`    appended to the arguments `{"a": [1`
            `{"name": "f", "arguments": {}]</call>`   `]`    removed, because the reader already
                                                             has all arguments: `{}`

        At the marker, the tool call ends, and the result is True. The marker stays unread. If no
        marker has arrived, the tool call stays open, and the result is False.
        """
        rest_end, marker = self.variant.end_of_invalid_arguments.find(self._buffer)
        if rest_end > self._buffer.pos:
            rest = self._buffer.take_until(rest_end)
            self._text_writer.drop_call_text(rest)  # The rest is never content.
            if not self._body_reader.has_all_arguments:
                self._call_writer.write(rest)
        if marker:
            self._call_writer.end(self._description_of_fault())
        return bool(marker)

    def _description_of_fault(self) -> str:
        """Return the description of the fault in a tool call that is not valid JSON."""
        return BROKEN_AFTER_ARGUMENTS if self._body_reader.has_all_arguments else BROKEN_ARGUMENTS

    def finish(self) -> bool:
        """End the body, because the message ends. Return whether the body ends with a tool call.

        If the result is False, the caller removes the pending text, or writes it as content.
        Examples of bodies at the end of the message:

            body                                 result
            `{"name": "f", "arguments": {"a"`    True. The open tool call is ended.
            `[{"name": "f", "arguments": {}},`   True. The pending text `,` is removed.
            `{"na`                               False, because no tool call has started.
        """
        # The body reader ends the tool call that is open, if any. Then the reader's status is DONE
        # if the reader has ended a tool call now (the first example) or earlier (the second
        # example). Otherwise the status is BROKEN.
        self._body_reader.finish()
        # If all tool calls have ended in the prompt, the output contains none.
        has_started_calls = self._call_writer.num_started > 0
        has_ended = has_started_calls and self._body_reader.status is DONE
        if has_ended:
            self._text_writer.end_traced_call()
            self._text_writer.drop_pending()  # Such as `,` after the last tool call of a list.
        return has_ended

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
        if not self._is_confirmed or not text:
            return False
        closing_markers = (*self.variant.closing_markers, *section_closes)
        return not any(marker in text for marker in closing_markers)

    def finish_broken(self) -> None:
        """At the end of the message, end an open tool call whose arguments are not valid JSON."""
        if self._call_writer.is_open:
            self._call_writer.end(self._description_of_fault())
            self._text_writer.end_traced_call()
