"""Decides which forms of a tool call may start at a position, and matches these forms."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.stream.bodies.body_reader import Head
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.compiled_call import CompiledCall
from nereid_parsers.stream.compiled_format import CompiledCalls
from nereid_parsers.stream.pattern_matching import NEED_MORE, NO_MATCH
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.values.argument_types import Tools

# A tag that starts in one of these ways is a special token. Ordinary text does not contain special
# tokens.
_SPECIAL_TOKEN_STARTS = ("<|", "<｜")


@dataclass(frozen=True, slots=True)
class MatchedCall:
    """The start of a tool call in the text.

    Attributes:
        form: The form of the tool call.
        head: The text before the body.
        is_confirmed: Whether a marker or an earlier tool call shows that the text is a tool call.
    """

    form: CompiledCall
    head: Head
    is_confirmed: bool


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """The tool call that may start at the current position.

    Attributes:
        forms: The possible forms, in the order in which they are tried.
        opening: The text that indicates the tool call: a marker, the first character of a tool call
            without a marker, or "" inside a tool section. Without a tool call, this text is
            content.
        is_confirmed: Whether a marker shows that the text is a tool call. If not, the text is a
            tool call only if the request offers its function.
    """

    forms: tuple[CompiledCall, ...]
    opening: str
    is_confirmed: bool

    def match(self, buffer: TextBuffer, tools: Tools) -> MatchedCall | int:
        """Match the unread text with each form. Return the match, NEED_MORE or NO_MATCH.

        A tool call that omits its opening marker matches only if `tools` contains the function.
        """
        for form in self.forms:
            head = form.match(buffer.text, buffer.pos, buffer.is_final)
            if head == NEED_MORE:
                return NEED_MORE
            if not isinstance(head, Head):
                continue
            is_offered = not tools.is_known or head.name in tools
            if is_offered or not form.omits_marker:
                return MatchedCall(form, head, self.is_confirmed)
        return NO_MATCH

    def is_incomplete(self, buffer: TextBuffer, *, includes_bare: bool) -> bool:
        """Return whether more text could complete the start of the tool call.

        Args:
            buffer: The text at the end of the message.
            includes_bare: Whether forms without a marker are considered too.
        """
        return any(
            form.match(buffer.text, buffer.pos, is_final=False) == NEED_MORE
            for form in self.forms
            if includes_bare or not form.is_bare
        )


class CallStarts:
    """Decides which tool call may start at a position of the message."""

    __slots__ = ("_calls", "_writer")

    def __init__(self, forms: CompiledCalls, writer: CallWriter) -> None:
        self._calls = forms
        self._writer = writer

    def in_section(self) -> ExpectedCall:
        """Return the tool call that must start inside a tool section."""
        return ExpectedCall(self._calls.all, "", is_confirmed=True)

    def at_marker(self, marker: str) -> ExpectedCall:
        """Return the tool call that may start with its opening marker."""
        return ExpectedCall(self._calls.by_trigger[marker], marker, is_confirmed=True)

    def at_head(self, marker: str) -> ExpectedCall | None:
        """Return the tool call that may start with its head, because the opening marker is missing.

        Example: the tag `<invoke name=` without `<minimax:tool_call>` before it may start a tool
        call if the request offers tools. If the request offers no tools, only a special token is
        accepted, because ordinary text may contain any other tag. Otherwise the result is None.

        Args:
            marker: The first literal of the tool call's head.
        """
        if not self._writer.tools.parameters and not marker.startswith(_SPECIAL_TOKEN_STARTS):
            return None
        return ExpectedCall(self._calls.by_head[marker], marker, is_confirmed=True)

    def at_bare_opening(self, opening: str, has_content: bool) -> ExpectedCall | None:
        """Return the tool call that may start without a marker.

        At the start of the output, any tool call without a marker may start. After content or
        another tool call, a tool call may start only if the request offers tools, because only the
        name of an offered tool then distinguishes a tool call from content.

        Args:
            opening: The first text of the tool call, for example `{`.
            has_content: Whether content precedes `opening`.

        Returns:
            The tool call, or None if `opening` is content.
        """
        if has_content or self._writer.num_started:
            may_follow = any(form.may_follow_content() for form in self._calls.bare)
            if not self._writer.tools.parameters or not may_follow:
                return None
        return ExpectedCall(self._calls.bare, opening, is_confirmed=False)

    def after_call(self, buffer: TextBuffer) -> ExpectedCall | None:
        """Return the tool call that may start, without a marker, directly after another tool call.

        Example: after `{"name": "f", ..}`, the text `{"name": "g", ..}` is another tool call. The
        result is None if the unread text does not start like a tool call.
        """
        bare = self._calls.bare
        openings = (opening for form in bare for opening in form.body_openings())
        if not any(buffer.starts_with(opening) for opening in openings):
            return None
        return ExpectedCall(bare, buffer.text[buffer.pos], is_confirmed=False)
