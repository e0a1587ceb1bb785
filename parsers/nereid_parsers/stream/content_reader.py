"""Reads content, and finds the markers inside the content."""

from __future__ import annotations

from collections.abc import Callable

from nereid_parsers.events import ContentDelta
from nereid_parsers.stream.call_reader import CallReader
from nereid_parsers.stream.compiled_format import MarkerKind
from nereid_parsers.stream.header_reader import HeaderReader
from nereid_parsers.stream.pattern_matching import is_compound_start
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.reasoning_reader import ReasoningReader
from nereid_parsers.stream.state import State


class ContentReader:
    """Reads the text outside reasoning, tool calls and message headers.

    Each method `read_...` handles one state of the parser. The method reads text from the buffer
    and returns the next state, or None if it needs more text.
    """

    __slots__ = (
        "_buffer", "_calls", "_calls_first", "_format", "_headers", "_marker_handlers", "_text",
    )  # fmt: skip

    def __init__(
        self,
        context: ReaderContext,
        calls: CallReader,
        headers: HeaderReader,
        reasoning: ReasoningReader,
    ) -> None:
        """Create a reader of the text in `context`. The other readers handle its markers."""
        self._format = context.format
        self._buffer = context.buffer
        self._text = context.text
        self._calls = calls
        self._headers = headers
        self._calls_first = context.calls_first
        # A handler reads a marker in the content, and returns the next state. If the marker has no
        # meaning at this place, the handler leaves the marker in the buffer and returns None.
        # `read` then writes the marker as content.
        self._marker_handlers: dict[MarkerKind, Callable[[str], State | None]] = {
            MarkerKind.START_MESSAGE: headers.start,
            MarkerKind.OPEN_REASONING: reasoning.open_in_content,
            MarkerKind.CLOSE_REASONING: reasoning.close_in_content,
            MarkerKind.OPEN_SECTION: calls.open_section,
            MarkerKind.OPEN_CALL: calls.open_call,
            MarkerKind.CALL_HEAD: calls.open_call_at_head,
            MarkerKind.UNMARKED_CALL: calls.open_unmarked_call,
            MarkerKind.CLOSE_CALLS: self._close_calls,
            MarkerKind.WRAP_CONTENT: self._remove,
            MarkerKind.END: self._remove,
        }

    def read(self) -> State | None:
        """Read content up to a marker, and return the next state, which depends on the marker.

        Example: from `Hi<tool_call>`, `Hi` is written as content, and the next state is CALL_START.
        """
        start, marker = self._format.content_markers.find(self._buffer)
        if start > self._buffer.pos:
            self._text.write(self._buffer.take_until(start), ContentDelta)
            if self._calls_first and self._text.has_content:
                return State.CONTENT_ONLY
        if not marker:
            return None
        handler = self._marker_handlers[self._format.content_kinds[marker]]
        return handler(marker) or self._write_as_content(marker)

    def _close_calls(self, marker: str) -> State | None:
        """Remove a closing marker that directly follows a tool call, or that closes a tool section.

        Return None if `marker` is at any other place.
        """
        return self._remove(marker) if self._calls.close_section(marker) else None

    def _remove(self, marker: str) -> State:
        """Remove a marker from the content."""
        self._text.write_markup(self._buffer.take(len(marker)))
        return State.CONTENT

    def _write_as_content(self, marker: str) -> State:
        """Write `marker` as content, because the marker has no meaning at this place."""
        self._text.write(self._buffer.take(len(marker)), ContentDelta)
        return State.CONTENT_ONLY if self._calls_first else State.CONTENT

    def read_content_only(self) -> State | None:
        """Read content, and remove only the markers that enclose messages or content."""
        start, marker = self._format.outer_markers.find(self._buffer)
        if start > self._buffer.pos:
            self._text.write(self._buffer.take_until(start), ContentDelta)
        if not marker:
            return None
        self._text.write_markup(self._buffer.take(len(marker)))
        return State.CONTENT_ONLY

    def read_plain_message(self) -> State | None:
        """Read the body of a message that cannot contain tool calls.

        Markers of tool calls have no meaning in this message. Example: a message to the user may
        quote `<tool_call>` to explain the format.
        """
        # In the layout `Messages`, these are the markers that start or end a message.
        start, marker = self._format.reasoning_markers.find(self._buffer)
        if start > self._buffer.pos:
            self._text.write(self._buffer.take_until(start), ContentDelta)
        if not marker:
            return None
        if self._format.reasoning_kinds[marker] is MarkerKind.START_MESSAGE:
            return self._headers.start(marker)
        return self._remove(marker)  # The message has ended, so tool calls may follow.

    def finish_marker(self, state: State) -> None:
        """Remove an incomplete marker at the end of the message.

        An incomplete marker is removed only if the marker has several tags and the first tag is
        complete. Any other incomplete marker is content, because ordinary text may contain it.
        Example: of the marker `<|message|><|text|>`, the beginning `<|message|><|te` is removed,
        but `<|mess` is content.

        Args:
            state: The state in which the message has ended.
        """
        rest = self._buffer.unread()
        if not rest:
            return
        is_reasoning = state is State.REASONING
        markers = self._format.reasoning_kinds if is_reasoning else self._format.content_kinds
        if any(marker.startswith(rest) and is_compound_start(marker, rest) for marker in markers):
            self._text.write_markup(self._buffer.take_unread())
