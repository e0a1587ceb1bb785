"""Builds the structural tag with which xgrammar 0.2.8 constrains the decoding of one response.

The structural tag has the form `{"type": "structural_tag", "format": ...}` and describes the whole
output after the prompt. The reasoning is free text up to its closing marker. Content or tool calls
follow the reasoning, and must have the form that the format declares. Three details are important:

- White space inside JSON is limited to one character. Without this limit, the model could generate
  white space forever.
- The structural tag contains no end-of-turn tokens. The engine must therefore stop when the model
  generates such a token.
- xgrammar accepts some schema keywords without enforcing them. If a strict request uses such a
  keyword, `structural_tag` raises an error.
"""

from __future__ import annotations

from typing import Any

from nereid_parsers.constrain_answer import report_unenforced
from nereid_parsers.constrain_calls import (
    ListBody,
    call_node,
    list_node,
    section_node,
    trigger_of,
)
from nereid_parsers.constrain_messages import (
    final_messages,
    first_route,
    header_text,
    reasoning_messages,
)
from nereid_parsers.constrain_nodes import (
    WHITESPACE,
    Node,
    any_text,
    const,
    one_of,
    optional,
    sequence,
    tag,
    without_outer_whitespace,
)
from nereid_parsers.constrain_reasoning import ReasoningState, unclosed_reasoning_error
from nereid_parsers.constrain_request import Request
from nereid_parsers.declarations import (
    FormatData,
    Messages,
    ReasoningGate,
    Sections,
    Stage,
    Wrapper,
)
from nereid_parsers.errors import ConstraintError
from nereid_parsers.stream.parser import OutputStart
from nereid_parsers.tool_declarations import (
    ToolSection,
)

# Matches one character that is neither `[` nor white space. An array of tool calls cannot start
# with such a character.
_NO_BRACKET: Node = {"type": "regex", "pattern": r"[^\[\s]"}


def structural_tag(
    fmt: FormatData, request: Request, reasoning: ReasoningState
) -> dict[str, Any] | None:
    """Return the structural tag for a request, or None if the request allows any output.

    Args:
        fmt: The format of the output.
        request: The constraints of the request.
        reasoning: The state of the reasoning at the start of the constrained text.

    Raises:
        ConstraintError: The request cannot be expressed as a structural tag of this format.
    """
    if request.is_unconstrained:
        return None
    for tool in request.tools:
        report_unenforced(tool.parameters, tool.is_strict, f"tools: {tool.name}")
    layout = fmt.layout
    if isinstance(layout, Messages):
        nodes = reasoning_messages(fmt, layout, reasoning)
        output = sequence(*nodes, final_messages(fmt, layout, request))
    else:
        nodes = _reasoning_nodes(fmt, layout, reasoning)
        output = sequence(*nodes, _answer_or_calls(fmt, layout, request))
    return {"type": "structural_tag", "format": output}


def gate_of(fmt: FormatData, start: OutputStart) -> ReasoningGate | None:
    """Return the markers of the reasoning, and the state of the reasoning after the prompt.

    A server uses the markers to find or to enforce the end of the reasoning. Return None if the
    format has no reasoning, or if no marker closes the reasoning.

    Args:
        fmt: The format of the output.
        start: The state of the reasoning at the end of the prompt.
    """
    markers = _reasoning_markers(fmt.layout)
    if markers is None:
        return None
    opening, closing = markers
    is_open = start.stage is Stage.REASONING
    may_open = not is_open and not start.has_reasoned
    return ReasoningGate(opening, closing, is_open=is_open, may_open=may_open)


def _reasoning_markers(layout: Sections | Messages) -> tuple[str, str] | None:
    """Return the opening marker and the closing marker of the reasoning.

    Return None if the format has no reasoning, or if no marker closes the reasoning.

    Examples: `("<think>", "</think>")` for the layout `Sections`, and
    `("<|channel|>analysis<|message|>", "<|end|>")` for the layout `Messages`.
    """
    if isinstance(layout, Sections):
        part = layout.reasoning
        return (part.open, part.close) if part is not None else None
    route = first_route(layout, Stage.REASONING)
    if route is None or not layout.ends:
        return None
    return header_text(layout, route), layout.ends[0]


# ---- the layout Sections -------------------------------------------------------------------------


