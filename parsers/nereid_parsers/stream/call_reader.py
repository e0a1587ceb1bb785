"""Reads tool calls: their markers, their headers, their bodies and the text between tool calls."""

from __future__ import annotations

from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.call_markers import (
    ClosingMarker,
    IncompleteMarker,
    SectionMarkers,
    match_closing_marker,
)
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.compiled_call import CompiledCall
from nereid_parsers.stream.expected_call import CallStarts, ExpectedCall, MatchedCall
from nereid_parsers.stream.open_call import OpenCall, Outcome
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    is_special_token,
    looks_like_markup,
    skip_whitespace,
)
from nereid_parsers.stream.reader_context import ReaderContext
from nereid_parsers.stream.state import State
from nereid_parsers.tool_declarations import JsonObject

# Descriptions of deviations from the format. Events contain these descriptions.
_NO_CALL = "the text is not a tool call"
_NO_CALL_AFTER_MARKER = "no call follows the marker"
_MISSING_MARKER = "the opening marker of the tool call is missing"
_EMPTY_SECTION = "the tool section contains no call"


class CallReader:
    """Reads tool calls, and the text between two tool calls.

    Each method `read_...` handles one state of the parser. The method reads text from the buffer
    and returns the next state, or None if the method needs more text.

    `CallStarts` decides which tool call may start. An `OpenCall` reads the body. The `CallWriter`
    appends the events. The `TextWriter` receives all other text, and stores an opening marker as
    "pending text" until a tool call has started.

    Example: the text `<tool_call>{"name": "f", "arguments": {}}</tool_call>` is read in four steps:

        method      text that the method reads             next state
        open_call   none, but it stores the expected call  CALL_START
        read_start  `<tool_call>`                          CALL_BODY
        read_body   `{"name": "f", "arguments": {}}`       CALL_END
        read_end    `</tool_call>`                         BETWEEN_CALLS
    """

    __slots__ = (
        "_buffer", "_call_writer", "_calls_first", "_closing_markers", "_expected", "_format",
        "_is_in_section", "_last_variant", "_open_call", "_section_markers", "_starts",
        "_text_writer",
    )  # fmt: skip

    def __init__(self, context: ReaderContext, writer: CallWriter) -> None:
        """Create a reader for the text in `context`. The reader passes tool calls to `writer`."""
        # The markers that the format declares, and the policy.
        self._format = context.format
        self._section_markers = SectionMarkers(context.format.tools)
        self._starts = CallStarts(context.format.calls, writer)
        self._calls_first = context.calls_first  # Whether no tool call may follow content.
        # The objects that store and write text.
        self._buffer = context.buffer
        self._text_writer = context.text
        self._call_writer = writer
        # The position in the message.
        self._is_in_section = False  # Whether the text is between the markers of a tool section.
        self._expected = self._starts.in_section()  # The tool call that may start next.
        # The tool call whose body is being read in the states CALL_BODY and BROKEN_CALL.
        self._open_call: OpenCall | None = None
        # The variant of the last tool call (one of the declared ways to write a tool call), and the
        # closing markers that may still follow this tool call.
        self._last_variant: CompiledCall | None = None
        self._closing_markers: tuple[str, ...] = ()

    # ---- transitions from content and headers ----------------------------------------------------

    def open_section(self, marker: str) -> State:
        """Read `marker`, which opens a tool section. Return the state BETWEEN_CALLS.

        A tool section is the part of a message that contains all tool calls. The marker becomes
        pending text: it is removed when a tool call starts, and is content if no tool call follows.
        """
        self._is_in_section = True
        self._text_writer.store_pending(self._buffer.take(len(marker)))
        return State.BETWEEN_CALLS

    # Each of the next three methods returns the state CALL_START, or None if no tool call can
    # start. If the result is None, the caller treats the marker as content.

    def open_call(self, marker: str) -> State | None:
        """Expect a tool call that starts with the opening marker `marker`, as in `<tool_call>`."""
        return self._expect(self._starts.at_marker(marker))

    def open_call_at_head(self, marker: str) -> State | None:
        """Expect a tool call whose opening marker the model has omitted.

        Example: the text starts with `<function=`, although `<tool_call>` should precede this text.

        Args:
            marker: The first fixed text of the tool call's header, for example `<function=`.
        """
        return self._expect(self._starts.at_head(marker))

    def open_unmarked_call(self, opening: str) -> State | None:
        """Expect a tool call without an opening marker. It starts with `opening`, such as `{`."""
        has_content = self._text_writer.has_content
        return self._expect(self._starts.at_unmarked_opening(opening, has_content))

    def _expect(self, expected: ExpectedCall | None) -> State | None:
        """Store `expected` as the tool call to read next, and return the state CALL_START.

        `read_start` compares the text with the stored tool call. If `expected` is None, no tool
        call can start here, so nothing is stored and None is returned.
        """
        if expected is None:
            return None
        self._expected = expected
        return State.CALL_START

    def start_message_call(self, head: Head) -> State:
        """Create the reader for the arguments of a tool call that is a whole message.

        The message header `head` has been read. The header names the function (`head.name`).
        """
        variant = self._format.message_call
        assert variant is not None  # Formats with message headers have a message call.
        self._begin_body(MatchedCall(variant, head, is_confirmed=True))
        return State.CALL_BODY

    def close_section(self, marker: str) -> bool:
        """Leave the tool section if `marker` closes it. Return whether the section was left."""
        closes_section = self._is_in_section and marker in self._section_markers.closes
        if closes_section:
            self._is_in_section = False
        return closes_section

    def is_after_call(self) -> bool:
        """Return whether only markup, such as `</tool_call>`, follows the last tool call."""
        return self.has_calls() and self._text_writer.is_after_marker

    def has_calls(self) -> bool:
        """Return whether a tool call has started in this message."""
        return self._call_writer.num_started > 0

    def add_deviation(self, deviation: str) -> None:
        """Store the description of a deviation from the format. See `CallWriter.add_deviation`."""
        self._call_writer.add_deviation(deviation)

    # ---- text that is not a tool call ------------------------------------------------------------

    def treat_as_content(self, fault: str, *, num_unread_chars: int = 0) -> State:
        """Write text as content, because the text looked like a tool call but is none.

        The text consists of the pending text, which has been read but not written, and of the next
        `num_unread_chars` characters of the buffer. Example: `<tool_call>` is pending, and ` is` is
        unread. With `num_unread_chars=3`, the content `<tool_call> is` is written.

        Args:
            fault: The reason that the event gives for returning this text as content.
            num_unread_chars: The number of unread characters that are content.

        Returns:
            The state in which the text after this content is read.
        """
        self._discard_open_call()
        self._text_writer.write_pending(self._buffer.take(num_unread_chars), fault)
        # With the policy CALLS_FIRST, no tool call may follow content.
        if self._calls_first and self._text_writer.has_content:
            return State.CONTENT_ONLY
        return State.CONTENT

    def _discard_open_call(self) -> None:
        """Forget the open tool call, and the descriptions of its deviations from the format.

        If no tool call of the message has started, also leave the tool section, because the opening
        marker of the section is a part of the text that is now content.
        """
        self._open_call = None
        self._call_writer.clear_deviations()
        if not self.has_calls():
            self._is_in_section = False

    def _is_rest_unusable(self) -> bool:
        """Return whether no client can use the rest of the message, because it contains a tag.

        The message has ended inside a tool call. The rest consists of the pending text and the
        unread text. Example: the result is True for `<tool_call>{"na` and False for `{"na`.
        """
        return looks_like_markup(self._text_writer.pending_text + self._buffer.unread())

    def _remove_rest(self) -> State:
        """Remove the pending text and all unread text from the output. Return the state CONTENT.

        The message has ended, and this text is an incomplete tool call or an empty tool section.
        """
        self._is_in_section = False
        self._open_call = None
        self._text_writer.drop_pending()
        self._text_writer.write_markup(self._buffer.take_unread())
        return State.CONTENT

    # ---- CALL_START and CALL_BODY ----------------------------------------------------------------

    def read_start(self) -> State | None:
        """Read the opening marker of a tool call, and the header that names the function.

        `_expected` is the tool call that may start here, and the unread text decides. Examples:

            `<tool_call>{"` starts a tool call.
            `<tool_call> is a tag` is content, because no tool call follows the marker.
            `<tool_call>{` at the end of the message is an incomplete tool call and is removed.

        Returns:
            The next state, or None if more text is required to decide whether a tool call starts.
        """
        match = self._expected.match(self._buffer, self._call_writer.tools)
        if isinstance(match, MatchedCall):
            return self._read_head(match)
        if match == NEED_MORE:
            return None
        if self._is_start_cut_off() and self._is_rest_unusable():
            return self._remove_rest()
        # No tool call starts here, so the text that was taken for the opening marker is content.
        opening = self._expected.opening
        return self.treat_as_content(_NO_CALL_AFTER_MARKER, num_unread_chars=len(opening))

    def _is_start_cut_off(self) -> bool:
        """Return whether the message has ended with an incomplete start of a tool call.

        Example: `<tool_call>{` is incomplete, because `{"` would start a JSON object. Inside a tool
        section, a tool call may lack its opening marker, so `{` alone is incomplete, too.
        """
        return self._buffer.is_final and self._expected.is_incomplete(
            self._buffer, includes_unmarked=self._is_in_section
        )

    def _read_head(self, match: MatchedCall) -> State:
        """Read the opening marker and the header of a tool call, and prepare to read its body.

        The text up to `match.head.end` is stored as pending text, which is removed from the output
        when the tool call starts. Example: in `<call>f{"a": 1}`, the text `<call>f` is read.

        Returns:
            The state CALL_BODY, or a later state if the body ends without any text.
        """
        if match.variant.omits_marker:
            self._call_writer.add_deviation(_MISSING_MARKER)
        self._text_writer.store_pending(self._buffer.take_until(match.head.end))
        self._begin_body(match)
        if self._buffer.has_unread():
            return State.CALL_BODY
        # Some body readers start the tool call before any text of the body arrives. `read_body` is
        # called now, so that the client receives the start of the tool call without delay.
        return self.read_body() or State.CALL_BODY

    def _begin_body(self, match: MatchedCall) -> None:
        """Set `_open_call` to the tool call of `match`, and create the reader of its body.

        The opening marker and the header of this tool call have been read.
        """
        body = match.variant.create_reader(
            self._call_writer, match.head, is_confirmed=match.is_confirmed
        )
        self._open_call = OpenCall(match, body, self._buffer, self._text_writer)
        body.begin()

    def read_body(self) -> State | None:
        """Read a part of the open tool call's body, which is the text between its markers.

        Example: from `{"name": "f", "arguments": {}}</tool_call>`, the JSON object is read. If the
        text turns out not to be a tool call, the text is written as content.

        Returns:
            None if the body continues. CALL_END after the body, BROKEN_CALL if the arguments are
            not valid JSON, or the state after content.
        """
        call = self._open_call
        assert call is not None
        outcome = call.read()
        if outcome is None:
            return None
        if outcome is Outcome.ENDED:
            return self._end_call(call.variant)
        if outcome is Outcome.BROKEN:
            return State.BROKEN_CALL
        return self.treat_as_content(_NO_CALL)

    def read_broken(self) -> State | None:
        """Read arguments that are not valid JSON, such as `{"a": x}`, up to the next marker.

        Return the next state, or None if the marker has not arrived. See `OpenCall.read_broken`.
        """
        call = self._open_call
        assert call is not None
        return self._end_call(call.variant) if call.read_broken() else None

    def _end_call(self, variant: CompiledCall) -> State:
        """Leave the body of a tool call that has ended, and expect its closing markers.

        `_open_call` becomes None, and `_last_variant` and `_closing_markers` are set.

        Args:
            variant: The compiled declaration of the tool call, which contains the closing markers.

        Returns:
            CALL_END, in which the closing markers are read. If the tool call is a whole message,
            the result is CONTENT, because the marker that ends a message is read in this state.
        """
        self._text_writer.end_call()
        self._text_writer.start_after_call()
        self._open_call = None
        self._last_variant = variant
        self._closing_markers = variant.closing_markers
        return State.CONTENT if variant is self._format.message_call else State.CALL_END

    # ---- CALL_END and BETWEEN_CALLS --------------------------------------------------------------

    def read_end(self) -> State | None:
        """Read the next closing marker of a tool call whose body has been read.

        `_closing_markers` contains the markers that may follow. A model may omit any of them.
        Example: after the body `{"name": "f"}`, the text `}</tool_call>` is read. The superfluous
        bracket is removed together with the marker.

        Returns:
            None if more text is required. CALL_END if other closing markers may follow, or
            BETWEEN_CALLS if all closing markers have been read or omitted. If a second tool call
            starts before the closing marker, the state in which this tool call is read.
        """
        buffer = self._buffer
        match = match_closing_marker(self._closing_markers, buffer.text, buffer.pos)
        if isinstance(match, ClosingMarker):
            self._text_writer.write_markup(buffer.take_until(match.end))
            self._closing_markers = match.later_markers
            return State.CALL_END if match.later_markers else State.BETWEEN_CALLS
        if isinstance(match, IncompleteMarker):
            if not buffer.is_final:
                return None  # The rest of the marker may still arrive.
            return self._remove_incomplete_marker() if match.prefix else State.BETWEEN_CALLS
        return self._start_second_object() or State.BETWEEN_CALLS

    def _remove_incomplete_marker(self) -> State:
        """Remove all unread text from the output, and return the state BETWEEN_CALLS.

        The message has ended, and the unread text is the beginning of a marker, such as `</tool_c`.
        """
        self._text_writer.write_markup(self._buffer.take_unread())
        return State.BETWEEN_CALLS

    def _start_second_object(self) -> State | None:
        """Start another tool call if a second JSON object precedes the closing marker.

        Example: in `<tool_call>{..}{..}</tool_call>`, the first object has been read, so the unread
        text is `{..}</tool_call>`. The second object is another tool call.

        Returns:
            The state in which the second object is read. None if no object follows, or if the
            format does not write tool calls as JSON objects between two markers.
        """
        variant = self._last_variant
        if variant is None or not self._may_repeat_object(variant):
            return None
        object_start = skip_whitespace(self._buffer.text, self._buffer.pos)
        if not self._buffer.text.startswith("{", object_start):
            return None
        self._text_writer.store_whitespace(self._buffer.take_until(object_start))
        # No marker precedes the second object, so it is a tool call only if the request offers the
        # function that the object names.
        return self._read_head(MatchedCall(variant, Head(object_start), is_confirmed=False))

    def _may_repeat_object(self, variant: CompiledCall) -> bool:
        """Return whether the markers of a tool call may enclose several JSON objects.

        Example: `<tool_call>{..}{..}</tool_call>`. At least one closing marker of the last tool
        call must not have been read yet. `variant` is the compiled declaration of this tool call.
        """
        is_json_object = isinstance(variant.call.body, JsonObject)
        has_opening_marker = bool(variant.call.open.strip())
        expects_closing_marker = bool(self._closing_markers)
        return is_json_object and has_opening_marker and expects_closing_marker

    def read_between(self) -> State | None:
        """Read the text after a tool call, or after the opening marker of a tool section.

        White space, and then one of these texts is read:

            unread text      example          next state
            closing marker   `</tool_calls>`  CONTENT
            separator        `, `             BETWEEN_CALLS
            other text       `{"name"`        CALL_START or CONTENT; the text stays unread

        Returns:
            The next state, or None if more text is required.
        """
        buffer = self._buffer
        whitespace_end = skip_whitespace(buffer.text, buffer.pos)
        self._text_writer.store_whitespace(buffer.take_until(whitespace_end))
        if not buffer.has_unread():
            return None
        close_end = self._match_section_close()
        separator_end = self._match_separator()
        if close_end >= 0:
            return self._end_section(buffer.text[buffer.pos : close_end])
        if NEED_MORE in (close_end, separator_end):
            # The rest of the marker or separator may still arrive, unless the message has ended.
            return self._remove_incomplete_marker() if buffer.is_final else None
        if separator_end >= 0:
            self._text_writer.write_markup(buffer.take_until(separator_end))
            return State.BETWEEN_CALLS
        return self._state_of_other_text()

    def _state_of_other_text(self) -> State:
        """Return the state that reads unread text that is no closing marker and no separator.

        Inside a tool section, only a tool call can follow, so the state is CALL_START. Otherwise
        the text is a tool call if it starts like a tool call without a marker. If it does not, the
        text is content, so the state is CONTENT.
        """
        if self._is_in_section:
            expected: ExpectedCall | None = self._starts.in_section()
        else:
            expected = self._starts.after_call(self._buffer)
        return self._expect(expected) or State.CONTENT

    def _match_section_close(self) -> int:
        """Match the closing marker of the tool section at the start of the unread text.

        Return the position after the marker, NEED_MORE or NO_MATCH.
        """
        if not self._is_in_section:
            return NO_MATCH
        return self._section_markers.match_close(self._buffer, is_empty=self._is_section_empty())

    def _is_section_empty(self) -> bool:
        """Return whether no tool call has started in the tool section.

        The opening marker of a section is pending text until the first tool call of the section
        starts. Between two tool calls, no other text is pending.
        """
        return bool(self._text_writer.pending)

    def _match_separator(self) -> int:
        """Match the separator between two tool calls at the start of the unread text.

        Return the position after the separator, NEED_MORE or NO_MATCH. No separator can precede the
        first tool call.
        """
        if not self.has_calls():
            return NO_MATCH
        return self._section_markers.match_separator(self._buffer)

    def _end_section(self, close: str) -> State:
        """Leave the tool section, and read its closing marker `close`. Return the next state.

        Usually, the marker is removed from the output. If the section contains no tool call, its
        opening marker is still pending text, and both markers are treated alike:

            section                          both markers are
            `<tool_calls></tool_calls>`      content
            `<|calls_begin|><|calls_end|>`   removed, because ordinary text never contains such
                                             special tokens; content with the policy CALLS_FIRST
        """
        self._is_in_section = False
        if self._is_section_empty():
            may_be_content = self._calls_first or not is_special_token(close)
            if may_be_content:
                return self.treat_as_content(_EMPTY_SECTION, num_unread_chars=len(close))
            self._text_writer.drop_pending()  # Removes the opening marker of the section.
        self._text_writer.write_markup(self._buffer.take(len(close)))
        return State.CONTENT

    # ---- the end of the text ---------------------------------------------------------------------

    def finish_body(self) -> State:
        """End the open tool call, because the message has ended inside its body.

        The first case that applies decides:

            text of the tool call                   effect
            `<call>{.. "a": "x}</call>`             The arguments end before `</call>`, because a
                                                    quote is missing. `</call>` is read again.
            `<call>{"name": "f", "arguments": {`    The tool call ends with incomplete arguments.
            `<call>{"na`                            The text is removed.
            `{"na`                                  The text is content.

        Returns:
            The next state.
        """
        call = self._open_call
        assert call is not None
        if call.end_at_stored_marker():
            return self._end_call(call.variant)
        if call.finish():
            self._open_call = None
            return State.CONTENT
        is_start_cut_off = call.is_start_cut_off(self._section_markers.closes)
        if is_start_cut_off and self._is_rest_unusable():
            return self._remove_rest()
        return self.treat_as_content(_NO_CALL)

    def finish_broken(self) -> None:
        """At the end of the message, end the open tool call, whose arguments are not valid JSON."""
        if self._open_call is not None:
            self._open_call.finish_broken()

    def finish_empty_section(self) -> None:
        """Remove or write the text of a section without tool calls, because the message has ended.

        The text of such a tool section is pending text. Examples: `<tool_calls>` is removed,
        because the text contains a tag. `TOOLS:` contains no tag, so it is written as content.
        """
        if not self._text_writer.pending:
            return
        if self._is_rest_unusable():
            self._remove_rest()
        else:
            self.treat_as_content(_EMPTY_SECTION)
