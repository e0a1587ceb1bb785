"""Builds the structural tag (xgrammar 0.2.8) that constrains the decoding of one response.

The structural tag has the form `{"type": "structural_tag", "format": ...}` and describes the whole
output after the prompt. The reasoning is free text up to its closing marker. Content, tool calls or
JSON follow the reasoning, as the format declares them. Three details are important:

- White space inside JSON is limited to one character. Without this limit, the model could generate
  white space without end.
- The structural tag contains no end-of-turn tokens. The engine must have the ids of these tokens
  among its stop token ids.
- xgrammar accepts some schema keywords without enforcing them. Such keywords raise an error if the
  request is strict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_parsers.constrain_answer import answer_node, report_unenforced
from nereid_parsers.constrain_arguments import ToolSchema
from nereid_parsers.constrain_calls import call_tag, section_node, trigger_of
from nereid_parsers.constrain_nodes import (
    BLANKS,
    Node,
    any_text,
    const,
    json_schema,
    one_of,
    optional,
    sequence,
    tag,
    without_outer_blanks,
)
from nereid_parsers.declarations import (
    FormatData,
    Messages,
    Opener,
    Reasoning,
    ReasoningGate,
    Route,
    Sections,
    Stage,
    Wrapper,
)
from nereid_parsers.errors import ConstraintError
from nereid_parsers.pattern_syntax import Slot, pattern
from nereid_parsers.tool_declarations import JsonArguments, JsonArray, PythonCalls, ToolSection

# Matches a character that cannot start an array of tool calls.
_NO_BRACKET: Node = {"type": "regex", "pattern": r"[^\[\s]"}


@dataclass(frozen=True, slots=True)
class Request:
    """The validated constraints that a request places on the output.

    Attributes:
        tools: The tools that the model may call, in the order of the request.
        must_call: Whether the model must make at least one tool call.
        is_single: Whether the model may make at most one tool call.
        answer: The structural-tag node that the content must match, or None for free text.
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
        """Convert the fields of an OpenAI request.

        Raises:
            ConstraintError: A field is invalid, or `tool_choice` contradicts `tools`.
        """
        allowed = tuple(ToolSchema.of(tool) for tool in tools or ())
        mode, names = _parse_tool_choice(tool_choice, bool(allowed))
        if names is not None:
            missing = names - {tool.name for tool in allowed}
            if missing:
                raise ConstraintError(f"tool_choice: no tool is called {sorted(missing)[0]!r}")
            allowed = tuple(tool for tool in allowed if tool.name in names)
        if mode == "required" and not allowed:
            raise ConstraintError("tool_choice: a tool call is required, but tools is empty")
        if mode == "none":
            allowed = ()
        is_named = isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"
        return cls(
            tools=allowed,
            must_call=mode == "required",
            is_single=is_named or not parallel_tool_calls,
            answer=answer_node(response_format),
        )

    @property
    def is_unconstrained(self) -> bool:
        """Whether the request allows any output."""
        constrains_calls = self.must_call or any(tool.is_strict for tool in self.tools)
        limits_calls = bool(self.tools) and self.is_single
        return self.answer is None and not constrains_calls and not limits_calls


def _parse_tool_choice(
    choice: str | Mapping[str, Any] | None, has_tools: bool
) -> tuple[str, frozenset[str] | None]:
    """Return the mode (auto, required or none) and the names of the tools that the model may call.

    The names are None if the model may call all tools. Example:
    `{"type": "function", "function": {"name": "f"}}` gives `("required", {"f"})`.

    Raises:
        ConstraintError: The value is not a `tool_choice` of the OpenAI API.
    """
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
                f"tool_choice: allowed_tools.mode must be auto or required, but is {mode!r}"
            )
        return mode, frozenset(_function_name(tool) for tool in allowed.get("tools", ()))
    raise ConstraintError(f"tool_choice: type must be function or allowed_tools, but is {kind!r}")


def _function_name(choice: Mapping[str, Any]) -> str:
    """Return the function's name from `{"function": {"name": ..}}` or `{"name": ..}`.

    Raises:
        ConstraintError: The object contains no name.
    """
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ConstraintError(
            f"tool_choice: {dict(choice)!r} names no function. Set function.name."
        )
    return name


def structural_tag(
    fmt: FormatData,
    request: Request,
    stage: Stage,
    may_reason: bool = True,
    skip_reasoning: bool = False,
) -> dict[str, Any] | None:
    """Return the structural tag for a request, or None if the request allows any output.

    Args:
        fmt: The format of the output.
        request: The constraints of the request.
        stage: The stage in which the output starts.
        may_reason: Whether the model itself may still open the reasoning.
        skip_reasoning: Whether the structural tag describes only the text after the reasoning.

    Raises:
        ConstraintError: No structural tag of this format expresses the request.
    """
    if request.is_unconstrained:
        return None
    for tool in request.tools:
        report_unenforced(tool.parameters, tool.is_strict, f"tools: {tool.name}")
    layout = fmt.layout
    if isinstance(layout, Messages):
        if skip_reasoning:
            return _wrap(sequence(const(layout.start), _final_messages(fmt, layout, request)))
        return _wrap(_all_messages(fmt, layout, request, stage))
    if skip_reasoning:
        return _wrap(_answer_or_calls(fmt, layout, request))
    parts: list[Node] = []
    if layout.reasoning is not None:
        parts += _reasoning_nodes(layout.reasoning, fmt.ends, stage, may_reason)
    elif stage is Stage.REASONING:
        raise _no_end_marker(fmt)
    parts.append(_answer_or_calls(fmt, layout, request))
    return _wrap(sequence(*parts))


