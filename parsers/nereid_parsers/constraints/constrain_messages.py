"""Builds the grammar nodes for models that write their output as a sequence of messages.

A message consists of a start marker, a header, a body and an end marker. Example:
`<|start|>assistant`, `<|channel|>final<|message|>`, `Hello` and `<|end|>`. A `Route` declares a
header, and assigns a stage to all messages with this header: reasoning, content or tool calls.
"""

from __future__ import annotations

from nereid_parsers.constraints.constrain_nodes import (
    NOTHING,
    Node,
    any_text,
    const,
    json_schema,
    one_of,
    one_or_more,
    optional,
    sequence,
)
from nereid_parsers.constraints.constrain_reasoning import ReasoningState, unclosed_reasoning_error
from nereid_parsers.constraints.constrain_request import Request, ToolSchema
from nereid_parsers.constraints.constrain_tagged_arguments import tagged_arguments
from nereid_parsers.declarations import FormatData, Messages, Route, Stage
from nereid_parsers.errors import ConstraintError
from nereid_parsers.pattern_syntax import PatternField, split_pattern
from nereid_parsers.tool_declarations import TaggedArguments


def first_route(layout: Messages, stage: Stage) -> Route | None:
    """Return the declaration of a message header for a stage, such as `Stage.REASONING`.

    The header, such as `<|channel|>final`, shows the stage of a message: reasoning, content or tool
    calls. If several routes have the stage, the first route whose header has no fields (`{name}`)
    is preferred, because such a header is one exact text. Return None if no route has the stage.
    """
    routes = [route for route in layout.routes if route.stage is stage]
    exact_routes = [route for route in routes if not _has_fields(route.written_header)]
    return next(iter(exact_routes or routes), None)


def _has_fields(pattern: str) -> bool:
    """Return whether a pattern contains a field, such as `{name}`."""
    return any(isinstance(part, PatternField) for part in split_pattern(pattern))


def header_text(layout: Messages, route: Route, name: str = "") -> str:
    """Return the text before the content of a message, such as `<|channel|>final<|message|>`.

    This text consists of the header that the model should write (`route.written_header`) and
    `layout.header_end`. Example: the header ` to=functions.{name}`, the name `f` and the header end
    `<|message|>` give `" to=functions.f<|message|>"`.

    `name` is the name of the function, if the message is a tool call.

    Raises:
        ConstraintError: The header has a field other than `{name}`, so its text is not known.
    """
    header = ""
    for part in split_pattern(route.written_header):
        if isinstance(part, str):
            header += part
        elif part.field == "name":
            header += name
        else:
            raise ConstraintError(
                f"The message header {route.header!r} contains the field {{{part.field}}}, which "
                "can match different texts. Constrained output needs one exact header. Set "
                "Route.written to the header that the model writes."
            )
    return header + layout.header_end


def reasoning_message(fmt: FormatData, layout: Messages, state: ReasoningState) -> Node:
    """Return a grammar node that matches a reasoning message and the start of the next message.

    The state of the reasoning at the start of the output determines which text the node matches:

        EXCLUDED         `<|start|>assistant`, because the caller constrains only the text after the
                         reasoning
        OPEN             `Hm.<|end|><|start|>assistant`, because the prompt ends with the header
        POSSIBLE, ENDED  `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant`, or the empty
                         text. A model may write one more reasoning message after an ended message.

    Raises:
        ConstraintError: The output starts inside the reasoning, but no marker ends the reasoning.
    """
    next_message_start = const(layout.start)  # Such as `<|start|>assistant`.
    if state is ReasoningState.EXCLUDED:
        return next_message_start
    route = _route_of_closed_reasoning(layout)
    if route is None and state is ReasoningState.OPEN:
        raise unclosed_reasoning_error(fmt)
    if route is None:
        return NOTHING
    text_after_header = sequence(_reasoning_body(fmt, layout), next_message_start)
    if state is ReasoningState.OPEN:
        return text_after_header
    return optional(sequence(const(header_text(layout, route)), text_after_header))


def _route_of_closed_reasoning(layout: Messages) -> Route | None:
    """Return the declaration of the header of reasoning messages.

    Return None if the format has no reasoning messages, or if no marker, such as `<|end|>`, ends
    its messages.
    """
    return first_route(layout, Stage.REASONING) if layout.ends else None


