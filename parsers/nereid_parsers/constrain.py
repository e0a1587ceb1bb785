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

from typing import Any, NamedTuple

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
    Reasoning,
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

    A structural tag is the JSON object from which xgrammar builds the grammar of the output. The
    grammar forces the model to write valid tool calls, or an answer of the requested form. For
    each schema keyword of a tool that xgrammar cannot enforce, a warning is logged.

    Args:
        fmt: The format of the output. It declares how reasoning and tool calls are written.
        request: The constraints of the request: its tools and the form of the answer.
        reasoning: The state of the reasoning at the start of the constrained text.

    Raises:
        ConstraintError: The request cannot be expressed as a structural tag of this format.
    """
    if request.is_unconstrained:
        return None
    for tool in request.tools:
        report_unenforced(tool.parameters, tool.is_strict, f"tools: {tool.name}")
    layout = fmt.layout  # The output is a sequence of messages, or one text with markers.
    if isinstance(layout, Messages):
        reasoning_nodes = reasoning_messages(fmt, layout, reasoning)
        answer_or_calls = final_messages(fmt, layout, request)
    else:
        reasoning_nodes = _reasoning_nodes(fmt, layout, reasoning)
        answer_or_calls = _answer_or_calls(fmt, layout, request)
    output = sequence(*reasoning_nodes, answer_or_calls)
    return {"type": "structural_tag", "format": output}


def gate_of(fmt: FormatData, start: OutputStart) -> ReasoningGate | None:
    """Return the reasoning's markers, and the state of the reasoning at the end of the prompt.

    A server uses the markers to find or to enforce the end of the reasoning. Return None if the
    format has no reasoning, or if no marker closes the reasoning.

    Example: if the prompt ends with `<think>`, the reasoning is open, and the result is
    `ReasoningGate("<think>", "</think>", is_open=True, may_open=False)`.

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


class _ReasoningMarkers(NamedTuple):
    """The marker that opens the reasoning, and the marker that closes the reasoning."""

    opening: str
    closing: str


def _reasoning_markers(layout: Sections | Messages) -> _ReasoningMarkers | None:
    """Return the opening marker and the closing marker of the reasoning.

    Return None if the format has no reasoning, or if no marker closes the reasoning.

    Examples: `("<think>", "</think>")` for the layout `Sections`, and
    `("<|channel|>analysis<|message|>", "<|end|>")` for the layout `Messages`.
    """
    if isinstance(layout, Sections):
        declaration = layout.reasoning
        if declaration is None:
            return None
        return _ReasoningMarkers(declaration.open, declaration.close)
    route = first_route(layout, Stage.REASONING)
    if route is None or not layout.ends:
        return None
    return _ReasoningMarkers(header_text(layout, route), layout.ends[0])


# ---- the layout Sections -------------------------------------------------------------------------


def _reasoning_nodes(fmt: FormatData, layout: Sections, state: ReasoningState) -> list[Node]:
    """Return the grammar nodes that match the reasoning and its markers.

    `state` is the state of the reasoning at the start of the constrained text. Examples for the
    markers `<think>` and `</think>`:

        state             matching text
        OPEN              `Let me see.</think>`, because the prompt ends with `<think>`
        ENDED, EXCLUDED   none, because the list of nodes is empty
        POSSIBLE          `<think>Let me see.</think>`, or the empty text

    If the format has no reasoning, the list is also empty.

    Raises:
        ConstraintError: The output starts inside the reasoning, but the format has no reasoning.
    """
    if state in (ReasoningState.ENDED, ReasoningState.EXCLUDED):
        return []
    is_open = state is ReasoningState.OPEN
    declaration = layout.reasoning
    if declaration is None and is_open:
        raise unclosed_reasoning_error(fmt)
    if declaration is None:
        return []
    text = _reasoning_text(fmt, layout, declaration)
    if is_open:
        return _opened_reasoning(declaration, text)
    return [_optional_reasoning(declaration, text)]


def _reasoning_text(fmt: FormatData, layout: Sections, declaration: Reasoning) -> Node:
    """Return the grammar node for the text of the reasoning, without the markers around it.

    The node matches any text that contains no marker that ends or interrupts the reasoning, for
    example the opening marker of the content. The node does not exclude the usual closing marker
    `declaration.close`, because the caller puts the node into a tag that ends at this marker.
    """
    content_open = (layout.content.open,) if layout.content is not None else ()
    return any_text(
        (*declaration.also_close, *declaration.interrupted_by, *content_open, *fmt.ends)
    )


def _opened_reasoning(declaration: Reasoning, text: Node) -> list[Node]:
    """Return the nodes for reasoning whose opening marker is already a part of the prompt."""
    close = declaration.close.strip()
    return [{"type": "tag", "begin": "", "content": text, "end": close}, WHITESPACE]


def _optional_reasoning(declaration: Reasoning, text: Node) -> Node:
    """Return the grammar node that matches either reasoning with its markers, or the empty text.

    Example of matching text: `<think>Hm.</think>`. Some models that write the opening marker
    themselves skip the reasoning, and write only the closing marker. For these models
    (`declaration.is_opened_by_model`), the node also matches `</think>` alone.

    Args:
        declaration: The declaration of the reasoning and its markers.
        text: The node for the text between the markers.
    """
    close = declaration.close.strip()
    reasoning: Node = {
        "type": "tag",
        "begin": declaration.open.strip(),
        "content": text,
        "end": close,
    }
    options = [reasoning, const(close)] if declaration.is_opened_by_model else [reasoning]
    return optional(sequence(WHITESPACE, one_of(*options), WHITESPACE))


