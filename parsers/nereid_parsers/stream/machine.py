"""The machine: which part of a message each stretch of text belongs to.

A state is a method. It reads some text from `self.at` on and returns the state to go on with, or
None when it needs more text than there is. Text that is not consumed is shown again with the next
piece; only what may still become a marker, and blanks whose part is not known, is held back.

    undecided -> reasoning -> content <-> open -> body -> close -> between
                              header  -> reasoning | content | body
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nereid_parsers.events import (
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallStart,
)
from nereid_parsers.format import (
    JsonArray,
    JsonObject,
    Messages,
    Policy,
    PythonCalls,
    Reasoning,
    Shown,
    Stage,
    StrayClose,
    TextRule,
)
from nereid_parsers.stream.body import BROKEN, MORE, Body, CallSink
from nereid_parsers.stream.json_bodies import ArgumentsBody
from nereid_parsers.stream.patterns import (
    FAIL,
    NEED,
    is_compound_start,
    looks_like_markup,
    skip_blanks,
)
from nereid_parsers.stream.plan import Act, CallPlan, Head, Plan
from nereid_parsers.stream.speech import Speech

State = Callable[[], "State | None"]

_JUNK = "}])`"  # closing brackets too many, between a body and the marker that closes its call
_MAX_JUNK = 16  # characters
_MAX_CUTS = 16  # per message; bounds how often held arguments are read again


class Machine(Speech):
    """One message's parsing: the states, and what leads from one to the next."""

    def __init__(self, plan: Plan, sink: CallSink, policy: Policy) -> None:
        super().__init__(sink)
        self.plan = plan
        self.state: State = self.content
        self.reasoning_part: Reasoning | None = plan.sections.reasoning if plan.sections else None
        self.has_reasoned = False  # the output closed its reasoning
        self._policy = policy
        self._calls_first = policy.text is TextRule.CALLS_FIRST
        self._in_section = False
        self._candidates: tuple[CallPlan, ...] = plan.calls
        self._raw: list[str] = []  # consumed, but content if no call follows
        self._marker = ""
        self._is_sure = True
        self._body: Body | None = None
        self._call: CallPlan | None = plan.calls[0] if plan.calls else None
        self._closing: tuple[str, ...] = ()
        self._held: list[str] = []
        self.default_is_reasoning = False  # where nothing decides
        self._cuts = 0

    def forget_prompt(self) -> None:
        """What was read so far is the prompt's: only a call that it left open is the output's."""
        events = self.take()
        self._blanks = []
        self._borrowed = sum(map(len, self._raw)) + len(self.text) - self.at
        if self.state == self.inline and self.reasoning_part is not None:
            self.out.append(ContentDelta(self.reasoning_part.open))
        if not self.sink.is_open:
            self.sink.index = -1
            self.sink.count = 0
            return
        begun = max(n for n, event in enumerate(events) if isinstance(event, ToolCallStart))
        index = self.sink.index
        for event in events[begun:]:
            if isinstance(event, ToolCallStart | ArgumentsDelta) and event.index == index:
                self.out.append(replace(event, index=0))
        self.sink.index = 0
        self.sink.count = 1

    def feed(self, text: str) -> None:
        """Take more text."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0
        self._run()

    def _run(self) -> None:
        while self.at < len(self.text):
            state = self.state()
            if state is None:
                return
            self.state = state

    def finish(self) -> None:
        """Nothing more comes: decide what was left open."""
        self.final = True
        if self.state == self.undecided:
            self._decide(self.default_is_reasoning)
        self._take_cut_marker()
        self._run()
        while self._body is not None and self.state == self.body:
            self._finish_body(self._body)
            self._run()
        if self.state == self.broken and self.sink.is_open:
            self.sink.end("broken arguments")
            self._flush_call()
        elif self._raw and self.state == self.header:
            self._commit()
        elif self._raw and self.state in (self.open, self.between):
            self._cut_or_back(0, "a tool section without a call")
        self._flush_blanks(self.state == self.reasoning)

    def _take_cut_marker(self) -> None:
        """A marker of several parts is markup though cut off, once its first part stands there."""
        rest = self.text[self.at :]
        if rest and self.state in (self.reasoning, self.content, self.rest):
            acts = self.plan.reasoning_acts if self.state == self.reasoning else self.plan.acts
            if any(marker.startswith(rest) and is_compound_start(marker, rest) for marker in acts):
                self._take_marker(rest)

    def _cut_or_back(self, size: int, reason: str) -> State:
        """The text ends in a call's beginning: markup if it has the looks of it, else content."""
        text = "".join(self._raw) + self.text[self.at :]
        if not looks_like_markup(text):
            return self._give_back(size, reason)
        self._in_section = False
        self._body = None
        self._commit()
        self._take_marker(self.text[self.at :])
        return self.content

    def _literal(self, marker: str) -> State:
        """A marker that means nothing here is text."""
        self._say(marker, ContentDelta)
        self.at += len(marker)
        return self.rest if self._calls_first else self.content

    # ---- reasoning -------------------------------------------------------------------------------

    def undecided(self) -> State | None:
        """No prompt is known, and a closing marker may yet show that all this is reasoning."""
        start, marker = self.plan.undecided.find(self.text, self.at, self.final)
        self._held.append(self.text[self.at : start])
        self.at = start
        if not marker:
            return None
        self._decide(self.plan.acts[marker] is Act.CLOSE_REASONING)
        return self.state

    def _decide(self, is_reasoning: bool) -> None:
        self.text = "".join(self._held) + self.text[self.at :]
        self.at = 0
        self._held = []
        assert self.reasoning_part is not None
        self.state = self.start_reasoning() if is_reasoning else self.content

    def start_reasoning(self) -> State:
        """The state for output that starts inside reasoning which the prompt opened."""
        part = self.reasoning_part
        if part is not None and part.shown is Shown.INLINE:
            self.out.append(ContentDelta(part.open))
            return self.inline
        self.is_fresh = True
        return self.reasoning

    def reasoning(self) -> State | None:
        """Inside reasoning."""
        start, marker = self.plan.reasoning.find(self.text, self.at, self.final)
        if start > self.at:
            self._say(self.text[self.at : start], ReasoningDelta)
            self.at = start
        if not marker:
            return None
        act = self.plan.reasoning_acts[marker]
        if act is Act.OPEN_REASONING and self._said:
            self._say(marker, ReasoningDelta)
            self.at += len(marker)
            return self.reasoning
        if act is Act.INTERRUPT:
            return self._interrupt(marker)
        if act is Act.MESSAGE:
            return self._start_header(marker)
        self._take_marker(marker)
        if act is Act.CLOSE_REASONING:
            self.has_reasoned = True
            return self.content
        return self.reasoning if act is Act.OPEN_REASONING else self.content

    def _interrupt(self, marker: str) -> State | None:
        """A marker that opens calls: it ends the reasoning if a call does follow it."""
        found: Head | int = FAIL
        if not self._calls_first:
            begin = self.at if marker in self.plan.triggered else self.at + len(marker)
            for call in self.plan.triggered.get(marker, self.plan.calls):
                at = begin if begin == self.at else skip_blanks(self.text, begin)
                found = call.match(self.text, at, self.final)
                if found != FAIL:
                    break
        if found == NEED:
            return None
        if found == FAIL:
            self._say(marker, ReasoningDelta)
            self.at += len(marker)
            return self.reasoning
        self._drop_blanks()
        self.has_reasoned = self.is_fresh = True
        return self.content

    def inline(self) -> State | None:
        """Inside reasoning that is shown as content, its markers too."""
        start, marker = self.plan.reasoning.find(self.text, self.at, self.final)
        is_close = bool(marker) and self.plan.reasoning_acts[marker] is Act.CLOSE_REASONING
        end = start + len(marker)
        if end > self.at:
            self._tell("content", self.text[self.at : end])
            self.out.append(ContentDelta(self.text[self.at : end]))
            self.at = end
        if not marker:
            return None
        self.has_reasoned = self.has_reasoned or is_close
        return self.content if is_close else self.inline

    # ---- content ---------------------------------------------------------------------------------

    def content(self) -> State | None:
        """Content, in which markers may open other things."""
        start, marker = self.plan.content.find(self.text, self.at, self.final)
        if start > self.at:
            self._say(self.text[self.at : start], ContentDelta)
            self.at = start
            if self._calls_first and self.has_spoken:
                return self.rest
        if not marker:
            return None
        act = self.plan.acts[marker]
        if act in (Act.WRAP, Act.END):
            self._take_marker(marker)
            return self.content
        if act is Act.MESSAGE:
            return self._start_header(marker)
        if act in (Act.OPEN_REASONING, Act.CLOSE_REASONING, Act.INTERRUPT):
            return self._reasoning_marker(marker, act)
        if act is Act.CLOSING:
            return self._closing_marker(marker)
        return self._call_marker(marker, act)

    def rest(self) -> State | None:
        """Content to the end: only wrappers and end tokens are still markup."""
        start, marker = self.plan.rest.find(self.text, self.at, self.final)
        if start > self.at:
            self._say(self.text[self.at : start], ContentDelta)
            self.at = start
        if not marker:
            return None
        self._take_marker(marker)
        return self.rest

    def _reasoning_marker(self, marker: str, act: Act) -> State:
        is_again = act is Act.CLOSE_REASONING and not self._calls_first  # closed twice
        at_start = not self.has_spoken and not self.sink.count
        at_start = at_start and (is_again or not self.has_reasoned)
        behind_marker = act is Act.OPEN_REASONING and self.is_fresh and not self._calls_first
        if not (at_start or behind_marker) or self.reasoning_part is None:
            return self._literal(marker)
        if act is Act.OPEN_REASONING and self.reasoning_part.shown is Shown.INLINE:
            self._drop_blanks()
            return self.inline
        self._take_marker(marker)
        if act is Act.OPEN_REASONING:
            return self.reasoning
        self.has_reasoned = True
        return self.content

    def _closing_marker(self, marker: str) -> State:
        tools = self.plan.tools
        if self._in_section and tools is not None and marker == tools.close.strip():
            self._in_section = False
        elif not self.sink.count or not self.is_fresh:
            return self._literal(marker)
        self._take_marker(marker)
        return self.content

    def _call_marker(self, marker: str, act: Act) -> State:
        if act is Act.SECTION:
            self._in_section = True
            self._raw = [marker]
            self.at += len(marker)
            return self.between
        if act is Act.BARE and not self._may_be_bare():
            return self._literal(marker)
        self._is_sure = act is Act.CALL
        self._candidates = self.plan.bare if act is Act.BARE else self.plan.triggered[marker]
        self._marker = marker
        self._raw = []
        return self.open

    def _may_be_bare(self) -> bool:
        """Whether a call without a marker may begin here.

        At the start it may; within text only JSON, or a list of Python calls, may that names a
        function which is offered.
        """
        if not self.has_spoken and not self.sink.count:
            return True
        bodies = [call.call.body for call in self.plan.bare]
        return bool(self.sink.tools.parameters) and any(
            isinstance(body, JsonObject | JsonArray)
            or (isinstance(body, PythonCalls) and bool(body.open))
            for body in bodies
        )

    # ---- calls -----------------------------------------------------------------------------------

    def open(self) -> State | None:
        """Where a call may begin: at its marker, or inside a section."""
        for call in self._candidates:
            head = call.match(self.text, self.at, self.final)
            if isinstance(head, Head):
                return self._begin_body(call, head)
            if head == NEED:
                return None
        if self.final and any(
            call.match(self.text, self.at, final=False) == NEED
            for call in self._candidates
            if self._in_section or not call.is_bare
        ):
            return self._cut_or_back(len(self._marker), "no call follows the marker")
        return self._give_back(len(self._marker), "no call follows the marker")

    def _begin_body(self, call: CallPlan, head: Head) -> State:
        self._call = call
        self._body = call.body(self.sink, head, self._is_sure)
        self._raw.append(self.text[self.at : head.end])
        self.at = head.end
        return self._read_body(self._body) or self.body if self.at == len(self.text) else self.body

    def _give_back(self, size: int, reason: str) -> State:
        """What looked like a call's beginning was content."""
        text = self._own("".join(self._raw) + self.text[self.at : self.at + size])
        self.at += size
        self._raw = []
        self._body = None
        if self._in_section and not self.sink.count:
            self._in_section = False
        if text.strip():
            text = "".join(self._blanks) + text
            self._blanks = []
            self.is_fresh = False
            self.has_spoken = self._said = True
            self._tell("content", text)
            self.out.append(ContentDelta(text, reason))
        elif text:
            self._blanks.append(text)
        return self.rest if self._calls_first and self.has_spoken else self.content

    def body(self) -> State | None:
        """Inside a call."""
        assert self._body is not None
        return self._read_body(self._body)

    def _read_body(self, body: Body) -> State | None:
        sink = self.sink
        was_open = sink.is_open
        body.cut = -1
        body.final = self.final
        start = self.at
        self.at = end = body.read(self.text, start)
        if sink.is_open:
            if self._raw:
                self._commit()
            self._tell_call(self.text[start:end])
        elif body.cut >= 0 or was_open or body.status is not MORE:
            self._settle(body, start, end, was_open)
        else:
            self._raw.append(self.text[start:end])
        if body.status is MORE:
            return None
        return self._after_body(body)

    def _settle(self, body: Body, start: int, end: int, was_open: bool) -> None:
        """A call ended in this text, or none was in it: divide it between call and raw text."""
        if body.cut >= 0:
            self._commit()
            self._tell_call(self.text[start : body.cut])
            self._flush_call()
            self._raw = [self.text[body.cut : end]]
        elif was_open or body.status is not BROKEN:
            self._commit()
            self._tell_call(self.text[start:end])
            self._flush_call()
        else:
            self._raw.append(self.text[start:end])

    def _commit(self) -> None:
        """What was held as raw text was a call's after all."""
        self._drop_blanks()
        self._tell("markup", self._own("".join(self._raw)))
        self._raw = []

    def _after_body(self, body: Body) -> State:
        call = self._call
        assert call is not None
        if body.status is BROKEN:
            if not self.sink.is_open:
                return self._give_back(0, "no call")
            if body.abandon():
                self.is_fresh = True
                return self._end_call(call)
            return self._cut_held(call)
        if self._raw:
            self._commit()
        return self._end_call(call)

    def _end_call(self, call: CallPlan) -> State:
        self._flush_call()
        self._body = None
        self._closing = call.close
        self.is_fresh = True
        self._said = False
        return self.content if call is self.plan.message_call else self.close

    def _cut_held(self, call: CallPlan) -> State:
        """Broken arguments. Where they were held back, their marker may stand inside them."""
        marker = call.close[0] if call.close else ""
        may_cut = self._cuts < _MAX_CUTS and self._body is not None and self._body.is_verbatim
        rest = self.sink.cut_held(marker) if may_cut else None
        if rest is None:
            return self.broken
        told = "".join(self._told_late)
        self._told_late = [told[: len(told) - len(rest)]]
        self._cuts += 1
        self.text = rest + self.text[self.at :]
        self.at = 0
        self.sink.end("broken arguments")
        return self._end_call(call)

    def broken(self) -> State | None:
        """Arguments that are no JSON: as they stand, up to the next marker."""
        assert self._call is not None
        start, marker = self._call.escape.find(self.text, self.at, self.final)
        if start > self.at:
            self.sink.write(self.text[self.at : start])
            self._tell_call(self.text[self.at : start])
            self.at = start
        if not marker:
            return None
        self.sink.end("broken arguments")
        return self._end_call(self._call)

    def close(self) -> State | None:
        """Behind a call's body: its closing markers, of which any may be missing."""
        at = skip_blanks(self.text, self.at)
        junk = at
        while junk < len(self.text) and junk - at < _MAX_JUNK and self.text[junk] in _JUNK:
            junk += 1
        for begin in (at, skip_blanks(self.text, junk)):
            for index, token in enumerate(self._closing):
                if self.text.startswith(token, begin):
                    return self._take_closing(begin + len(token), index)
                if token.startswith(self.text[begin:]):
                    return self._await_or_cut(begin)
        return self._glued(at) or self.between

    def _glued(self, at: int) -> State | None:
        """Another object where a call's closing marker is due: the next call, its marker saved."""
        call = self._call
        is_marked = call is not None and bool(call.call.open.strip()) and bool(self._closing)
        if call is None or not is_marked or not isinstance(call.call.body, JsonObject):
            return None
        if not self.text.startswith("{", at):
            return None
        self._hold_blanks(self.text[self.at : at])
        self.at = at
        self._marker = ""
        self._is_sure = False
        return self._begin_body(call, Head(at))

    def _await_or_cut(self, begin: int) -> State | None:
        """Behind a call the text ends in what may become the marker that is due there."""
        if not self.final:
            return None
        if begin < len(self.text):
            self._take_marker(self.text[self.at :])
        return self.between

    def _take_closing(self, end: int, index: int) -> State:
        self._drop_blanks()
        self._tell("markup", self.text[self.at : end])
        self.at = end
        self._closing = self._closing[index + 1 :]
        return self.close if self._closing else self.between

    def between(self) -> State | None:
        """Behind a call, or at a section's start: the next call, the section's end, or text."""
        tools = self.plan.tools
        assert tools is not None
        at = skip_blanks(self.text, self.at)
        self._hold_blanks(self.text[self.at : at])
        self.at = at
        if at == len(self.text):
            return None
        close = tools.close.strip()
        if self._in_section and close:
            if self.text.startswith(close, at):
                return self._close_section(close)
            if close.startswith(self.text[at:]) and not (self.final and self._raw):
                return self._await_or_cut(at)
        separator = tools.separator.strip()
        if separator and self.sink.count:
            if self.text.startswith(separator, at):
                self._take_marker(separator)
                return self.between
            is_awaited = not self.final or looks_like_markup(self.text[at:])
            if is_awaited and separator.startswith(self.text[at:]):
                return self._await_or_cut(at)
        return self._next_call()

    def _hold_blanks(self, blanks: str) -> None:
        if blanks:
            (self._raw if self._raw else self._blanks).append(blanks)

    def _close_section(self, close: str) -> State:
        self._in_section = False
        if self._raw:
            return self._give_back(len(close), "a tool section without a call")
        self._take_marker(close)
        return self.content

    def _next_call(self) -> State:
        self._marker = ""
        if self._in_section:
            self._candidates = self.plan.calls
            self._is_sure = True
            return self.open
        starts = tuple(start for call in self.plan.bare for start in call.body_starts())
        if starts and self.text.startswith(starts, self.at):
            self._candidates = self.plan.bare
            self._is_sure = False
            self._marker = self.text[self.at]
            return self.open
        return self.content

    def _finish_body(self, body: Body) -> None:
        """The text ended inside a call."""
        assert self._call is not None
        if self.sink.is_open and (found := self._cut_held(self._call)) != self.broken:
            self.state = found
            return
        was_open = self.sink.is_open
        is_cut = body.status is MORE and self._is_sure and not self._is_closed_in_raw()
        body.finish()
        if was_open or (self.sink.count and body.status is not BROKEN):
            self._body = None
            self._flush_call()
            self._commit()
            self.state = self.content
        elif self._raw and is_cut:
            self.state = self._cut_or_back(0, "no call")
        elif self._raw:
            self.state = self._give_back(0, "no call")

    def _is_closed_in_raw(self) -> bool:
        """Whether a marker that ends calls stands in what was held: then it was not cut off."""
        assert self._call is not None
        assert self.plan.tools is not None or self._call is self.plan.message_call
        closes = [*self._call.close, self.plan.tools.close.strip() if self.plan.tools else ""]
        text = "".join(self._raw)
        return any(close and close in text for close in closes)

    # ---- messages --------------------------------------------------------------------------------

    def _start_header(self, marker: str) -> State:
        self._raw = [marker]
        self.at += len(marker)
        return self.header

    def header(self) -> State | None:
        """Inside a message's header."""
        layout = self.plan.format.layout
        assert isinstance(layout, Messages)
        start = layout.start.strip()
        if not self._raw and self.text.startswith(start, self.at):
            return self._start_header(start)
        if not self._raw and not self.final and start.startswith(self.text[self.at :]):
            return None
        for route in self.plan.routes:
            head = route.match(self.text, self.at, self.final)
            if isinstance(head, Head):
                return self._enter(route.route.stage, head)
            if head == NEED:
                return None
        if self.final and any(r.is_begun(self.text, self.at) for r in self.plan.routes):
            self._commit()
            self._take_marker(self.text[self.at :])
            return self.content
        return self._give_back(0, "no header follows the marker")

    def _enter(self, stage: Stage, head: Head) -> State:
        self._commit()
        if stage is Stage.CALLS and self._calls_first and self.has_spoken:
            return self.rest
        self._take_marker(self.text[self.at : head.end])
        if stage is Stage.CALLS:
            self._call = self.plan.message_call
            self._body = ArgumentsBody(self.sink, head.name, head.call_id)
            return self.body
        return self.reasoning if stage is Stage.REASONING else self.content


def undecided_applies(policy: Policy, part: Reasoning | None) -> bool:
    """Whether text without a known prompt is held back until a closing marker decides."""
    return (
        part is not None
        and part.shown is Shown.APART
        and policy.stray_close is StrayClose.REASONING
    )
