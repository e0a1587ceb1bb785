"""Decides how a tool call may start at a position, and tests whether one starts there."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.compiled.compiled_call import CompiledCall
from nereid_parsers.stream.compiled.compiled_calls import CompiledCalls
from nereid_parsers.stream.pattern_matching import NEED_MORE, NO_MATCH, Mismatch
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.values.argument_types import Tools

# Special tokens start with one of these texts. Ordinary text does not contain special tokens.
_SPECIAL_TOKEN_STARTS = ("<|", "<｜")


@dataclass(frozen=True, slots=True)
class MatchedCall:
    """A tool call whose start has been found in the text.

    Attributes:
        variant: The matched variant, which is one of several ways to write a tool call.
        head: The matched marker and header, which precede the body.
        is_confirmed: Whether a marker or an earlier tool call shows that the text is a tool call.
    """

    variant: CompiledCall
    head: Head
    is_confirmed: bool


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """A tool call that may start at the current position. `match` decides whether it starts there.

    Attributes:
        variants: The ways to write a tool call that are possible here. `match` tries them in this
            order.
        unread_opening: The first unread text of the tool call: the opening marker, or the first
            character of a tool call without a marker. This text becomes content if no tool call
            starts. "" if the marker has already been read.
        is_confirmed: Whether a marker shows that the text is a tool call. If no marker shows this,
            the text is a tool call only if the request offers the function.
    """

    variants: tuple[CompiledCall, ...]
    unread_opening: str
    is_confirmed: bool

    def match(self, buffer: TextBuffer, tools: Tools) -> MatchedCall | Mismatch:
        """Return the first variant in `variants` that matches the unread text.

        A variant is one of several ways to write a tool call. A variant without the declared marker
        matches only if it names a function that the request offers. Examples for a tool call that
        is written as an object or as an array, after the marker `<call>`:

            `<call>{"name"`   The first variant, an object, matches.
            `<call>[{"name"`  The second variant, an array, matches.
            `<call>`          NEED_MORE, because more text is required to select a variant.
            `<call> is`       NO_MATCH, because the text is not a tool call.
        """
        for variant in self.variants:
            match = variant.match(buffer.text, buffer.pos, buffer.is_final)
            if match is NEED_MORE:
                # More text may complete the match of this variant. The later variants are not tried
                # yet, because this variant takes precedence.
                return NEED_MORE
            if isinstance(match, Head):
                # Without a marker such as `<call>`, only the name of an offered function shows that
                # the text is a tool call.
                is_offered = match.name in tools or not tools.is_known
                if is_offered or not variant.needs_offered_name:
                    return MatchedCall(variant.for_name(match.name), match, self.is_confirmed)
        return NO_MATCH

    def is_incomplete(self, buffer: TextBuffer, *, includes_unmarked: bool) -> bool:
        """Return whether the message ends before a tool call has started, as in `<tool_call>{`.

        The buffer must contain the last text of the message. Examples of this text:

            `<tool_call>{`   True, because `"name"` could complete the start of a tool call
            `<tool_call>x`   False, because no tool call starts with this text
            `{`              True if `includes_unmarked` is true, because a tool call without a
                             marker could start
            `<br`            True if `includes_unmarked` is true, although `<` starts tool calls
                             such as `<get_weather>`, because content often contains `<`

        The caller removes an incomplete start from the output.
        """
        variants = [
            variant
            for variant in self.variants
            if includes_unmarked
            or not (variant.is_unmarked or variant.call.starts_with_punctuation)
        ]
        # With `is_final=False`, the result NEED_MORE shows that more text could complete the start
        # of a tool call.
        return any(
            variant.match(buffer.text, buffer.pos, is_final=False) is NEED_MORE
            for variant in variants
        )


class CallStarts:
    """Decides how a tool call may start at a position of the message.

    Each method returns the expected tool call. The caller then tests whether the text matches.
    """

    __slots__ = ("_call_writer", "_calls")

    def __init__(self, variants: CompiledCalls, writer: CallWriter) -> None:
        """Create an object that decides how the tool calls of one message may start.

        `variants` are the ways in which the model may write a tool call. The writer contains the
        tools that the request offers, and the number of earlier tool calls.
        """
        self._calls = variants
        self._call_writer = writer

    def in_section(self) -> ExpectedCall:
        """Return the tool call that may start after a marker such as `<tool_calls>`.

        A tool section is the text between the markers that enclose all tool calls of a message.
        """
        return ExpectedCall(self._calls.all, unread_opening="", is_confirmed=True)

    def at_marker(self, marker: str) -> ExpectedCall:
        """Return the tool call that may start with `marker`, for example `<call>`."""
        return ExpectedCall(self._calls.by_marker[marker], marker, is_confirmed=True)

    def at_head(self, header_start: str) -> ExpectedCall | None:
        """Return the tool call that may start with its header, without the opening marker.

        Example: the model writes `<invoke name="f">` without the marker `<calls>` before this
        header. `header_start` is the first fixed text of the header, for example `<invoke name=`.
        Return None if the header is ordinary text.
        """
        # If the request offers no tools, `<invoke name=` is ordinary text. A special token, such as
        # `<|invoke|>`, is never ordinary text.
        is_special_token = header_start.startswith(_SPECIAL_TOKEN_STARTS)
        may_be_call = is_special_token or self._offers_tools()
        if not may_be_call:
            return None
        # The header replaces the marker, so it confirms that the text is a tool call.
        variants = self._calls.by_header[header_start]
        return ExpectedCall(variants, header_start, is_confirmed=True)

    def _offers_tools(self) -> bool:
        """Return whether the request offers at least one tool."""
        return bool(self._call_writer.tools.parameters)

    def at_unmarked_opening(self, opening: str, has_content: bool) -> ExpectedCall | None:
        """Return the tool call that may start with `opening`, such as `{`, instead of a marker.

        Example: `{` may start the tool call `{"name": "f", "arguments": {}}`. Return None if
        `opening` is content. `has_content` is true if content precedes `opening`.

        At the start of the output, `opening` may always start a tool call. After content or another
        tool call, `opening` is usually content, as `{` in `The set {1, 2}`, so more conditions
        apply: see `_may_follow_content_or_call`.
        """
        has_calls = self._call_writer.num_started > 0
        is_output_start = not has_content and not has_calls
        may_be_call = is_output_start or self._may_follow_content_or_call()
        if not may_be_call:
            return None
        # No marker confirms the tool call, so it must name a function that the request offers.
        return ExpectedCall(self._calls.unmarked, opening, is_confirmed=False)

    def _may_follow_content_or_call(self) -> bool:
        """Return whether a tool call without a marker may follow content or another tool call.

        After content, text such as `{` is usually content, too. A tool call is possible only if the
        request offers tools, and if the format writes tool calls as JSON or between brackets. A
        Python call without brackets, such as `f(a=1)`, cannot be distinguished from content.
        """
        if not self._offers_tools():
            return False
        return any(variant.may_follow_content() for variant in self._calls.unmarked)

    def after_call(self, buffer: TextBuffer) -> ExpectedCall | None:
        """Return the tool call that may follow a tool call without a marker in between, or None.

        Example: after `{"name": "f", ..}`, the unread text `{"name": "g", ..}` may be another tool
        call, because it starts with `{`. For the unread text `Hello`, the result is None.
        """
        variants = self._calls.unmarked
        call_starts = (text for variant in variants for text in variant.body_openings())
        may_be_call = any(buffer.starts_with(text) for text in call_starts)
        if not may_be_call:
            return None
        # If the text turns out to be content, only its first character is written as content. The
        # parser then reads the following characters, which may contain a marker.
        first_char = buffer.text[buffer.pos]
        # No marker confirms the tool call, so it must name a function that the request offers.
        return ExpectedCall(variants, unread_opening=first_char, is_confirmed=False)
