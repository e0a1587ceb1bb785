"""Reads message headers, which show whether a message is reasoning, content or a tool call."""

from __future__ import annotations

from nereid_parsers.declarations import Stage
from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.calls.call_reader import CallReader
from nereid_parsers.stream.compiled.compiled_header import CompiledHeader
from nereid_parsers.stream.pattern_matching import NEED_MORE
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.state import State

# If no header follows a message start marker, such as `<|start|>`, the content event has this
# `reason`.
_NO_HEADER = "no header follows the marker"


class HeaderReader:
    """Reads the start of a message, such as `<|start|>assistant<|channel|>final<|message|>`.

    Example: of `<|start|>assistant<|channel|>final<|message|>Hi`, the marker is
    `<|start|>assistant`, and the header is `<|channel|>final<|message|>`. Until the whole header
    has been read, the TextWriter stores the marker as pending text. The pending text is content if
    no header follows.
    """

    __slots__ = (
        "_buffer", "_call_reader", "_calls_must_come_first", "_format",
        "_has_read_start_marker", "_text_writer",
    )  # fmt: skip

    def __init__(self, context: ReaderContext, calls: CallReader) -> None:
        """Create a reader for message headers. `calls` reads messages that are tool calls."""
        self._format = context.format
        self._buffer = context.buffer
        self._text_writer = context.text
        self._call_reader = calls
        # If true, all text after the start of the content is content, even `<call>` after `Hi`.
        self._calls_must_come_first = context.calls_must_come_first
        # Whether a message start marker, such as `<|start|>assistant`, has been read in the output.
        # If the prompt ends with such a marker, the output starts with the header that follows the
        # marker.
        self._has_read_start_marker = False

    def read_start_marker(self, marker: str) -> State:
        """Read the start marker of a message, and return the state HEADER.

        The TextWriter stores the marker as pending text, which is removed if a header follows.
        """
        self._has_read_start_marker = True
        self._text_writer.store_pending(self._buffer.take(len(marker)))
        return State.HEADER

    def read(self) -> State | None:
        """Read the header of a message, such as `<|channel|>final<|message|>`.

        A marker, such as `<|start|>assistant`, precedes the header of each message. There are three
        cases, in the order of the code:

        - The marker of this message has been read. The header is read now.
        - The output starts with the marker. The marker is read now, and the next state is HEADER.
        - The prompt ends with the marker, so the output starts with the header, which is read now.

        Return the next state, or None if more text is required.
        """
        if self._has_read_start_marker:
            return self._read_header()
        marker = self._format.message_start
        if self._buffer.starts_with(marker):
            return self.read_start_marker(marker)
        may_become_marker = self._buffer.is_prefix_of(marker) and not self._buffer.is_final
        return None if may_become_marker else self._read_header()

    def _read_header(self) -> State | None:
        """Read a message header such as `<|channel|>final<|message|>`. Return the next state.

        Examples for the unread text, in the order of the code:

            `<|channel|>final<|message|>Hi`   The header is read. The next state is CONTENT.
            `<|channel|>fin`                  More text is required, so the result is None. At the
                                              end of the output, the incomplete header is removed.
            `Hi`                              No header matches, so the text is content.
        """
        buffer = self._buffer
        for route in self._format.routes:
            head = route.match(buffer.text, buffer.pos, buffer.is_final)
            if isinstance(head, Head):
                return self._enter_message(route, head)
            if head is NEED_MORE:  # This route takes precedence over the later routes.
                return None
        # At the end of the output, the result for an incomplete header is NO_MATCH.
        if self._is_header_cut_off():
            return self._call_reader.drop_unwritten_text()
        return self._call_reader.treat_as_content(_NO_HEADER)

    def _is_header_cut_off(self) -> bool:
        """Return whether the output ends inside a message header, such as `<|channel|>fin`.

        No complete header matches the unread text. Content, such as `Hi`, does not start with the
        first fixed text of a header, here `<|channel|>`.
        """
        buffer = self._buffer
        return buffer.is_final and any(
            route.has_started(buffer.text, buffer.pos) for route in self._format.routes
        )

    def _enter_message(self, route: CompiledHeader, head: Head) -> State:
        """Remove the start marker and the header of a message, and return the next state.

        Example: `<|start|>assistant` and the header `<|channel|>final<|message|>` are removed. The
        next state is CONTENT, in which the text after the header is read.

            message           next state
            tool call         CALL_BODY
            late tool call    CONTENT_ONLY. The header stays unread, because it is content.
            reasoning         REASONING
            content           CONTENT, or PLAIN_MESSAGE if the message contains no tool calls

        A tool call is late if content precedes the tool call, but the policy requires that all tool
        calls precede the content.
        """
        self._text_writer.drop_pending()  # The start marker of the message, which has been read.
        is_late = self._calls_must_come_first and self._text_writer.has_content
        if route.stage is Stage.CALLS and is_late:
            return State.CONTENT_ONLY
        self._text_writer.drop_markup(self._buffer.take_until(head.end))
        match route.stage:
            case Stage.CALLS:
                return self._call_reader.start_message_call(head)
            case Stage.REASONING:
                return State.REASONING
            case Stage.CONTENT:
                return State.CONTENT if route.has_calls else State.PLAIN_MESSAGE

    def finish(self) -> None:
        """If the output ends directly after a message start marker, remove this marker."""
        if self._text_writer.pending_text:
            self._text_writer.drop_pending()
