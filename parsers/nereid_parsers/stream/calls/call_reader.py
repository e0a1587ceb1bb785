"""Reads tool calls, including the markers around each call: `<tool_call>{..}</tool_call>`."""

from __future__ import annotations

from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.calls.call_markers import (
    CallSection,
    ClosingMarker,
    NoMarker,
    match_closing_marker,
)
from nereid_parsers.stream.calls.expected_call import CallStarts, ExpectedCall, MatchedCall
from nereid_parsers.stream.calls.open_call import OpenCall, Outcome
from nereid_parsers.stream.calls.repeated_opening import (
    find_repeated_opening,
    position_after_opening,
)
from nereid_parsers.stream.marker_kinds import MarkerKind
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    looks_like_markup,
    skip_whitespace,
)
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.state import State

# Texts for the `reason` of an event. They describe how the model's text deviates from its usual
# syntax.
_NO_CALL = "the text is not a tool call"
_NO_CALL_AFTER_MARKER = "no call follows the marker"
_MISSING_MARKER = "the opening marker of the tool call is missing"
_REPEATED_MARKER = "an opening marker before the tool call is repeated"


class CallReader:
    """Reads tool calls, including the markers around each tool call: `<call>{..}</call>`.

    A `BetweenCallsReader` reads the text between two tool calls.

    Each method `read_...` handles one state of the parser. The method reads text from the buffer
    and returns the next state, or None if the method needs more text.

    `CallStarts` decides which tool call may start. An `OpenCall` reads the body. The `CallWriter`
    appends the events. The `TextWriter` receives all other text, and stores an opening marker as
    "pending text" until a tool call has started.

    For example, `<tool_call>{"name": "f", "arguments": {}}</tool_call>` is read in four steps:

        method      text that the method reads             next state
        open_call   none, but it stores the expected call  CALL_START
        read_start  `<tool_call>`                          CALL_BODY
        read_body   `{"name": "f", "arguments": {}}`       CALL_END
        read_end    `</tool_call>`                         BETWEEN_CALLS

    Attributes:
        section: The tool section, which is the part of a message that contains all tool calls.
        starts: Decides which forms of a tool call may start at a position.
    """

    __slots__ = (
        "_buffer", "_call", "_call_writer", "_calls_must_come_first", "_closing_markers",
        "_expected", "_format", "_text_writer", "section", "starts",
    )  # fmt: skip

    # The current tool call, or the last tool call if none is open. This attribute is set when the
    # arguments of a tool call start.
    _call: OpenCall
    # The tool call that may start next. Used only in the state CALL_START. The method `expect` sets
    # this attribute before each transition to this state.
    _expected: ExpectedCall

    def __init__(self, context: ReaderContext, writer: CallWriter) -> None:
        """Create a reader of tool calls, such as `<tool_call>{"name": "f"}</tool_call>`."""
        self._buffer = context.buffer
        self._text_writer = context.text
        self._call_writer = writer
        self._format = context.format
        # If true, no tool call can follow content: in `Hi<call>f()</call>`, all text is content.
        self._calls_must_come_first = context.calls_must_come_first
        self.starts = CallStarts(context.format.calls, writer)  # Its methods give `_expected`.
        self.section = CallSection(context.format.tools)
        # The markers, such as `</tool_call>`, that may still follow the last tool call.
        self._closing_markers: tuple[str, ...] = ()

    # ---- transitions from content and headers ----------------------------------------------------

    def open_section(self, marker: str) -> State:
        """Read a marker that precedes all tool calls (`<tool_calls>`). Return BETWEEN_CALLS.

        The marker becomes pending text: it is removed from the output when a tool call starts, and
        is content if no tool call follows.
        """
        self.section.is_open = True
        self._text_writer.store_pending(self._buffer.take(len(marker)))
        return State.BETWEEN_CALLS

    def open_call(self, marker: str) -> State:
        """Prepare to read a tool call that starts with `marker`, for example with `<tool_call>`.

        The marker stays unread, because `read_start` reads the marker. Return the state CALL_START.
        """
        return self.expect(self.starts.at_marker(marker))

    def open_call_at_head(self, marker: str) -> State | None:
        """Prepare to read a tool call whose opening marker the model has omitted.

        Example: the model writes `<function=f>` instead of `<tool_call><function=f>`. The text
        stays unread, because `read_start` reads the header. `marker` is the first fixed text of the
        header, for example `<function=`.

        Return the state CALL_START. Return None if no tool call can start here. The caller then
        writes `marker` as content.
        """
        expected = self.starts.at_head(marker)
        return None if expected is None else self.expect(expected)

    def open_unmarked_call(self, opening: str) -> State | None:
        """Prepare to read a tool call that starts with `opening`, such as `{`, instead of a marker.

        Return the state CALL_START. Return None if no tool call can start here. The caller then
        writes `opening` as content.
        """
        has_content = self._text_writer.has_content
        expected = self.starts.at_unmarked_opening(opening, has_content)
        return None if expected is None else self.expect(expected)

    def expect(self, expected: ExpectedCall) -> State:
        """Store the tool call that may start next, and return the state CALL_START.

        In this state, `read_start` compares the unread text with the stored tool call.
        """
        self._expected = expected
        return State.CALL_START

    def start_message_call(self, head: Head) -> State:
        """Create the reader for the arguments of a message that is a tool call.

        The message header `head` has been read. The header names the function (`head.name`).
        """
        variant = self._format.message_call
        assert variant is not None  # Only formats without message headers have none.
        self._begin_body(MatchedCall(variant, head, is_confirmed=True))
        return State.CALL_BODY

    def close_section(self, marker: str) -> bool:
        """Return whether `marker`, such as `</tool_calls>`, closes the open section of tool calls.

        If so, set `section.is_open` to False.
        """
        closes_section = self.section.is_open and marker in self.section.closes
        if closes_section:
            self.section.is_open = False
        return closes_section

    def is_after_call(self) -> bool:
        """Return whether only markup, such as `</tool_call>`, has followed the last tool call."""
        return self.has_calls() and self._text_writer.is_after_marker

    def has_calls(self) -> bool:
        """Return whether a tool call has started in this message."""
        return self._call_writer.num_started > 0

    def add_deviation(self, deviation: str) -> None:
        """Store a description of how the text deviates from the model's usual syntax.

        The description becomes a part of the end event of the open or of the next tool call.
        """
        self._call_writer.add_deviation(deviation)

    # ---- text that is not a tool call ------------------------------------------------------------

    def treat_as_content(self, reason: str, *, num_unread_chars: int = 0) -> State:
        """Write text as content. The text looked like a tool call, but is not a tool call.

        The text consists of the pending text, which has been read but not written, and of the next
        `num_unread_chars` characters of the buffer. Example: `<tool_call>` is pending, and ` is` is
        unread. With `num_unread_chars=3`, the content `<tool_call> is` is written.

        The content event contains the `reason` why the text is not a tool call. Return the state in
        which the text after this content is read.
        """
        self._forget_supposed_call()
        self._text_writer.write_pending(self._buffer.take(num_unread_chars), reason)
        return self._state_of_content()

    def _forget_supposed_call(self) -> None:
        """Reset the state of the reader, because the text of a supposed tool call is content.

        The descriptions of the deviations are deleted. If no tool call has started in this message,
        a marker before the text, such as `<tool_calls>`, is also content, so no section is open.
        """
        self._call_writer.clear_deviations()
        if not self.has_calls():
            self.section.is_open = False

    def _state_of_content(self) -> State:
        """Return CONTENT_ONLY if all later text is content. Otherwise return CONTENT.

        All later text is content if the policy allows tool calls only before the content, and if
        content has been written. White space is not content, so a tool call may follow it.
        """
        allows_no_calls = self._calls_must_come_first and self._text_writer.has_content
        return State.CONTENT_ONLY if allows_no_calls else State.CONTENT

    def has_tag_in_unwritten_text(self) -> bool:
        """Return whether the unwritten text contains a tag, such as `<tool_call>`.

        The message has ended inside a tool call or a message header. The unwritten text consists of
        the pending text and the unread text. No client can use a part of a tool call with a tag, so
        the caller removes such a text. Examples: the result is True for `<tool_call>{"na`. The
        result is False for `{"na`, which may be content.
        """
        return looks_like_markup(self._text_writer.pending_text + self._buffer.unread())

    def drop_unwritten_text(self) -> State:
        """Discard all text that has not been written to the output. Return the state CONTENT.

        The message has ended, and this text is an incomplete tool call, such as `<tool_call>{"na`,
        or an incomplete message header.
        """
        self._text_writer.drop_pending()
        self._text_writer.drop_markup(self._buffer.take_unread())
        return State.CONTENT

    # ---- CALL_START and CALL_BODY ----------------------------------------------------------------

    def read_start(self) -> State | None:
        """Read the start of a tool call, such as `<tool_call><function=f>`, but not the arguments.

        `_expected` is the tool call that may start here, and the unread text decides:

            unread text              next state
            `<tool_call>{"`          CALL_BODY, because a tool call starts
            `<tool_call>{`           None, because more text is required. At the end of the message,
                                     this text is removed, and the next state is CONTENT.
            `<tool_call><tool_call>` CALL_START: the model has repeated the marker. The first marker
                                     is content if no tool call follows the second marker.
            `<tool_call> is a tag`   the state after content, because no tool call starts. The
                                     marker `<tool_call>` is written as content.

        Return the next state, or None if more text is required.
        """
        match = self._expected.match(self._buffer, self._call_writer.tools)
        if isinstance(match, MatchedCall):
            return self._read_head(match)
        if match is NEED_MORE:  # At the end of the message, the result is NO_MATCH instead.
            return None
        num_read_chars = len(self._text_writer.pending_text)
        kinds = self._format.calls.kinds
        next_opening = find_repeated_opening(self._expected, self._buffer, kinds, num_read_chars)
        if isinstance(next_opening, str):
            return self._read_repeated_opening(next_opening)
        return None if next_opening is NEED_MORE else self._reject_start()

    def _reject_start(self) -> State:
        """Give up the expected tool call, because no tool call starts here. Return the next state.

        If the message ends inside this text, as in `<tool_call>{`, the text is removed. Otherwise,
        the text is content, as in `<tool_call> is a tag`.
        """
        # No client can use `<tool_call>{` at the end of the message. But `{` alone may be content.
        if self._is_start_cut_off() and self.has_tag_in_unwritten_text():
            return self.drop_unwritten_text()
        num_opening_chars = len(self._expected.unread_opening)  # Such as `<tool_call>`.
        return self.treat_as_content(_NO_CALL_AFTER_MARKER, num_unread_chars=num_opening_chars)

    def _read_repeated_opening(self, next_opening: str) -> State:
        """Expect a tool call at `next_opening`, a marker that follows another opening marker.

        Example: the model has written `<call><call>`, and `next_opening` is the second `<call>`.
        The first `<call>` becomes pending text. The pending text is removed from the output if a
        tool call follows `next_opening`. Otherwise, both markers are content. Return the next
        state.
        """
        self._store_unread_opening()
        # If a complete tool call precedes `next_opening`, as in `<calls>f()<call>`, no marker is
        # repeated. There is then no pending text.
        is_marker_repeated = bool(self._text_writer.pending_text)
        if is_marker_repeated:
            self._call_writer.add_deviation(_REPEATED_MARKER)
        if self._format.calls.kinds[next_opening] is MarkerKind.OPEN_SECTION:
            return self.open_section(next_opening)
        return self.open_call(next_opening)

    def _store_unread_opening(self) -> None:
        """Add the unread opening marker, and the white space after it, to the pending text.

        If the marker has already been read and stored, only white space is added.
        """
        next_start = position_after_opening(self._expected, self._buffer)
        if next_start > self._buffer.pos:
            self._text_writer.store_pending(self._buffer.take_until(next_start))

    def _is_start_cut_off(self) -> bool:
        """Return whether the message ends inside the start of a tool call, as in `<tool_call>{`.

        Inside a tool section, such as `<tool_calls>{`, a tool call may lack its own opening marker,
        so the result is True for `{` alone, too.
        """
        return self._buffer.is_final and self._expected.is_incomplete(
            self._buffer, includes_unmarked=self.section.is_open
        )

    def _read_head(self, match: MatchedCall) -> State:
        """Read the matched start of a tool call, and create the reader for its body.

        Example: in `<call>f{"a": 1}`, the start `<call>f` is read. The TextWriter stores the start
        as pending text, because the body reader decides whether the text is a tool call. The body
        `{"a": 1}` stays unread, and the next state is CALL_BODY.

        If no text follows the start yet, the body reader may still start or reject the tool call,
        for example because the request does not offer `f`. Return the state that results.
        """
        if match.variant.lacks_opening_marker:  # Such as `<function=f>` without `<tool_call>`.
            self._call_writer.add_deviation(_MISSING_MARKER)
        self._text_writer.store_pending(self._buffer.take_until(match.head.end))
        self._begin_body(match)
        if self._buffer.has_unread():
            return State.CALL_BODY
        # In the state CALL_BODY, the parser calls `read_body` only if there is unread text.
        next_state = self.read_body()
        return State.CALL_BODY if next_state is None else next_state

    def _begin_body(self, match: MatchedCall) -> None:
        """Store the matched tool call as `_call`, and create the reader for its arguments.

        The opening marker and the header of this tool call have been read.
        """
        body = match.variant.create_reader(
            self._call_writer, match.head, is_confirmed=match.is_confirmed
        )
        self._call = OpenCall(match, body, self._buffer, self._text_writer)
        body.begin()

    def read_body(self) -> State | None:
        """Read the next part of a tool call's body, which is the text between the markers.

        Examples after the marker `<tool_call>`:

            text                                     next state
            `{"name": "f", "argu`                    None, because the body continues
            `{"name": "f", "arguments": {}}`         CALL_END
            `{"name": "f", "arguments": {"a": [}}`   BROKEN_CALL: the arguments are not valid JSON
            `{"x": 1}`                               CONTENT: the text has no name

        Return the next state, or None if the body continues.
        """
        match self._call.read():
            case None:
                return None
            case Outcome.ENDED:
                return self._end_call()
            case Outcome.BROKEN:
                return State.BROKEN_CALL
            case Outcome.NO_CALL:
                return self.treat_as_content(_NO_CALL)

    def read_broken(self) -> State | None:
        """Read the rest of the invalid arguments, up to the next marker.

        The rest of the arguments is written unchanged. Example: in `{"a": x}</call>`, `x` is not
        valid, and `x}` is the rest. Return the next state, or None if the marker has not arrived.
        """
        has_ended = self._call.read_invalid_rest()
        return self._end_call() if has_ended else None

    def _end_call(self) -> State:
        """Record that the arguments of a tool call have ended. Return the next state.

        The next state is CALL_END, in which the closing markers are read. If the tool call is a
        whole message, the next state is CONTENT, in which the marker that ends a message is read.
        """
        variant = self._call.variant
        self._text_writer.end_traced_call()  # The trace function receives the tool call's text.
        self._text_writer.treat_call_as_marker()  # Blank lines after a tool call are removed.
        self._closing_markers = variant.closing_markers  # Only used in the state CALL_END.
        is_whole_message = variant is self._format.message_call
        return State.CONTENT if is_whole_message else State.CALL_END

    # ---- CALL_END --------------------------------------------------------------------------------

    def read_end(self) -> State | None:
        """Read the next closing marker after a tool call's arguments, such as `</tool_call>`.

        `_closing_markers` contains the markers that may follow. Examples for the markers `</f>` and
        `</call>`:

            unread text   next state      reason
            `</f>`        CALL_END        `</call>` may follow.
            `}</call>`    BETWEEN_CALLS   No marker may follow. The superfluous bracket is removed
                                          together with the marker.
            `</ca`        None            The rest of the marker may still arrive. At the end of the
                                          message, `</ca` is removed.
            `{"name"`     CALL_BODY       A second tool call precedes the markers.
            `Hi`          BETWEEN_CALLS   The model has omitted the markers.

        Return the next state, or None if more text is required.
        """
        buffer = self._buffer
        # Remove the white space from the buffer now. Otherwise, the search for a marker would read
        # the white space again whenever more text arrives.
        whitespace_end = skip_whitespace(buffer.text, buffer.pos)
        self._text_writer.store_whitespace(buffer.take_until(whitespace_end))
        if not buffer.has_unread():
            return None
        match match_closing_marker(self._closing_markers, buffer):  # Skips a bracket: `}</call>`.
            case ClosingMarker(end, later_markers):
                self._text_writer.drop_markup(buffer.take_until(end))
                self._closing_markers = later_markers
                return State.CALL_END if later_markers else State.BETWEEN_CALLS
            case NoMarker.INCOMPLETE:
                return None
            case NoMarker.CUT_OFF:
                return self.drop_incomplete_marker()
            case NoMarker.OTHER_TEXT:
                return self._start_second_object_or_leave()

    def drop_incomplete_marker(self) -> State:
        """Remove the unread text, which is an incomplete marker such as `</tool_c`.

        The message has ended inside this marker. Return the state BETWEEN_CALLS.
        """
        self._text_writer.drop_markup(self._buffer.take_unread())
        return State.BETWEEN_CALLS

    def _start_second_object_or_leave(self) -> State:
        """If a second JSON object follows, as in `<call>{..}{..}</call>`, start its tool call.

        The text follows the first tool call instead of a closing marker. Return the state in which
        the second object is read. For any other text, return BETWEEN_CALLS.
        """
        is_second_object = self._call.variant.may_repeat_object and self._buffer.starts_with("{")
        if not is_second_object:
            return State.BETWEEN_CALLS
        # `is_confirmed=False`: no marker directly precedes the second object, so it may be ordinary
        # text. It is a tool call only if it names a function that the request offers.
        head = Head(end=self._buffer.pos)  # An empty header, because the object starts here.
        return self._read_head(MatchedCall(self._call.variant, head, is_confirmed=False))

    # ---- the end of the text ---------------------------------------------------------------------

    def finish_body(self) -> State:
        """End the current tool call, because the message has ended. Return the next state.

        Examples of messages, in the order of the code:

            `f{"a": "x}</call>`   A quote is missing. The tool call ends before `</call>`, which is
                                  read next.
            `f{"a": 1`            The tool call ends with incomplete arguments.
            `<call>{"na`          No tool call has started. The text is removed, because no client
                                  can use an incomplete tool call with a tag.
            `<call>{"x</call>`    No tool call has started, but the text is not cut off, because the
                                  closing marker has arrived. The text is content.
            `{"na`                The text contains no tag. It is content.
        """
        has_ended_at_marker = self._call.end_at_marker_in_arguments()
        if has_ended_at_marker:
            return self._end_call()
        has_ended = self._call.finish()
        if has_ended:
            return State.CONTENT
        is_cut_off = self._call.is_start_cut_off(section_closes=self.section.closes)
        if is_cut_off and self.has_tag_in_unwritten_text():
            return self.drop_unwritten_text()
        return self.treat_as_content(_NO_CALL)

    def finish_broken(self) -> None:
        """At the end of the message, end an open tool call whose arguments are not valid JSON."""
        self._call.finish_broken()
