"""Compiled declarations of calls and message headers, which the parser matches against the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nereid_parsers.declarations import Messages, Route, Stage
from nereid_parsers.pattern_syntax import pattern
from nereid_parsers.stream.body_reader import BodyReader
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.json_bodies import ArgumentsReader, ArrayReader, ObjectReader
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


@dataclass(frozen=True, slots=True)
class Head:
    """The matched text before the body of a call or message.

    Attributes:
        end: The position after the head.
        name: The name of the function, or "" if the head contains no name.
        call_id: The id of the call, or "" if the head contains no id.
    """

    end: int
    name: str = ""
    call_id: str = ""


class CallPlan:
    """One spelling of a call, compiled.

    Attributes:
        call: The declaration.
        is_bare: Whether the call starts without a marker.
        closing_markers: The parts of the marker after the call.
        end_of_broken: Finds the markers that end arguments which are not valid JSON.
    """

    __slots__ = (
        "_body_start", "_head_pattern", "_id_template", "_possible_body_start", "_tags",
        "call", "closing_markers", "end_of_broken", "is_bare",
    )  # fmt: skip

    def __init__(self, call: Call, section: ToolSection) -> None:
        self.call = call
        self.is_bare = not call.trigger
        self.closing_markers = marker_parts(call.close)
        self._head_pattern: Pattern = compile_pattern(call.open + call.head)
        self._id_template = call.id
        self._body_start, self._possible_body_start = _body_start_regexes(call)
        # These markers cannot be a part of the arguments.
        outer_markers = (*self.closing_markers[-1:], section.close.strip(), call.open.strip())
        self.end_of_broken = Lexer(marker for marker in outer_markers if marker)
        self._tags: TagsPlan | None = None
        if isinstance(call.body, TaggedArguments):
            stop_markers = dict.fromkeys((*self.closing_markers[:1], *outer_markers))
            self._tags = TagsPlan(call.body, tuple(marker for marker in stop_markers if marker))

    def match(self, text: str, pos: int, is_final: bool) -> Head | int:
        """Match the marker and the head of the call at `pos`, and the first character of its body.

        Example: `<tool_call>{` matches a JSON object after the marker `<tool_call>`, and the head
        ends at 11. The text `<tool_call>` alone gives NEED_MORE, and `<tool_call>x` NO_MATCH.

        Returns:
            The head, NEED_MORE or NO_MATCH.
        """
        fields: dict[str, str] = {}
        end = self._head_pattern.match(text, pos, is_final, fields)
        if end < 0:
            return end
        body_pos = skip_blanks(text, end)
        if body_pos == len(text) and not is_final:
            return NEED_MORE
        if self._tags is not None:
            failure = self._check_tags_start(self._tags, text, body_pos, is_final)
        else:
            failure = self._check_body_start(text, body_pos, is_final)
        if failure is not None:
            return failure
        call_id = _fill_in_id(self._id_template, fields)
        return Head(end, fields.get("name", ""), call_id)

    def _check_tags_start(self, tags: TagsPlan, text: str, pos: int, is_final: bool) -> int | None:
        """Return None if tagged values start at `pos`, otherwise NEED_MORE or NO_MATCH.

        A call without arguments has no tagged value, so a marker that ends the body is accepted
        too.
        """
        if pos == len(text) or tags.is_at_stop_marker(text, pos):
            return None
        opening = tags.match(text, pos, is_final)
        if opening == NEED_MORE:
            return NEED_MORE
        if opening != NO_MATCH:
            return None
        is_possible = not is_final and tags.may_become_stop_marker(text, pos)
        return NEED_MORE if is_possible else NO_MATCH

    def _check_body_start(self, text: str, pos: int, is_final: bool) -> int | None:
        """Return None if the body starts at `pos`, otherwise NEED_MORE or NO_MATCH.

        Example: for a JSON array of calls, `[{` gives None, `[` NEED_MORE and `[1` NO_MATCH.
        """
        if self._body_start.match(text, pos) is not None:
            return None
        is_possible = not is_final and self._possible_body_start.match(text, pos) is not None
        return NEED_MORE if is_possible else NO_MATCH

    def create_reader(self, writer: CallWriter, head: Head, is_certain: bool) -> BodyReader:
        """Return a reader for the body after `head`.

        Args:
            writer: The writer of the call.
            head: The head that `match` returned.
            is_certain: Whether a marker proves that the text is a call.
        """
        body = self.call.body
        if isinstance(body, JsonArguments):
            return ArgumentsReader(writer, head.name, head.call_id)
        if isinstance(body, JsonObject):
            return ObjectReader(writer, body.keys, is_certain)
        if isinstance(body, JsonArray):
            return ArrayReader(writer, body.keys, is_certain)
        if isinstance(body, PythonCalls):
            return PythonCallsReader(writer, body, is_certain)
        if isinstance(body, BareKeyArguments):
            return BareKeyReader(writer, body, head.name, head.call_id)
        if isinstance(body, NestedTags):
            stop_marker = self.closing_markers[0]
            return NestedReader(writer, body, stop_marker, head.name, head.call_id)
        assert self._tags is not None
        return TaggedReader(writer, self._tags, head.name, head.call_id)

    def body_openings(self) -> tuple[str, ...]:
        """Return the texts with which a bare call can start: `("{",)`, `("[",)` or `()`."""
        body = self.call.body
        if isinstance(body, PythonCalls):
            return (body.open,) if body.open else ()
        return ("[",) if isinstance(body, JsonArray) else ("{",)


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """The call that may start at the current position.

    Attributes:
        plans: The possible spellings, in the order in which they are tried.
        opening: The text that caused the expectation: a marker, the first character of a bare
            call, or "" inside a section. If no call follows, this text is content.
        is_certain: Whether a marker proves that the text is a call.
    """

    plans: tuple[CallPlan, ...]
    opening: str
    is_certain: bool

    def match(self, buffer: TextBuffer) -> tuple[CallPlan, Head] | int:
        """Match the unread text, and return the spelling and the head, NEED_MORE or NO_MATCH."""
        for plan in self.plans:
            head = plan.match(buffer.text, buffer.pos, buffer.is_final)
            if isinstance(head, Head):
                return plan, head
            if head == NEED_MORE:
                return NEED_MORE
        return NO_MATCH

    def is_incomplete(self, buffer: TextBuffer, with_bare: bool) -> bool:
        """Return whether more text could complete the start of the call.

        Args:
            buffer: The text, to which no more text is added.
            with_bare: Whether spellings without a marker are considered too.
        """
        return any(
            plan.match(buffer.text, buffer.pos, is_final=False) == NEED_MORE
            for plan in self.plans
            if with_bare or not plan.is_bare
        )


def _body_start_regexes(call: Call) -> tuple[re.Pattern[str], re.Pattern[str]]:
    r"""Return the regex of a body's first characters, and the regex of their possible beginnings.

    Example: a JSON array of calls starts with `[{` or `[]`, and may have white space in between.
    The text `[` could become such a start if it is at the end of the text.
    """
    body = call.body
    if isinstance(body, NestedTags):
        mark_prefix = marker_prefix_regex(body.mark)
        start = re.compile(rf"\s*{re.escape(body.mark)}")
        return start, re.compile(rf"\s*(?:\Z|{mark_prefix})")
    first = r"\{"
    second = ""
    if isinstance(body, PythonCalls):
        first = re.escape(body.open)
        second = r"[^\W\d]"
    elif isinstance(body, JsonArray):
        first = r"\["
        second = r"[{\]]"
    elif isinstance(body, JsonObject):
        second = '["}]'
    elif isinstance(body, JsonArguments) and _ends_with_marker(call):
        first = ""  # The markers prove that this is a call, even if its arguments are not valid.
    return re.compile(rf"{first}\s*{second}"), re.compile(rf"{first}\s*\Z")


def _ends_with_marker(call: Call) -> bool:
    """Return whether the call has an opening marker, and a head that ends with a literal.

    Example: true for the marker `[TOOL_CALLS]` and the head `{name}[ARGS]`, but not for the head
    `{name}`. If true, the text after the head can only be arguments.
    """
    last_part = pattern(call.head)[-1]
    is_literal = isinstance(last_part, str) and bool(last_part.strip())
    return bool(call.open.strip()) and is_literal


def _fill_in_id(template: str, fields: dict[str, str]) -> str:
    """Return the id of a call from the fields of its head, or "" if a field is missing.

    Example: `_fill_in_id("functions.{name}:{number}", {"name": "f", "number": "0"})` returns
    `"functions.f:0"`.
    """
    if template == "{id}":
        return fields.get("id", "")
    try:
        return template.format(**fields)
    except KeyError:
        return ""


class RoutePlan:
    """A message header, compiled. `stage` is the stage of the message's body."""

    __slots__ = ("_blank_header_end", "_first_literal", "_header_pattern", "stage")

    def __init__(self, route: Route, layout: Messages) -> None:
        self.stage = route.stage
        # A pattern matches any white space. If only white space ends the header, it must match
        # exactly, so it is compared separately.
        is_blank = not layout.header_end.strip()
        self._blank_header_end = layout.header_end if is_blank else ""
        self._header_pattern = compile_pattern(
            route.header if is_blank else route.header + layout.header_end
        )
        first_part = pattern(route.header)[0]
        self._first_literal = first_part.strip() if isinstance(first_part, str) else ""

    def has_started(self, text: str, pos: int) -> bool:
        """Return whether the first literal of the header is at `pos`.

        If the text ends inside a header, this distinguishes the header from content.
        """
        return bool(self._first_literal) and text.startswith(self._first_literal, pos)

    def match(self, text: str, pos: int, is_final: bool) -> Head | int:
        """Match the header at `pos`, for example `<|channel|>final<|message|>`.

        The header of a call matches only if `{` follows it.

        Returns:
            The header, NEED_MORE or NO_MATCH.
        """
        fields: dict[str, str] = {}
        end = self._header_pattern.match(text, pos, is_final, fields)
        if end < 0:
            return end
        if not text.startswith(self._blank_header_end, end):
            is_possible = not is_final and self._blank_header_end.startswith(text[end:])
            return NEED_MORE if is_possible else NO_MATCH
        end += len(self._blank_header_end)
        if self.stage is Stage.CALLS:
            body_pos = skip_blanks(text, end)
            if body_pos == len(text):
                return NO_MATCH if is_final else NEED_MORE
            if text[body_pos] != "{":
                return NO_MATCH
        return Head(end, fields.get("name", ""), fields.get("id", ""))
