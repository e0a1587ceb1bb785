"""Reads the text after a tool call: white space, a separator, or the marker after all calls."""

from __future__ import annotations

from nereid_parsers.stream.calls.call_markers import NoMarker
from nereid_parsers.stream.calls.call_reader import CallReader
from nereid_parsers.stream.marker_kinds import MarkerKind
from nereid_parsers.stream.pattern_matching import is_special_token, skip_whitespace
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.state import State

# If no tool call follows a marker such as `<tool_calls>`, the parser returns the marker as content.
# This text is the `reason` of the content event.
_NO_CALL_IN_SECTION = "the tool section contains no call"


class BetweenCallsReader:
    """Reads the text after a tool call, or after a marker such as `<tool_calls>`.

    A tool section is the part of a message that contains all tool calls. Example: in
    `<calls>{"name": "f"}, {"name": "g"}</calls>`, this reader reads `, ` and `</calls>`. The
    `CallReader` reads the two objects.
    """

    __slots__ = (
        "_buffer", "_call_reader", "_calls_must_come_first", "_content_markers", "_section",
        "_starts", "_text_writer",
    )  # fmt: skip

    def __init__(self, context: ReaderContext, calls: CallReader) -> None:
        """Create a reader for the text after a tool call, such as `, ` or `</tool_calls>`."""
        self._buffer = context.buffer
        self._text_writer = context.text
        self._content_markers = context.format.content_markers
        self._call_reader = calls
        # If true, all text after the start of the content is content, even `<call>` after `Hi`.
        self._calls_must_come_first = context.calls_must_come_first
        # The part of the message between markers such as `<tool_calls>` and `</tool_calls>`.
        self._section = calls.section
        # Decides which forms of a tool call may come next in the text.
        self._starts = calls.starts

    def read(self) -> State | None:
        """Read white space, and then a marker such as `</tool_calls>` or a separator such as `, `.

            unread text                         example          next state
            closing marker of all tool calls    `</tool_calls>`  CONTENT
            separator between two tool calls    `, `             BETWEEN_CALLS
            other text, which stays unread      `{"name"`        CALL_START or CONTENT

        Return the next state, or None if more text is required.
        """
        buffer = self._buffer
        whitespace_end = skip_whitespace(buffer.text, buffer.pos)
        self._text_writer.store_whitespace(buffer.take_until(whitespace_end))
        if not buffer.has_unread():
            return None
        match self._match_close():
            case int(close_end):
                return self._end_section(buffer.text[buffer.pos : close_end])
            case NoMarker.INCOMPLETE:
                return None
            case NoMarker.CUT_OFF:
                return self._call_reader.drop_incomplete_marker()
            case NoMarker.OTHER_TEXT:
                return self._read_separator_or_text()

    def _match_close(self) -> int | NoMarker:
        """Return the end of the closing marker `</tool_calls>` in the unread text.

        If no section of tool calls is open, no closing marker can follow: return OTHER_TEXT.
        """
        if not self._section.is_open:
            return NoMarker.OTHER_TEXT
        follows_call = not self._is_after_opening_marker()
        return self._section.match_close(self._buffer, follows_call=follows_call)

    def _read_separator_or_text(self) -> State | None:
        """Read the separator between two tool calls, such as `, `. Any other text stays unread.

        After a separator, the next state is BETWEEN_CALLS. Before other text, the next state is
        CALL_START or CONTENT. Return the next state, or None if more text is required.
        """
        match self._match_separator():
            case int(separator_end):
                self._text_writer.drop_markup(self._buffer.take_until(separator_end))
                return State.BETWEEN_CALLS
            case NoMarker.INCOMPLETE:
                return None
            case NoMarker.CUT_OFF:
                return self._call_reader.drop_incomplete_marker()
            case NoMarker.OTHER_TEXT:
                return self._select_state_for_text()

    def _match_separator(self) -> int | NoMarker:
        """Return the end of the separator between two tool calls in the unread text.

        No separator can precede the first tool call, so the result is then OTHER_TEXT.
        """
        if not self._call_reader.has_calls():
            return NoMarker.OTHER_TEXT
        return self._section.match_separator(self._buffer)

    def _is_after_opening_marker(self) -> bool:
        """Return True after the opening marker `<tool_calls>`, until the first tool call starts.

        The opening marker is pending text until the first tool call starts, because it is content
        if no tool call follows. Between two tool calls, no text is pending.
        """
        return bool(self._text_writer.pending_text)

    def _select_state_for_text(self) -> State | None:
        """Return CALL_START if the unread text may be a tool call, otherwise CONTENT.

        Before CALL_START, the expected tool call is passed to the CallReader. Examples: after
        `<tool_calls>`, only a tool call can follow. After a tool call without such a marker,
        `{"name"` may start another tool call, and `Hello` is content.

        Return None if more text is required.
        """
        if self._section.is_open:  # The marker `</tool_calls>` has not been read.
            return self._call_reader.expect(self._starts.in_section())
        expected = self._starts.after_call(self._buffer)
        if expected is None:
            return State.CONTENT
        # A marker that ends the message, such as `[/assistant]`, may start like a tool call.
        text_end, marker = self._content_markers.find(self._buffer)
        is_at_marker = text_end == self._buffer.pos
        if is_at_marker and not marker:  # Only a part of a marker has arrived.
            return None
        if is_at_marker and self._content_markers.kinds[marker] is MarkerKind.END:
            return State.CONTENT
        return self._call_reader.expect(expected)

    def _end_section(self, close: str) -> State:
        """Read `close`, the marker after all tool calls, such as `</calls>`. Return the next state.

        If a tool call precedes `close`, the marker is removed from the output. If no tool call
        precedes `close`, the opening marker is still pending, and `_end_empty_section` decides
        whether the two markers are content.
        """
        self._section.is_open = False
        if self._is_after_opening_marker():
            return self._end_empty_section(close)
        self._text_writer.drop_markup(self._buffer.take(len(close)))
        return State.CONTENT

    def _end_empty_section(self, close: str) -> State:
        """End a section without tool calls, such as `<calls></calls>`. Return the next state.

        The opening marker is pending text, and the closing marker `close` is unread:

            `<calls></calls>`          Both markers are written as content.
            `<|calls|><|calls_end|>`   Both markers are removed, because ordinary text contains no
                                       special tokens. With the policy CALLS_FIRST, both markers are
                                       content, because only tool calls are removed from the output.
        """
        may_remove_tokens = not self._calls_must_come_first
        if may_remove_tokens and is_special_token(close):
            self._text_writer.drop_pending()
            self._text_writer.drop_markup(self._buffer.take(len(close)))
            return State.CONTENT
        return self._call_reader.treat_as_content(
            reason=_NO_CALL_IN_SECTION, num_unread_chars=len(close)
        )

    def finish(self) -> None:
        """Handle a message that ends after an opening marker, before any tool call starts.

        Examples: the marker `<tool_calls>` is removed from the output, because it is a tag. The
        marker `TOOLS:` is written as content, because it is ordinary text. The text after the
        marker is treated in the same way. If a tool call has started, do nothing.
        """
        if not self._is_after_opening_marker():
            return
        if self._call_reader.has_tag_in_unwritten_text():
            self._call_reader.drop_unwritten_text()
        else:
            self._call_reader.treat_as_content(reason=_NO_CALL_IN_SECTION)
