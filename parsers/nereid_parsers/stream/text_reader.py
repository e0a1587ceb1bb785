"""Reads reasoning, content and message headers, and finds the markers inside this text."""

from __future__ import annotations

from nereid_parsers.declarations import Opener, Shown, Stage
from nereid_parsers.events import ContentDelta, ReasoningDelta
from nereid_parsers.policy import Policy, StrayClose, TextRule
from nereid_parsers.stream.body_reader import Head
from nereid_parsers.stream.call_plan import RoutePlan
from nereid_parsers.stream.call_reader import CallReader
from nereid_parsers.stream.format_plan import FormatPlan, MarkerKind
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    is_compound_start,
    is_special_token,
    skip_blanks,
)
from nereid_parsers.stream.state import State
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.text_writer import TextWriter

# The descriptions of deviations from the format, which events contain.
_NO_HEADER = "no header follows the marker"
_UNCLOSED_REASONING = "the reasoning before the tool call is not closed"


class TextReader:
    """Reads the text outside tool calls.

    Each method `read_...` handles one state of the parser. The method reads text from the buffer
    and returns the next state, or None if it needs more text.

    Attributes:
        has_reasoned: Whether the reasoning has ended.
        is_reasoning_by_default: Whether text in the state UNCLASSIFIED is reasoning if the message
            ends without a marker.
    """

    __slots__ = (
        "_buffer", "_calls", "_calls_first", "_is_interrupted", "_is_never_closed", "_plan",
        "_reasoning", "_stored_text", "_stray_close", "_text", "has_reasoned",
        "is_reasoning_by_default",
    )  # fmt: skip

    def __init__(
        self,
        plan: FormatPlan,
        buffer: TextBuffer,
        text: TextWriter,
        calls: CallReader,
        policy: Policy,
    ) -> None:
        """Create a reader for the text of one message.

        Args:
            plan: The compiled format.
            buffer: The buffer that contains the text.
            text: The writer of reasoning and content.
            calls: The reader that reads tool calls and tool sections.
            policy: The rules for cases that the format does not define.
        """
        self.has_reasoned = False
        self.is_reasoning_by_default = False
        self._plan = plan
        self._reasoning = plan.reasoning
        self._buffer = buffer
        self._text = text
        self._calls = calls
        self._calls_first = policy.text is TextRule.CALLS_FIRST
        self._stray_close = policy.stray_close
        # The text that the states UNCLASSIFIED and INTERRUPTED_REASONING store.
        self._stored_text: list[str] = []
        # Whether a tool call has ended the reasoning, so that a closing marker may still follow.
        self._is_interrupted = False
        # Whether the message has ended, so that no closing marker of the reasoning can follow.
        self._is_never_closed = False

    # ---- reasoning -------------------------------------------------------------------------------

    def delays_unclassified_text(self) -> bool:
        """Return whether the parser delays text until a marker shows whether the text is reasoning.

        This method applies only if the prompt is not known.
        """
        if self._reasoning is None or self._is_inline():
            return False
        is_ambiguous = self._reasoning.opener is Opener.EITHER
        return is_ambiguous or self._stray_close is StrayClose.REASONING

    def start_reasoning(self) -> State:
        """Return the first state of an output whose prompt has opened the reasoning."""
        if self._is_inline():
            self.repeat_opening_marker()
            return State.INLINE_REASONING
        self._text.is_after_marker = True
        return State.REASONING

    def repeat_opening_marker(self) -> None:
        """Write the opening marker of the reasoning, which the model did not write, as content."""
        if self._reasoning is not None:
            self._text.write_generated_content(self._reasoning.open.strip())

    def read_unclassified(self) -> State | None:
        """Store text until a marker shows whether the stored text is reasoning.

        Example: `Let me see.</think>` shows that the text is reasoning.
        """
        start, marker = self._plan.content_markers.find(self._buffer)
        self._stored_text.append(self._buffer.take_until(start))
        if not marker:
            return None
        return self._classify(self._plan.kinds[marker] is MarkerKind.CLOSE_REASONING)

    def finish_unclassified(self) -> State:
        """Return the stored text to the buffer, because the message has ended without a marker.

        The attribute `is_reasoning_by_default` decides whether the text is then read as reasoning.
        """
        return self._classify(self.is_reasoning_by_default)

    def _classify(self, is_reasoning: bool) -> State:
        """Put the text stored by `read_unclassified` back into the buffer. Return the next state.

        Args:
            is_reasoning: Whether the text is read as reasoning. Otherwise it is read as content.
        """
        self._buffer.push_back(self._take_stored_text())
        return self.start_reasoning() if is_reasoning else State.CONTENT

    def _take_stored_text(self) -> str:
        """Return the stored text, and store nothing."""
        text = "".join(self._stored_text)
        self._stored_text = []
        return text

    def read_reasoning(self) -> State | None:
        """Read reasoning up to a marker, and return the next state.

        Example: from `Let me see.</think>Hi`, `Let me see.` is written as reasoning, and the marker
        is removed. The rest, `Hi`, is content.
        """
        start, marker = self._plan.reasoning_markers.find(self._buffer)
        if start > self._buffer.pos:
            self._text.write(self._buffer.take_until(start), ReasoningDelta)
        if not marker:
            return None
        kind = self._plan.reasoning_kinds[marker]
        if kind is MarkerKind.INTERRUPT:
            return self._read_interrupt(marker)
        if kind is MarkerKind.START_MESSAGE:
            return self._start_header(marker)
        if kind is MarkerKind.WRAP_CONTENT:
            return self._read_content_opening(marker)
        if kind is MarkerKind.OPEN_REASONING:
            # Models sometimes repeat the opening marker with which the prompt ends. If the model
            # has already written other reasoning, the marker is part of the reasoning.
            if self._text.has_text:
                self._text.write(self._buffer.take(len(marker)), ReasoningDelta)
            else:
                self._text.write_markup(self._buffer.take(len(marker)))
            return State.REASONING
        self._text.write_markup(self._buffer.take(len(marker)))
        if kind is MarkerKind.CLOSE_REASONING:
            self.has_reasoned = True
        return State.CONTENT

    def _read_content_opening(self, marker: str) -> State:
        """Handle the content's opening marker, which was found inside the reasoning.

        The marker ends the reasoning if the reasoning is empty, or if the marker is a special
        token, which a model does not quote. Otherwise the marker is a part of the reasoning.
        Example: after a prompt that ends with `<think>`, the text `<response>Hi` is content.
        """
        if self._text.has_text and not is_special_token(marker):
            self._text.write(self._buffer.take(len(marker)), ReasoningDelta)
            return State.REASONING
        self._text.write_markup(self._buffer.take(len(marker)))
        self.has_reasoned = True
        self._is_interrupted = True
        return State.CONTENT

    def read_inline_reasoning(self) -> State | None:
        """Read reasoning, including its markers, and write all of this text as content."""
        start, marker = self._plan.reasoning_markers.find(self._buffer)
        if start > self._buffer.pos:
            self._text.write_content_exactly(self._buffer.take_until(start))
        if not marker:
            return None
        kind = self._plan.reasoning_kinds[marker]
        if kind is MarkerKind.INTERRUPT:
            return self._read_interrupt(marker)
        self._text.write_content_exactly(self._buffer.take(len(marker)))
        if kind is not MarkerKind.CLOSE_REASONING:
            return State.INLINE_REASONING
        self.has_reasoned = True
        return State.CONTENT

    # ---- tool calls inside the reasoning ---------------------------------------------------------

    def _read_interrupt(self, marker: str) -> State | None:
        """Handle a marker of tool calls inside the reasoning. Return the next state.

        Examples: `<tool_call> is a tag` is a part of the reasoning. After `<think>I call it.`, the
        text `<tool_call>{"name": ` is a tool call if the reasoning is never closed, and otherwise a
        part of the reasoning, so the text is stored until this is known. Directly after `<think>`,
        the same text is a tool call.
        """
        match = NO_MATCH if self._calls_first else self._match_call_at(marker)
        if match == NEED_MORE:
            return None
        if match == NO_MATCH:
            self._write_reasoning(self._buffer.take(len(marker)))
            return State.INLINE_REASONING if self._is_inline() else State.REASONING
        if self._is_never_closed or not (self._text.has_text or self._is_inline()):
            return self._end_reasoning()
        return State.INTERRUPTED_REASONING

    def _match_call_at(self, marker: str) -> Head | int:
        """Match a tool call at `marker`, or after `marker` if `marker` opens a tool section.

        Returns:
            The head of the tool call, NEED_MORE or NO_MATCH.
        """
        buffer = self._buffer
        candidates = self._plan.calls.by_trigger.get(marker)
        pos = buffer.pos
        if candidates is None:
            candidates = self._plan.calls.all
            pos = skip_blanks(buffer.text, pos + len(marker))
        for plan in candidates:
            match = plan.match(buffer.text, pos, buffer.is_final)
            if match != NO_MATCH:
                return match
        return NO_MATCH

    def read_interrupted_reasoning(self) -> State | None:
        """Store text until the reasoning is closed. The stored text is then reasoning.

        Example: in `<think>I could write <tool_call>{"name": "f"}</tool_call>.</think>Hi`, the tool
        call is a part of the reasoning, because the reasoning is closed after the tool call.
        """
        start, marker = self._plan.reasoning_closes.find(self._buffer)
        self._stored_text.append(self._buffer.take_until(start))
        if not marker:
            return None
        self._write_reasoning(self._take_stored_text())
        return State.INLINE_REASONING if self._is_inline() else State.REASONING

    def finish_interrupted_reasoning(self) -> State:
        """Read the stored text as a tool call, because the message has ended.

        Example: in `<think>I call it.<tool_call>{"name": "f"}</tool_call>`, the reasoning is never
        closed, so `<tool_call>` ends the reasoning.
        """
        self._is_never_closed = True
        self._buffer.push_back(self._take_stored_text())
        return self._end_reasoning()

    def _end_reasoning(self) -> State:
        """End reasoning that no closing marker ends, because a tool call follows."""
        self._text.drop_blanks()
        self._text.is_after_marker = True
        self.has_reasoned = True
        self._is_interrupted = True
        self._calls.report(_UNCLOSED_REASONING)
        return State.CONTENT

    def num_stored_chars(self) -> int:
        """Return the number of characters that have been read and not been classified yet."""
        return sum(map(len, self._stored_text))

    def _is_inline(self) -> bool:
        """Return whether the client receives the reasoning as content."""
        return self._reasoning is not None and self._reasoning.shown is Shown.INLINE

    def _write_reasoning(self, text: str) -> None:
        """Write `text` as reasoning, or as content if the client receives reasoning as content."""
        if self._is_inline():
            self._text.write_content_exactly(text)
        else:
            self._text.write(text, ReasoningDelta)

    # ---- content ---------------------------------------------------------------------------------

    def read_content(self) -> State | None:
        """Read content up to a marker, and return the next state, which depends on the marker.

        Example: from `Hi<tool_call>`, `Hi` is written as content, and the next state is CALL_START.
        """
        start, marker = self._plan.content_markers.find(self._buffer)
        if start > self._buffer.pos:
            self._text.write(self._buffer.take_until(start), ContentDelta)
            if self._calls_first and self._text.has_content:
                return State.CONTENT_ONLY
        if not marker:
            return None
        return self._read_content_marker(marker, self._plan.kinds[marker])

    def _read_content_marker(self, marker: str, kind: MarkerKind) -> State | None:
        """Handle a marker in the content, and return the next state."""
        if kind is MarkerKind.START_MESSAGE:
            return self._start_header(marker)
        if kind is MarkerKind.OPEN_REASONING:
            return self._open_reasoning(marker)
        if kind is MarkerKind.CLOSE_REASONING:
            return self._close_reasoning(marker)
        if kind is MarkerKind.OPEN_SECTION:
            return self._calls.open_section(marker)
        if kind is MarkerKind.OPEN_CALL:
            return self._calls.open_call(marker)
        if kind is MarkerKind.ORPHAN_CALL:
            return self._calls.open_orphan_call(marker) or self._write_as_content(marker)
        if kind is MarkerKind.BARE_CALL:
            return self._calls.open_bare_call(marker) or self._write_as_content(marker)
        if kind is MarkerKind.CLOSE_CALLS and not self._calls.close_section(marker):
            return self._write_as_content(marker)
        self._text.write_markup(self._buffer.take(len(marker)))
        return State.CONTENT

    def read_content_only(self) -> State | None:
        """Read content, and remove only the markers that enclose messages or content."""
        start, marker = self._plan.outer_markers.find(self._buffer)
        if start > self._buffer.pos:
            self._text.write(self._buffer.take_until(start), ContentDelta)
        if not marker:
            return None
        self._text.write_markup(self._buffer.take(len(marker)))
        return State.CONTENT_ONLY

    def _write_as_content(self, marker: str) -> State:
        """Write `marker` as content, because it has no meaning at this place."""
        self._text.write(self._buffer.take(len(marker)), ContentDelta)
        return State.CONTENT_ONLY if self._calls_first else State.CONTENT

    def _open_reasoning(self, marker: str) -> State:
        """Handle an opening marker of the reasoning that occurs in the content.

        The marker starts reasoning at the start of the message, and directly after another marker.
        Everywhere else, its text is content. Examples: in `<think>Hm` and `</tool_call><think>Hm`,
        the marker starts reasoning. In `Write <think> first.`, the marker is content.
        """
        is_after_marker = self._text.is_after_marker and not self._calls_first
        is_at_start = not self.has_reasoned and not self._has_output()
        if not (is_after_marker or is_at_start or self._is_stray_token(marker)):
            return self._write_as_content(marker)
        if self._is_inline():
            self._text.drop_blanks()
            return State.INLINE_REASONING
        self._text.write_markup(self._buffer.take(len(marker)))
        return State.REASONING

    def _close_reasoning(self, marker: str) -> State:
        """Handle a closing marker of the reasoning that occurs in the content.

        The marker is removed before the first content and the first tool call. The marker is also
        removed if a tool call has ended the reasoning. Everywhere else, its text is content.
        Examples: `</think>Hi` becomes `Hi`, and `Hi</think>` stays `Hi</think>`.
        """
        if not self._has_output():
            # A second closing marker is superfluous. The policy CALLS_FIRST keeps it as content.
            is_removed = not self.has_reasoned or not self._calls_first
        else:
            is_removed = self._is_interrupted or self._is_stray_token(marker)
        if not is_removed:
            return self._write_as_content(marker)
        self._text.write_markup(self._buffer.take(len(marker)))
        self.has_reasoned = True
        self._is_interrupted = False
        return State.CONTENT

    def _has_output(self) -> bool:
        """Return whether the message has content or a tool call before the current position."""
        return self._text.has_content or self._calls.has_calls()

    def _is_stray_token(self, marker: str) -> bool:
        """Return whether `marker` is a special token, which is never a part of ordinary content.

        Example: the content `Hello<channel|>` ends with a special token, which is removed.
        """
        return is_special_token(marker) and not self._calls_first

    # ---- message headers -------------------------------------------------------------------------

    def _start_header(self, marker: str) -> State:
        """Read the marker that starts a message."""
        self._text.hold_tentative(self._buffer.take(len(marker)))
        return State.HEADER

    def read_header(self) -> State | None:
        """Read the header of a message, and return the state in which the message's body is read.

        Example: after the marker `<|start|>assistant`, the header `<|channel|>final<|message|>`
        leads to the state CONTENT. Text that is not a header is content.
        """
        buffer = self._buffer
        if not self._text.tentative:
            # At the start of the output, the marker is missing if the prompt already contains it.
            message_start = self._plan.message_start
            if buffer.starts_with(message_start):
                return self._start_header(message_start)
            if not buffer.is_final and buffer.is_prefix_of(message_start):
                return None
        for route in self._plan.routes:
            head = route.match(buffer.text, buffer.pos, buffer.is_final)
            if isinstance(head, Head):
                return self._enter_message(route, head)
            if head == NEED_MORE:
                return None
        has_started = any(route.has_started(buffer.text, buffer.pos) for route in self._plan.routes)
        if buffer.is_final and has_started:
            self._text.accept_tentative()
            self._text.write_markup(buffer.take_unread())
            return State.CONTENT
        return self._calls.reject(0, _NO_HEADER)

    def _enter_message(self, route: RoutePlan, head: Head) -> State:
        """Read a header, and return the state in which the body of the message is read."""
        self._text.accept_tentative()
        if route.stage is Stage.CALLS and self._calls_first and self._text.has_content:
            return State.CONTENT_ONLY
        self._text.write_markup(self._buffer.take_until(head.end))
        if route.stage is Stage.CALLS:
            return self._calls.start_message_call(head)
        if route.stage is Stage.REASONING:
            return State.REASONING
        return State.CONTENT if route.has_calls else State.PLAIN_MESSAGE

    def read_plain_message(self) -> State | None:
        """Read the body of a content message in which markers of tool calls are content.

        Example: a message to the user may quote `<tool_call>` to explain the format.
        """
        start, marker = self._plan.reasoning_markers.find(self._buffer)
        if start > self._buffer.pos:
            self._text.write(self._buffer.take_until(start), ContentDelta)
        if not marker:
            return None
        if self._plan.reasoning_kinds[marker] is MarkerKind.START_MESSAGE:
            return self._start_header(marker)
        self._text.write_markup(self._buffer.take(len(marker)))
        return State.CONTENT

    # ---- the end of the text ---------------------------------------------------------------------

    def finish_marker(self, state: State) -> None:
        """Remove an incomplete marker at the end of the message.

        An incomplete marker is removed only if the marker has several tags and the first tag is
        complete. Any other incomplete marker is content, because ordinary text may contain it.
        Example: of the marker `<|message|><|text|>`, the beginning `<|message|><|te` is removed,
        but `<|mess` is content.
        """
        beginning = self._buffer.unread()
        if not beginning:
            return
        is_reasoning = state is State.REASONING
        markers = self._plan.reasoning_kinds if is_reasoning else self._plan.kinds
        if any(
            marker.startswith(beginning) and is_compound_start(marker, beginning)
            for marker in markers
        ):
            self._text.write_markup(self._buffer.take_unread())

    def finish_header(self) -> None:
        """Remove the marker that starts a message, if the output ends after this marker."""
        if self._text.tentative:
            self._text.accept_tentative()
