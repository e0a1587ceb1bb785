"""What the registry holds under a name: half a format, and where it was read."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.format import Messages, Reasoning, Source, ToolSection, Wrapper


@dataclass(frozen=True, slots=True)
class ReasoningEntry:
    """How a family marks its reasoning (and wraps its content, where it does)."""

    part: Reasoning | Messages
    source: Source
    content: Wrapper | None = None
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolEntry:
    """How a family writes its calls.

    `reasoning` is how the same family reasons, for use where a tool name is given alone: set where
    its models open the reasoning themselves, so that prompts do not show it.
    """

    part: ToolSection | Messages
    source: Source
    ends: tuple[str, ...] = ()
    reasoning: ReasoningEntry | None = None
