"""Builds structural tags: the grammars with which xgrammar 0.2.8 constrains a model's output.

The structural tag has the form `{"type": "structural_tag", "format": ...}` and describes the whole
output after the prompt. The reasoning is free text up to its closing marker. Content or tool calls
follow the reasoning, and must have the form that the format declares. Three details are important:

- White space between the tokens of JSON text is limited to one character. Without this limit, the
  model could generate white space forever.
- The structural tag contains no end-of-turn tokens. The engine must therefore stop when the model
  generates such a token.
- xgrammar accepts some schema keywords without enforcing them. If a strict request uses such a
  keyword, `structural_tag` raises an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from nereid_parsers.constraints.constrain_calls import section_node
from nereid_parsers.constraints.constrain_messages import (
    final_messages,
    first_route,
    header_text,
    reasoning_message,
)
from nereid_parsers.constraints.constrain_nodes import (
    LINE_BREAKS,
    NOTHING,
    WHITESPACE,
    Node,
    any_text,
    const,
    limited_size,
    one_of,
    optional,
    sequence,
    without_outer_whitespace,
)
from nereid_parsers.constraints.constrain_reasoning import ReasoningState, unclosed_reasoning_error
from nereid_parsers.constraints.constrain_request import Request
from nereid_parsers.constraints.constrain_text import text_with_calls
from nereid_parsers.constraints.report_unenforced import report_unenforced
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
from nereid_parsers.tool_declarations import ToolSection


def structural_tag(
    fmt: FormatData, request: Request, reasoning: ReasoningState
) -> dict[str, Any] | None:
    """Return the structural tag for a request, or None if the request allows any output.

    A structural tag is the JSON object from which xgrammar builds the grammar of the output. The
    grammar forces the model to write valid tool calls, or an answer of the requested form.

    If xgrammar cannot enforce a keyword in the schema of a tool, a warning is logged. If the tool
    is strict, an error is raised instead.

    Raises:
        ConstraintError: The request cannot be expressed as a structural tag of this format, or
            xgrammar cannot enforce a keyword in the schema of a strict tool, or the grammar would
            be too large.
    """
    if not request.is_constrained:
        return None
    for tool in request.tools:
        field = f"tools: {tool.name}"
        report_unenforced(tool.parameters, is_strict=tool.is_strict, field=field)
    layout = fmt.layout
    with limited_size():
        if isinstance(layout, Messages):
            reasoning_node = reasoning_message(fmt, layout, reasoning)
            answer_or_calls = final_messages(fmt, layout, request)
        else:
            reasoning_node = _reasoning_node(fmt, layout, reasoning)
            answer_or_calls = _answer_or_calls(fmt, layout, request)
        return {"type": "structural_tag", "format": sequence(reasoning_node, answer_or_calls)}


def reasoning_gate(fmt: FormatData, start: OutputStart) -> ReasoningGate | None:
    """Return a `ReasoningGate`: the markers around the reasoning, and where the reasoning starts.

    A server that limits the length of the reasoning needs the closing marker to find or to enforce
    the end of the reasoning. Return None if the format has no reasoning, or if no marker closes the
    reasoning. `start` describes the end of the prompt:

        end of the prompt                                     is_open   may_open
        inside the reasoning                                  True      False
        before the reasoning, which the model may still open  False     True
        after the reasoning                                   False     False
    """
    markers = _reasoning_markers(fmt.layout)
    if markers is None:
        return None
    is_open = start.stage is Stage.REASONING
    may_open = not is_open and not start.has_reasoned
    return ReasoningGate(markers.opening, markers.closing, is_open=is_open, may_open=may_open)


class _ReasoningMarkers(NamedTuple):
    """The markers around the reasoning, such as `<think>` and `</think>`."""

    opening: str
    closing: str


def _reasoning_markers(layout: Sections | Messages) -> _ReasoningMarkers | None:
    """Return the markers around the reasoning, or None if the layout has no such markers.

    Examples: `<think>` and `</think>` for `Sections`. In the layout `Messages`, the reasoning is a
    separate message with a header, so the markers are, for example,
    `<|channel|>analysis<|message|>` and `<|end|>`.
    """
    if isinstance(layout, Sections):
        if layout.reasoning is None:
            return None
        return _ReasoningMarkers(layout.reasoning.open, layout.reasoning.close)
    route = first_route(layout, Stage.REASONING)
    if route is None or not layout.ends:
        return None
    # The first marker in `layout.ends` ends one message. The other markers end the whole output.
    return _ReasoningMarkers(header_text(layout, route), layout.ends[0])


# ---- the layout Sections -------------------------------------------------------------------------


def _reasoning_node(fmt: FormatData, layout: Sections, state: ReasoningState) -> Node:
    """Return the grammar node for the start of the output: the reasoning and its markers.

    `state` is the state of the reasoning at the start of the output. Examples for the markers
    `<think>` and `</think>`:

        state             text that the node matches
        OPEN              `Let me see.</think>`, because the prompt ends with `<think>`
        POSSIBLE          `<think>Let me see.</think>`, or the empty text
        ENDED, EXCLUDED   the empty text

    If the format has no reasoning, the node matches only the empty text.

    Raises:
        ConstraintError: The output starts inside the reasoning, but the format has no reasoning.
    """
    declaration = layout.reasoning
    if declaration is None:
        if state is ReasoningState.OPEN:
            raise unclosed_reasoning_error(fmt)
        return NOTHING
    match state:
        case ReasoningState.OPEN:
            return _open_reasoning(fmt, layout, declaration)
        case ReasoningState.POSSIBLE:
            return _possible_reasoning(fmt, layout, declaration)
        case ReasoningState.ENDED | ReasoningState.EXCLUDED:
            return NOTHING


def _open_reasoning(fmt: FormatData, layout: Sections, declaration: Reasoning) -> Node:
    """Return the grammar node for the rest of the reasoning: `Let me see.</think>`.

    The prompt contains the opening marker. `declaration` declares the markers of the reasoning. A
    header such as `<|assistant|>` may follow the closing marker, if the format declares this.
    """
    reasoning = _tagged_reasoning(fmt, layout, declaration, opening="")
    return sequence(reasoning, LINE_BREAKS, _repeated_header(fmt))


def _possible_reasoning(fmt: FormatData, layout: Sections, declaration: Reasoning) -> Node:
    """Return the grammar node for optional reasoning: `<think>Let me see.</think>`, or no text.

    A model that normally starts with `<think>` may write only `</think>` to skip the reasoning. For
    such a model, the node also matches `</think>`. `declaration` declares the markers. A header
    such as `<|assistant|>` may follow the closing marker, if the format declares this.
    """
    opening = declaration.open.strip()
    options = [_tagged_reasoning(fmt, layout, declaration, opening=opening)]
    if declaration.is_opened_by_model:
        skipped_reasoning = const(declaration.close.strip())
        options.append(skipped_reasoning)
    # White space around the markers is optional, because some models omit the white space.
    return optional(sequence(WHITESPACE, one_of(*options), LINE_BREAKS, _repeated_header(fmt)))


def _tagged_reasoning(
    fmt: FormatData, layout: Sections, declaration: Reasoning, *, opening: str
) -> Node:
    """Return the grammar node for reasoning with its markers: `<think>Let me see.</think>`.

    `opening` is the opening marker, `<think>` in the example, or "" if the prompt contains it.
    """
    text = _reasoning_text(fmt, layout, declaration)
    return {"type": "tag", "begin": opening, "content": text, "end": declaration.close.strip()}


def _reasoning_text(fmt: FormatData, layout: Sections, declaration: Reasoning) -> Node:
    """Return the grammar node for the text of the reasoning, without the markers around it.

    Some markers end or interrupt the reasoning, for example the opening marker of the content. The
    text must not contain such a marker. The closing marker `declaration.close` is not excluded
    here, because the caller puts the node into a tag that ends at this marker.
    """
    content_open = (layout.content.open,) if layout.content is not None else ()
    return any_text(
        (*declaration.also_close, *declaration.interrupted_by, *content_open, *fmt.ends)
    )


def _repeated_header(fmt: FormatData) -> Node:
    """Return the grammar node for an optional header of a turn, such as `<|assistant|>`.

    The prompt already contains the header, but some models write the header again after the
    reasoning. The formats of these models declare the header in `ends`, the texts that the parser
    removes. For all other formats, the node matches only the empty text.
    """
    headers = [header.strip() for header in fmt.turn if header in fmt.ends]
    if not headers:
        return NOTHING
    return optional(sequence(one_of(*map(const, headers)), WHITESPACE))


def _answer_or_calls(fmt: FormatData, layout: Sections, request: Request) -> Node:
    """Return the grammar node for the whole text after the reasoning.

    The request decides which text the node matches:

        tools   must_call   answer    matching text
        none    any         any       content that matches `answer`
        some    True                  tool calls
        some    False       None      free text that may contain tool calls
        some    False       a node    tool calls, or content that matches `answer`

    Raises:
        ConstraintError: The request has tools, but the format declares no tool calls.
    """
    if not request.tools:
        return _content_node(layout.content, request.answer)
    section = layout.tools
    if section is None:
        raise ConstraintError(
            f"The format {fmt.name!r} does not define how the model writes tool calls. Use a "
            "format that defines tool calls, or send a request without tools."
        )
    if request.must_call:
        # Before tool calls, some models write the markers around the content even if the content is
        # empty. Models also differ in the white space around tool calls.
        empty_content = _empty_content(layout.content)
        only_calls = without_outer_whitespace(section_node(section, request))
        return sequence(empty_content, WHITESPACE, only_calls, WHITESPACE)
    if request.answer is None:
        section = _without_markers_of_content(section, layout.content)
        return text_with_calls(fmt, layout, section, request)
    return one_of(section_node(section, request), _content_node(layout.content, request.answer))


def _content_node(wrapper: Wrapper | None, answer: Node | None) -> Node:
    """Return the grammar node for the content and its markers: `<response>Hello</response>`.

    The content must match the node `answer`. If `answer` is None, the content is free text.
    """
    content = any_text() if answer is None else answer
    if wrapper is None:
        return content
    return sequence(const(wrapper.open), content, const(wrapper.close))


def _empty_content(wrapper: Wrapper | None) -> Node:
    """Return the grammar node for empty content, with or without markers: `<response></response>`.

    Some templates write the markers around the content even if a message has only tool calls.
    Examples of matching texts: `<response></response>`, `</response>` and the empty text.
    If `wrapper` is None, or has no opening marker, the node matches only the empty text.
    """
    if wrapper is None or not wrapper.open.strip():
        return NOTHING
    opening = const(wrapper.open.strip())
    has_closing_marker = bool(wrapper.close.strip())
    if not has_closing_marker:  # The content ends where the tool calls start.
        return optional(sequence(WHITESPACE, opening))
    closing = const(wrapper.close.strip())
    # The prompt may already contain the opening marker. The model then writes only the closing
    # marker.
    markers = sequence(WHITESPACE, optional(opening), WHITESPACE, closing)
    return optional(markers)


def _without_markers_of_content(section: ToolSection, wrapper: Wrapper | None) -> ToolSection:
    """Return `section` without its markers if the same markers also surround the content.

    Example: the model writes the content as `<response>Hello</response>`, and a tool call as
    `<response><call>f{}</call></response>`. Then `<response>` does not show that a tool call
    starts. Only `<call>` shows this, so the result has no markers around the tool calls. If the
    tool call has no marker of its own, such as `<call>`, `section` is returned unchanged.
    """
    surrounds_content = wrapper is not None and wrapper.open.strip() == section.open.strip()
    if not surrounds_content or not section.calls[0].trigger:
        return section
    return replace(section, open="", close="", also_open=(), also_close=())
