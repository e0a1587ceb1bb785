"""Reads reasoning, and decides where the reasoning starts and ends."""

from __future__ import annotations

from enum import Enum

from nereid_parsers.declarations import Shown
from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.calls.call_reader import CallReader
from nereid_parsers.stream.compiled.compiled_call import CompiledCall
from nereid_parsers.stream.header_reader import HeaderReader
from nereid_parsers.stream.marker_kinds import MarkerKind
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    is_special_token,
    looks_like_markup,
    skip_whitespace,
)
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.state import State

# If a tool call starts before the reasoning is closed, the end event of the tool call has this
# `reason`.
_UNCLOSED_REASONING = "the reasoning before the tool call is not closed"
# The number of characters that are stored for a test at a second `<think>`: the parser tests
# whether the text before this `<think>` ends with the closing marker of a tool call.
_NUM_LAST_CHARS = 200


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

    Each of the methods `read`, `read_inline` and `read_interrupted` handles one state of the
    parser. The method reads text from the buffer, and returns the next state or None.

    Example: in `<think>Hm</think>Hi`, `open_in_content` removes `<think>` and returns the state
    REASONING. `read` then appends `ReasoningDelta("Hm")`, removes `</think>` and returns CONTENT.
    """

    __slots__ = (
        "_buffer", "_call_reader", "_calls_must_come_first", "_format", "_header_reader",
        "_is_inline", "_last_stored_text", "_reasoning_end", "_stored_pieces",
        "_stores_possible_calls", "_text_writer",
    )  # fmt: skip

    def __init__(self, context: ReaderContext, calls: CallReader, headers: HeaderReader) -> None:
        """Create a reader for reasoning, such as `<think>Hm.</think>`."""
        self._buffer = context.buffer
        self._text_writer = context.text
        self._call_reader = calls
        self._header_reader = headers
        self._format = context.format
        # Whether tool calls are recognised only before the content, and never in the reasoning.
        self._calls_must_come_first = context.calls_must_come_first
        reasoning = context.format.reasoning
        # Whether the client receives the reasoning and its markers as a part of the content.
        self._is_inline = reasoning is not None and reasoning.shown is Shown.INLINE
        # The way in which the reasoning of this message has ended.
        self._reasoning_end = _ReasoningEnd.NONE
        # In `<think>Hm<call>{..}`, the text from `<call>` on is stored until `</think>` shows that
        # this text is reasoning, or until the message ends, which shows that it is a tool call.
        self._stored_pieces: list[str] = []
        self._last_stored_text = ""  # The last `_NUM_LAST_CHARS` characters of the stored text.
        # Becomes False at the end of the message, because no `</think>` can follow. A tool call is
        # then read at once.
        self._stores_possible_calls = True

    @property
    def _reasoning_state(self) -> State:
        """The state in which the parser reads the reasoning of this format."""
        return State.INLINE_REASONING if self._is_inline else State.REASONING

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
        reasoning = self._format.reasoning
        assert reasoning is not None  # The method is called only for a format with reasoning.
        self._text_writer.write_generated_content(reasoning.open.strip())

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
        match self._format.reasoning_markers.kinds[marker]:
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
            self._keep_marker(marker)
        else:
            self._drop_marker(marker)
        return State.REASONING

    def _read_content_opening(self, marker: str) -> State:
        """Read the opening marker of the content, such as `<response>`, inside the reasoning.

        The marker is a part of the reasoning if the reasoning only mentions it. Otherwise, the
        marker ends the reasoning, and is removed. Examples, after a prompt that ends with
        `<think>`:

            `I write <response>`     Text precedes the marker, so the text only mentions it.
            `<response>Hi`           No text precedes the marker, so the marker ends the reasoning.
            `I write.<|response|>`   Models do not mention special tokens, such as `<|response|>`,
                                     in ordinary text, so the marker ends the reasoning.

        Return the next state.
        """
        is_mentioned = self._text_writer.has_text_since_marker and not is_special_token(marker)
        if is_mentioned:
            self._keep_marker(marker)
            return State.REASONING
        self._drop_marker(marker)
        self._reasoning_end = _ReasoningEnd.INTERRUPTED  # `</think>` may still follow.
        return State.CONTENT

    def _keep_marker(self, marker: str) -> None:
        """Read `marker`, the next text in the buffer, and write it as a part of the reasoning."""
        self._write_reasoning(self._buffer.take(len(marker)))

    def _write_reasoning(self, text: str) -> None:
        """Write `text` as reasoning, or as content if the client receives reasoning as content."""
        if self._is_inline:
            self._text_writer.write_content_exactly(text)
        else:
            self._text_writer.write_reasoning(text)

    def read_inline(self) -> State | None:
        """Read reasoning that the client receives as content, up to the next marker.

        The markers of the reasoning are kept in the content, too. Examples:

            text               content            next state
            `Hm</think>Hi`     `Hm</think>`       CONTENT, because `</think>` ends the reasoning
            `Hm<|im_end|>`     `Hm`               CONTENT, because `<|im_end|>` ends the message
            `Hm<think>Well`    `Hm<think>`        INLINE_REASONING

        Return the next state, or None if more text is required.
        """
        text_end, marker = self._format.reasoning_markers.find(self._buffer)
        if text_end > self._buffer.pos:
            self._text_writer.write_content_exactly(self._buffer.take_until(text_end))
        if not marker:
            return None
        match self._format.reasoning_markers.kinds[marker]:
            case MarkerKind.INTERRUPT:  # Such as `<tool_call>`.
                return self._read_possible_call(marker)
            case MarkerKind.CLOSE_REASONING:
                self._keep_marker(marker)
                self._reasoning_end = _ReasoningEnd.CLOSED
                return State.CONTENT
            case MarkerKind.END:
                self._drop_marker(marker)
                return State.CONTENT
            case _:  # Such as a second `<think>`.
                self._keep_marker(marker)
                return State.INLINE_REASONING

    # ---- tool calls inside the reasoning ---------------------------------------------------------

    def _read_possible_call(self, marker: str) -> State | None:
        """Decide whether `marker`, such as `<call>`, starts a tool call inside the reasoning.

            text                           next state
            `<think>Use <call> here`       REASONING, because no tool call follows `<call>`
            `<think>Hm<call>{"na`          None, because more text is required
            `<think>Hm<call>{"name": ..`   INTERRUPTED_REASONING, because a later `</think>` would
                                           show that the text `<call>..` is reasoning
            `<think><call>{"name": ..`     CONTENT, because the tool call ends the empty reasoning

        If the client receives the reasoning as content, the state INLINE_REASONING takes the place
        of REASONING.

        Return the next state, or None if more text is required.
        """
        match = self._match_call_at(marker)
        if match is NO_MATCH:
            self._keep_marker(marker)
            return self._reasoning_state
        return None if match is NEED_MORE else self._start_possible_call()

    def _start_possible_call(self) -> State:
        """Return the state in which the matched tool call inside the reasoning is read.

        The state is INTERRUPTED_REASONING if `</think>` may follow. This marker would show that the
        text is not a tool call. In two cases, the tool call ends the reasoning, and the state is
        CONTENT: the reasoning contains no other text, or the message has ended.
        """
        # Inline reasoning is never empty, because it contains the opening marker.
        has_reasoning = self._text_writer.has_text_since_marker or self._is_inline
        if has_reasoning and self._stores_possible_calls:
            return State.INTERRUPTED_REASONING
        return self._end_at_call()

    def _match_call_at(self, marker: str) -> Head | Mismatch:
        """Match the header of a tool call at `marker`, which is the next unread text.

        The matched text stays unread. Examples of markers:

            `<call>` in `<call>{"name"`           The marker is the start of the tool call.
            `<calls>` in `<calls><call>{"name"`   The tool call must start after the marker, which
                                                  precedes all tool calls.

        Return the header of the tool call, NEED_MORE or NO_MATCH. If the policy requires that tool
        calls come first, the reasoning contains no tool call, so the result is NO_MATCH.
        """
        if self._calls_must_come_first:
            return NO_MATCH
        calls = self._format.calls
        marker_start = self._buffer.pos
        if marker in calls.by_marker:
            return self._match_any(calls.by_marker[marker], marker_start)
        return self._match_any(calls.all, marker_start + len(marker))

    def _match_any(self, variants: tuple[CompiledCall, ...], pos: int) -> Head | Mismatch:
        """Skip white space from `pos` on, and match the header of a tool call there.

        Return the header of the first variant that matches, NEED_MORE or NO_MATCH.
        """
        buffer = self._buffer
        call_start = skip_whitespace(buffer.text, pos)
        for variant in variants:
            match = variant.match(buffer.text, call_start, buffer.is_final)
            # An earlier variant takes precedence, even if it needs more text.
            if match is not NO_MATCH:
                return match
        return NO_MATCH

    def read_interrupted(self) -> State | None:
        """Read a possible tool call in the reasoning, and the text after it, up to `</think>`.

        The text is stored until a marker shows what the text is:

            `<think>I write <call>f()</call>.</think>`     `</think>` closes the reasoning, so the
                                                           text `<call>f()</call>.` is reasoning.
            `<think>Hm<call>f()</call><think>Hm</think>`   The second `<think>` opens reasoning
                                                           again, so `<call>` has ended the first
                                                           reasoning, and starts a tool call.

        Return the state in which the stored text, or the marker after this text, is read. Return
        None if no marker has arrived. If the message ends without a marker, the parser calls
        `finish_interrupted`.
        """
        bounds = self._format.reasoning_bounds
        text_end, marker = bounds.find(self._buffer)
        self._store_text(self._buffer.take_until(text_end))
        if not marker:
            return None
        if bounds.kinds[marker] is MarkerKind.CLOSE_REASONING:
            self._write_reasoning(self._take_stored_text())
            return self._reasoning_state  # In this state, the marker `</think>` is read next.
        if self._opens_reasoning_after_call(marker):
            return self._end_at_stored_call()
        # This `<think>` is ordinary text, so the search for `</think>` continues after it.
        self._store_text(self._buffer.take(len(marker)))
        return State.INTERRUPTED_REASONING

    def _opens_reasoning_after_call(self, marker: str) -> bool:
        """Return whether `marker`, such as `<think>`, opens a second block of reasoning.

        `marker` follows the stored text, which starts with a possible tool call. Examples:

            stored text            marker        result
            `<call>f()</call>`     `<think>`     True, because the marker follows a tool call
            `<call>f() and then`   `<think>`     False, because the marker may be ordinary text
            `<call>f() and then`   `<|think|>`   True, because a special token is never a part of
                                                 ordinary text
        """
        if is_special_token(marker):
            return True
        kinds = self._format.calls.kinds
        closing_markers = tuple(m for m, kind in kinds.items() if kind is MarkerKind.CLOSE_CALLS)
        return self._last_stored_text.rstrip().endswith(closing_markers)

    def _store_text(self, text: str) -> None:
        """Store a piece of text that is a tool call or reasoning."""
        self._stored_pieces.append(text)
        self._last_stored_text = (self._last_stored_text + text)[-_NUM_LAST_CHARS:]

    def _take_stored_text(self) -> str:
        """Return the text that `read_interrupted` has stored, and delete the stored text."""
        text = "".join(self._stored_pieces)
        self._stored_pieces = []
        self._last_stored_text = ""
        return text

    def num_stored_chars(self) -> int:
        """Return the number of characters that `read_interrupted` has read and stored."""
        return sum(map(len, self._stored_pieces))

    def finish_interrupted(self) -> State:
        """Treat the stored text as a tool call, because the message has ended.

        The reasoning ends before the stored text. The stored text is put back into the buffer.
        Return the state in which the parser reads this text as a tool call. Example: in
        `<think>I call it.<tool_call>{"name": "f"}`, no marker closes the reasoning, so
        `<tool_call>` ends the reasoning.
        """
        self._stores_possible_calls = False  # No closing marker can follow.
        return self._end_at_stored_call()

    def _end_at_stored_call(self) -> State:
        """Put the stored text back into the buffer, and end the reasoning before this tool call."""
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
        Return None if the marker is a part of the content, as in `Write <think> first.`.
        """
        if not self._opens_reasoning(marker):
            return None
        if self._is_inline:
            # Only the white space before the marker is removed. `read_inline` will read the marker.
            self._text_writer.drop_whitespace()
        else:
            self._drop_marker(marker)
        return self._reasoning_state

    def _opens_reasoning(self, marker: str) -> bool:
        r"""Return whether an opening marker, such as `<think>`, in the content starts reasoning.

        Examples, in the order of the code:

            `<think>Hm`              True: the marker starts the message.
            `</tool_call><think>Hm`  True: another marker directly precedes the marker.
            `Hi <|think|>Hm`         True: ordinary text contains no special token.
            `Hi.\n<think>Hm`         True: the tag starts a line, so it is not only mentioned.
            `Write <think> first.`   False: ordinary text may contain this marker.

        There are two exceptions. If the policy requires that tool calls come first, all examples
        except the first give False. If the client receives reasoning as content ("inline"), the
        fourth example gives False.
        """
        if self._is_at_message_start():
            return True
        if self._calls_must_come_first:
            return False
        if self._text_writer.is_after_marker or is_special_token(marker):
            return True
        if self._is_inline:
            return False
        return looks_like_markup(marker) and not self._text_writer.mentions_next_tag()

    def close_in_content(self, marker: str) -> State | None:
        """Remove a superfluous closing marker, such as `</think>`, that is found in the content.

        Return the state CONTENT. If the marker is a part of the content, as in `Hi</think>`, leave
        the marker in the buffer, and return None.
        """
        return self._read_closing(marker) if self._is_superfluous_closing(marker) else None

    def _is_superfluous_closing(self, marker: str) -> bool:
        """Return whether a closing marker outside the reasoning must be removed from the output.

        Examples of such markers, in the order of the code:

            `</think>Hi`                        The marker starts the message.
            `<think>Hm<call>..</call></think>`  The tool call has interrupted the reasoning.
            `<think>Hm</think></think>`         The model repeats the marker before the content.
            `Hi<|end_think|>`                   Ordinary text contains no special token.

        If the policy requires that tool calls come first, the markers in the last two examples stay
        in the content. A marker such as `</think>` in `Hi</think>` always stays in the content.
        """
        if self._is_at_message_start():
            return True
        has_output = self._has_output()
        if has_output and self._reasoning_end is _ReasoningEnd.INTERRUPTED:
            return True
        if self._calls_must_come_first:
            return False
        follows_only_reasoning = not has_output
        return follows_only_reasoning or is_special_token(marker)

    def _is_at_message_start(self) -> bool:
        """Return whether no reasoning, content or tool call precedes the current position."""
        return not self.has_reasoned and not self._has_output()

    def _has_output(self) -> bool:
        """Return whether content or a tool call precedes the current position."""
        return self._text_writer.has_content or self._call_reader.has_calls()
