"""What a parser says: five events, and the message that they add up to.

Events are only ever appended: an event is never changed or taken back by a later one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content text.

    `reason` is None for text that the model meant as content. Where markup was malformed and is
    given back as text, it says why, for logs.
    """

    text: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the message's calls from 0.

    `id` is the model's own where it wrote one before the arguments, else a made-up one.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More JSON text of the arguments of call `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """Call `index` is over. `reason` says what was wrong with it, if anything was."""

    index: int
    reason: str | None = None


Event = ReasoningDelta | ContentDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a finished message. `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True, slots=True)
class Message:
    """A parsed message; parts that the model did not write are None or empty."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


def fold(events: Iterable[Event]) -> Message:
    """Add events up to the message that a client appending the deltas would hold."""
    reasoning: list[str] = []
    content: list[str] = []
    heads: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart():
                heads.append(event)
                arguments.append([])
            case ArgumentsDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd():
                pass
    return Message(
        reasoning="".join(reasoning) or None,
        content="".join(content) or None,
        tool_calls=[
            ToolCall(name=head.name, arguments="".join(parts), id=head.id)
            for head, parts in zip(heads, arguments, strict=True)
        ],
    )
