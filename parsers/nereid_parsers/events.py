"""The events that a parser returns, and the message that a client assembles from the events.

A parser only appends events. A later event never changes or withdraws an earlier event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """The next piece of the content text.

    `reason` is None if the model wrote the text as content. If the parser returns a malformed tool
    call or header as content, `reason` describes the fault for the logs.
    """

    text: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call. `index` counts the tool calls of the message from 0.

    `id` is the id that the model wrote before the arguments. If the model wrote no id before the
    arguments, `id` is a generated id.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next part of a tool call's arguments. Joined in order, the parts form JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The end of a tool call. `reason` describes a fault in the tool call, or is None."""

    index: int
    reason: str | None = None


Event = ReasoningDelta | ContentDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a complete message. `arguments` contains JSON text."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True, slots=True)
class Message:
    """A parsed message.

    `reasoning` is None if the model wrote no reasoning. `content` is None if the model wrote no
    content.
    """

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


def fold(events: Iterable[Event]) -> Message:
    """Create a `Message` from all events that a parser returned for one message.

    The events must be in the order in which the parser returned them. Example:
    `fold([ContentDelta("Hel"), ContentDelta("lo")])` returns `Message(content="Hello")`.
    """
    reasoning: list[str] = []
    content: list[str] = []
    # `starts[i]` and `arguments[i]` belong to the same tool call: `starts[i]` is its start event,
    # and `arguments[i]` contains the pieces of its arguments.
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart():
                starts.append(event)
                arguments.append([])
            case ArgumentsDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd():
                pass
    tool_calls = [
        ToolCall(name=start.name, arguments="".join(pieces), id=start.id)
        for start, pieces in zip(starts, arguments, strict=True)
    ]
    return Message("".join(reasoning) or None, "".join(content) or None, tool_calls)
