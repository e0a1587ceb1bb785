"""From a Format and a request to the structural tag that constrains decoding (xgrammar 0.2.8).

The tag is the format form: `{"type": "structural_tag", "format": ...}`. It covers the whole output
from where the prompt leaves off: reasoning stays free up to its closing marker, then come content,
calls, or JSON, each in the format's written form. Three traps are minded here: JSON may hold one
blank at a time only, or sampling may never end; end-of-turn tokens are left to the engine's stop
ids, so they must be listed there; and schema keywords that xgrammar passes over are an error where
the request is strict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_parsers.constrain_answer import answer_node, report
from nereid_parsers.constrain_calls import (
    BLANKS,
    Node,
    ToolSchema,
    any_text,
    call_tag,
    const,
    json_schema,
    one_of,
    optional,
    section_tag,
    sequence,
    tag,
    trigger_of,
    without_blanks,
)
from nereid_parsers.errors import ConstraintError
from nereid_parsers.format import (
    Format,
    JsonArguments,
    JsonArray,
    Messages,
    Opener,
    PythonCalls,
    Reasoning,
    ReasoningGate,
    Route,
    Sections,
    Slot,
    Stage,
    ToolSection,
    Wrapper,
    pattern,
)


@dataclass(frozen=True, slots=True)
class Request:
    """What a request asks of the output, checked.

    tools       those that may be called, in order.
    must_call   whether at least one call is required.
    is_single   whether at most one call may be made.
    answer      what content must be, as a node; None for free text.
    """

    tools: tuple[ToolSchema, ...] = ()
    must_call: bool = False
    is_single: bool = False
    answer: Node | None = None

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None,
        response_format: Mapping[str, Any] | None,
        parallel_tool_calls: bool,
    ) -> Request:
        """Read the OpenAI fields. Raises: ConstraintError for what they cannot mean."""
        known = tuple(ToolSchema.of(tool) for tool in tools or ())
        mode, names = _choice(tool_choice, bool(known))
        if names is not None:
            missing = names - {tool.name for tool in known}
            if missing:
                raise ConstraintError(f"tool_choice: no tool is called {sorted(missing)[0]!r}")
            known = tuple(tool for tool in known if tool.name in names)
        if mode == "required" and not known:
            raise ConstraintError("tool_choice: a call is required, but tools is empty")
        is_named = isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"
        if mode == "none":
            known = ()
        return cls(
            tools=known,
            must_call=mode == "required",
            is_single=is_named or not parallel_tool_calls,
            answer=answer_node(response_format),
        )

    @property
    def is_free(self) -> bool:
        """Whether nothing is to be constrained: then every output is as good as any other."""
        wants_calls = self.must_call or any(tool.is_strict for tool in self.tools)
        limits_calls = bool(self.tools) and self.is_single
        return self.answer is None and not wants_calls and not limits_calls


def _choice(
    choice: str | Mapping[str, Any] | None, has_tools: bool
) -> tuple[str, frozenset[str] | None]:
    """(auto, required or none; the names that may be called, None for all)."""
    if choice is None:
        return ("auto" if has_tools else "none"), None
    if isinstance(choice, str):
        if choice not in ("auto", "required", "none"):
            raise ConstraintError(f"tool_choice: {choice!r} is not auto, required or none")
        return choice, None
    kind = choice.get("type")
    if kind == "function":
        return "required", frozenset({_function_name(choice)})
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise ConstraintError(
                f"tool_choice: allowed_tools.mode {mode!r} is not auto or required"
            )
        return mode, frozenset(_function_name(tool) for tool in allowed.get("tools", ()))
    raise ConstraintError(f"tool_choice: type {kind!r} is not function or allowed_tools")


def _function_name(choice: Mapping[str, Any]) -> str:
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ConstraintError(f"tool_choice: {dict(choice)!r} names no function")
    return name


def structural_tag(
    fmt: Format,
    request: Request,
    stage: Stage,
    may_reason: bool = True,
    skip_reasoning: bool = False,
) -> dict[str, Any] | None:
    """The structural tag for a request whose output starts in `stage`; None if it stays free.

    `may_reason`: whether the model may still open its reasoning itself.
    `skip_reasoning`: only what stands behind the reasoning's closing marker.

    Raises: ConstraintError when the format cannot write what the request asks for.
    """
    if request.is_free:
        return None
    for tool in request.tools:
        report(tool.parameters, tool.is_strict, f"tools: {tool.name}")
    layout = fmt.layout
    if isinstance(layout, Messages):
        if skip_reasoning:
            return _tag(sequence(const(layout.start), _messages(fmt, layout, request)))
        return _tag(_in_messages(fmt, layout, request, stage))
    if skip_reasoning:
        return _tag(_answer(fmt, layout, request))
    parts: list[Node] = []
    if layout.reasoning is not None:
        parts += _reasoning(layout.reasoning, fmt.ends, stage, may_reason)
    elif stage is Stage.REASONING:
        raise ConstraintError(f"{fmt.name}: output starts in reasoning, but has no end marker")
    parts.append(_answer(fmt, layout, request))
    return _tag(sequence(*parts))


def _tag(node: Node) -> dict[str, Any]:
    return {"type": "structural_tag", "format": node}


# ---- sections ------------------------------------------------------------------------------------


def _reasoning(
    part: Reasoning, ends: tuple[str, ...], stage: Stage, may_reason: bool
) -> list[Node]:
    """Free text up to the closing marker, and the blanks that stand behind it."""
    close = part.close.strip()
    free = any_text((*part.also_close, *part.interrupted_by, *ends))
    if stage is Stage.REASONING:
        return [{"type": "tag", "begin": "", "content": free, "end": close}, BLANKS]
    if not may_reason:
        return []
    begin = part.open.strip()
    marked = {"type": "tag", "begin": begin, "content": free, "end": close}
    written = [marked]
    if part.opener is Opener.MODEL:  # some close at once what they did not open
        written.append(const(close))
    return [optional(sequence(BLANKS, one_of(*written), BLANKS))]


def _answer(fmt: Format, layout: Sections, request: Request) -> Node:
    json = _content(layout, request)
    if not request.tools:
        assert json is not None
        return json
    if layout.tools is None:
        raise ConstraintError(
            f"{fmt.name}: calls are asked for, but the format has no tool section"
        )
    if request.must_call:
        calls = section_tag(layout.tools, request.tools, request.is_single)
        # Templates differ in the blanks around calls, and so do models.
        return sequence(*_empty_content(layout.content), BLANKS, without_blanks(calls), BLANKS)
    if json is not None:
        return one_of(section_tag(layout.tools, request.tools, request.is_single), json)
    return _auto(layout.tools, request)


def _content(layout: Sections, request: Request) -> Node | None:
    node = request.answer
    wrapper = layout.content
    if node is None or wrapper is None:
        return node
    return sequence(const(wrapper.open), node, const(wrapper.close))


def _empty_content(wrapper: Wrapper | None) -> list[Node]:
    """The markers of content with nothing between, which some templates write before calls.

    The prompt may have written the first of them.
    """
    if wrapper is None or not wrapper.open.strip():
        return []
    opened, closed = const(wrapper.open.strip()), const(wrapper.close.strip())
    if not wrapper.close.strip():
        return [optional(sequence(BLANKS, opened))]
    return [optional(sequence(BLANKS, optional(opened), BLANKS, closed))]


def _auto(tools: ToolSection, request: Request) -> Node:
    """Free text in which calls, once begun, must be right."""
    first = tools.calls[0]
    is_row = isinstance(first.body, JsonArray | PythonCalls)
    if is_row and not (tools.opens or first.trigger):
        # A bracket may stand in any prose, so only one at the start begins calls.
        prose = sequence({"type": "regex", "pattern": r"[^\[\s]"}, any_text())
        return one_of(section_tag(tools, request.tools, request.is_single), prose)
    if tools.opens:
        tags = [tag(section_tag(tools, request.tools, request.is_single))]
    else:
        groups = [request.tools] if is_row else [(tool,) for tool in request.tools]
        tags = [call_tag(first, group, request.is_single) for group in groups]
    tags = [{**one, "begin": one["begin"].lstrip()} for one in tags]  # the trigger comes first
    return {
        "type": "triggered_tags",
        "triggers": [trigger_of(tools)],
        "tags": tags,
        "stop_after_first": request.is_single,
    }


def gate_of(fmt: Format, stage: Stage, has_reasoned: bool) -> ReasoningGate | None:
    """How reasoning is delimited behind a prompt; None if the format has none, or no end of it."""
    layout = fmt.layout
    if isinstance(layout, Messages):
        thinking = _route(layout, Stage.REASONING)
        if thinking is None or not layout.ends:
            return None
        start, end = _head(layout, thinking), layout.ends[0]
    elif layout.reasoning is None:
        return None
    else:
        start, end = layout.reasoning.open, layout.reasoning.close
    is_open = stage is Stage.REASONING
    return ReasoningGate(start, end, is_open, may_open=not is_open and not has_reasoned)


# ---- messages ------------------------------------------------------------------------------------


def _route(layout: Messages, stage: Stage) -> Route | None:
    return next((route for route in layout.routes if route.stage is stage), None)


def _head(layout: Messages, route: Route, name: str = "") -> str:
    text = ""
    for part in pattern(route.form):
        if isinstance(part, Slot) and part.field != "name":
            raise ConstraintError(
                f"route {route.header!r} does not say how {part.field} is written"
            )
        text += name if isinstance(part, Slot) else part
    return text + layout.header_end


def _in_messages(fmt: Format, layout: Messages, request: Request, stage: Stage) -> Node:
    """Output that starts in a header, or in the body of a reasoning message."""
    end = layout.ends[0] if layout.ends else ""
    thinking = _route(layout, Stage.REASONING)
    parts: list[Node] = []
    if thinking is not None and end:
        free = any_text((layout.start, *layout.ends[1:], *fmt.ends))
        body = {"type": "tag", "begin": "", "content": free, "end": end}
        rest = sequence(body, const(layout.start))
        head = const(_head(layout, thinking))
        parts.append(rest if stage is Stage.REASONING else optional(sequence(head, rest)))
    elif stage is Stage.REASONING:
        raise ConstraintError(f"{fmt.name}: output starts in reasoning, but has no end marker")
    return sequence(*parts, _messages(fmt, layout, request))


def _messages(fmt: Format, layout: Messages, request: Request) -> Node:
    """Output that starts in the header of a call or of the answer."""
    answers: list[Node] = []
    if request.tools:
        answers.append(_message_calls(fmt, layout, request))
    if not request.must_call:
        final = _route(layout, Stage.CONTENT)
        if final is None:
            raise ConstraintError(f"{fmt.name}: no message holds content")
        text = any_text() if request.answer is None else request.answer
        answers.append(sequence(const(_head(layout, final)), text))
    return one_of(*answers)


def _message_calls(fmt: Format, layout: Messages, request: Request) -> Node:
    routes = [route for route in layout.routes if route.stage is Stage.CALLS]
    if not routes or not isinstance(layout.body, JsonArguments):
        raise ConstraintError(f"{fmt.name}: calls inside content messages cannot be constrained")
    # The first is what a model is expected to write; others count where it is known how.
    written = [routes[0], *(route for route in routes[1:] if route.written)]
    calls = [
        sequence(
            one_of(*(const(_head(layout, route, tool.name)) for route in written)),
            json_schema(tool.parameters),
        )
        for tool in request.tools
    ]
    one = one_of(*calls)
    if request.is_single or layout.call_end:
        return one  # the marker that ends a call ends the turn too
    more = {"type": "star", "content": sequence(const(layout.start), one)}
    return sequence(one, more)
