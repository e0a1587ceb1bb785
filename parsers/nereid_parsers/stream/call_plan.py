"""Compiled declarations of tool calls and message headers, which match the model's text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nereid_parsers.declarations import Messages, Route, Stage
from nereid_parsers.pattern_syntax import pattern
from nereid_parsers.stream.argument_types import Tools
from nereid_parsers.stream.body_reader import BodyReader, Head
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.json_bodies import ArrayReader, JsonArgumentsReader
from nereid_parsers.stream.json_object import ObjectReader
from nereid_parsers.stream.lexer import Lexer, marker_prefix_regex
from nereid_parsers.stream.nested_tags import NestedReader
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Pattern,
    compile_pattern,
    marker_parts,
    skip_blanks,
)
from nereid_parsers.stream.python_calls import BareKeyReader, PythonCallsReader
from nereid_parsers.stream.tagged_arguments import TaggedReader, TagsPlan
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.tool_declarations import (
    BareKeyArguments,
    Call,
    JsonArguments,
    JsonArray,
    JsonObject,
    NestedTags,
    PythonCalls,
    TaggedArguments,
    ToolSection,
)


class CallPlan:
    """The compiled declaration of one form of a tool call.

    Attributes:
        call: The declaration.
        is_bare: Whether the tool call starts without a marker.
        is_orphan: Whether the marker before the head is missing. Such a tool call is accepted only
            if the request offers the function.
        closing_markers: The parts of the closing marker of the tool call.
        end_of_broken: A lexer that finds the end of arguments that are not valid JSON.
    """

    def __init__(self, call: Call, section: ToolSection, is_orphan: bool = False) -> None:
        self.call = call
        self.is_bare = not call.trigger
        self.is_orphan = is_orphan
        self.closing_markers = marker_parts(call.close)
        self._head_pattern: Pattern = compile_pattern(call.open + call.head)
        self._id_template = call.id
        self._body_start, self._possible_body_start = _body_start_regexes(call)
        # These markers cannot be a part of the arguments, so they end the arguments.
        outer_markers = (*self.closing_markers[-1:], *section.closes, call.open.strip())
        self.end_of_broken = Lexer(marker for marker in outer_markers if marker)
        self._tags: TagsPlan | None = None
        if isinstance(call.body, TaggedArguments):
            stop_markers = dict.fromkeys((*self.closing_markers[:1], *outer_markers))
            between = (*self.closing_markers, *section.closes, *map(str.strip, section.opens))
            self._tags = TagsPlan(
                call.body,
                self._head_pattern,
                tuple(marker for marker in stop_markers if marker),
                tuple(dict.fromkeys(between)),
            )

    def match(self, text: str, pos: int, is_final: bool) -> Head | int:
        """Match the marker and the head of a tool call at `pos`, and the start of its body.

        Example: `<tool_call>{"` matches a JSON object after the marker `<tool_call>`, and the head
        ends at 11. The text `<tool_call>` alone gives NEED_MORE, and `<tool_call>x` gives NO_MATCH.

        Returns:
            The head, NEED_MORE or NO_MATCH.
        """
        fields: dict[str, str] = {}
        end = self._head_pattern.match(text, pos, is_final, fields)
        if end < 0:
            return end
        body_start = self.match_body_start(text, end, is_final)
        if body_start < 0:
            return body_start
        call_id = _fill_in_id(self._id_template, fields)
        return Head(end, fields.get("name", ""), call_id)

    def match_body_start(self, text: str, head_end: int, is_final: bool) -> int:
        """Return the start of the body after a head, or NEED_MORE or NO_MATCH.

        Example: for a JSON array of tool calls, `[{` starts the body, `[` gives NEED_MORE and `[1`
        gives NO_MATCH.

        Args:
            text: The text.
            head_end: The end of the head. White space may follow.
            is_final: Whether no more text follows.
        """
        pos = skip_blanks(text, head_end)
        if pos == len(text) and not is_final:
            return NEED_MORE
        if self._tags is not None:
            return self._tags.match_start(text, pos, is_final)
        if self._body_start.match(text, pos) is not None:
            return pos
        is_possible = not is_final and self._possible_body_start.match(text, pos) is not None
        return NEED_MORE if is_possible else NO_MATCH

    def create_reader(self, writer: CallWriter, head: Head, is_certain: bool) -> BodyReader:
        """Return a reader for the body after `head`.

        Args:
            writer: The writer of the tool call.
            head: The head that `match` returned.
            is_certain: Whether a marker proves that the text is a tool call.
        """
        body = self.call.body
        if isinstance(body, JsonArguments):
            return JsonArgumentsReader(writer, head)
        if isinstance(body, JsonObject):
            return ObjectReader(writer, body.keys, is_certain)
        if isinstance(body, JsonArray):
            return ArrayReader(writer, body.keys, is_certain)
        if isinstance(body, PythonCalls):
            return PythonCallsReader(writer, body, is_certain)
        if isinstance(body, BareKeyArguments):
            return BareKeyReader(writer, head, body.quote)
        if isinstance(body, NestedTags):
            return NestedReader(writer, head, body.mark, stop_marker=self.closing_markers[0])
        assert self._tags is not None
        return TaggedReader(writer, head, self._tags)

    def may_follow_content(self) -> bool:
        """Return whether this tool call without a marker may start after other content.

        Only JSON and Python calls between brackets are distinguished from other content.
        """
        body = self.call.body
        if isinstance(body, PythonCalls):
            return bool(body.open)
        return isinstance(body, JsonObject | JsonArray)

    def body_openings(self) -> tuple[str, ...]:
        """Return the texts with which a body without a marker can start.

        Examples: `("{",)` for a JSON object, `("[",)` for a JSON array, and `()` for Python calls
        without brackets.
        """
        body = self.call.body
        if isinstance(body, PythonCalls):
            return (body.open,) if body.open else ()
        return ("[",) if isinstance(body, JsonArray) else ("{",)


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

    def match(self, buffer: TextBuffer, tools: Tools) -> tuple[CallPlan, Head] | int:
        """Match the unread text with each form.

        Args:
            buffer: The text.
            tools: The tools that the request offers.

        Returns:
            The form that matches and the matched head, or NEED_MORE or NO_MATCH.
        """
        for plan in self.plans:
            head = plan.match(buffer.text, buffer.pos, buffer.is_final)
            if isinstance(head, Head):
                if plan.is_orphan and tools.is_known and head.name not in tools:
                    continue
                return plan, head
            if head == NEED_MORE:
                return NEED_MORE
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


def _body_start_regexes(call: Call) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return a regex for the start of a body, and a regex for an incomplete start of a body.

    Example: a JSON array of tool calls starts with `[{` or `[]`, or with white space between the
    two characters. The text `[` at the end of the text is an incomplete start.
    """
    body = call.body
    if isinstance(body, NestedTags):
        mark_prefix = marker_prefix_regex(body.mark)
        start = re.compile(rf"\s*{re.escape(body.mark)}")
        return start, re.compile(rf"\s*(?:\Z|{mark_prefix})")
    first_char = r"\{"
    second_char = ""
    if isinstance(body, PythonCalls):
        first_char = re.escape(body.open)
        second_char = r"[^\W\d]"
    elif isinstance(body, JsonArray):
        first_char = r"\["
        second_char = r"[{\]]"
    elif isinstance(body, JsonObject):
        second_char = """["'}]"""
    elif isinstance(body, JsonArguments) and _ends_with_marker(call):
        first_char = ""  # The markers prove that any text is the body of a tool call.
    return re.compile(rf"{first_char}\s*{second_char}"), re.compile(rf"{first_char}\s*\Z")


