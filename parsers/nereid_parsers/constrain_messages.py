"""Builds the grammar nodes for the layout `Messages`."""

from __future__ import annotations

from nereid_parsers.constrain_arguments import tagged_arguments
from nereid_parsers.constrain_nodes import (
    Node,
    any_text,
    const,
    json_schema,
    one_of,
    optional,
    repeated,
    sequence,
)
from nereid_parsers.constrain_reasoning import ReasoningState, unclosed_reasoning_error
from nereid_parsers.constrain_request import Request, ToolSchema
from nereid_parsers.declarations import FormatData, Messages, Route, Stage
from nereid_parsers.errors import ConstraintError
from nereid_parsers.pattern_syntax import PatternField, split_pattern
from nereid_parsers.tool_declarations import JsonArguments, TaggedArguments


def first_route(layout: Messages, stage: Stage) -> Route | None:
    """Return the declaration of the header for messages of the given stage.

    Constrained output contains this header. A route maps a message header, such as
    `<|channel|>final`, to the stage of the message: reasoning, content or tool calls. A header
    without fields (`{name}`) is preferred, because such a header is one exact text. If no route has
    the stage, return None.
    """
    routes = [route for route in layout.routes if route.stage is stage]
    for route in routes:
        header_parts = split_pattern(route.written_header)
        has_fields = any(isinstance(part, PatternField) for part in header_parts)
        if not has_fields:
            return route
    return routes[0] if routes else None


def header_text(layout: Messages, route: Route, name: str = "") -> str:
    """Return the text before a message body: the header, followed by `layout.header_end`.

    Examples: `"<|channel|>final<|message|>"` for content. If the header of a tool call is
    ` to=functions.{name}`, and the function is `f`, the result is `" to=functions.f<|message|>"`.

    Args:
        layout: The layout of the format.
        route: The declaration of the message's header.
        name: The name of the function, if the message is a tool call.

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


def reasoning_messages(fmt: FormatData, layout: Messages, state: ReasoningState) -> list[Node]:
    """Return the grammar nodes for the reasoning message and the start of the next message.

    `layout` declares how messages are written. The state of the reasoning at the start of the
    output determines which text the nodes match:

        POSSIBLE, ENDED  optionally `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant`
        OPEN             `Hm.<|end|><|start|>assistant`, because the prompt ends with the header
        EXCLUDED         only the start of the next message, `<|start|>assistant`

    Raises:
        ConstraintError: The output starts inside the reasoning, but no marker ends the reasoning.
    """
    next_start = const(layout.start)
    is_open = state is ReasoningState.OPEN
    if state is ReasoningState.EXCLUDED:
        return [next_start]
    route = first_route(layout, Stage.REASONING)  # The route declares the header of the message.
    if route is None or not layout.ends:
        if is_open:
            raise unclosed_reasoning_error(fmt)
        return []  # Without a reasoning message that can end, the output starts with the answer.
    body = _reasoning_body(fmt, layout)
    if is_open:
        return [sequence(body, next_start)]
    header = const(header_text(layout, route))
    return [optional(sequence(header, body, next_start))]


def _reasoning_body(fmt: FormatData, layout: Messages) -> Node:
    """Return the grammar node for the text and the end marker of a reasoning message.

    The first end marker ends the reasoning. Any other end marker would end the whole output before
    the answer, so the text must not contain such a marker.
    """
    first_end, *other_ends = layout.ends
    text = any_text((layout.start, *other_ends, *fmt.ends))
    return {"type": "tag", "begin": "", "content": text, "end": first_end}


def final_messages(fmt: FormatData, layout: Messages, request: Request) -> Node:
    """Return the grammar node for the messages after the reasoning: tool calls or an answer.

    Example of an answer: `<|channel|>final<|message|>Hello`.

    Raises:
        ConstraintError: The request allows an answer, but the format has no message for content.
    """
    options: list[Node] = []
    if request.tools:
        options.append(_call_messages(fmt, layout, request))
    if not request.must_call:
        options.append(_content_message(fmt, layout, request.answer))
    return one_of(*options)


def _content_message(fmt: FormatData, layout: Messages, answer: Node | None) -> Node:
    """Return the grammar node for a message with content. The node also matches the header.

    `answer` is the node that the content must match, or None for free text.

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

    Each message consists of a header and the arguments. The header contains the function's name.
    Example of matching text: ` to=functions.f<|message|>{"city": "Paris"}`. The node does not match
    the marker that starts the first message, such as `<|start|>`.

    Args:
        fmt: The format of the output.
        layout: The declaration of the messages. The routes with the stage CALLS declare the headers
            of tool calls.
        request: The constraints of the request.

    Raises:
        ConstraintError: The format has no messages that are tool calls.
    """
    call_routes = [route for route in layout.routes if route.stage is Stage.CALLS]
    if not call_routes:
        raise ConstraintError(
            f"The tool calls of the format {fmt.name!r} cannot be constrained, because the model "
            "writes them inside messages that also contain other text"
        )
    calls: list[Node] = []
    for tool in request.tools:
        header = _call_header(layout, call_routes, tool.name)
        calls.append(sequence(header, _message_arguments(layout.body, tool)))
    # Some formats have an end marker that occurs only after tool calls. Such a marker also ends the
    # model's turn, so no second tool call can follow.
    has_only_one_call = request.is_single or bool(layout.call_end)
    return repeated(calls, _message_boundary(layout), is_single=has_only_one_call)


def _message_boundary(layout: Messages) -> Node:
    """Return the grammar node for the end marker of a message and the next message's start marker.

    Example of matching text: `<|end|><|start|>assistant`. The first marker in `layout.ends` ends
    only the message. The other markers also end the model's turn.
    """
    message_end = layout.ends[0] if layout.ends else ""
    return const(message_end + layout.start)


def _call_header(layout: Messages, routes: list[Route], name: str) -> Node:
    """Return the grammar node for the header of a message that calls the function `name`.

    A route declares a header. The node matches the header of the first route, and the headers of
    the other routes that declare which text a model must write (`Route.written`). Example of a
    matching text: ` to=functions.f<|message|>`.

    Args:
        layout: The layout of the format.
        routes: The routes of messages that are tool calls.
        name: The name of the function.
    """
    first, *others = routes
    others_with_text = [route for route in others if route.written]
    headers = [header_text(layout, route, name) for route in (first, *others_with_text)]
    return one_of(*(const(header) for header in headers))


def _message_arguments(body: JsonArguments | TaggedArguments, tool: ToolSchema) -> Node:
    """Return the grammar node for the body of a message that is a tool call.

    Example of matching text: `{"city": "Paris"}`.
    """
    if isinstance(body, TaggedArguments):
        return tagged_arguments(body, tool)
    return json_schema(tool.parameters)
