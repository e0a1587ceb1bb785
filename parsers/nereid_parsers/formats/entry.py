"""The classes that describe how a model writes its reasoning or its tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.declarations import Messages, Reasoning, Source, Wrapper
from nereid_parsers.tool_declarations import ToolSection


@dataclass(frozen=True, slots=True)
class ReasoningEntry:
    """Describes how a model marks its reasoning and its content.

    Attributes:
        part: The markers of the reasoning, or the layout of all messages.
        source: The document from which the declaration was derived.
        content: The markers around the content, or None.
        ends: The end-of-turn tokens.
    """

    part: Reasoning | Messages
    source: Source
    content: Wrapper | None = None
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolEntry:
    """Describes how a model writes tool calls.

    Attributes:
        part: The declaration of the tool calls, or the layout of all messages.
        source: The document from which the declaration was derived.
        ends: The end-of-turn tokens.
        reasoning: The reasoning of the same model family. If `get_format` receives only the name of
            the tool calls, the format contains this reasoning. The attribute is set only for models
            that write the opening marker themselves, because the prompt does not show whether such
            a model will reason.
    """

    part: ToolSection | Messages
    source: Source
    ends: tuple[str, ...] = ()
    reasoning: ReasoningEntry | None = None