def _reasoning_nodes(fmt: FormatData, layout: Sections, state: ReasoningState) -> list[Node]:
    """Return the structural-tag nodes that match the reasoning and its markers.

    Example of matching text: `<think>Let me see.</think>`. If the prompt has opened the reasoning,
    the nodes match only the text after the opening marker. If the model may open the reasoning, the
    whole reasoning is optional. The list is empty if the reasoning has ended or is excluded.

    Raises:
        ConstraintError: The output starts inside the reasoning, but the format has no reasoning.
    """
    if state in (ReasoningState.ENDED, ReasoningState.EXCLUDED):
        return []
    is_open = state is ReasoningState.OPEN
    part = layout.reasoning
    if part is None:
        if is_open:
            raise unclosed_reasoning_error(fmt)
        return []
    # The opening marker of the content can end the reasoning. The text of the reasoning must
    # therefore not contain this marker.
    content_open = (layout.content.open,) if layout.content is not None else ()
    text = any_text((*part.also_close, *part.interrupted_by, *content_open, *fmt.ends))
    begin = "" if is_open else part.open.strip()
    close = part.close.strip()
    reasoning: Node = {"type": "tag", "begin": begin, "content": text, "end": close}
    if is_open:
        return [reasoning, WHITESPACE]
    # Some models skip the reasoning and write only the closing marker.
    skipped_reasoning = [const(close)] if part.is_opened_by_model else []
    return [optional(sequence(WHITESPACE, one_of(reasoning, *skipped_reasoning), WHITESPACE))]


def _answer_or_calls(fmt: FormatData, layout: Sections, request: Request) -> Node:
    """Return the structural-tag node for the whole text after the reasoning.

    The fields of the request decide what the node matches:

        no tools                                              the requested content
        tool_choice "required"                                tool calls
        tool_choice "auto", response_format allows any text   free text with tool calls
        tool_choice "auto", response_format limits the text   tool calls, or the requested content

    Raises:
        ConstraintError: The request has tools, but the format declares no tool calls.
    """
    content = _content_node(layout, request)
    if not request.tools:
        # A request without tools and without `answer` is unconstrained, so `content` is not None.
        assert content is not None
        return content
    if layout.tools is None:
        raise ConstraintError(
            f"The format {fmt.name!r} does not define how the model writes tool calls. Use a "
            "format that defines tool calls, or send a request without tools."
        )
    if content is None and not request.must_call:
        return _text_with_calls(layout.tools, request)
    calls = section_node(layout.tools, request.tools, is_single=request.is_single)
    if content is not None and not request.must_call:
        return one_of(calls, content)
    # Different templates and models write different white space before and after tool calls, so
    # white space is optional at both places.
    empty_content = _empty_content_nodes(layout.content)
    return sequence(*empty_content, WHITESPACE, without_outer_whitespace(calls), WHITESPACE)


def _content_node(layout: Sections, request: Request) -> Node | None:
    """Return the structural-tag node for the content and the markers around the content.

    Return None if the request allows any text as content.
    """
    if request.answer is None or layout.content is None:
        return request.answer
    return sequence(const(layout.content.open), request.answer, const(layout.content.close))


def _empty_content_nodes(wrapper: Wrapper | None) -> list[Node]:
    """Return the structural-tag nodes for empty content, for example `<response></response>`.

    Some templates write the markers of empty content before tool calls. The opening marker is
    optional, because the prompt may already contain this marker.
    """
    if wrapper is None or not wrapper.open.strip():
        return []
    opening = const(wrapper.open.strip())
    closing = wrapper.close.strip()
    if not closing:
        return [optional(sequence(WHITESPACE, opening))]
    return [optional(sequence(WHITESPACE, optional(opening), WHITESPACE, const(closing)))]


def _text_with_calls(tools: ToolSection, request: Request) -> Node:
    """Return the structural-tag node for free text in which all tool calls are valid.

    Example of matching text: `Let me look.<tool_call>{"name": "f", "arguments": {}}</tool_call>`.
    """
    is_list = isinstance(tools.calls[0].body, ListBody)
    has_marker = bool(tools.opens or tools.calls[0].trigger)
    if is_list and not has_marker:
        # A list without a marker starts with a bracket, and other text may contain brackets too.
        # Such a list is therefore allowed only at the start of the output.
        text = sequence(_NO_BRACKET, any_text())
        return one_of(section_node(tools, request.tools, is_single=request.is_single), text)
    tags = [tag(node) for node in _marked_calls(tools, request)]
    return {
        "type": "triggered_tags",
        "triggers": [trigger_of(tools)],
        # xgrammar requires that the `begin` text of each tag starts with a trigger, so the white
        # space before the trigger is removed.
        "tags": [{**node, "begin": node["begin"].lstrip()} for node in tags],
        "stop_after_first": request.is_single,
    }


def _marked_calls(tools: ToolSection, request: Request) -> list[Node]:
    """Return the structural-tag nodes for tool calls that start with a marker.

    Examples: one node for a whole section `<tool_calls>..</tool_calls>`, or one node for each tool
    if every tool call has the markers `<tool_call>..</tool_call>`.
    """
    if tools.opens:
        return [section_node(tools, request.tools, is_single=request.is_single)]
    call = tools.calls[0]
    if isinstance(call.body, ListBody):
        return [list_node(call, call.body, request.tools, is_single=request.is_single)]
    return [call_node(call, tool) for tool in request.tools]
