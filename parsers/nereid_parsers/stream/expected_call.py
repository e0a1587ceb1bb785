"""Decides which variants of a tool call may start at a position, and matches these variants."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.compiled_call import CompiledCall
from nereid_parsers.stream.compiled_format import CompiledCalls
from nereid_parsers.stream.pattern_matching import NEED_MORE, NO_MATCH, Mismatch
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.values.argument_types import Tools

# Special tokens start with one of these texts. Ordinary text does not contain special tokens.
_SPECIAL_TOKEN_STARTS = ("<|", "<｜")


@dataclass(frozen=True, slots=True)
class MatchedCall:
    """The start of a tool call in the text.

    Attributes:
        variant: The variant of the tool call.
        head: The text before the body.
        is_confirmed: Whether a marker or an earlier tool call shows that the text is a tool call.
    """

    variant: CompiledCall
    head: Head
    is_confirmed: bool


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """The tool call that may start at the current position.

    Attributes:
        variants: The possible variants, in the order in which they are tried.
        opening: The text that indicates the tool call: a marker, the first character of a tool call
            without a marker, or "" inside a tool section. If no tool call starts, this text
            is content.
        is_confirmed: Whether a marker shows that the text is a tool call. If no marker shows this,
            the text is a tool call only if the request offers the function.
    """

    variants: tuple[CompiledCall, ...]
    opening: str
    is_confirmed: bool

    def match(self, buffer: TextBuffer, tools: Tools) -> MatchedCall | Mismatch:
        """Match the start of a tool call with the unread text. Try the variants in their order.

        A variant is one of several ways to write a tool call, for example as an object or as an
        array. If the model has omitted the opening marker of a tool call, the tool call matches
        only if `tools` contains the function.

        Returns:
            The match of the first variant that matches. NEED_MORE if more text is required to
            select a variant. NO_MATCH if the text is not a tool call.
        """
        for variant in self.variants:
            match = variant.match(buffer.text, buffer.pos, buffer.is_final)
            if match == NEED_MORE:
                return NEED_MORE
            if isinstance(match, Head):
                may_be_offered = not tools.is_known or match.name in tools
                if may_be_offered or not variant.omits_marker:
                    return MatchedCall(variant, match, self.is_confirmed)
        return NO_MATCH

    def is_incomplete(self, buffer: TextBuffer, *, includes_unmarked: bool) -> bool:
        """Return whether the message ends with an incomplete start of a tool call.

        Example: the result is True for `<tool_call>{` at the end of the message, because `{"` would
        start a JSON object.

        Args:
            buffer: The text at the end of the message.
            includes_unmarked: Whether tool calls without a marker are considered, too. Example: `{`
                is the start of the tool call `{"name": "f"}`.
        """
        for variant in self.variants:
            if variant.is_unmarked and not includes_unmarked:
                continue
            # The result is NEED_MORE if more text could complete the start of the tool call.
            match = variant.match(buffer.text, buffer.pos, is_final=False)
            if match == NEED_MORE:
                return True
        return False


class CallStarts:
    """Decides which tool call may start at a position of the message."""

    __slots__ = ("_call_writer", "_calls")

    def __init__(self, variants: CompiledCalls, writer: CallWriter) -> None:
        """Store the variants of tool calls that the format declares, and the `CallWriter`.

        A decision depends on the tools that the request offers (`writer.tools`), and on the number
        of earlier tool calls (`writer.num_started`).
        """
        self._calls = variants
        self._call_writer = writer

    def in_section(self) -> ExpectedCall:
        """Return the tool call that must start inside a tool section."""
        return ExpectedCall(self._calls.all, "", is_confirmed=True)

    def at_marker(self, marker: str) -> ExpectedCall:
        """Return the tool call that may start with the opening marker `marker`."""
        return ExpectedCall(self._calls.by_trigger[marker], marker, is_confirmed=True)

    def at_head(self, marker: str) -> ExpectedCall | None:
        """Return the tool call that may start with a header, because its marker is missing.

        The header of a tool call contains the function's name, for example `<invoke name="f">`. The
        result is None if `marker` may be ordinary text: the request offers no tools, and `marker`
        is not a special token such as `<|invoke|>`, which ordinary text does not contain.

        Args:
            marker: The first literal of the tool call's header, for example `<invoke name=`.
        """
        offers_tools = bool(self._call_writer.tools.parameters)
        is_special_token = marker.startswith(_SPECIAL_TOKEN_STARTS)
        if not offers_tools and not is_special_token:
            return None
        return ExpectedCall(self._calls.by_head[marker], marker, is_confirmed=True)

    def at_unmarked_opening(self, opening: str, has_content: bool) -> ExpectedCall | None:
        """Return the unmarked tool call that may start with `opening`, for example with `{`.

        At the start of the output, any tool call without a marker may start. After content or
        another tool call, a tool call may start only if the request offers tools, because only the
        name of an offered tool then distinguishes a tool call from content.

        Args:
            opening: The first text of the tool call, for example `{`.
            has_content: Whether content precedes `opening`.

        Returns:
            The tool call, or None if `opening` is content.
        """
        is_at_start = not has_content and not self._call_writer.num_started
        offers_tools = bool(self._call_writer.tools.parameters)
        may_follow = any(variant.may_follow_content() for variant in self._calls.unmarked)
        if is_at_start or (offers_tools and may_follow):
            return ExpectedCall(self._calls.unmarked, opening, is_confirmed=False)
        return None

    def after_call(self, buffer: TextBuffer) -> ExpectedCall | None:
        """Return the tool call that may start, without a marker, directly after another tool call.

        Example: after `{"name": "f", ..}`, the text `{"name": "g", ..}` is another tool call. The
        result is None if the unread text does not start like a tool call.
        """
        unmarked = self._calls.unmarked
        openings = (opening for variant in unmarked for opening in variant.body_openings())
        if not any(buffer.starts_with(opening) for opening in openings):
            return None
        return ExpectedCall(unmarked, buffer.text[buffer.pos], is_confirmed=False)
