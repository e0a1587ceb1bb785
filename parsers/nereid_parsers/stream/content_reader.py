"""Reads content, and finds the markers inside the content."""

from __future__ import annotations

from collections.abc import Callable

from nereid_parsers.stream.calls.call_reader import CallReader
from nereid_parsers.stream.header_reader import HeaderReader
from nereid_parsers.stream.marker_kinds import MarkerKind
from nereid_parsers.stream.pattern_matching import contains_first_tag
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.reasoning_reader import ReasoningReader
from nereid_parsers.stream.state import State


class ContentReader:
    """Reads content: the text outside reasoning, tool calls and message headers.

    Each method `read_...` handles one state of the parser. The method reads text from the buffer
    and returns the next state, or None if it needs more text.
    """

    __slots__ = (
        "_buffer", "_call_reader", "_calls_must_come_first", "_format", "_header_reader",
        "_marker_handlers", "_text_writer",
    )  # fmt: skip

    def __init__(
        self,
        context: ReaderContext,
        calls: CallReader,
        headers: HeaderReader,
        reasoning: ReasoningReader,
    ) -> None:
        """Create a reader for the content of a message. The other readers handle most markers."""
        self._format = context.format
        self._buffer = context.buffer
        self._text_writer = context.text
        self._call_reader = calls
        self._header_reader = headers
        # If true, all text after the start of the content is content, even `<call>` after `Hi`.
        self._calls_must_come_first = context.calls_must_come_first
        # Maps each kind of marker to a method that handles the marker and returns the next state.
        # If the marker has no meaning at its position, the method returns None, and the marker is
        # content. Example: `<tool_call>` has the kind OPEN_CALL, so `open_call("<tool_call>")` is
        # called.
        self._marker_handlers: dict[MarkerKind, Callable[[str], State | None]] = {
            MarkerKind.START_MESSAGE: headers.read_start_marker,
            MarkerKind.OPEN_REASONING: reasoning.open_in_content,
            MarkerKind.CLOSE_REASONING: reasoning.close_in_content,
            MarkerKind.OPEN_SECTION: calls.open_section,  # `<tool_calls>`, before all tool calls
            MarkerKind.OPEN_CALL: calls.open_call,
            MarkerKind.CALL_HEAD: calls.open_call_at_head,  # `<function=`, without `<tool_call>`
            MarkerKind.UNMARKED_CALL: calls.open_unmarked_call,  # `{`, as in `{"name": "f"}`
            MarkerKind.CLOSE_CALLS: self._close_calls,
            MarkerKind.WRAP_CONTENT: self._remove,  # `<response>`, before or after the content
            MarkerKind.CONTENT_WORDS: self._remove_at_start,  # `Answer:`, before the content
            MarkerKind.END: self._remove,
        }

    def read(self) -> State | None:
        """Read content up to the next marker, and call the handler that reads this marker.

        A handler is a method for markers of one kind, and returns the next state. Examples:

            `Hi<tool_call>`   `Hi` is written as content. The next state is CALL_START.
            `Hi</tool_call>`  No tool call is open, so the marker has no meaning here. The handler
                              returns None, and the marker is written as content.

        Return the next state, or None if more text is required.
        """
        text_end, marker = self._format.content_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write_content(self._buffer.take_until(text_end))
            # White space alone is not content, so a tool call may still follow white space.
            if self._calls_must_come_first and self._text_writer.has_content:
                return State.CONTENT_ONLY
        if not marker:
            return None
        handler = self._marker_handlers[self._format.content_markers.kinds[marker]]
        next_state = handler(marker)
        if next_state is None:  # The marker has no meaning here.
            return self._keep_marker(marker)
        return next_state

    def _keep_marker(self, marker: str) -> State:
        """Write a marker as content, because it has no meaning here. Return the next state.

        Example: `</tool_call>` is content if no tool call is open.
        """
        self._text_writer.write_content(self._buffer.take(len(marker)))
        # If tool calls must come first, only content can follow content.
        return State.CONTENT_ONLY if self._calls_must_come_first else State.CONTENT

    def _close_calls(self, marker: str) -> State | None:
        """Remove a closing marker that follows a tool call, such as `</call>` or `</calls>`.

        Example: the second `</call>` in `<call>{..}</call></call>` is removed. Return the next
        state. At any other position, a closing marker is content. Then return None, and leave the
        marker in the buffer.
        """
        closes_section = self._call_reader.close_section(marker)
        if closes_section or self._call_reader.is_after_call():
            return self._remove(marker)
        return None

    def _remove(self, marker: str) -> State:
        """Remove a marker from the content, and return the next state."""
        self._text_writer.drop_markup(self._buffer.take(len(marker)))
        return State.CONTENT

    def _remove_at_start(self, words: str) -> State | None:
        """Remove words that open the content, such as `Answer:`, and return the next state.

        Ordinary text may contain these words, so they are removed only before the content. In
        `Answer: Yes. Answer: No.`, the second `Answer:` is content. Then return None, and leave the
        words in the buffer.
        """
        return None if self._text_writer.has_content else self._remove(words)

    def read_content_only(self) -> State | None:
        """Read the rest of a message that can only be content (state CONTENT_ONLY).

        Markers of tool calls and of reasoning are then content. Only markers around the content or
        the message are removed. Example: from `Hi <tool_call><|im_end|>`, the text
        `Hi <tool_call>` is written as content, and `<|im_end|>` is removed.

        Return the state CONTENT_ONLY, in which the text after the marker is read, or None if no
        such marker has arrived.
        """
        # This lexer finds only the markers that enclose the content, and the markers that end the
        # message.
        text_end, marker = self._format.content_only_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write_content(self._buffer.take_until(text_end))
        if not marker:
            return None
        self._text_writer.drop_markup(self._buffer.take(len(marker)))
        return State.CONTENT_ONLY

    def read_plain_message(self) -> State | None:
        """Read the content of a message that cannot contain tool calls, up to the message's end.

        Markers of tool calls have no meaning in this message, so they are written as content.
        Example: from `Write <tool_call>.<|end|>`, the text `Write <tool_call>.` is written as
        content, and `<|end|>`, which ends the message, is removed.

        Return HEADER if the next message starts, CONTENT if the message ends, or None if no marker
        has arrived.
        """
        message_markers = self._format.message_markers
        text_end, marker = message_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write_content(self._buffer.take_until(text_end))
        if not marker:
            return None
        if message_markers.kinds[marker] is MarkerKind.START_MESSAGE:
            return self._header_reader.read_start_marker(marker)
        self._remove(marker)  # The marker ends the message.
        return State.CONTENT

    def drop_incomplete_marker(self, *, is_reasoning: bool) -> None:
        """Remove an incomplete marker, such as `<|message|><|te`, at the end of the message.

        Examples for the marker `<|message|><|text|>`, which consists of two tags:

            end of the message   effect
            `<|message|><|te`    The text is removed, because the first tag is complete, so that the
                                 text is certainly markup.
            `<|mess`             The text stays unread and becomes content, because ordinary text
                                 may contain a part of a tag.

        `is_reasoning` is true if the message ends inside the reasoning. The markers that may occur
        in reasoning and in content differ.
        """
        last_text = self._buffer.unread()  # `read` leaves only an incomplete marker unread.
        lexer = self._format.reasoning_markers if is_reasoning else self._format.content_markers
        is_incomplete_marker = any(
            marker.startswith(last_text) and contains_first_tag(last_text, marker)
            for marker in lexer.kinds
        )
        if is_incomplete_marker:
            self._text_writer.drop_markup(self._buffer.take_unread())