def _answer_or_calls(fmt: FormatData, layout: Sections, request: Request) -> Node:
    """Return the grammar node for the whole text after the reasoning.

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
        # For a request with neither tools nor the field `answer`, `structural_tag` returns None
        # and does not call this function. So `content` is not None here.
        assert content is not None
        return content
    tools = _declared_tools(fmt, layout)
    if request.must_call:
        return _only_calls(tools, layout.content, request)
    if content is None:
        return _text_with_calls(tools, request)
    calls = section_node(tools, request.tools, is_single=request.is_single)
    return one_of(calls, content)


def _declared_tools(fmt: FormatData, layout: Sections) -> ToolSection:
    """Return the declaration of the tool calls. Raise ConstraintError if there is none."""
    if layout.tools is None:
        raise ConstraintError(
            f"The format {fmt.name!r} does not define how the model writes tool calls. Use a "
            "format that defines tool calls, or send a request without tools."
        )
    return layout.tools


def _only_calls(tools: ToolSection, wrapper: Wrapper | None, request: Request) -> Node:
    """Return the grammar node for an output that contains tool calls, but no content.

    Different templates and models write different white space before and after tool calls, so the
    node allows white space at both places. `wrapper` declares the markers around the content.
    """
    calls = section_node(tools, request.tools, is_single=request.is_single)
    empty_content = _empty_content_nodes(wrapper)
    return sequence(*empty_content, WHITESPACE, without_outer_whitespace(calls), WHITESPACE)


def _content_node(layout: Sections, request: Request) -> Node | None:
    """Return the grammar node for the content and the markers around the content.

    Return None if the request allows any text as content.
    """
    if request.answer is None or layout.content is None:
        return request.answer
    return sequence(const(layout.content.open), request.answer, const(layout.content.close))


def _empty_content_nodes(wrapper: Wrapper | None) -> list[Node]:
    """Return the grammar nodes for empty content, for example `<response></response>`.

    Some templates write the markers of empty content before tool calls. The opening marker is
    optional, because the prompt may already contain this marker. The list is empty if no markers
    surround the content.

    Args:
        wrapper: The declaration of the markers around the content, or None.
    """
    opening = wrapper.open.strip() if wrapper is not None else ""
    closing = wrapper.close.strip() if wrapper is not None else ""
    if not opening:
        return []
    if not closing:  # The content has only an opening marker.
        return [optional(sequence(WHITESPACE, const(opening)))]
    opening_or_nothing = optional(const(opening))
    empty_content = sequence(WHITESPACE, opening_or_nothing, WHITESPACE, const(closing))
    return [optional(empty_content)]


def _text_with_calls(tools: ToolSection, request: Request) -> Node:
    """Return the grammar node for free text that may contain valid tool calls.

    Example of matching text: `Let me look.<tool_call>{"name": "f", "arguments": {}}</tool_call>`.
    The marker `<tool_call>` is the "trigger": xgrammar allows any text before the trigger, and
    requires a valid tool call at the trigger.

    Args:
        tools: The declaration of the tool calls.
        request: The constraints of the request: its tools, and the allowed number of tool calls.
    """
    if _is_unmarked_list(tools):
        return _unmarked_list_or_text(tools, request)
    return {
        "type": "triggered_tags",
        "triggers": [trigger_of(tools)],
        "tags": [_tag_at_trigger(node) for node in _marked_calls(tools, request)],
        "stop_after_first": request.is_single,
    }


def _unmarked_list_or_text(tools: ToolSection, request: Request) -> Node:
    """Return the grammar node for either a list of tool calls without a marker, or free text.

    Examples of matching texts: `[f(a=1), g()]` and `Let me look.` A list without a marker starts
    with a bracket, and free text may contain brackets too. The node therefore matches a list only
    at the start of the output, and free text must not start with a bracket.
    """
    calls = section_node(tools, request.tools, is_single=request.is_single)
    text_without_calls = sequence(_NO_BRACKET, any_text())
    return one_of(calls, text_without_calls)


def _is_unmarked_list(tools: ToolSection) -> bool:
    """Return whether tool calls are written as a list without a marker, such as `[f(), g()]`."""
    call = tools.calls[0]
    has_marker = bool(tools.opens or call.trigger)
    return isinstance(call.body, ListBody) and not has_marker


def _tag_at_trigger(node: Node) -> Node:
    r"""Convert a node for a tool call to a tag whose `begin` text starts with a visible character.

    xgrammar requires that `begin` starts with a trigger, such as `<tool_call>`. Example: the tag of
    `const("\n<tool_call>")` has the `begin` text `<tool_call>`.
    """
    node_as_tag = tag(node)
    return {**node_as_tag, "begin": node_as_tag["begin"].lstrip()}


def _marked_calls(tools: ToolSection, request: Request) -> list[Node]:
    """Return the grammar nodes for tool calls that start with a marker.

    The declaration `tools` decides what one node matches:

        markers around all tool calls    `<tool_calls>..</tool_calls>`, with all tool calls
        markers around a list of calls   `<tool_call>[f(), g()]</tool_call>`, the whole list
        markers around each tool call    `<tool_call>..</tool_call>`, a call of one tool

    In the first two cases, the result is one node. In the last case, the result is one node for
    each tool of the request.
    """
    if tools.opens:
        return [section_node(tools, request.tools, is_single=request.is_single)]
    call = tools.calls[0]
    if isinstance(call.body, ListBody):
        return [list_node(call, call.body, request.tools, is_single=request.is_single)]
    return [call_node(call, tool) for tool in request.tools]