def _wrap(node: Node) -> dict[str, Any]:
    """Return a complete structural tag that contains `node`."""
    return {"type": "structural_tag", "format": node}


def _no_end_marker(fmt: FormatData) -> ConstraintError:
    """Return the error for output that starts inside reasoning that no marker can close."""
    return ConstraintError(
        f"The output starts inside the reasoning, but the format {fmt.name!r} has no end marker "
        "for the reasoning"
    )


def gate_of(fmt: FormatData, stage: Stage, has_reasoned: bool) -> ReasoningGate | None:
    """Return the markers of the reasoning and the state of the reasoning after a prompt.

    Return None if the format has no reasoning, or no marker that closes the reasoning.

    Args:
        fmt: The format of the output.
        stage: The stage in which the output starts.
        has_reasoned: Whether the prompt contains reasoning that has been closed.
    """
    layout = fmt.layout
    if isinstance(layout, Messages):
        route = _first_route(layout, Stage.REASONING)
        if route is None or not layout.ends:
            return None
        start = _header_text(layout, route)
        end = layout.ends[0]
    elif layout.reasoning is None:
        return None
    else:
        start = layout.reasoning.open
        end = layout.reasoning.close
    is_open = stage is Stage.REASONING
    return ReasoningGate(start, end, is_open, may_open=not is_open and not has_reasoned)


# ---- the layout Sections -------------------------------------------------------------------------


def _reasoning_nodes(
    part: Reasoning, ends: tuple[str, ...], stage: Stage, may_reason: bool
) -> list[Node]:
    """Return the structural-tag nodes for the reasoning, its markers and white space.

    Example of matching text: `<think>Let me see.</think>`. If `stage` is REASONING, the opening
    marker is omitted.
    """
    close = part.close.strip()
    text = any_text((*part.also_close, *part.interrupted_by, *ends))
    if stage is Stage.REASONING:
        return [{"type": "tag", "begin": "", "content": text, "end": close}, BLANKS]
    if not may_reason:
        return []
    options = [{"type": "tag", "begin": part.open.strip(), "content": text, "end": close}]
    if part.opener is Opener.MODEL:
        # Some models skip the reasoning and write only the closing marker.
        options.append(const(close))
    return [optional(sequence(BLANKS, one_of(*options), BLANKS))]


def _answer_or_calls(fmt: FormatData, layout: Sections, request: Request) -> Node:
    """Return the structural-tag node for the whole text after the reasoning.

    Raises:
        ConstraintError: The request requires tool calls, but the format has none.
    """
    content = _content_node(layout, request)
    if not request.tools:
        assert content is not None  # Otherwise the request would be unconstrained.
        return content
    if layout.tools is None:
        raise ConstraintError(
            f"The format {fmt.name!r} has no tool section, so the model cannot call tools"
        )
    if not request.must_call and content is None:
        return _text_with_calls(layout.tools, request)
    calls = section_node(layout.tools, request.tools, request.is_single)
    if not request.must_call:
        assert content is not None
        return one_of(calls, content)
    # Templates and models write different white space around tool calls.
    empty_content = _empty_content_nodes(layout.content)
    return sequence(*empty_content, BLANKS, without_outer_blanks(calls), BLANKS)


def _content_node(layout: Sections, request: Request) -> Node | None:
    """Return the structural-tag node for the requested content and its markers.

    Return None if the content is free text.
    """
    if request.answer is None or layout.content is None:
        return request.answer
    return sequence(const(layout.content.open), request.answer, const(layout.content.close))


def _empty_content_nodes(wrapper: Wrapper | None) -> list[Node]:
    """Return the structural-tag nodes for empty content before tool calls.

    Some templates write such empty content. Example of matching text: `<response></response>`. The
    opening marker is optional, because the prompt may contain it.
    """
    if wrapper is None or not wrapper.open.strip():
        return []
    opening = const(wrapper.open.strip())
    closing = wrapper.close.strip()
    if not closing:
        return [optional(sequence(BLANKS, opening))]
    return [optional(sequence(BLANKS, optional(opening), BLANKS, const(closing)))]


