"""Reads the markers, heads and bodies of tool calls, and the text between tool calls."""

from __future__ import annotations

from nereid_parsers.stream.body_reader import BROKEN, BROKEN_ARGUMENTS, MORE, BodyReader
from nereid_parsers.stream.call_plan import CallPlan, ExpectedCall, Head
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.format_plan import FormatPlan
from nereid_parsers.stream.json_bodies import ArgumentsReader
from nereid_parsers.stream.pattern_matching import NEED_MORE, looks_like_markup, skip_blanks
from nereid_parsers.stream.state import State
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.text_writer import TextWriter
from nereid_parsers.tool_declarations import JsonArray, JsonObject, PythonCalls

# Some models write superfluous closing brackets before the closing marker of a tool call.
_SUPERFLUOUS_CHARS = "}])`"
_MAX_SUPERFLUOUS_CHARS = 16
# The maximum number of times per message that stored arguments are read again. Without this limit,
# the parsing time would not be linear in the length of the text.
_MAX_REREADS = 16

# The reasons that events give for returning text that looked like a tool call as content.
_NO_CALL = "the text is not a tool call"
_NO_CALL_AFTER_MARKER = "no call follows the marker"
_EMPTY_SECTION = "the tool section contains no call"


class CallReader:
    """Reads tool calls, from the opening marker of a tool call to the text after it.

    Each method `read_...` handles one state of the parser. The method reads text from the buffer
    and returns the next state, or None if it needs more text.
    """

    __slots__ = (
        "_body", "_buffer", "_call", "_calls_first", "_closing_markers", "_expected",
        "_is_call_certain", "_is_in_section", "_num_rereads", "_plan", "_text", "_writer",
    )  # fmt: skip

    def __init__(
        self,
        plan: FormatPlan,
        buffer: TextBuffer,
        text: TextWriter,
        writer: CallWriter,
        calls_first: bool,
    ) -> None:
        """Create a reader for the tool calls of one message.

        Args:
            plan: The compiled format.
            buffer: The buffer that contains the text.
            text: The writer of content.
            writer: The writer of tool calls.
            calls_first: Whether all text after the first content is content, see
                `TextRule.CALLS_FIRST`.
        """
        self._plan = plan
        self._buffer = buffer
        self._text = text
        self._writer = writer
        self._calls_first = calls_first
        self._is_in_section = False
        self._expected = ExpectedCall(plan.calls, "", is_certain=True)
        # The tool call that is being read, and the closing markers that may still follow its body.
        self._call: CallPlan | None = None
        self._body: BodyReader | None = None
        self._is_call_certain = True
        self._closing_markers: tuple[str, ...] = ()
        self._num_rereads = 0

    # ---- transitions from content and headers ----------------------------------------------------

    def open_section(self, marker: str) -> State:
        """Read the opening marker of a tool section."""
        self._is_in_section = True
        self._text.hold_tentative(self._buffer.take(len(marker)))
        return State.BETWEEN_CALLS

    def open_call(self, marker: str) -> State:
        """Prepare to read a tool call that starts with `marker`."""
        plans = self._plan.calls_by_trigger[marker]
        self._expected = ExpectedCall(plans, marker, is_certain=True)
        return State.CALL_START

    def open_bare_call(self, opening: str) -> State | None:
        """Prepare to read a tool call that starts without a marker.

        Args:
            opening: The first text of the tool call, for example `{`.

        Returns:
            The next state, or None if no tool call can start here. In that case `opening` is
            content.
        """
        if not self._may_be_bare():
            return None
        self._expected = ExpectedCall(self._plan.bare_calls, opening, is_certain=False)
        return State.CALL_START

    def _may_be_bare(self) -> bool:
        """Return whether a tool call without a marker may start here.

        At the start of the output, any tool call without a marker may start. After other text, only
        JSON or a list of Python calls may start, and only if the offered tools are known. The name
        of an offered tool is then the only proof that the text is a tool call.
        """
        if not self._text.has_content and not self._writer.num_started:
            return True
        if not self._writer.tools.parameters:
            return False
        bodies = [plan.call.body for plan in self._plan.bare_calls]
        return any(
            isinstance(body, JsonObject | JsonArray)
            or (isinstance(body, PythonCalls) and bool(body.open))
            for body in bodies
        )

    def start_message_call(self, head: Head) -> State:
        """Create the reader of a tool call's arguments, after the message header has been read."""
        self._call = self._plan.message_call
        self._is_call_certain = True
        self._body = ArgumentsReader(self._writer, head.name, head.call_id)
        return State.CALL_BODY

    def close_section(self, marker: str) -> bool:
        """Leave the tool section if `marker` closes it.

        Returns:
            Whether `marker` is removed from the content. This is also the case directly after a
            tool call.
        """
        tools = self._plan.tools
        if self._is_in_section and tools is not None and marker == tools.close.strip():
            self._is_in_section = False
            return True
        return bool(self._writer.num_started) and self._text.is_after_marker

    def has_calls(self) -> bool:
        """Return whether a tool call has started in this message."""
        return bool(self._writer.num_started)

    # ---- text that is not a tool call ------------------------------------------------------------

    def reject(self, num_chars: int, fault: str) -> State:
        """Write the tentative text, and the next `num_chars` characters, as content.

        Args:
            num_chars: The number of characters.
            fault: The reason that the event gives for returning this text as content.
        """
        self._body = None
        if not self._writer.num_started:
            self._is_in_section = False
        self._text.reject_tentative(self._buffer.take(num_chars), fault)
        only_content = self._calls_first and self._text.has_content
        return State.CONTENT_ONLY if only_content else State.CONTENT

    def _drop_or_reject(self, num_chars: int, fault: str) -> State:
        """Handle an incomplete tool call at the end of the message.

        If the text contains a tag, the text is removed. Otherwise the text is content. Example: at
        the end of the message, `<tool_call>{"na` is removed, and `{"na` is content.
        """
        if not looks_like_markup(self._text.tentative_text + self._buffer.unread()):
            return self.reject(num_chars, fault)
        self._is_in_section = False
        self._body = None
        self._text.accept_tentative()
        self._text.write_markup(self._buffer.take_unread())
        return State.CONTENT

    # ---- CALL_START and CALL_BODY ----------------------------------------------------------------

    def read_start(self) -> State | None:
        """Read the marker and the head of a tool call. Without a head, the marker is content.

        Example: `<tool_call>{"` starts a tool call. In `<tool_call> is a tag`, the marker is
        content.
        """
        expected = self._expected
        match = expected.match(self._buffer)
        if isinstance(match, tuple):
            return self._start_body(*match, expected.is_certain)
        if match == NEED_MORE:
            return None
        num_chars = len(expected.opening)
        if self._buffer.is_final and expected.is_incomplete(self._buffer, self._is_in_section):
            return self._drop_or_reject(num_chars, _NO_CALL_AFTER_MARKER)
        return self.reject(num_chars, _NO_CALL_AFTER_MARKER)

    def _start_body(self, plan: CallPlan, head: Head, is_certain: bool) -> State:
        """Read the head of a tool call, and create the reader of the body."""
        self._call = plan
        self._is_call_certain = is_certain
        self._body = plan.create_reader(self._writer, head, is_certain)
        self._text.hold_tentative(self._buffer.take_until(head.end))
        if self._buffer.has_unread():
            return State.CALL_BODY
        # The parser reads no body until more text arrives. Some tool calls can start earlier.
        return self._read_body(self._body) or State.CALL_BODY

    def read_body(self) -> State | None:
        """Read a part of the body of a tool call, and return the next state."""
        assert self._body is not None
        return self._read_body(self._body)

    def _read_body(self, body: BodyReader) -> State | None:
        """Read a part of the body of a tool call, classify the text, and return the next state.

        If a tool call is open, the text belongs to the tool call. If a tool call of a list has
        ended, the text after it is tentative, because another tool call may follow. If no tool call
        has started, the text is tentative too.
        """
        writer = self._writer
        buffer = self._buffer
        was_open = writer.is_open
        if buffer.is_final:
            body.is_final = True
        start = buffer.pos
        buffer.pos = body.read(buffer.text, start)
        if writer.is_open:
            if self._text.tentative:
                self._text.accept_tentative()
            self._text.write_call(buffer.text[start : buffer.pos], writer.keeps_arguments)
        elif body.last_call_end is not None:
            self._write_ended_call(start, body.last_call_end)
            self._text.hold_tentative(buffer.text[body.last_call_end : buffer.pos])
        elif was_open or body.status not in (MORE, BROKEN):
            self._write_ended_call(start, buffer.pos)
        else:
            self._text.hold_tentative(buffer.text[start : buffer.pos])
        return None if body.status is MORE else self._leave_body(body)

    def _write_ended_call(self, start: int, end: int) -> None:
        """Classify the text of a tool call that has ended, and accept the tentative text before it.

        Args:
            start: The position in the buffer at which the text of the tool call starts.
            end: The position after the text of the tool call.
        """
        self._text.accept_tentative()
        self._text.write_call(self._buffer.text[start:end], self._writer.keeps_arguments)
        self._text.end_call()

    def _leave_body(self, body: BodyReader) -> State:
        """Return the state after a body that is complete or not valid."""
        assert self._call is not None
        if body.status is BROKEN:
            if not self._writer.is_open:
                return self.reject(0, _NO_CALL)
            if body.abandon():
                return self._end_body(self._call)
            return self._recover(self._call)
        if self._text.tentative:
            self._text.accept_tentative()
        return self._end_body(self._call)

    def _end_body(self, call: CallPlan) -> State:
        """Prepare to read the closing markers of a tool call whose body has ended."""
        self._text.end_call()
        self._text.start_after_call()
        self._body = None
        self._closing_markers = call.closing_markers
        return State.CONTENT if call is self._plan.message_call else State.CALL_END

    def _recover(self, call: CallPlan) -> State:
        """Handle arguments that are not valid JSON, and return the next state.

        If the stored arguments contain the closing marker, the tool call ended at the marker. The
        parser then reads the text from the marker on again. Example: in `{"a": "x}</tool_call>`, a
        quote is missing, so the marker was read as a part of the string.
        """
        marker = call.closing_markers[0] if call.closing_markers else ""
        can_reread = self._body is not None and self._body.is_verbatim
        rest = None
        if can_reread and self._num_rereads < _MAX_REREADS:
            rest = self._writer.cut_arguments_at(marker)
        if rest is None:
            return State.BROKEN_CALL
        self._num_rereads += 1
        self._text.shorten_call(len(rest))
        self._buffer.push_back(rest)
        self._writer.end(BROKEN_ARGUMENTS)
        return self._end_body(call)

    def read_broken(self) -> State | None:
        """Pass on arguments that are not valid JSON, up to the next marker.

        Example: for `{"a": x}</tool_call>`, the arguments are `{"a": x}`.
        """
        assert self._call is not None
        start, marker = self._call.end_of_broken.find(self._buffer)
        if start > self._buffer.pos:
            piece = self._buffer.take_until(start)
            self._writer.write(piece)
            self._text.write_call(piece, self._writer.keeps_arguments)
        if not marker:
            return None
        self._writer.end(BROKEN_ARGUMENTS)
        return self._end_body(self._call)

    # ---- CALL_END and BETWEEN_CALLS --------------------------------------------------------------

    def read_end(self) -> State | None:
        """Read the closing markers of a tool call. A model may leave out any of these markers.

        White space and superfluous brackets before a closing marker are skipped. Example: with the
        closing markers `</function>` and `</tool_call>`, both `</tool_call>` and `}</tool_call>`
        end the tool call.
        """
        text = self._buffer.text
        after_blanks = skip_blanks(text, self._buffer.pos)
        end = after_blanks
        last_end = min(len(text), after_blanks + _MAX_SUPERFLUOUS_CHARS)
        while end < last_end and text[end] in _SUPERFLUOUS_CHARS:
            end += 1
        for start in (after_blanks, skip_blanks(text, end)):
            for index, marker in enumerate(self._closing_markers):
                if text.startswith(marker, start):
                    self._text.write_markup(self._buffer.take_until(start + len(marker)))
                    self._closing_markers = self._closing_markers[index + 1 :]
                    return State.CALL_END if self._closing_markers else State.BETWEEN_CALLS
                if marker.startswith(text[start:]):
                    return self._wait_or_drop(start)
        if self._is_next_object(after_blanks):
            return self._start_next_object(after_blanks)
        return State.BETWEEN_CALLS

    def _wait_or_drop(self, start: int) -> State | None:
        """Wait for the rest of the marker that begins at `start`.

        If the message has ended, remove the incomplete marker.
        """
        if not self._buffer.is_final:
            return None
        if start < len(self._buffer.text):
            self._text.write_markup(self._buffer.take_unread())
        return State.BETWEEN_CALLS

    def _is_next_object(self, pos: int) -> bool:
        """Return whether another tool call starts at `pos`, directly after the last tool call.

        Example: in `<tool_call>{..}{..}</tool_call>`, no marker separates the two JSON objects.
        """
        if self._call is None or not self._closing_markers:
            return False
        call = self._call.call
        is_marked_object = isinstance(call.body, JsonObject) and bool(call.open.strip())
        return is_marked_object and self._buffer.text.startswith("{", pos)

    def _start_next_object(self, pos: int) -> State:
        """Start the tool call at `pos`, which has the same declaration as the last tool call."""
        assert self._call is not None
        self._text.hold_blanks(self._buffer.take_until(pos))
        return self._start_body(self._call, Head(pos), is_certain=False)

    def read_between(self) -> State | None:
        """Read white space, a separator or the tool section's closing marker after a tool call.

        Example: after a tool call, the text `, {"name": ` contains the separator `,` and the start
        of another tool call. The text `Hello` is content.
        """
        tools = self._plan.tools
        assert tools is not None
        buffer = self._buffer
        self._text.hold_blanks(buffer.take_until(skip_blanks(buffer.text, buffer.pos)))
        if not buffer.has_unread():
            return None
        close = tools.close.strip()
        if self._is_in_section and close:
            if buffer.starts_with(close):
                return self._end_section(close)
            # An incomplete closing marker is removed, unless the section contains no tool call.
            is_empty_section = buffer.is_final and bool(self._text.tentative)
            if buffer.is_prefix_of(close) and not is_empty_section:
                return self._wait_or_drop(buffer.pos)
        separator = tools.separator.strip()
        if separator and self._writer.num_started:
            if buffer.starts_with(separator):
                self._text.write_markup(buffer.take(len(separator)))
                return State.BETWEEN_CALLS
            # At the end of the message, a short separator such as "," is more likely content.
            is_markup = not buffer.is_final or looks_like_markup(buffer.unread())
            if is_markup and buffer.is_prefix_of(separator):
                return self._wait_or_drop(buffer.pos)
        return self._expect_next_call()

    def _end_section(self, close: str) -> State:
        """Leave the tool section. Write the section as content if it contains no tool call."""
        self._is_in_section = False
        if self._text.tentative:
            return self.reject(len(close), _EMPTY_SECTION)
        self._text.write_markup(self._buffer.take(len(close)))
        return State.CONTENT

    def _expect_next_call(self) -> State:
        """Prepare to read the next tool call.

        Returns:
            CALL_START if a tool call may start at the current position, otherwise CONTENT.
        """
        if self._is_in_section:
            self._expected = ExpectedCall(self._plan.calls, "", is_certain=True)
            return State.CALL_START
        buffer = self._buffer
        for plan in self._plan.bare_calls:
            if any(buffer.starts_with(opening) for opening in plan.body_openings()):
                first_char = buffer.text[buffer.pos]
                self._expected = ExpectedCall(self._plan.bare_calls, first_char, is_certain=False)
                return State.CALL_START
        return State.CONTENT

    # ---- the end of the text ---------------------------------------------------------------------

    def finish_body(self) -> State:
        """End a tool call whose body is incomplete at the message's end. Return the next state."""
        body = self._body
        assert body is not None
        assert self._call is not None
        was_open = self._writer.is_open
        if was_open:
            state = self._recover(self._call)
            if state is not State.BROKEN_CALL:
                return state
        is_incomplete = body.status is MORE and self._is_call_certain
        body.finish()
        if was_open or (self._writer.num_started and body.status is not BROKEN):
            self._body = None
            self._text.end_call()
            self._text.accept_tentative()
            return State.CONTENT
        if is_incomplete and self._text.tentative and not self._is_closed_in_tentative():
            return self._drop_or_reject(0, _NO_CALL)
        return self.reject(0, _NO_CALL)

    def _is_closed_in_tentative(self) -> bool:
        """Return whether the tentative text contains a closing marker of tool calls.

        If so, the tool call was closed before the end of the message, and the tentative text is
        content.
        """
        assert self._call is not None
        tools = self._plan.tools
        section_close = tools.close.strip() if tools is not None else ""
        text = self._text.tentative_text
        markers = (*self._call.closing_markers, section_close)
        return any(marker and marker in text for marker in markers)

    def finish_broken(self) -> None:
        """End a tool call with broken arguments, because the message has ended."""
        if self._writer.is_open:
            self._writer.end(BROKEN_ARGUMENTS)
            self._text.end_call()

    def finish_empty_section(self) -> None:
        """Handle a tool section without a tool call at the end of the message.

        If the text of the section contains a tag, the text is removed. Otherwise the text is
        content.
        """
        if self._text.tentative:
            self._drop_or_reject(0, _EMPTY_SECTION)
