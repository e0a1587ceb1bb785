"""Reads message headers, which show whether a message is reasoning, content or a tool call."""

from __future__ import annotations

from nereid_parsers.declarations import Stage
from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.call_reader import CallReader
from nereid_parsers.stream.compiled_header import CompiledHeader
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

        A marker, such as `<|start|>assistant`, precedes the header of each message. At the start of
        the output, the marker is usually in the prompt, so the output starts with the header. If
        the output starts with the marker, only the marker is read now.

        Return the state that reads the text of the message, HEADER if only the marker was read, or
        None if more text is required.
        """
        buffer = self._buffer
        is_output_start = not self._has_read_start_marker
        if is_output_start:
            marker = self._format.message_start
            if buffer.starts_with(marker):
                return self.read_start_marker(marker)
            may_become_marker = buffer.is_prefix_of(marker) and not buffer.is_final
            if may_become_marker:
                return None
        return self._read_header()

    def _read_header(self) -> State | None:
        """Read a message header such as `<|channel|>final<|message|>`. Return the next state.

        Examples for the unread text:

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
            if head is NEED_MORE:  # Never at the end of the output, where no more text can follow.
                return None
        # No complete header matches. If the output has ended, the unread text may be an incomplete
        # header, such as `<|channel|>fin`.
        is_cut_off = buffer.is_final and any(
            route.has_started(buffer.text, buffer.pos) for route in self._format.routes
        )
        if is_cut_off:
            return self._call_reader.drop_unwritten_text()
        return self._call_reader.treat_as_content(_NO_HEADER)

    def _enter_message(self, route: CompiledHeader, head: Head) -> State:
        """Remove a message header and the preceding start marker. Return the next state.

        In the next state, the text after the header is read. Example: `<|start|>assistant` and
        `<|channel|>final<|message|>` are removed, and the next state is CONTENT.
        """
        self._text_writer.drop_pending()  # The pending text is the start marker of the message.
        is_call = route.stage is Stage.CALLS
        follows_content = self._text_writer.has_content
        if is_call and follows_content and self._calls_must_come_first:
            # With the policy CALLS_FIRST, a message after content cannot be a tool call. The header
            # and the text of the message are content. The header stays unread, and is read in the
            # state CONTENT_ONLY.
            return State.CONTENT_ONLY
        self._text_writer.drop_markup(self._buffer.take_until(head.end))
        if is_call:
            return self._call_reader.start_message_call(head)
        if route.stage is Stage.REASONING:
            return State.REASONING
        return State.CONTENT if route.has_calls else State.PLAIN_MESSAGE

    def finish(self) -> None:
        """If the output ends directly after a message start marker, remove this marker."""
        if self._text_writer.pending_text:
            self._text_writer.drop_pending()
