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
        "_buffer", "_call_reader", "_calls_first", "_format", "_header_reader", "_marker_handlers",
        "_text_writer",
    )  # fmt: skip

    def __init__(
        self,
        context: ReaderContext,
        calls: CallReader,
        headers: HeaderReader,
        reasoning: ReasoningReader,
    ) -> None:
        """Create a reader for the content in `context`.

        The other arguments are the readers of tool calls, message headers and reasoning. They read
        the markers that this reader finds, and the text after these markers.
        """
        self._format = context.format
        self._buffer = context.buffer
        self._text_writer = context.text
        self._call_reader = calls
        self._header_reader = headers
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
        """Read content up to a marker, and let the handler of this marker select the next state.

        A handler is the method that reads markers of one kind. A marker without a meaning at this
        place is written as content. Example: from `Hi<tool_call>`, `Hi` is written as content, and
        the next state is CALL_START. If the policy allows no tool calls after content
        (CALLS_FIRST), the next state after content is CONTENT_ONLY.

        Returns:
            The next state, or None if more text is required.
        """
        text_end, marker = self._format.content_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write(self._buffer.take_until(text_end), ContentDelta)
            if self._calls_first and self._text_writer.has_content:
                return State.CONTENT_ONLY
        if not marker:
            return None
        handle_marker = self._marker_handlers[self._format.content_kinds[marker]]
        next_state = handle_marker(marker)
        return self._write_as_content(marker) if next_state is None else next_state

    def _close_calls(self, marker: str) -> State | None:
        """Remove a closing marker that directly follows a tool call, or that closes a tool section.

        Example: the second `</call>` in `<call>{..}</call></call>` is removed. Return the next
        state. If the marker is at any other place, the marker is content, so return None.
        """
        closes_section = self._call_reader.close_section(marker)
        if closes_section or self._call_reader.is_after_call():
            return self._remove(marker)
        return None

    def _remove(self, marker: str) -> State:
        """Remove a marker from the content."""
        self._text_writer.write_markup(self._buffer.take(len(marker)))
        return State.CONTENT

    def _write_as_content(self, marker: str) -> State:
        """Write `marker` as content, because the marker has no meaning at this place."""
        self._text_writer.write(self._buffer.take(len(marker)), ContentDelta)
        return State.CONTENT_ONLY if self._calls_first else State.CONTENT

    def read_content_only(self) -> State | None:
        """Read content in a message that can contain no more tool calls or reasoning.

        Only the markers that enclose messages or content, for example `<|im_end|>`, are removed.
        Example: `Hi <tool_call><|im_end|>` is written as `Hi <tool_call>`.

        Returns:
            The next state, or None if more text is required.
        """
        text_end, marker = self._format.outer_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write(self._buffer.take_until(text_end), ContentDelta)
        if not marker:
            return None
        self._text_writer.write_markup(self._buffer.take(len(marker)))
        return State.CONTENT_ONLY

    def read_plain_message(self) -> State | None:
        """Read the body of a message that cannot contain tool calls.

        Markers of tool calls have no meaning in this message. Example: a message to the user may
        quote `<tool_call>` to explain the format.

        Returns:
            The next state, or None if more text is required.
        """
        # The parser is in this state only if the format writes reasoning as a separate message. The
        # markers that end a reasoning message also end the body of the current message.
        text_end, marker = self._format.reasoning_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write(self._buffer.take_until(text_end), ContentDelta)
        if not marker:
            return None
        if self._format.reasoning_kinds[marker] is MarkerKind.START_MESSAGE:
            return self._header_reader.start(marker)
        return self._remove(marker)  # The message has ended, so tool calls may follow.

    def finish_marker(self, state: State) -> None:
        """Remove an incomplete marker at the end of the message.

        An incomplete marker is removed only if the marker has several tags and the first tag is
        complete. Any other incomplete marker is content, because ordinary text may contain such
        characters. Example: of the marker `<|message|><|text|>`, the beginning `<|message|><|te` is
        removed, but `<|mess` is content.

        Args:
            state: The state in which the message has ended.
        """
        last_text = self._buffer.unread()
        if not last_text:
            return
        is_reasoning = state is State.REASONING
        markers = self._format.reasoning_kinds if is_reasoning else self._format.content_kinds
        possible_markers = [marker for marker in markers if marker.startswith(last_text)]
        has_complete_tag = any(is_compound_start(marker, last_text) for marker in possible_markers)
        if has_complete_tag:
            self._text_writer.write_markup(self._buffer.take_unread())
