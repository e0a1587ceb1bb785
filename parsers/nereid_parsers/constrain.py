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

from typing import Any

from nereid_parsers.constrain_answer import report_unenforced
from nereid_parsers.constrain_arguments import tagged_arguments
from nereid_parsers.constrain_calls import call_node, section_node, trigger_of
from nereid_parsers.constrain_nodes import (
    BLANKS,
    Node,
    any_text,
    const,
    json_schema,
    one_of,
    optional,
    repeated,
    sequence,
    tag,
    without_outer_blanks,
)
from nereid_parsers.constrain_request import Request, ToolSchema
from nereid_parsers.declarations import (
    FormatData,
    Messages,
    ReasoningGate,
    Route,
    Sections,
    Stage,
    Wrapper,
)
from nereid_parsers.errors import ConstraintError
from nereid_parsers.pattern_syntax import Slot, pattern
from nereid_parsers.tool_declarations import (
    JsonArguments,
    JsonArray,
    PythonCalls,
    TaggedArguments,
    ToolSection,
)

# Matches a character that cannot start an array of tool calls.
_NO_BRACKET: Node = {"type": "regex", "pattern": r"[^\[\s]"}


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
    parts: list[Node] = []
    if isinstance(layout, Messages):
        if skip_reasoning:
            parts.append(const(layout.start))
        else:
            parts += _reasoning_messages(fmt, layout, stage)
        parts.append(_final_messages(fmt, layout, request))
    else:
        if not skip_reasoning:
            parts += _reasoning_nodes(fmt, layout, stage, may_reason)
        parts.append(_answer_or_calls(fmt, layout, request))
    return {"type": "structural_tag", "format": sequence(*parts)}


def _no_end_marker(fmt: FormatData) -> ConstraintError:
    """Return the error for a prompt that ends inside reasoning which no marker can close."""
    return ConstraintError(
        f"The prompt ends inside the reasoning, but the format {fmt.name!r} has no marker that "
        "ends the reasoning. The output after such a prompt cannot be constrained."
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
    fmt: FormatData, layout: Sections, stage: Stage, may_reason: bool
) -> list[Node]:
    """Return the structural-tag nodes for the reasoning, its markers and white space.

    Example of matching text: `<think>Let me see.</think>`. If `stage` is REASONING, the opening
    marker is omitted.

    Raises:
        ConstraintError: The output starts inside the reasoning, but the format has no reasoning.
    """
    part = layout.reasoning
    if part is None:
        if stage is Stage.REASONING:
            raise _no_end_marker(fmt)
        return []
    close = part.close.strip()
    # The opening marker of the content may end the reasoning, so the reasoning must not contain it.
    content_open = (layout.content.open,) if layout.content is not None else ()
    text = any_text((*part.also_close, *part.interrupted_by, *content_open, *fmt.ends))
    if stage is Stage.REASONING:
        return [{"type": "tag", "begin": "", "content": text, "end": close}, BLANKS]
    if not may_reason:
        return []
    options = [{"type": "tag", "begin": part.open.strip(), "content": text, "end": close}]
    if part.is_opened_by_model:
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
            f"The format {fmt.name!r} does not define how the model writes tool calls. Use a "
            "format that defines tool calls, or send a request without tools."
        )
    if not request.must_call:
        if content is None:
            return _text_with_calls(layout.tools, request)
        return one_of(section_node(layout.tools, request.tools, request.is_single), content)
    calls = section_node(layout.tools, request.tools, request.is_single)
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
    is_list = isinstance(first.body, JsonArray | PythonCalls)
    if is_list and not (tools.opens or first.trigger):
        # A list without a marker starts with a bracket, which other text may contain too. Such a
        # list is therefore allowed only at the start of the output.
        text = sequence(_NO_BRACKET, any_text())
        return one_of(section_node(tools, request.tools, request.is_single), text)
    if tools.opens:
        tags = [tag(section_node(tools, request.tools, request.is_single))]
    elif is_list:
        tags = [tag(call_node(first, request.tools, request.is_single))]
    else:
        tags = [tag(call_node(first, (tool,), request.is_single)) for tool in request.tools]
    return {
        "type": "triggered_tags",
        "triggers": [trigger_of(tools)],
        # xgrammar requires that the `begin` text of each tag starts with a trigger.
        "tags": [{**node, "begin": node["begin"].lstrip()} for node in tags],
        "stop_after_first": request.is_single,
    }


# ---- the layout Messages -------------------------------------------------------------------------


def _first_route(layout: Messages, stage: Stage) -> Route | None:
    """Return the route whose header constrained output contains for the messages of a stage.

    Of the routes with this stage, the first one whose header is an exact text is returned. If all
    headers contain fields, the first route is returned. The result is None if no route has this
    stage.
    """
    routes = [route for route in layout.routes if route.stage is stage]
    for route in routes:
        if all(isinstance(part, str) for part in pattern(route.form)):
            return route
    return routes[0] if routes else None


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
                f"The message header {route.header!r} contains the field {{{part.field}}}, which "
                "can match different texts. Constrained output needs one exact header. Set "
                "Route.written to the header that the model writes."
            )
        text += name if isinstance(part, Slot) else part
    return text + layout.header_end


def _reasoning_messages(fmt: FormatData, layout: Messages, stage: Stage) -> list[Node]:
    """Return the structural-tag nodes for the reasoning message and the start of the next message.

    Example of matching text: `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant`. If
    `stage` is REASONING, the header is omitted. Otherwise the whole message is optional.

    Raises:
        ConstraintError: The output starts inside the reasoning, but no marker ends the reasoning.
    """
    route = _first_route(layout, Stage.REASONING)
    if route is None or not layout.ends:
        if stage is Stage.REASONING:
            raise _no_end_marker(fmt)
        return []
    text = any_text((layout.start, *layout.ends[1:], *fmt.ends))
    body = {"type": "tag", "begin": "", "content": text, "end": layout.ends[0]}
    body_and_next_start = sequence(body, const(layout.start))
    if stage is Stage.REASONING:
        return [body_and_next_start]
    header = const(_header_text(layout, route))
    return [optional(sequence(header, body_and_next_start))]


def _final_messages(fmt: FormatData, layout: Messages, request: Request) -> Node:
    """Return the structural-tag node for a message header with the tool calls or the answer.

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
                f"The format {fmt.name!r} has no message type for an answer in text, so the model "
                "can only call tools. Set tool_choice to required, or choose another format."
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
    if not routes:
        raise ConstraintError(
            f"The tool calls of the format {fmt.name!r} cannot be constrained, because the model "
            "writes them inside messages that also contain other text"
        )
    # The first route is the usual header. Other headers are allowed if their text is declared.
    written_routes = [routes[0], *(route for route in routes[1:] if route.written)]
    calls = [
        sequence(
            one_of(*(const(_header_text(layout, route, tool.name)) for route in written_routes)),
            _message_arguments(layout.body, tool),
        )
        for tool in request.tools
    ]
    if request.is_single or layout.call_end:
        return one_of(*calls)  # The marker after the tool call also ends the turn.
    end = layout.ends[0] if layout.ends else ""
    return repeated(calls, const(end + layout.start), is_single=False)


def _message_arguments(body: JsonArguments | TaggedArguments, tool: ToolSchema) -> Node:
    """Return the structural-tag node for the arguments in a message that is a tool call.

    Example of matching text: `{"city": "Paris"}`.
    """
    if isinstance(body, TaggedArguments):
        return tagged_arguments(body, tool)
    return json_schema(tool.parameters)
