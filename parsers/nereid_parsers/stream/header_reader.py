"""Reads message headers. The header of a message determines the type of the message's body."""

from __future__ import annotations

from nereid_parsers.declarations import Stage
from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.call_reader import CallReader
from nereid_parsers.stream.compiled_call import CompiledHeader
from nereid_parsers.stream.pattern_matching import NEED_MORE
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.state import State

# The description of a deviation from the format. An event contains this description.
_NO_HEADER = "no header follows the marker"


class HeaderReader:
    """Reads the marker that starts a message, and the header after this marker.

    Until the whole header has been read, the TextWriter stores the marker as pending text.
    """

    __slots__ = ("_buffer", "_call_reader", "_calls_first", "_format", "_text_writer")

    def __init__(self, context: ReaderContext, calls: CallReader) -> None:
        """Create a reader for message headers. `calls` reads messages that are tool calls."""
        self._format = context.format
        self._buffer = context.buffer
        self._text_writer = context.text
        self._call_reader = calls
        self._calls_first = context.calls_first

    def start(self, marker: str) -> State:
        """Read the marker that starts a message, and store the marker as pending text.

        The marker is removed from the output after the header has been read.
        """
        self._text_writer.store_pending(self._buffer.take(len(marker)))
        return State.HEADER

    def read(self) -> State | None:
        """Read the header of a message, and return the state in which the message's body is read.

        Example: after the marker `<|start|>assistant`, the header `<|channel|>final<|message|>`
        leads to the state CONTENT. Text that does not match any header is content. The result is
        None if more text is required.
        """
        buffer = self._buffer
        marker = self._format.message_start
        has_read_marker = bool(self._text_writer.pending)
        if not has_read_marker:
            # The output has just started. The marker is optional, because the prompt may contain
            # the marker.
            if buffer.starts_with(marker):
                return self.start(marker)
            if buffer.is_prefix_of(marker) and not buffer.is_final:
                return None
        for route in self._format.routes:
            head = route.match(buffer.text, buffer.pos, buffer.is_final)
            if isinstance(head, Head):
                return self._enter_message(route, head)
            if head == NEED_MORE:
                return None
        return self._drop_or_treat_as_content()

    def _drop_or_treat_as_content(self) -> State:
        """Remove an incomplete header at the end of the message, or treat the text as content.

        Return the next state. Example: at the end of the message, the incomplete header
        `<|channel|>fin` is removed. Text that does not start like a header is content.
        """
        if self._buffer.is_final and self._has_header_started():
            self._text_writer.drop_pending()
            self._text_writer.write_markup(self._buffer.take_unread())
            return State.CONTENT
        return self._call_reader.treat_as_content(_NO_HEADER)

    def _enter_message(self, route: CompiledHeader, head: Head) -> State:
        """Read a header that matches `route`, and return the state in which the body is read.

        A route declares which part of the message the body is: reasoning, content or a tool call.
        The marker that starts the message is removed from the output. Example: after `<|start|>`,
        the header `<|channel|>final<|message|>` is removed too, and the state is CONTENT.

        With the policy CALLS_FIRST, no tool call may follow content. The header of such a tool call
        stays unread, and the state is CONTENT_ONLY, so that the parser reads the header as content.
        """
        self._text_writer.drop_pending()  # This text is the marker that starts the message.
        is_call = route.stage is Stage.CALLS
        follows_content = self._text_writer.has_content
        if is_call and follows_content and self._calls_first:
            return State.CONTENT_ONLY
        self._text_writer.write_markup(self._buffer.take_until(head.end))
        if is_call:
            return self._call_reader.start_message_call(head)
        if route.stage is Stage.REASONING:
            return State.REASONING
        return State.CONTENT if route.has_calls else State.PLAIN_MESSAGE

    def _has_header_started(self) -> bool:
        """Return whether the unread text starts with the first literal of a header."""
        buffer = self._buffer
        return any(route.has_started(buffer.text, buffer.pos) for route in self._format.routes)

    def finish(self) -> None:
        """Remove the start marker of a message if the output ends directly after this marker."""
        if self._text_writer.pending:
            self._text_writer.drop_pending()
