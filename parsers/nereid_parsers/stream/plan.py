"""A Format, compiled for the machine: which markers mean what, and how calls are recognised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from nereid_parsers.format import (
    BareKeyArguments,
    Call,
    Format,
    JsonArguments,
    JsonArray,
    JsonObject,
    Messages,
    NestedTags,
    PythonCalls,
    Route,
    Sections,
    Stage,
    TaggedArguments,
    ToolSection,
    pattern,
)
from nereid_parsers.stream.body import Body, CallSink
from nereid_parsers.stream.json_bodies import ArgumentsBody, ArrayBody, ObjectBody
from nereid_parsers.stream.lexer import Lexer, partial
from nereid_parsers.stream.nested import NestedBody
from nereid_parsers.stream.patterns import FAIL, NEED, Pattern, compiled, skip_blanks, tokens
from nereid_parsers.stream.python_calls import BareKeyBody, PythonBody
from nereid_parsers.stream.tagged import RowPlan, TaggedBody


class Act(Enum):
    """What a marker in the text asks for."""

    OPEN_REASONING = "open_reasoning"
    CLOSE_REASONING = "close_reasoning"
    INTERRUPT = "interrupt"
    SECTION = "section"
    CALL = "call"
    BARE = "bare"
    CLOSING = "closing"  # of a section or call that is over
    WRAP = "wrap"
    MESSAGE = "message"
    END = "end"


@dataclass(frozen=True, slots=True)
class Head:
    """What a recognised head says."""

    end: int
    name: str = ""
    call_id: str = ""


class CallPlan:
    """One spelling of a call, compiled."""

    __slots__ = ("_id", "_pattern", "_starts", "_tag_plan", "call", "close", "escape", "is_bare")

    def __init__(self, call: Call, section: ToolSection) -> None:
        self.call = call
        self.is_bare = not call.trigger
        self.close = tokens(call.close)
        self._pattern: Pattern = compiled(call.open + call.head)
        self._id = call.id
        self._starts = _body_starts(call)
        # What ends arguments that are no JSON: the markers that cannot be part of them.
        ends = (*self.close[-1:], section.close.strip(), call.open.strip())
        self.escape = Lexer(end for end in ends if end)
        self._tag_plan: RowPlan | None = None
        if isinstance(call.body, TaggedArguments):
            stops = [*self.close[:1], *self.close[-1:], section.close.strip(), call.open.strip()]
            self._tag_plan = RowPlan(call.body, tuple(dict.fromkeys(s for s in stops if s)))

    def match(self, text: str, at: int, final: bool) -> Head | int:
        """The head at `at`, or NEED, or FAIL; a head counts once its body has begun."""
        fields: dict[str, str] = {}
        end = self._pattern.match(text, at, final, fields)
        if end < 0:
            return end
        begin = skip_blanks(text, end)
        if begin == len(text) and not final:
            return NEED
        if self._tag_plan is not None:
            begun = self._row_begins(self._tag_plan, text, begin, final)
        else:
            begun = self._body_begins(text, begin, final)
        return begun or Head(end, fields.get("name", ""), _filled(self._id, fields))

    def _row_begins(self, plan: RowPlan, text: str, at: int, final: bool) -> int:
        """0 where a row of tagged values, perhaps an empty one, begins; else NEED or FAIL."""
        if at == len(text) or any(text.startswith(stop, at) for stop in plan.stops):
            return 0
        found = plan.match(text, at, final)[1]
        if found != FAIL:
            return min(found, 0)
        more = not final and any(stop.startswith(text[at:]) for stop in plan.stops)
        return NEED if more else FAIL

    def _body_begins(self, text: str, at: int, final: bool) -> int:
        full, awaited = self._starts
        if full.match(text, at) is not None:
            return 0
        return NEED if not final and awaited.match(text, at) is not None else FAIL

    def body(self, sink: CallSink, head: Head, is_sure: bool) -> Body:
        """A reader for the body behind this head."""
        part = self.call.body
        if isinstance(part, JsonArguments):
            return ArgumentsBody(sink, head.name, head.call_id)
        if isinstance(part, JsonObject):
            return ObjectBody(sink, part.keys, is_sure)
        if isinstance(part, JsonArray):
            return ArrayBody(sink, part.keys, is_sure)
        if isinstance(part, PythonCalls):
            return PythonBody(sink, part, is_sure)
        if isinstance(part, BareKeyArguments):
            return BareKeyBody(sink, part, head.name, head.call_id)
        if isinstance(part, NestedTags):
            return NestedBody(sink, part, self.close[0], head.name, head.call_id)
        assert self._tag_plan is not None
        return TaggedBody(sink, self._tag_plan, head.name, head.call_id)

    def body_starts(self) -> tuple[str, ...]:
        """What a bare call may begin with."""
        body = self.call.body
        if isinstance(body, PythonCalls):
            return (body.open,) if body.open else ()
        return ("[",) if isinstance(body, JsonArray) else ("{",)


def _body_starts(call: Call) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Regexes for a body's first characters, and for what may still become those."""
    body = call.body
    if isinstance(body, NestedTags):
        begins = re.compile(rf"\s*{re.escape(body.mark)}")
        return begins, re.compile(rf"\s*(?:\Z|{partial(body.mark)})")
    if isinstance(body, PythonCalls):
        first, second = re.escape(body.open), r"[^\W\d]"
    elif isinstance(body, JsonArray):
        first, second = r"\[", r"[{\]]"
    elif isinstance(body, JsonObject):
        first, second = r"\{", '["}]'
    elif isinstance(body, JsonArguments) and _is_explicit(call):
        first, second = "", ""  # a call it is, whatever its arguments are
    else:
        first, second = r"\{", ""
    return re.compile(rf"{first}\s*{second}"), re.compile(rf"{first}\s*\Z")


