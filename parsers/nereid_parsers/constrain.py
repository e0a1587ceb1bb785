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
    reasoning_message,
)
from nereid_parsers.constrain_nodes import (
    NOTHING,
    WHITESPACE,
    Node,
    any_text,
    const,
    elements_of,
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
from nereid_parsers.pattern_syntax import first_literal
from nereid_parsers.stream.parser import OutputStart
from nereid_parsers.tool_declarations import ToolSection

# Matches one character that is neither `[` nor white space. Free text must start with such a
# character, because `[` would start a list of tool calls.
_NO_BRACKET: Node = {"type": "regex", "pattern": r"[^\[\s]"}


def structural_tag(
    fmt: FormatData, request: Request, reasoning: ReasoningState
) -> dict[str, Any] | None:
    """Return the structural tag for a request, or None if the request allows any output.

    A structural tag is the JSON object from which xgrammar builds the grammar of the output. The
    grammar forces the model to write valid tool calls, or an answer of the requested form. If
    xgrammar cannot enforce a keyword in the schema of a tool, a warning is logged.

    Raises:
        ConstraintError: The request cannot be expressed as a structural tag of this format. For
            example, xgrammar cannot enforce a keyword in the schema of a strict tool.
    """
    if request.is_unconstrained:
        return None
    for tool in request.tools:
        report_unenforced(tool.parameters, tool.is_strict, f"tools: {tool.name}")
    layout = fmt.layout
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
    the end of the reasoning. The reasoning starts in the prompt (`is_open`), or the model may still
    write the opening marker (`may_open`), or the prompt has already closed the reasoning (neither).
    Return None if the format has no reasoning, or if no marker closes the reasoning.

    Examples for a prompt that ends inside the reasoning (`is_open=True, may_open=False`): the
    markers are `<think>` and `</think>` if the layout is `Sections`, and
    `<|channel|>analysis<|message|>` and `<|end|>` if the layout is `Messages`.
    """
    layout = fmt.layout
    if isinstance(layout, Messages):  # The reasoning is a separate message, with a header.
        route = first_route(layout, Stage.REASONING)
        if route is None or not layout.ends:
            return None
        # The other markers in `layout.ends` end the whole output, not only one message.
        opening, closing = header_text(layout, route), layout.ends[0]
    elif layout.reasoning is None:
        return None
    else:
        opening, closing = layout.reasoning.open, layout.reasoning.close
    is_open = start.stage is Stage.REASONING
    may_open = not is_open and not start.has_reasoned
    return ReasoningGate(opening, closing, is_open=is_open, may_open=may_open)


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
    if declaration is None and state is ReasoningState.OPEN:
        raise unclosed_reasoning_error(fmt)
    if declaration is None or state in (ReasoningState.ENDED, ReasoningState.EXCLUDED):
        return NOTHING
    text = _reasoning_text(fmt, layout, declaration)
    close = declaration.close.strip()
    header = _repeated_header(fmt)
    if state is ReasoningState.OPEN:  # The prompt contains the opening marker.
        rest_of_reasoning: Node = {"type": "tag", "begin": "", "content": text, "end": close}
        return sequence(rest_of_reasoning, WHITESPACE, header)
    opening = declaration.open.strip()
    options: list[Node] = [{"type": "tag", "begin": opening, "content": text, "end": close}]
    if declaration.is_opened_by_model:
        # A model that normally starts with `<think>` may write only `</think>` to skip the
        # reasoning.
        options.append(const(close))
    # White space around the markers is optional, because some models omit the white space.
    return optional(sequence(WHITESPACE, one_of(*options), WHITESPACE, header))


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
        none                          content that matches `answer`
        some    True                  tool calls
        some    False       None      free text that may contain tool calls
        some    False       a node    tool calls, or content that matches `answer`

    Raises:
        ConstraintError: The request has tools, but the format declares no tool calls.
    """
    if not request.tools:
        return _content_node(layout.content, request.answer)
    tools = layout.tools
    if tools is None:
        raise ConstraintError(
            f"The format {fmt.name!r} does not define how the model writes tool calls. Use a "
            "format that defines tool calls, or send a request without tools."
        )
    if request.must_call:
        # Different templates and models write different white space around tool calls.
        only_calls = without_outer_whitespace(section_node(tools, request))
        return sequence(_empty_content(layout.content), WHITESPACE, only_calls, WHITESPACE)
    if request.answer is None:
        return _text_with_calls(fmt, layout, tools, request)
    calls = section_node(tools, request)
    return one_of(calls, _content_node(layout.content, request.answer))


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

    Some templates write the markers of the content before tool calls, even if there is no content.
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
    # The opening marker is optional, because the prompt may already contain this marker.
    return optional(sequence(WHITESPACE, optional(opening), WHITESPACE, closing))


def _text_with_calls(
    fmt: FormatData, layout: Sections, tools: ToolSection, request: Request
) -> Node:
    """Return the grammar node for free text that may contain valid tool calls.

    Example of matching text: `Let me look.<tool_call>{"name": "f", "arguments": {}}</tool_call>`.
    Here `<tool_call>` is the "trigger". xgrammar allows any text before the trigger. The text that
    starts with the trigger must be a valid tool call.
    """
    if _is_unmarked_list(tools):
        # A list such as `[f(a=1), g()]` starts with `[`, so free text must not start with `[`. Free
        # text may contain `[` at any other place, so a list cannot follow free text.
        return one_of(section_node(tools, request), sequence(_NO_BRACKET, any_text()))
    calls = _marked_calls(tools, request)
    if any(_ends_with_repetition(node) for node in calls):
        return _text_then_calls(tools, calls)
    # xgrammar requires that each tag starts with a trigger, such as `<tool_call>`. Therefore white
    # space before the trigger is removed.
    tags = [{**node, "begin": node["begin"].lstrip()} for node in map(tag, calls)]
    return {
        "type": "triggered_tags",
        "triggers": _triggers(fmt, layout, tools, tags),
        "tags": tags,
        "stop_after_first": request.is_single,
    }


def _is_unmarked_list(tools: ToolSection) -> bool:
    """Return whether the format writes tool calls as a list without a marker: `[f(), g()]`."""
    call = tools.calls[0]
    has_marker = bool(tools.opens or call.trigger)
    return isinstance(call.body, ListBody) and not has_marker


def _ends_with_repetition(node: Node) -> bool:
    """Return whether a node ends with a repeated part, as in `<calls>f(), g()`.

    If so, no marker ends the tool calls. A closing marker, such as `</calls>`, would be the last
    element of the node.
    """
    return elements_of(node)[-1]["type"] in ("star", "plus", "tags_with_separator")


def _text_then_calls(tools: ToolSection, calls: list[Node]) -> Node:
    """Return the grammar node for free text, which tool calls without an end marker may follow.

    Example of matching text: `Let me look.<calls>f(), g()`. No text can follow the tool calls,
    because no marker shows where they end. The node is a sequence and not a `triggered_tags` node,
    because xgrammar requires an end marker in each tag of a `triggered_tags` node.
    """
    text = any_text((trigger_of(tools),))
    return sequence(text, optional(one_of(*map(without_outer_whitespace, calls))))


def _triggers(fmt: FormatData, layout: Sections, tools: ToolSection, tags: list[Node]) -> list[str]:
    """Return the triggers: the texts that start a tool call, such as `<tool_call>`.

    All tool calls have one trigger if possible. No other marker of the format may start with the
    trigger. Example: `<|channel|>tool.f` calls the tool `f`, and `<|channel|>answer` opens the
    content. Then `<|channel|>` is no trigger, but `<|channel|>tool.` is.
    """
    other_markers = _markers_outside_calls(fmt, layout)
    call = tools.calls[0]
    start_of_call = call.open.lstrip() + first_literal(call.head)  # Such as `<|channel|>tool.`.
    for trigger in (trigger_of(tools), start_of_call):
        is_ambiguous = any(marker.startswith(trigger) for marker in other_markers)
        starts_all_tags = all(node["begin"].startswith(trigger) for node in tags)
        if trigger and starts_all_tags and not is_ambiguous:
            return [trigger]
    # The whole start of each tool call is a trigger, such as `<call>f:`. A long text is less likely
    # to be the start of another marker.
    return list(dict.fromkeys(node["begin"] for node in tags))


def _markers_outside_calls(fmt: FormatData, layout: Sections) -> list[str]:
    """Return the markers of the content, of the reasoning and of the end, such as `<think>`."""
    markers = list(fmt.ends)
    if layout.content is not None:
        markers += [layout.content.open, layout.content.close]
    if layout.reasoning is not None:
        markers += [*layout.reasoning.opens, *layout.reasoning.closes]
    return [marker.strip() for marker in markers]


def _marked_calls(tools: ToolSection, request: Request) -> list[Node]:
    """Return the grammar nodes for tool calls that start with a marker, such as `<tool_call>`.

    If each tool call has its own markers, there is one node for each tool of the request. Otherwise
    one node matches all tool calls of a message.
    """
    if tools.opens:  # As in `<calls><call>f{}</call></calls>`.
        return [section_node(tools, request)]
    call = tools.calls[0]
    if isinstance(call.body, ListBody):  # As in `<call>[f(), g()]</call>`.
        return [list_node(call, call.body, request)]
    return [call_node(call, tool) for tool in request.tools]  # As in `<call>f{}</call>`.