def _ends_with_marker(call: Call) -> bool:
    """Return whether the text after the head of a tool call can only be arguments.

    This is the case if the tool call has an opening marker and the last part of its head is a
    literal. Example: the result is True for the marker `[TOOL_CALLS]` and the head `{name}[ARGS]`.
    The result is False for the head `{name}`.
    """
    last_part = pattern(call.head)[-1]
    is_literal = isinstance(last_part, str) and bool(last_part.strip())
    return bool(call.open.strip()) and is_literal


def _fill_in_id(template: str, fields: dict[str, str]) -> str:
    """Return the id of a tool call, filled in from the fields of its head.

    Return "" if a field is missing. Example:
    `_fill_in_id("functions.{name}:{number}", {"name": "f", "number": "0"})` returns
    `"functions.f:0"`.
    """
    if template == "{id}":
        return fields.get("id", "")
    try:
        return template.format(**fields)
    except KeyError:
        return ""


class RoutePlan:
    """The compiled declaration of a message header.

    Attributes:
        stage: The stage of the message's body.
        has_calls: Whether the body may contain tool calls.
    """

    def __init__(self, route: Route, layout: Messages, message_call: CallPlan) -> None:
        """Compile a route.

        Args:
            route: The declaration.
            layout: The layout that contains the route.
            message_call: The form of a tool call that is a message of its own.
        """
        self.stage = route.stage
        self._message_call = message_call
        self.has_calls = route.has_calls
        # In a pattern, white space matches white space of any length. A header end that consists
        # only of white space must match exactly. `match` compares it after the pattern.
        is_blank = not layout.header_end.strip()
        self._blank_header_end = layout.header_end if is_blank else ""
        self._header_pattern = compile_pattern(
            route.header if is_blank else route.header + layout.header_end
        )
        first_part = pattern(route.header)[0]
        self._first_literal = first_part.strip() if isinstance(first_part, str) else ""

    def has_started(self, text: str, pos: int) -> bool:
        """Return whether the first literal of the header is at `pos`.

        If the message ends inside a header, this result distinguishes the header from content.
        """
        pos = skip_blanks(text, pos)
        return bool(self._first_literal) and text.startswith(self._first_literal, pos)

    def match(self, text: str, pos: int, is_final: bool) -> Head | int:
        """Match the header at `pos`, for example `<|channel|>final<|message|>`.

        The header of a tool call matches only if the arguments start after the header.

        Returns:
            The matched header, NEED_MORE or NO_MATCH.
        """
        fields: dict[str, str] = {}
        if not self._blank_header_end:
            pos = skip_blanks(text, pos)
        end = self._header_pattern.match(text, pos, is_final, fields)
        if end < 0:
            return end
        if not text.startswith(self._blank_header_end, end):
            is_possible = not is_final and self._blank_header_end.startswith(text[end:])
            return NEED_MORE if is_possible else NO_MATCH
        end += len(self._blank_header_end)
        if self.stage is Stage.CALLS:
            body_start = self._message_call.match_body_start(text, end, is_final)
            if body_start < 0:
                return body_start
        return Head(end, fields.get("name", ""), fields.get("id", ""))
