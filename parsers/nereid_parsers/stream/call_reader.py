"""Reads tool calls: their markers, their headers, their bodies and the text between tool calls."""

from __future__ import annotations

from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.call_markers import (
    ClosingMarker,
    IncompleteMarker,
    SectionMarkers,
    match_closing_marker,
)
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.compiled_call import CompiledCall
from nereid_parsers.stream.expected_call import CallStarts, ExpectedCall, MatchedCall
from nereid_parsers.stream.open_call import OpenCall, Outcome
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    is_special_token,
    looks_like_markup,
    skip_whitespace,
)
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.state import State
from nereid_parsers.tool_declarations import JsonObject

# Descriptions of deviations from the format. Events contain these descriptions.
_NO_CALL = "the text is not a tool call"
_NO_CALL_AFTER_MARKER = "no call follows the marker"
_MISSING_MARKER = "the opening marker of the tool call is missing"
_EMPTY_SECTION = "the tool section contains no call"


class CallReader:
    """Reads tool calls and the text between them.

    Each method `read_...` handles one state of the parser. The method reads text from the buffer
    and returns the next state, or None if it needs more text.

    `CallStarts` decides which tool call may start. An `OpenCall` reads the body. The `CallWriter`
    appends the events. The `TextWriter` receives all other text, and stores an opening marker as
    "pending text" until a tool call has started.

    Example: the text `<tool_call>{"name": "f", "arguments": {}}</tool_call>` is read in four steps:

        method      text that the method reads             next state
        open_call   none, but it stores the expected call  CALL_START
        read_start  `<tool_call>`                          CALL_BODY
        read_body   `{"name": "f", "arguments": {}}`       CALL_END
        read_end    `</tool_call>`                         BETWEEN_CALLS
    """

    __slots__ = (
        "_buffer", "_call_writer", "_calls_first", "_closing_markers", "_expected", "_format",
        "_is_in_section", "_last_variant", "_open_call", "_section_markers", "_starts",
        "_text_writer",
    )  # fmt: skip

    def __init__(self, context: ReaderContext, writer: CallWriter) -> None:
        """Create a reader for the text in `context`. The reader passes tool calls to `writer`."""
        # The declaration of the format and the policy.
        self._format = context.format
        self._section_markers = SectionMarkers(context.format.tools)
        self._starts = CallStarts(context.format.calls, writer)
        self._calls_first = context.calls_first  # Whether no tool call may follow content.
        # The objects that store and write text.
        self._buffer = context.buffer
        self._text_writer = context.text
        self._call_writer = writer
        # The position in the message.
        self._is_in_section = False  # Whether the text is between the markers of a tool section.
        self._expected = self._starts.in_section()  # The tool call that may start next.
        # The tool call whose body is being read in the states CALL_BODY and BROKEN_CALL.
        self._open_call: OpenCall | None = None
        # The variant of the last tool call, and the closing markers that may still follow the call.
        self._last_variant: CompiledCall | None = None
        self._closing_markers: tuple[str, ...] = ()

    # ---- transitions from content and headers ----------------------------------------------------

    def open_section(self, marker: str) -> State:
        """Read the opening marker of a tool section, but do not write the marker to the output yet.

        The marker is removed from the output when the first tool call starts.
        """
        self._is_in_section = True
        self._text_writer.store_pending(self._buffer.take(len(marker)))
        return State.BETWEEN_CALLS

    # The next three methods return None if no tool call can start. The marker is then content.

    def open_call(self, marker: str) -> State | None:
        """Prepare to read a tool call that starts with `marker`."""
        return self._expect(self._starts.at_marker(marker))

    def open_call_at_head(self, marker: str) -> State | None:
        """Prepare to read a tool call whose opening marker the model has omitted.

        Example: `<function=` without `<tool_call>` before it.

        Args:
            marker: The first literal of the tool call's header.
        """
        return self._expect(self._starts.at_head(marker))

    def open_unmarked_call(self, opening: str) -> State | None:
        """Prepare to read a tool call that has no marker, but starts with the text `opening`."""
        has_content = self._text_writer.has_content
        return self._expect(self._starts.at_unmarked_opening(opening, has_content))

    def _expect(self, expected: ExpectedCall | None) -> State | None:
        """Set `expected` as the next tool call to read, and return the state CALL_START.

        If `expected` is None, no tool call can start here, so return None.
        """
        if expected is None:
            return None
        self._expected = expected
        return State.CALL_START

    def start_message_call(self, head: Head) -> State:
        """Prepare to read the arguments of a tool call that is a message with the header `head`."""
        variant = self._format.message_call
        assert variant is not None  # Formats with message headers have a message call.
        self._begin_body(MatchedCall(variant, head, is_confirmed=True))
        return State.CALL_BODY

    def close_section(self, marker: str) -> bool:
        """Return whether `marker` closes the tool section. If so, leave the section."""
        closes_section = self._is_in_section and marker in self._section_markers.closes
        if closes_section:
            self._is_in_section = False
        return closes_section

    def is_after_call(self) -> bool:
        """Return whether only markup, such as `</tool_call>`, follows the last tool call."""
        return self.has_calls() and self._text_writer.is_after_marker

    def has_calls(self) -> bool:
        """Return whether a tool call has started in this message."""
        return self._call_writer.num_started > 0

    def add_deviation(self, deviation: str) -> None:
        """Store the description of a deviation from the format. See `CallWriter.add_deviation`."""
        self._call_writer.add_deviation(deviation)

    # ---- text that is not a tool call ------------------------------------------------------------

    def treat_as_content(self, fault: str, *, num_unread_chars: int = 0) -> State:
        """Write text as content, because the text looked like a tool call but is none.

        The text consists of the pending text, which has been read but not written, and of the next
        `num_unread_chars` characters of the buffer. The open tool call is discarded, including the
        descriptions of its deviations from the format. If no tool call has started in the tool
        section, the section is left, because its opening marker is a part of the pending text.

        Args:
            fault: The reason that the event gives for returning this text as content.
            num_unread_chars: The number of unread characters that are content.

        Returns:
            The state in which the text after this content is read.
        """
        self._open_call = None
        self._call_writer.clear_deviations()
        if not self.has_calls():
            self._is_in_section = False
        self._text_writer.write_pending(self._buffer.take(num_unread_chars), fault)
        if self._calls_first and self._text_writer.has_content:
            return State.CONTENT_ONLY
        return State.CONTENT

    def _drop_or_treat_as_content(self, fault: str, *, num_unread_chars: int = 0) -> State:
        """Remove an incomplete tool call at the end of the message, or treat its text as content.

        If the text of the tool call contains a tag, no client can use the text, so the whole rest
        of the message is removed. Otherwise the text is content. Example: at the end of the
        message, `<tool_call>{"na` is removed, and `{"na` is content.

        Args:
            fault: The reason that the event gives for returning this text as content.
            num_unread_chars: For `treat_as_content`: the number of unread characters that are
                content.

        Returns:
            The next state.
        """
        incomplete_call = self._text_writer.pending_text + self._buffer.unread()
        if not looks_like_markup(incomplete_call):
            return self.treat_as_content(fault, num_unread_chars=num_unread_chars)
        self._is_in_section = False
        self._open_call = None
        self._text_writer.drop_pending()
        self._text_writer.write_markup(self._buffer.take_unread())
        return State.CONTENT

    # ---- CALL_START and CALL_BODY ----------------------------------------------------------------

    def read_start(self) -> State | None:
        """Read the opening marker of a tool call, and the text before the arguments.

        Examples:
            `<tool_call>{"` starts a tool call.
            `<tool_call> is a tag` is content, because no tool call follows the marker.
            `<tool_call>{` at the end of the message is an incomplete tool call and is removed.

        Returns:
            The next state, or None if more text is required to decide whether a tool call starts.
        """
        match = self._expected.match(self._buffer, self._call_writer.tools)
        if isinstance(match, MatchedCall):
            return self._read_head(match)
        if match == NEED_MORE:
            return None
        # No tool call starts here, so the text that was taken for the opening marker is content.
        num_chars = len(self._expected.opening)
        if self._is_start_cut_off():
            return self._drop_or_treat_as_content(_NO_CALL_AFTER_MARKER, num_unread_chars=num_chars)
        return self.treat_as_content(_NO_CALL_AFTER_MARKER, num_unread_chars=num_chars)

    def _is_start_cut_off(self) -> bool:
        """Return whether the message ends inside the start of a tool call, as in `<tool_call>{`.

        Inside a tool section, a tool call may lack its opening marker, so the result is True for
        the text `{`, too.
        """
        return self._buffer.is_final and self._expected.is_incomplete(
            self._buffer, includes_unmarked=self._is_in_section
        )

    def _read_head(self, match: MatchedCall) -> State:
        """Read the matched marker and header of a tool call. Return the next state.

        The text is stored as pending text, which is removed from the output when the tool call
        starts. Usually, the next state is CALL_BODY, in which the arguments are read.
        """
        if match.variant.omits_marker:
            self._call_writer.add_deviation(_MISSING_MARKER)
        self._text_writer.store_pending(self._buffer.take_until(match.head.end))
        self._begin_body(match)
        if self._buffer.has_unread():
            return State.CALL_BODY
        # Some readers start the tool call before the body has any text. The state machine would
        # call `read_body` only when more text arrives, so `read_body` is called here.
        return self.read_body() or State.CALL_BODY

    def _begin_body(self, match: MatchedCall) -> None:
        """Create and start a reader for the body of the tool call whose header was matched."""
        body = match.variant.create_reader(
            self._call_writer, match.head, is_confirmed=match.is_confirmed
        )
        self._open_call = OpenCall(match, body, self._buffer, self._text_writer)
        body.begin()

    def read_body(self) -> State | None:
        """Read a part of a tool call's body. The body is the text between the call's markers.

        Example: from `{"name": "f", "arguments": {}}</tool_call>`, the JSON object is read. The
        `OpenCall` passes the tool call to the `CallWriter`, which appends its events.

        Returns:
            The next state, or None if the body has not ended. If the text is not a tool call, the
            text is written as content.
        """
        call = self._open_call
        assert call is not None
        outcome = call.read()
        if outcome is None:
            return None
        if outcome is Outcome.ENDED:
            return self._end_call(call.variant)
        if outcome is Outcome.BROKEN:
            return State.BROKEN_CALL
        return self.treat_as_content(_NO_CALL)

    def read_broken(self) -> State | None:
        """Read arguments that are not valid JSON. See `OpenCall.read_broken`."""
        call = self._open_call
        assert call is not None
        return self._end_call(call.variant) if call.read_broken() else None

    def _end_call(self, variant: CompiledCall) -> State:
        """Prepare to read the closing markers of a tool call whose body has ended.

        Args:
            variant: The declaration of the tool call, which contains these markers.

        Returns:
            The next state. If the tool call is a whole message, this is CONTENT, because the marker
            that ends a message is read in the state CONTENT. Otherwise it is CALL_END.
        """
        self._text_writer.end_call()
        self._text_writer.start_after_call()
        self._open_call = None
        self._last_variant = variant
        self._closing_markers = variant.closing_markers
        return State.CONTENT if variant is self._format.message_call else State.CALL_END

    # ---- CALL_END and BETWEEN_CALLS --------------------------------------------------------------

    def read_end(self) -> State | None:
        """Read the closing markers of a tool call. A model may omit any of these markers.

        White space and superfluous brackets before a closing marker are skipped. Example: with the
        closing markers `</function>` and `</tool_call>`, both `</tool_call>` and `}</tool_call>`
        end the tool call.

        Returns:
            The next state, or None if more text is required. The next state is CALL_END if more
            closing markers may follow.
        """
        buffer = self._buffer
        match = match_closing_marker(self._closing_markers, buffer.text, buffer.pos)
        if isinstance(match, ClosingMarker):
            self._text_writer.write_markup(buffer.take_until(match.end))
            self._closing_markers = match.later_markers
            return State.CALL_END if match.later_markers else State.BETWEEN_CALLS
        if isinstance(match, IncompleteMarker):
            return self._wait_or_drop(match.start)
        return self._start_next_object() or State.BETWEEN_CALLS

    def _wait_or_drop(self, start: int) -> State | None:
        """If more text can arrive, return None. The reader then waits for the rest of the marker.

        If the message has ended, remove the incomplete marker instead, and return the next state.
        """
        if not self._buffer.is_final:
            return None
        if start < len(self._buffer.text):
            self._text_writer.write_markup(self._buffer.take_unread())
        return State.BETWEEN_CALLS

    def _start_next_object(self) -> State | None:
        """Start another tool call if a second JSON object follows between the same markers.

        Example: in `<tool_call>{..}{..}</tool_call>`, no marker separates the two JSON objects.

        Returns:
            The next state, or None if no tool call starts here.
        """
        variant = self._last_variant
        if variant is None or not self._may_repeat_object(variant):
            return None
        object_start = skip_whitespace(self._buffer.text, self._buffer.pos)
        if not self._buffer.text.startswith("{", object_start):
            return None
        self._text_writer.store_whitespace(self._buffer.take_until(object_start))
        # No marker precedes this object, so its name must be the name of an offered tool.
        return self._read_head(MatchedCall(variant, Head(object_start), is_confirmed=False))

    def _may_repeat_object(self, variant: CompiledCall) -> bool:
        """Return whether another JSON object may precede the closing marker of a tool call."""
        is_json_object = isinstance(variant.call.body, JsonObject)
        has_opening_marker = bool(variant.call.open.strip())
        expects_closing_marker = bool(self._closing_markers)
        return is_json_object and has_opening_marker and expects_closing_marker

    def read_between(self) -> State | None:
        """Read the text after a tool call, or after the opening marker of a tool section.

        This text is white space, a separator between two tool calls, or the closing marker of the
        tool section. Example: in `, {"name": `, the separator `,` is read, and `{` starts another
        tool call. The text `Hello` is content.

        Returns:
            The next state, or None if more text is required.
        """
        buffer = self._buffer
        whitespace_end = skip_whitespace(buffer.text, buffer.pos)
        self._text_writer.store_whitespace(buffer.take_until(whitespace_end))
        if not buffer.has_unread():
            return None
        close_end = self._match_section_close()
        if close_end == NEED_MORE:
            return self._wait_or_drop(buffer.pos)
        if close_end != NO_MATCH:
            return self._end_section(buffer.text[buffer.pos : close_end])
        separator_end = self._match_separator()
        if separator_end == NEED_MORE:
            return self._wait_or_drop(buffer.pos)
        if separator_end != NO_MATCH:
            self._text_writer.write_markup(buffer.take_until(separator_end))
            return State.BETWEEN_CALLS
        return self._start_call_or_content()

    def _start_call_or_content(self) -> State:
        """Return the state that reads the text after a tool call or an opening marker.

        This text starts neither with a separator nor with a closing marker. Inside a tool section,
        only a tool call can follow. Otherwise a tool call without a marker or content follows.
        """
        if self._is_in_section:
            expected: ExpectedCall | None = self._starts.in_section()
        else:
            expected = self._starts.after_call(self._buffer)
        return self._expect(expected) or State.CONTENT

    def _match_section_close(self) -> int:
        """Match the section's closing marker. Return the end position, NEED_MORE or NO_MATCH."""
        if not self._is_in_section:
            return NO_MATCH
        return self._section_markers.match_close(self._buffer, is_empty=self._is_section_empty())

    def _is_section_empty(self) -> bool:
        """Return whether the section has no tool call yet.

        The opening marker of the section is pending text until a tool call starts.
        """
        return bool(self._text_writer.pending)

    def _match_separator(self) -> int:
        """Match a separator after a tool call. Return the end position, NEED_MORE or NO_MATCH."""
        has_calls = self.has_calls()
        return self._section_markers.match_separator(self._buffer) if has_calls else NO_MATCH

    def _end_section(self, close: str) -> State:
        """Leave the tool section, and read its closing marker `close`. Return the next state.

        The markers of a section without tool calls are content, unless the closing marker is a
        special token, because ordinary content never contains such a token. With the policy
        CALLS_FIRST, special tokens are content too. Examples: both markers of
        `<tool_calls></tool_calls>` are content. Both markers of `<|calls_begin|><|calls_end|>` are
        removed.
        """
        self._is_in_section = False
        if self._is_section_empty():
            may_be_content = self._calls_first or not is_special_token(close)
            if may_be_content:
                return self.treat_as_content(_EMPTY_SECTION, num_unread_chars=len(close))
            self._text_writer.drop_pending()  # This text is the opening marker of the section.
        self._text_writer.write_markup(self._buffer.take(len(close)))
        return State.CONTENT

    # ---- the end of the text ---------------------------------------------------------------------

    def finish_body(self) -> State:
        """End a tool call whose body is incomplete when the message ends. Return the next state.

        Examples: the call `{"name": "f", "arguments": {"a": 1` ends with incomplete arguments. The
        start of a tool call, `<tool_call>{"na`, is removed. Other text is not a tool call, so it is
        content.
        """
        call = self._open_call
        assert call is not None
        if call.end_at_stored_marker():
            return self._end_call(call.variant)
        if call.finish():
            self._open_call = None
            return State.CONTENT
        if call.is_start_cut_off(self._section_markers.closes):
            return self._drop_or_treat_as_content(_NO_CALL)
        return self.treat_as_content(_NO_CALL)

    def finish_broken(self) -> None:
        """At the end of the message, end a tool call whose arguments are not valid JSON."""
        if self._open_call is not None:
            self._open_call.finish_broken()

    def finish_empty_section(self) -> None:
        """At the end of the message, handle the text of a tool section that has no tool calls.

        If the text of the section contains a tag, this text is removed. Otherwise it is content.
        """
        if self._text_writer.pending:
            self._drop_or_treat_as_content(_EMPTY_SECTION)
