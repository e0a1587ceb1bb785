"""Decides which forms of a tool call may start at a position, and matches them with the text."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.stream.argument_types import Tools
from nereid_parsers.stream.body_reader import Head
from nereid_parsers.stream.call_plan import CallPlan
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.format_plan import CallPlans
from nereid_parsers.stream.pattern_matching import NEED_MORE, NO_MATCH
from nereid_parsers.stream.text_buffer import TextBuffer

# Ordinary text does not contain a tag that starts in this way.
_SPECIAL_TOKEN_STARTS = ("<|", "<｜")


@dataclass(frozen=True, slots=True)
class MatchedCall:
    """The start of a tool call in the text.

    Attributes:
        plan: The form of the tool call.
        head: The text before the body.
        is_certain: Whether a marker proves that the text is a tool call.
    """

    plan: CallPlan
    head: Head
    is_certain: bool


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """The tool call that may start at the current position.

    Attributes:
        plans: The possible forms, in the order in which they are tried.
        opening: The text that indicates the tool call: a marker, the first character of a tool call
            without a marker, or "" inside a tool section. Without a tool call, this text is
            content.
        is_certain: Whether a marker proves that the text is a tool call.
    """

    plans: tuple[CallPlan, ...]
    opening: str
    is_certain: bool

    def match(self, buffer: TextBuffer, tools: Tools) -> MatchedCall | int:
        """Match the unread text with each form.

        A tool call without its opening marker matches only if the request offers the function.

        Args:
            buffer: The text.
            tools: The tools that the request offers.

        Returns:
            The matched start of a tool call, NEED_MORE or NO_MATCH.
        """
        for plan in self.plans:
            head = plan.match(buffer.text, buffer.pos, buffer.is_final)
            if head == NEED_MORE:
                return NEED_MORE
            if not isinstance(head, Head):
                continue
            is_offered = not tools.is_known or head.name in tools
            if is_offered or not plan.is_orphan:
                return MatchedCall(plan, head, self.is_certain)
        return NO_MATCH

    def is_incomplete(self, buffer: TextBuffer, with_bare: bool) -> bool:
        """Return whether more text could complete the start of the tool call.

        Args:
            buffer: The text at the end of the message.
            with_bare: Whether tool calls without a marker are considered too.
        """
        return any(
            plan.match(buffer.text, buffer.pos, is_final=False) == NEED_MORE
            for plan in self.plans
            if with_bare or not plan.is_bare
        )


class CallStarts:
    """Decides which tool call may start at a position of the message."""

    __slots__ = ("_plans", "_writer")

    def __init__(self, plans: CallPlans, writer: CallWriter) -> None:
        self._plans = plans
        self._writer = writer

    def in_section(self) -> ExpectedCall:
        """Return the tool call that must start inside a tool section."""
        return ExpectedCall(self._plans.all, "", is_certain=True)

    def at_marker(self, marker: str) -> ExpectedCall:
        """Return the tool call that may start with its opening marker."""
        return ExpectedCall(self._plans.by_trigger[marker], marker, is_certain=True)

    def at_orphan(self, marker: str) -> ExpectedCall | None:
        """Return the tool call that may start without its opening marker.

        If the request offers no tools, such a tool call starts only with a special token, because
        ordinary text may contain any other tag. Example: the tag `<invoke name=` without
        `<minimax:tool_call>` before it may start a tool call if the request offers tools.

        Args:
            marker: The first literal of the tool call's head.
        """
        if not self._writer.tools.parameters and not marker.startswith(_SPECIAL_TOKEN_STARTS):
            return None
        return ExpectedCall(self._plans.orphans[marker], marker, is_certain=True)

    def at_bare_opening(self, opening: str, has_content: bool) -> ExpectedCall | None:
        """Return the tool call that may start without a marker.

        At the start of the output, any tool call without a marker may start. After other text, a
        tool call may start only if the offered tools are known, because the name of an offered tool
        is then the only proof that the text is a tool call.

        Args:
            opening: The first text of the tool call, for example `{`.
            has_content: Whether content precedes `opening`.
        """
        if has_content or self._writer.num_started:
            may_follow = any(plan.may_follow_content() for plan in self._plans.bare)
            if not self._writer.tools.parameters or not may_follow:
                return None
        return ExpectedCall(self._plans.bare, opening, is_certain=False)

    def after_call(self, buffer: TextBuffer) -> ExpectedCall | None:
        """Return the tool call without a marker that may directly follow another tool call.

        Example: after `{"name": "f", ..}`, the text `{"name": "g", ..}` is another tool call.
        """
        bare = self._plans.bare
        openings = (opening for plan in bare for opening in plan.body_openings())
        if not any(buffer.starts_with(opening) for opening in openings):
            return None
        return ExpectedCall(bare, buffer.text[buffer.pos], is_certain=False)
