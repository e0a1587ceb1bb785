"""Reads reasoning, and decides where the reasoning starts and ends."""

from __future__ import annotations

from nereid_parsers.declarations import Opener, Shown
from nereid_parsers.events import ReasoningDelta
from nereid_parsers.policy import StrayClose
from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.call_reader import CallReader
from nereid_parsers.stream.compiled_format import MarkerKind
from nereid_parsers.stream.header_reader import HeaderReader
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    is_special_token,
    skip_whitespace,
)
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.state import State

# The description of a deviation from the format. An event contains this description.
_UNCLOSED_REASONING = "the reasoning before the tool call is not closed"


class ReasoningReader:
    """Reads reasoning, and text that may be reasoning.

    Each method `read_...` handles one state of the parser. The method reads text from the buffer
    and returns the next state, or None if it needs more text.

    The `TextWriter` appends the events. The `CallReader` reports whether tool calls have started,
    and stores the deviation if a tool call ends the reasoning without a closing marker. The
    `HeaderReader` reads the marker that starts the next message.

    Example: in `<think>Hm</think>Hi`, `open_in_content` removes `<think>` and returns the state
    REASONING. `read` then appends `ReasoningDelta("Hm")`, removes `</think>` and returns CONTENT.

    Attributes:
        has_reasoned: Whether the reasoning has ended.
        is_reasoning_by_default: Whether text in the state UNCLASSIFIED is reasoning if the message
            ends without a marker.
    """

    __slots__ = (
        "_buffer", "_call_reader", "_calls_first", "_declaration", "_format", "_header_reader",
        "_is_inline", "_is_interrupted", "_is_never_closed", "_reasoning_state", "_stored_text",
        "_stray_close", "_text_writer", "has_reasoned", "is_reasoning_by_default",
    )  # fmt: skip

    def __init__(self, context: ReaderContext, calls: CallReader, headers: HeaderReader) -> None:
        """Create a reader for the text in `context`. The text starts outside the reasoning.

        `calls` and `headers` read the tool calls and the message headers that may follow.
        """
        # The objects that store, read and write text.
        self._buffer = context.buffer
        self._text_writer = context.text
        self._call_reader = calls
        self._header_reader = headers
        # The declaration of the format and the policy.
        self._format = context.format
        self._declaration = context.format.reasoning
        self._calls_first = context.calls_first  # Whether no tool call may follow content.
        self._stray_close = context.policy.stray_close  # The rule for `</think>` without `<think>`.
        # Whether the client receives the reasoning as a part of the content.
        self._is_inline = self._declaration is not None and self._declaration.shown is Shown.INLINE
        self._reasoning_state = State.INLINE_REASONING if self._is_inline else State.REASONING
        # The position in the message.
        self.has_reasoned = False  # Whether the reasoning has ended.
        # Whether stored text is reasoning if no marker shows whether it is reasoning or content.
        self.is_reasoning_by_default = False
        # Text that has been read in the state UNCLASSIFIED or INTERRUPTED_REASONING.
        self._stored_text: list[str] = []
        # Whether a tool call, or the opening marker of the content, has ended the reasoning. The
        # closing marker of the reasoning may then still follow.
        self._is_interrupted = False
        # Whether the message has ended, so that no closing marker of the reasoning can follow.
        self._is_never_closed = False

    # ---- text before the first marker ------------------------------------------------------------

    def delays_unclassified_text(self) -> bool:
        """Return whether the output must be stored until the first marker has been read.

        This marker shows whether the stored text is reasoning or content. The caller calls this
        method only if the prompt is not known.
        """
        if self._declaration is None or self._is_inline:
            return False
        # Some templates of the model family end the prompt with the opening marker, others do not.
        prompt_may_open_reasoning = self._declaration.opener is Opener.EITHER
        # The policy accepts a closing marker, such as `</think>`, without an opening marker.
        opening_may_be_missing = self._stray_close is StrayClose.REASONING
        return prompt_may_open_reasoning or opening_may_be_missing

    def read_unclassified(self) -> State | None:
        """Store text until a marker classifies the stored text as reasoning or as content.

        Example: `Let me see.</think>` shows that the text is reasoning. Any other marker shows that
        the text is content. The stored text is then put back into the buffer and read again.

        Returns:
            The next state, or None as long as no marker has arrived.
        """
        text_end, marker = self._format.content_markers.find(self._buffer)
        self._stored_text.append(self._buffer.take_until(text_end))
        if not marker:
            return None
        is_closing = self._format.content_kinds[marker] is MarkerKind.CLOSE_REASONING
        return self._read_again(is_reasoning=is_closing)

    def finish_unclassified(self) -> State:
        """Put the stored text back into the buffer, because the message ends without a marker.

        Return the state in which the text is read again. The text is read as reasoning if
        `is_reasoning_by_default` is true, and otherwise as content.
        """
        return self._read_again(is_reasoning=self.is_reasoning_by_default)

    def _read_again(self, *, is_reasoning: bool) -> State:
        """Put the text stored by `read_unclassified` back into the buffer, to be read again.

        Return the state in which the text is read: the state of the reasoning, or CONTENT.

        Args:
            is_reasoning: Whether the text is reasoning. If not, the text is content.
        """
        self._buffer.push_back(self._take_stored_text())
        return self.start_opened() if is_reasoning else State.CONTENT

    def num_stored_chars(self) -> int:
        """Return the number of stored characters.

        The stored text has been read, but whether the text is reasoning, content or a tool call is
        not known yet.
        """
        return sum(map(len, self._stored_text))

    def _take_stored_text(self) -> str:
        """Return the stored text. Afterwards, no text is stored."""
        text = "".join(self._stored_text)
        self._stored_text = []
        return text

    # ---- reasoning -------------------------------------------------------------------------------

    def start_opened(self) -> State:
        """Start to read reasoning whose opening marker is in the prompt. Return the next state.

        If the client receives the reasoning as content ("inline"), the missing opening marker is
        written as content, too.
        """
        if self._is_inline:
            self.repeat_opening_marker()
        else:
            # The opening marker is at the end of the prompt. Blank lines after this marker belong
            # to the marker and are removed.
            self._text_writer.is_after_marker = True
        return self._reasoning_state

    def repeat_opening_marker(self) -> None:
        """Write the opening marker as content. The model did not write this marker itself."""
        if self._declaration is not None:
            self._text_writer.write_generated_content(self._declaration.open.strip())

    def read(self) -> State | None:
        """Read reasoning up to the next marker. If there is a marker, return the next state.

        Example: from `Let me see.</think>Hi`, `Let me see.` is written as reasoning, and the marker
        is removed. The rest, `Hi`, is content. Markers that do not close the reasoning, for example
        the marker of a tool call, are handled by other methods.
        """
        text_end, marker = self._format.reasoning_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write(self._buffer.take_until(text_end), ReasoningDelta)
        if not marker:
            return None
        kind = self._format.reasoning_kinds[marker]
        match kind:
            case MarkerKind.INTERRUPT:
                return self._read_possible_call(marker)
            case MarkerKind.START_MESSAGE:
                return self._header_reader.start(marker)
            case MarkerKind.WRAP_CONTENT:
                return self._read_content_opening(marker)
            case MarkerKind.OPEN_REASONING:
                return self._read_second_opening(marker)
        # Any other marker ends the reasoning, the message or the model's turn.
        if kind is MarkerKind.CLOSE_REASONING:
            self.has_reasoned = True
        self._text_writer.write_markup(self._buffer.take(len(marker)))
        return State.CONTENT

    def _read_second_opening(self, marker: str) -> State:
        """Read a second opening marker, although the reasoning is already open.

        Models sometimes repeat the opening marker with which the prompt ends. Such a marker is
        removed. If reasoning text precedes the marker, the marker is a part of the reasoning.
        Return the next state.
        """
        if self._text_writer.has_text:
            return self._write_marker_as_reasoning(marker)
        self._text_writer.write_markup(self._buffer.take(len(marker)))
        return State.REASONING

    def _read_content_opening(self, marker: str) -> State:
        """Read a marker that opens the content while the reasoning is open. Return the next state.

        The marker ends the reasoning if the reasoning is empty, or if the marker is a special
        token, which a model does not quote. Otherwise the marker is a part of the reasoning.
        Example: after a prompt that ends with `<think>`, the text `<response>Hi` is content.
        """
        if self._text_writer.has_text and not is_special_token(marker):
            return self._write_marker_as_reasoning(marker)
        self._text_writer.write_markup(self._buffer.take(len(marker)))
        self.has_reasoned = True
        self._is_interrupted = True
        return State.CONTENT

    def _write_marker_as_reasoning(self, marker: str) -> State:
        """Write `marker` as a part of the reasoning. Return the state that reads the reasoning."""
        self._write(self._buffer.take(len(marker)))
        return self._reasoning_state

    def _write(self, text: str) -> None:
        """Write `text` as reasoning, or as content if the client receives reasoning as content."""
        if self._is_inline:
            self._text_writer.write_content_exactly(text)
        else:
            self._text_writer.write(text, ReasoningDelta)

    def read_inline(self) -> State | None:
        """Read reasoning, including its markers, and write all of this text as content.

        Example: `Hm</think>` is written unchanged, because the client of this format receives the
        reasoning as a part of the content.

        Returns:
            The next state, or None if more text is required.
        """
        text_end, marker = self._format.reasoning_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write_content_exactly(self._buffer.take_until(text_end))
        if not marker:
            return None
        kind = self._format.reasoning_kinds[marker]
        if kind is MarkerKind.INTERRUPT:
            return self._read_possible_call(marker)
        self._text_writer.write_content_exactly(self._buffer.take(len(marker)))
        if kind is not MarkerKind.CLOSE_REASONING:
            return State.INLINE_REASONING
        self.has_reasoned = True
        return State.CONTENT

    # ---- tool calls inside the reasoning ---------------------------------------------------------

    def _read_possible_call(self, marker: str) -> State | None:
        """Decide whether a marker inside the reasoning really starts a tool call.

        There are four cases:

        - The policy (CALLS_FIRST) allows no tool call here. The marker is a part of the reasoning.
        - No tool call follows, as in `<tool_call> is a tag`. The marker is a part of the reasoning.
        - The marker directly follows `<think>`. The tool call ends the reasoning.
        - Reasoning precedes the marker, as in `<think>I call it.<tool_call>{"name": `. The text is
          a tool call if the reasoning is never closed, and otherwise a part of the reasoning. The
          text is stored in the state INTERRUPTED_REASONING until a closing marker or the end of the
          message shows which case applies.

        Returns:
            The next state, or None if more text is required.
        """
        if self._calls_first:
            return self._write_marker_as_reasoning(marker)
        match = self._match_call_at(marker)
        if match == NEED_MORE:
            return None
        if match == NO_MATCH:
            return self._write_marker_as_reasoning(marker)
        is_reasoning_empty = not self._text_writer.has_text and not self._is_inline
        if is_reasoning_empty or self._is_never_closed:
            return self._end_at_call()
        return State.INTERRUPTED_REASONING

    def _match_call_at(self, marker: str) -> Head | Mismatch:
        """Match the header of a tool call at the start of the unread text.

        The unread text starts with `marker`, and stays unread. `marker` opens a tool call, or the
        tool section, which contains all tool calls of a message. Example: with the marker
        `<tool_call>`, the text `<tool_call>{"` matches.

        Returns:
            The header of the tool call, NEED_MORE or NO_MATCH.
        """
        buffer = self._buffer
        calls = self._format.calls
        opens_call = marker in calls.by_trigger
        if opens_call:
            variants = calls.by_trigger[marker]
            start = buffer.pos
        else:  # The marker opens a tool section. The tool call starts after the marker.
            variants = calls.all
            start = skip_whitespace(buffer.text, buffer.pos + len(marker))
        for variant in variants:
            match = variant.match(buffer.text, start, buffer.is_final)
            if match != NO_MATCH:
                return match
        return NO_MATCH

    def read_interrupted(self) -> State | None:
        """Store text that is a tool call, unless a marker still closes the reasoning.

        The text starts with a tool call inside the reasoning. If a closing marker follows, the
        stored text is written as reasoning.

        Example: in `<think>I could write <tool_call>{"name": "f"}</tool_call>.</think>Hi`, the tool
        call is a part of the reasoning, because the reasoning is closed after the tool call.

        Returns:
            The state of the reasoning, or None as long as no closing marker has arrived.
        """
        text_end, marker = self._format.reasoning_closes.find(self._buffer)
        self._stored_text.append(self._buffer.take_until(text_end))
        if not marker:
            return None
        self._write(self._take_stored_text())
        return self._reasoning_state  # The method for this state reads the closing marker.

    def finish_interrupted(self) -> State:
        """Put the stored text back into the buffer, so that this text is read as a tool call.

        Example: in `<think>I call it.<tool_call>{"name": "f"}</tool_call>`, the reasoning is never
        closed, so `<tool_call>` ends the reasoning.
        """
        self._is_never_closed = True
        self._buffer.push_back(self._take_stored_text())
        return self._end_at_call()

    def _end_at_call(self) -> State:
        """End the reasoning before a tool call, and report that the closing marker is missing."""
        self._text_writer.drop_whitespace()
        self._text_writer.is_after_marker = True
        self.has_reasoned = True
        self._is_interrupted = True
        self._call_reader.add_deviation(_UNCLOSED_REASONING)
        return State.CONTENT

    # ---- markers of the reasoning inside the content ---------------------------------------------

    def open_in_content(self, marker: str) -> State | None:
        """Start reasoning at an opening marker that occurs in the content.

        Example: the marker `<think>` at the start of the message is removed, and the next state is
        REASONING.

        Returns:
            The next state, or None if the marker is a part of the content.
        """
        if not self._may_open(marker):
            return None
        if self._is_inline:
            # The client receives the reasoning and its markers as content. The marker stays in the
            # buffer, because `read_inline` writes it.
            self._text_writer.drop_whitespace()
        else:
            self._text_writer.write_markup(self._buffer.take(len(marker)))
        return self._reasoning_state

    def _may_open(self, marker: str) -> bool:
        """Return whether an opening marker in the content starts reasoning.

        Examples: in `<think>Hm` and `</tool_call><think>Hm`, the marker starts reasoning. In
        `Write <think> first.`, the marker is content.
        """
        is_at_start = not self.has_reasoned and not self._has_output()
        if is_at_start:
            return True
        if self._calls_first:  # With this policy, only the start of a message can be reasoning.
            return False
        return self._text_writer.is_after_marker or is_special_token(marker)

    def close_in_content(self, marker: str) -> State | None:
        """Remove a closing marker of the reasoning that occurs in the content.

        A model that writes no opening marker may still write the closing marker. `_may_close`
        decides whether the marker is removed.

        Returns:
            The next state, or None if the marker is a part of the content.
        """
        if not self._may_close(marker):
            return None
        self._text_writer.write_markup(self._buffer.take(len(marker)))
        self.has_reasoned = True
        self._is_interrupted = False
        return State.CONTENT

    def _may_close(self, marker: str) -> bool:
        """Return whether the parser removes a closing marker, such as `</think>`, from the content.

        Examples: `</think>Hi` becomes `Hi`, and `Hi</think>` stays `Hi</think>`.
        """
        precedes_output = not self._has_output()
        if self._calls_first:
            # This policy allows only one closing marker before the output.
            return not self.has_reasoned if precedes_output else self._is_interrupted
        # If a tool call has interrupted the reasoning, the closing marker of the reasoning may
        # follow later. A special token, such as `<|end_think|>`, is never a part of the content.
        return precedes_output or self._is_interrupted or is_special_token(marker)

    def _has_output(self) -> bool:
        """Return whether the message has content or a tool call before the current position."""
        return self._text_writer.has_content or self._call_reader.has_calls()
