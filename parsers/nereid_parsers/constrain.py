"""From a Format and a request to the structural tag that constrains decoding (xgrammar 0.2.8).

The tag is the format form: `{"type": "structural_tag", "format": ...}`. It covers the whole output
from where the prompt leaves off: reasoning stays free up to its closing marker, then come content,
calls, or JSON, each in the format's written form. Three traps are minded here: JSON may hold one
blank at a time only, or sampling may never end; end-of-turn tokens are left to the engine's stop
ids, so they must be listed there; and schema keywords that xgrammar passes over are an error where
the request is strict.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_parsers.constrain_calls import (
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
)
from nereid_parsers.constrain_schema import unenforced
from nereid_parsers.errors import ConstraintError
from nereid_parsers.format import (
    Format,
    JsonArguments,
    JsonArray,
    Messages,
    PythonCalls,
    Reasoning,
    Route,
    Sections,
    Slot,
    Stage,
    ToolSection,
    pattern,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """What a request asks of the output, checked.

    tools       those that may be called, in order.
    must_call   whether at least one call is required.
    is_single   whether at most one call may be made.
    schema      what content must be, as a JSON schema; None for free text.
    """

    tools: tuple[ToolSchema, ...] = ()
    must_call: bool = False
    is_single: bool = False
    schema: Any = None

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
            schema=_response_schema(response_format),
        )

    @property
    def is_free(self) -> bool:
        """Whether nothing is to be constrained: then every output is as good as any other."""
        wants_calls = self.must_call or any(tool.is_strict for tool in self.tools)
        limits_calls = bool(self.tools) and self.is_single
        return self.schema is None and not wants_calls and not limits_calls


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


def _response_schema(response_format: Mapping[str, Any] | None) -> Any:  # noqa: ANN401  # JSON
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        spec = response_format.get("json_schema", response_format)
        schema = spec.get("schema", {})
        _report(schema, bool(spec.get("strict")), "response_format")
        return schema
    raise ConstraintError(f"response_format: type {kind!r} is not text, json_object or json_schema")


def _report(schema: Any, is_strict: bool, where: str) -> None:  # noqa: ANN401  # JSON
    """Say which keywords of a schema would not be enforced: an error if the request is strict."""
    found = unenforced(schema)
    if found and is_strict:
        raise ConstraintError(f"{where}: strict, but not enforced: {'; '.join(found)}")
    if found:
        log.warning("%s: not enforced: %s", where, "; ".join(found))


def structural_tag(
    fmt: Format, request: Request, stage: Stage, may_reason: bool = True
) -> dict[str, Any] | None:
    """The structural tag for a request whose output starts in `stage`; None if it stays free.

    `may_reason`: whether the model may still open its reasoning itself.

    Raises: ConstraintError when the format cannot write what the request asks for.
    """
    if request.is_free:
        return None
    for tool in request.tools:
        _report(tool.parameters, tool.is_strict, f"tools: {tool.name}")
    layout = fmt.layout
    if isinstance(layout, Messages):
        return _tag(_in_messages(fmt, layout, request, stage))
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
    blanks = {"type": "regex", "pattern": r"[ \n]{0,2}"}
    free = any_text((*part.also_close, *part.interrupted_by, *ends))
    if stage is Stage.REASONING:
        return [{"type": "tag", "begin": "", "content": free, "end": close}, blanks]
    if not may_reason:
        return []
    begin = part.open.strip()
    marked = {"type": "tag", "begin": begin, "content": free, "end": close}
    return [optional(sequence(marked, blanks))]


def _answer(fmt: Format, layout: Sections, request: Request) -> Node:
    json = _json_content(layout, request)
    if not request.tools:
        assert json is not None
        return json
    if layout.tools is None:
        raise ConstraintError(
            f"{fmt.name}: calls are asked for, but the format has no tool section"
        )
    if request.must_call:
        return section_tag(layout.tools, request.tools, request.is_single)
    if json is not None:
        return one_of(section_tag(layout.tools, request.tools, request.is_single), json)
    return _auto(layout.tools, request)


def _json_content(layout: Sections, request: Request) -> Node | None:
    if request.schema is None:
        return None
    node = json_schema(request.schema)
    wrapper = layout.content
    return sequence(const(wrapper.open), node, const(wrapper.close)) if wrapper else node


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
    return {
        "type": "triggered_tags",
        "triggers": [trigger_of(tools)],
        "tags": tags,
        "stop_after_first": request.is_single,
    }


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
    answers: list[Node] = []
    if request.tools:
        answers.append(_message_calls(fmt, layout, request))
    if not request.must_call:
        final = _route(layout, Stage.CONTENT)
        if final is None:
            raise ConstraintError(f"{fmt.name}: no message holds content")
        text = any_text() if request.schema is None else json_schema(request.schema)
        answers.append(sequence(const(_head(layout, final)), text))
    return sequence(*parts, one_of(*answers))


def _message_calls(fmt: Format, layout: Messages, request: Request) -> Node:
    route = _route(layout, Stage.CALLS)
    if route is None or not isinstance(layout.body, JsonArguments):
        raise ConstraintError(f"{fmt.name}: calls inside content messages cannot be constrained")
    calls = [
        sequence(const(_head(layout, route, tool.name)), json_schema(tool.parameters))
        for tool in request.tools
    ]
    one = one_of(*calls)
    if request.is_single or layout.call_end:
        return one  # the marker that ends a call ends the turn too
    more = {"type": "star", "content": sequence(const(layout.start), one)}
    return sequence(one, more)