def _is_explicit(call: Call) -> bool:
    """Whether the head ends in a marker, so that what follows can only be arguments."""
    last = pattern(call.head)[-1]
    return bool(call.open.strip()) and isinstance(last, str) and bool(last.strip())


def _filled(template: str, fields: dict[str, str]) -> str:
    """The id template with the head's fields in it; "" where the head lacks one of them."""
    if template == "{id}":
        return fields.get("id", "")
    try:
        return template.format(**fields)
    except KeyError:
        return ""


class RoutePlan:
    """A message header, compiled."""

    __slots__ = ("_pattern", "_start", "_tail", "_wants_json", "route")

    def __init__(self, route: Route, messages: Messages) -> None:
        self.route = route
        # White space at the header's end is what ends it, so there it must stand to the letter.
        self._tail = messages.header_end if not messages.header_end.strip() else ""
        self._pattern = compiled(route.header + ("" if self._tail else messages.header_end))
        self._wants_json = route.stage is Stage.CALLS
        first = pattern(route.header)[0]
        self._start = first.strip() if isinstance(first, str) else ""

    def is_begun(self, text: str, at: int) -> bool:
        """Whether the text has this header's first literal, so that it is markup though cut off."""
        return bool(self._start) and text.startswith(self._start, at)

    def match(self, text: str, at: int, final: bool) -> Head | int:
        """The header at `at`, or NEED, or FAIL."""
        fields: dict[str, str] = {}
        end = self._pattern.match(text, at, final, fields)
        if end < 0:
            return end
        if not text.startswith(self._tail, end):
            return NEED if not final and self._tail.startswith(text[end:]) else FAIL
        end += len(self._tail)
        if self._wants_json:
            begin = skip_blanks(text, end)
            if begin == len(text):
                return FAIL if final else NEED
            if text[begin] != "{":
                return FAIL
        return Head(end, fields.get("name", ""), fields.get("id", ""))


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a parser of one format looks up."""

    format: Format
    reasoning: Lexer
    content: Lexer
    rest: Lexer
    undecided: Lexer
    acts: dict[str, Act]
    reasoning_acts: dict[str, Act]
    calls: tuple[CallPlan, ...] = ()
    routes: tuple[RoutePlan, ...] = ()
    message_call: CallPlan | None = None
    triggered: dict[str, tuple[CallPlan, ...]] = field(default_factory=dict)
    bare: tuple[CallPlan, ...] = ()

    @property
    def sections(self) -> Sections | None:
        """The layout, if it is one of sections."""
        layout = self.format.layout
        return layout if isinstance(layout, Sections) else None

    @property
    def tools(self) -> ToolSection | None:
        """The tool section, if there is one."""
        return self.format.layout.tools


def _stripped(markers: tuple[str, ...]) -> Iterator[str]:
    return (marker.strip() for marker in markers if marker.strip())


@lru_cache(maxsize=512)
def plan_of(fmt: Format) -> Plan:
    """Compile a format (cached: formats are values)."""
    if isinstance(fmt.layout, Messages):
        return _plan_messages(fmt, fmt.layout)
    return _plan_sections(fmt, fmt.layout)


def _plan_messages(fmt: Format, layout: Messages) -> Plan:
    ends = tuple(_stripped((*layout.ends, *fmt.ends)))
    frame = {**dict.fromkeys(ends, Act.END), layout.start.strip(): Act.MESSAGE}
    acts: dict[str, Act] = {}
    calls: tuple[CallPlan, ...] = ()
    triggered: dict[str, tuple[CallPlan, ...]] = {}
    if layout.tools is not None:
        calls = tuple(CallPlan(call, layout.tools) for call in layout.tools.calls)
        triggered, _ = _triggers(layout.tools, calls)
        acts = _tool_acts(layout.tools, calls, triggered, ())
    acts |= frame
    whole = CallPlan(
        Call(layout.body, head="{name}", open=layout.start, close=layout.call_end),
        ToolSection((Call(JsonObject()),)),
    )
    return Plan(
        fmt, Lexer(frame), Lexer(acts), Lexer(ends), Lexer(acts), acts, frame,
        calls=calls, triggered=triggered, message_call=whole,
        routes=tuple(RoutePlan(route, layout) for route in layout.routes),
    )  # fmt: skip


def _plan_sections(fmt: Format, layout: Sections) -> Plan:
    ends = dict.fromkeys(_stripped(fmt.ends), Act.END)
    wraps = dict(ends)
    if layout.content is not None:
        markers = _stripped((layout.content.open, layout.content.close))
        wraps.update(dict.fromkeys(markers, Act.WRAP))
    acts: dict[str, Act] = {}
    calls: tuple[CallPlan, ...] = ()
    triggered: dict[str, tuple[CallPlan, ...]] = {}
    bare: tuple[CallPlan, ...] = ()
    if layout.tools is not None:
        calls = tuple(CallPlan(call, layout.tools) for call in layout.tools.calls)
        triggered, bare = _triggers(layout.tools, calls)
        acts |= _tool_acts(layout.tools, calls, triggered, bare)
    reasoning_acts = dict(ends)
    if layout.reasoning is not None:
        reasoning_acts.update(
            dict.fromkeys(_stripped(layout.reasoning.interrupted_by), Act.INTERRUPT)
        )
        closes = dict.fromkeys(_stripped(layout.reasoning.closes), Act.CLOSE_REASONING)
        opens = dict.fromkeys(_stripped(layout.reasoning.opens), Act.OPEN_REASONING)
        acts |= closes | opens
        reasoning_acts |= opens | closes
    acts |= wraps
    return Plan(
        fmt, Lexer(reasoning_acts), Lexer(acts), Lexer(wraps), Lexer(acts), acts, reasoning_acts,
        calls=calls, triggered=triggered, bare=bare,
    )  # fmt: skip


def _triggers(
    tools: ToolSection, calls: tuple[CallPlan, ...]
) -> tuple[dict[str, tuple[CallPlan, ...]], tuple[CallPlan, ...]]:
    """Which spellings each marker in the content may begin, and which begin without a marker."""
    triggered: dict[str, tuple[CallPlan, ...]] = {}
    for call in calls:
        trigger = call.call.trigger
        # Inside a section only a call's own marker is distinctive enough to show it without one.
        if trigger and (not tools.opens or call.call.open.strip()):
            triggered[trigger] = (*triggered.get(trigger, ()), call)
    bare = tuple(call for call in calls if call.is_bare and not tools.opens)
    return triggered, bare


def _tool_acts(
    tools: ToolSection,
    calls: tuple[CallPlan, ...],
    triggered: dict[str, tuple[CallPlan, ...]],
    bare: tuple[CallPlan, ...],
) -> dict[str, Act]:
    acts: dict[str, Act] = {}
    for call in calls:
        acts.update(dict.fromkeys((token for token in call.close if len(token) > 3), Act.CLOSING))
    for call in bare:
        acts.update(dict.fromkeys(call.body_starts(), Act.BARE))
    acts.update(dict.fromkeys(_stripped((tools.close,)), Act.CLOSING))
    acts.update(dict.fromkeys(triggered, Act.CALL))
    acts.update(dict.fromkeys(_stripped(tools.opens), Act.SECTION))
    return acts