def _text_with_calls(tools: ToolSection, request: Request) -> Node:
    """Return the structural-tag node for free text in which all tool calls are valid.

    Example of matching text: `Let me look.<tool_call>{"name": "f", "arguments": {}}</tool_call>`.
    """
    first = tools.calls[0]
    accepts_all_tools = isinstance(first.body, JsonArray | PythonCalls)
    if accepts_all_tools and not (tools.opens or first.trigger):
        # Any text may contain brackets. A bracket starts tool calls only at the start of the
        # output.
        text = sequence(_NO_BRACKET, any_text())
        return one_of(section_node(tools, request.tools, request.is_single), text)
    if tools.opens:
        tags = [tag(section_node(tools, request.tools, request.is_single))]
    elif accepts_all_tools:
        tags = [call_tag(first, request.tools, request.is_single)]
    else:
        tags = [call_tag(first, (tool,), request.is_single) for tool in request.tools]
    return {
        "type": "triggered_tags",
        "triggers": [trigger_of(tools)],
        # xgrammar requires that the `begin` text of each tag starts with a trigger.
        "tags": [{**node, "begin": node["begin"].lstrip()} for node in tags],
        "stop_after_first": request.is_single,
    }


# ---- the layout Messages -------------------------------------------------------------------------


def _first_route(layout: Messages, stage: Stage) -> Route | None:
    """Return the first route of a stage, or None. Constrained output uses this route."""
    return next((route for route in layout.routes if route.stage is stage), None)


def _header_text(layout: Messages, route: Route, name: str = "") -> str:
    """Return the text of a message header, including the text between header and body.

    Example: `"<|channel|>final<|message|>"`.

    Args:
        layout: The layout of the format.
        route: The route of the message.
        name: The name of the function, if the message is a tool call.

    Raises:
        ConstraintError: The header has a field whose text is not known.
    """
    text = ""
    for part in pattern(route.form):
        if isinstance(part, Slot) and part.field != "name":
            raise ConstraintError(
                f"The message header {route.header!r} cannot be constrained, because the text of "
                f"its field {part.field} is not known. Declare the header's text in Route.written."
            )
        text += name if isinstance(part, Slot) else part
    return text + layout.header_end


def _all_messages(fmt: FormatData, layout: Messages, request: Request, stage: Stage) -> Node:
    """Return the structural-tag node for output that starts in a header or in a reasoning message.

    Example of matching text: `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant`, followed
    by the header of a tool call or of the answer.
    """
    end = layout.ends[0] if layout.ends else ""
    reasoning_route = _first_route(layout, Stage.REASONING)
    parts: list[Node] = []
    if reasoning_route is not None and end:
        text = any_text((layout.start, *layout.ends[1:], *fmt.ends))
        body = {"type": "tag", "begin": "", "content": text, "end": end}
        body_and_next_start = sequence(body, const(layout.start))
        if stage is Stage.REASONING:
            parts.append(body_and_next_start)
        else:
            header = const(_header_text(layout, reasoning_route))
            parts.append(optional(sequence(header, body_and_next_start)))
    elif stage is Stage.REASONING:
        raise _no_end_marker(fmt)
    return sequence(*parts, _final_messages(fmt, layout, request))


def _final_messages(fmt: FormatData, layout: Messages, request: Request) -> Node:
    """Return the structural-tag node for the tool calls or the answer, from the header on.

    Raises:
        ConstraintError: The request allows an answer, but the format has no message for content.
    """
    options: list[Node] = []
    if request.tools:
        options.append(_call_messages(fmt, layout, request))
    if not request.must_call:
        content_route = _first_route(layout, Stage.CONTENT)
        if content_route is None:
            raise ConstraintError(
                f"The format {fmt.name!r} cannot express an answer, because no message contains "
                "content. Use a format that declares a route for the content."
            )
        text = any_text() if request.answer is None else request.answer
        options.append(sequence(const(_header_text(layout, content_route)), text))
    return one_of(*options)


def _call_messages(fmt: FormatData, layout: Messages, request: Request) -> Node:
    """Return the structural-tag node for one or more messages that are tool calls.

    Example of matching text: ` to=functions.f<|message|>{"city": "Paris"}`.

    Raises:
        ConstraintError: The format has no messages that are tool calls.
    """
    routes = [route for route in layout.routes if route.stage is Stage.CALLS]
    if not routes or not isinstance(layout.body, JsonArguments):
        raise ConstraintError(
            f"The tool calls of the format {fmt.name!r} cannot be constrained, because the format "
            "writes tool calls inside content messages"
        )
    # The first route is the usual header. Other headers are allowed if their text is declared.
    written_routes = [routes[0], *(route for route in routes[1:] if route.written)]
    calls = [
        sequence(
            one_of(*(const(_header_text(layout, route, tool.name)) for route in written_routes)),
            json_schema(tool.parameters),
        )
        for tool in request.tools
    ]
    call = one_of(*calls)
    if request.is_single or layout.call_end:
        return call  # The marker after the tool call also ends the turn.
    further_calls = {"type": "star", "content": sequence(const(layout.start), call)}
    return sequence(call, further_calls)