def _reasoning_body(fmt: FormatData, layout: Messages) -> Node:
    """Return the grammar node for the text of a reasoning message and its end marker: `Hm.<|end|>`.

    The first marker in `layout.ends` ends the message. The other markers end the whole output, so
    the text must not contain these markers.
    """
    message_end, *output_ends = layout.ends
    text = any_text((layout.start, *output_ends, *fmt.ends))
    return {"type": "tag", "begin": "", "content": text, "end": message_end}


def final_messages(fmt: FormatData, layout: Messages, request: Request) -> Node:
    """Return the grammar node for the messages after the reasoning: tool calls or an answer.

    Examples of matching texts: ` to=functions.f<|message|>{"city": "Paris"}` for a tool call, and
    `<|channel|>final<|message|>Hello` for an answer. The start marker of the first message, such as
    `<|start|>assistant`, does not belong to the node.

    Raises:
        ConstraintError: The format declares no message for an answer that the request allows, or no
            message for a tool call that the request allows.
    """
    options: list[Node] = []
    if request.tools:
        options.append(_call_messages(fmt, layout, request))
    if not request.must_call:
        options.append(_content_message(fmt, layout, request.answer))
    return one_of(*options)


def _content_message(fmt: FormatData, layout: Messages, answer: Node | None) -> Node:
    """Return the grammar node for a message with content: `<|channel|>final<|message|>Hello`.

    The start marker before the message, and the end marker after the message, do not belong to the
    node. `answer` is the node that the content must match, or None for free text.

    Raises:
        ConstraintError: The format has no message for content.
    """
    route = first_route(layout, Stage.CONTENT)
    if route is None:
        raise ConstraintError(
            f"The format {fmt.name!r} has no message type for an answer in text, so the model "
            "can only call tools. Set tool_choice to required, or choose another format."
        )
    header = const(header_text(layout, route))
    return sequence(header, any_text() if answer is None else answer)


def _call_messages(fmt: FormatData, layout: Messages, request: Request) -> Node:
    """Return the grammar node for one or more messages that are tool calls.

    Example of a matching text, in three parts: the call of `f`, the separator, and the call of `g`:

        ` to=functions.f<|message|>{"a": 1}`
        `<|end|><|start|>assistant`
        ` to=functions.g<|message|>{}`

    `<|end|>` ends a message, and `<|start|>assistant` starts a message. The node does not contain
    the start of the first message and the end of the last message.

    Raises:
        ConstraintError: The format has no messages that are tool calls.
    """
    routes = [route for route in layout.routes if route.stage is Stage.CALLS]
    if not routes:
        raise ConstraintError(
            f"The tool calls of the format {fmt.name!r} cannot be constrained, because the model "
            "writes them inside messages that also contain other text"
        )
    calls = [_call_message(layout, routes, tool) for tool in request.tools]
    # Some models write a special marker, such as `<|call|>`, after a tool call. This marker ends
    # the whole output, so no second tool call can follow.
    call_ends_output = bool(layout.call_end)
    if request.is_single or call_ends_output:
        return one_of(*calls)
    # The first marker in `layout.ends` ends one message. The other markers end the whole output.
    message_end = layout.ends[0] if layout.ends else ""
    separator = const(message_end + layout.start)
    return one_or_more(calls, separator)


def _call_message(layout: Messages, routes: list[Route], tool: ToolSchema) -> Node:
    """Return the grammar node for a message that calls `tool`, without the markers around it.

    Example of a matching text: ` to=functions.f<|message|>{"city": "Paris"}`. `routes` are the
    declarations of the headers of tool calls. The most common header is first.
    """
    headers = [header_text(layout, route, tool.name) for route in _routes_with_known_text(routes)]
    header = one_of(*map(const, headers))
    if isinstance(layout.body, TaggedArguments):
        return sequence(header, tagged_arguments(layout.body, tool))
    return sequence(header, json_schema(tool.parameters))


def _routes_with_known_text(routes: list[Route]) -> list[Route]:
    """Return the first route, and each other route that declares the exact text of its header.

    A route declares the header of a message. `Route.header` is a pattern, which may match different
    texts. `Route.written` is the one text that the model should write, or "". The first route is
    always returned, because the grammar needs at least one header.
    """
    first, *others = routes
    return [first, *(route for route in others if route.written)]
