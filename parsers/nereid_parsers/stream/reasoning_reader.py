"""Reads reasoning, and decides where the reasoning starts and ends."""

from __future__ import annotations

from enum import Enum

from nereid_parsers.declarations import Shown
from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.call_reader import CallReader
from nereid_parsers.stream.header_reader import HeaderReader
from nereid_parsers.stream.marker_kinds import MarkerKind
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    is_special_token,
    skip_whitespace,
)
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.state import State

# If a tool call starts before the reasoning is closed, the end event of the tool call has this
# `reason`.
_UNCLOSED_REASONING = "the reasoning before the tool call is not closed"


class _ReasoningEnd(Enum):
    """The way in which the reasoning of a message has ended, for example by a closing marker.

    NONE          The reasoning has not started, or has not ended.
    CLOSED        A closing marker, such as `</think>`.
    INTERRUPTED   A tool call, or the opening marker of the content. The closing marker of the
                  reasoning may still follow, and is then removed.
    """

    NONE = "none"
    CLOSED = "closed"
    INTERRUPTED = "interrupted"


class ReasoningReader:
    """Reads reasoning, and handles reasoning markers, such as `</think>`, in the content.

    Each of the methods `read`, `read_inline` and `store_until_closed` handles one state of the
    parser. The method reads text from the buffer, and returns the next state or None.

    Example: in `<think>Hm</think>Hi`, `open_in_content` removes `<think>` and returns the state
    REASONING. `read` then appends `ReasoningDelta("Hm")`, removes `</think>` and returns CONTENT.
    """

    __slots__ = (
        "_buffer", "_call_reader", "_calls_must_come_first", "_format", "_header_reader",
        "_is_inline", "_may_closing_marker_follow", "_opening_marker", "_reasoning_end",
        "_reasoning_state", "_stored_text", "_text_writer",
    )  # fmt: skip

    def __init__(self, context: ReaderContext, calls: CallReader, headers: HeaderReader) -> None:
        """Create a reader for reasoning, such as `<think>Hm.</think>`."""
        self._buffer = context.buffer
        self._text_writer = context.text
        self._call_reader = calls
        self._header_reader = headers
        # ---- The format and the policy.
        self._format = context.format
        # Whether tool calls are recognised only before the content, and never in the reasoning.
        self._calls_must_come_first = context.calls_must_come_first
        reasoning = context.format.reasoning
        self._opening_marker = reasoning.open.strip() if reasoning is not None else ""
        # Whether the client receives the reasoning as a part of the content.
        self._is_inline = reasoning is not None and reasoning.shown is Shown.INLINE
        self._reasoning_state = State.INLINE_REASONING if self._is_inline else State.REASONING
        # ---- The progress of the message.
        self._reasoning_end = _ReasoningEnd.NONE
        # Text inside the reasoning that looks like a tool call. If a marker closes the reasoning
        # later, this text is reasoning. Otherwise it is a tool call.
        self._stored_text: list[str] = []
        # False after the message has ended without a closing marker such as `</think>`. Text that
        # looks like a tool call is then read as a tool call, and is not stored.
        self._may_closing_marker_follow = True

    @property
    def has_reasoned(self) -> bool:
        """Whether the reasoning has ended."""
        return self._reasoning_end is not _ReasoningEnd.NONE

    # ---- reasoning -------------------------------------------------------------------------------

    def start_opened(self) -> State:
        """Start to read reasoning whose opening marker, such as `<think>`, is not in the output.

        Return the state in which the reasoning is read. Blank lines after the opening marker belong
        to the marker and are removed. If the client receives the reasoning as content ("inline"),
        the opening marker is written as content instead.
        """
        if self._is_inline:
            self.write_opening_marker()
        else:
            self._text_writer.is_after_marker = True
        return self._reasoning_state

    def write_opening_marker(self) -> None:
        """Write the opening marker of the reasoning, such as `<think>`, as content.

        The prompt contains the marker, so the output does not contain it.
        """
        self._text_writer.write_generated_content(self._opening_marker)

    def read(self) -> State | None:
        """Read reasoning up to the next marker. Decide whether the marker ends the reasoning.

        Example: from `Let me see.</think>Hi`, `Let me see.` is written as reasoning, and the marker
        is removed. The rest, `Hi`, is content.

        Return the next state, or None if no marker has arrived.
        """
        text_end, marker = self._format.reasoning_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write_reasoning(self._buffer.take_until(text_end))
        if not marker:
            return None
        match self._format.reasoning_kinds[marker]:
            case MarkerKind.INTERRUPT:  # Such as `<tool_call>`.
                return self._read_possible_call(marker)
            case MarkerKind.START_MESSAGE:  # Such as `<|start|>`.
                return self._header_reader.read_start_marker(marker)
            case MarkerKind.WRAP_CONTENT:  # Such as `<response>`.
                return self._read_content_opening(marker)
            case MarkerKind.OPEN_REASONING:  # Such as a second `<think>`.
                return self._read_second_opening(marker)
            case MarkerKind.CLOSE_REASONING:  # Such as `</think>`.
                return self._read_closing(marker)
            case _:  # The kind END, such as `<|im_end|>`. The text of the next message may follow.
                self._drop_marker(marker)
                return State.CONTENT

    def _drop_marker(self, marker: str) -> None:
        """Read `marker`, the next text in the buffer, and remove the marker from the output."""
        self._text_writer.drop_markup(self._buffer.take(len(marker)))

    def _read_closing(self, marker: str) -> State:
        """Remove a closing marker, such as `</think>`, and end the reasoning. Return CONTENT."""
        self._drop_marker(marker)
        self._reasoning_end = _ReasoningEnd.CLOSED
        return State.CONTENT

    def _read_second_opening(self, marker: str) -> State:
        """Read a second opening marker, such as `<think>`, in the reasoning. Return the next state.

        Models sometimes repeat the opening marker, such as `<think>`, with which the prompt ends.
        Such a marker is removed. If reasoning text precedes the marker, as in `I write <think>`,
        the marker is a part of the reasoning.
        """
        if self._text_writer.has_text_since_marker:
            return self._write_marker_as_reasoning(marker)
        self._drop_marker(marker)
        return State.REASONING

    def _read_content_opening(self, marker: str) -> State:
        """Read the opening marker of the content, such as `<response>`, inside the reasoning.

        The marker is a part of the reasoning if the reasoning quotes the marker. Otherwise, the
        marker ends the reasoning, and is removed. Examples, after a prompt that ends with
        `<think>`:

            `I write <response>`     Text precedes the marker, so the text quotes the marker.
            `<response>Hi`           No text precedes the marker, so the marker ends the reasoning.
            `I write.<|response|>`   Models do not quote special tokens, such as `<|response|>`, so
                                     the marker ends the reasoning.

        Return the next state.
        """
        is_quoted = self._text_writer.has_text_since_marker and not is_special_token(marker)
        if is_quoted:
            return self._write_marker_as_reasoning(marker)
        self._drop_marker(marker)
        self._reasoning_end = _ReasoningEnd.INTERRUPTED  # `</think>` may still follow.
        return State.CONTENT

    def _write_marker_as_reasoning(self, marker: str) -> State:
        """Write `marker` as a part of the reasoning. Return the next state."""
        self._write_reasoning(self._buffer.take(len(marker)))
        return self._reasoning_state

    def _write_reasoning(self, text: str) -> None:
        """Write `text` as reasoning. If the client receives reasoning as content, write content."""
        if self._is_inline:
            self._text_writer.write_content_exactly(text)
        else:
            self._text_writer.write_reasoning(text)

    def read_inline(self) -> State | None:
        """Read reasoning that the client receives as content. Write the text and its markers.

        Example: from `Hm</think>Hi`, `Hm</think>` is written unchanged as content. The closing
        marker ends the reasoning.

        Return the next state, or None if more text is required.
        """
        text_end, marker = self._format.reasoning_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write_content_exactly(self._buffer.take_until(text_end))
        if not marker:
            return None
        match self._format.reasoning_kinds[marker]:
            case MarkerKind.INTERRUPT:  # Such as `<tool_call>`.
                return self._read_possible_call(marker)
            case MarkerKind.END:  # Such as `<|im_end|>`, which is never a part of the content.
                self._drop_marker(marker)
                return State.CONTENT
            case MarkerKind.CLOSE_REASONING:  # Such as `</think>`.
                self._write_marker_as_reasoning(marker)
                self._reasoning_end = _ReasoningEnd.CLOSED
                return State.CONTENT
            case _:  # Such as a second `<think>`, which does not end the reasoning.
                return self._write_marker_as_reasoning(marker)

    # ---- tool calls inside the reasoning ---------------------------------------------------------

    def _read_possible_call(self, marker: str) -> State | None:
        """Decide whether a marker inside the reasoning starts a tool call and ends the reasoning.

        Examples for the marker `<call>`:

            `<think>Use <call> here`     reasoning, because no tool call follows the marker
            `<think>Hm<call>{"name": ..` not known yet: reasoning if `</think>` follows later,
                                         otherwise a tool call
            `<think><call>{"name": ..`   a tool call, because no reasoning precedes the marker

        If the policy requires that tool calls come first, a marker inside the reasoning is always
        reasoning.

        Return the next state, or None if more text is required.
        """
        if self._calls_must_come_first:
            return self._write_marker_as_reasoning(marker)
        match = self._match_call_at(marker)
        if match is NEED_MORE:
            return None
        if match is NO_MATCH:
            return self._write_marker_as_reasoning(marker)
        # Inline reasoning is never empty, because it contains the opening marker.
        has_reasoning = self._text_writer.has_text_since_marker or self._is_inline
        if has_reasoning and self._may_closing_marker_follow:
            return State.INTERRUPTED_REASONING
        return self._end_at_call()

    def _match_call_at(self, marker: str) -> Head | Mismatch:
        """Test whether a tool call starts with `marker`, which is the next unread text.

        All text stays unread. Examples: the marker `<call>` in `<call>{"name"` is the start of a
        tool call. The marker `<calls>` in `<calls><call>{"name"` precedes all tool calls, so a tool
        call must start after this marker.

        Return the header of the tool call, NEED_MORE or NO_MATCH.
        """
        buffer = self._buffer
        calls = self._format.calls
        variants = calls.by_marker.get(marker)  # The ways to write a tool call with this marker.
        call_start = buffer.pos
        if variants is None:  # The marker precedes all tool calls, so a call must start after it.
            variants = calls.all
            call_start = skip_whitespace(buffer.text, buffer.pos + len(marker))
        for variant in variants:
            match = variant.match(buffer.text, call_start, buffer.is_final)
            if match is not NO_MATCH:
                return match
        return NO_MATCH

    def store_until_closed(self) -> State | None:
        """Store the unread text that precedes the closing marker of the reasoning (`</think>`).

        The unread text starts with a possible tool call. The closing marker shows that the stored
        text is reasoning. Example: in
        `<think>I write <call>f()</call>.</think>`, the text `<call>f()</call>.` is stored until
        `</think>` has arrived, and is then written as reasoning.

        Return the state in which the closing marker is read, or None if no closing marker has
        arrived. If the message ends before, the parser calls `finish_interrupted`.
        """
        # If there is no complete marker, the text after `text_end` may be the beginning of a
        # marker.
        text_end, marker = self._format.reasoning_closes.find(self._buffer)
        self._stored_text.append(self._buffer.take_until(text_end))  # The marker stays unread.
        if not marker:
            return None
        self._write_reasoning(self._take_stored_text())
        return self._reasoning_state

    def _take_stored_text(self) -> str:
        """Return the text that `store_until_closed` has stored, and delete the stored text."""
        text = "".join(self._stored_text)
        self._stored_text = []
        return text

    def num_stored_chars(self) -> int:
        """Return the number of characters that `store_until_closed` has read and stored."""
        return sum(map(len, self._stored_text))

    def finish_interrupted(self) -> State:
        """At the end of the message, end the reasoning before the stored tool call.

        The stored text is put back into the buffer, and is then read as a tool call. Return the
        state in which it is read. Example: in `<think>I call it.<tool_call>{"name": "f"}`, no
        marker closes the reasoning, so `<tool_call>` ends the reasoning.
        """
        self._may_closing_marker_follow = False  # The message has ended without such a marker.
        self._buffer.push_back(self._take_stored_text())
        return self._end_at_call()

    def _end_at_call(self) -> State:
        """End the reasoning before a tool call. Return the state in which the tool call is read.

        The events of the tool call will report that the closing marker of the reasoning is missing.
        """
        self._text_writer.drop_whitespace()
        self._text_writer.is_after_marker = True
        self._reasoning_end = _ReasoningEnd.INTERRUPTED
        self._call_reader.add_deviation(_UNCLOSED_REASONING)
        return State.CONTENT

    # ---- markers of the reasoning inside the content ---------------------------------------------

    def open_in_content(self, marker: str) -> State | None:
        """Start reasoning at an opening marker, such as `<think>`, that is found in the content.

        The marker is removed, and the next state is REASONING. If the client receives the reasoning
        as content ("inline"), the marker stays unread, and the next state is INLINE_REASONING.
        Return the next state, or None if the marker is a part of the content. Examples:

            `<think>Hm`              The marker starts the message, so it starts reasoning.
            `</tool_call><think>Hm`  Another marker directly precedes the marker.
            `Hi <|think|>Hm`         Ordinary text contains no special token.
            `Write <think> first.`   None, because ordinary text may contain this marker.

        If the policy requires that tool calls come first, only the first example is reasoning.
        """
        starts_reasoning = self._is_at_message_start()
        if not starts_reasoning and not self._calls_must_come_first:
            starts_reasoning = self._text_writer.is_after_marker or is_special_token(marker)
        if not starts_reasoning:
            return None
        if self._is_inline:
            self._text_writer.drop_whitespace()  # Only the white space before the marker.
        else:
            self._drop_marker(marker)
        return self._reasoning_state

    def close_in_content(self, marker: str) -> State | None:
        """Handle a closing marker, such as `</think>`, that is found outside the reasoning.

        Return the next state, or None if the marker is content, as in `Hi</think>`. Examples of
        markers that are removed:

            `</think>Hi`                        The marker starts the message.
            `<think>Hm<call>..</call></think>`  The tool call has interrupted the reasoning.
            `<think>Hm</think></think>`         The model repeats the marker before the content.
            `Hi<|end_think|>`                   Ordinary text contains no special token.

        If the policy requires that tool calls come first, the last two markers are content.
        """
        has_output = self._has_output()
        has_interrupted = has_output and self._reasoning_end is _ReasoningEnd.INTERRUPTED
        is_superfluous = has_interrupted or self._is_at_message_start()
        if not is_superfluous and not self._calls_must_come_first:
            is_superfluous = not has_output or is_special_token(marker)
        return self._read_closing(marker) if is_superfluous else None

    def _is_at_message_start(self) -> bool:
        """Return whether no reasoning, content or tool call precedes the current position."""
        return not self.has_reasoned and not self._has_output()

    def _has_output(self) -> bool:
        """Return whether content or a tool call precedes the current position."""
        return self._text_writer.has_content or self._call_reader.has_calls()
