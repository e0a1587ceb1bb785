"""The entries of the registry. An entry is one half of a format, with its source."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.declarations import Messages, Reasoning, Source, Wrapper
from nereid_parsers.tool_declarations import ToolSection


@dataclass(frozen=True, slots=True)
class ReasoningEntry:
    """The part of a format that describes reasoning and content.

    Attributes:
        part: The markers of the reasoning, or the layout of all messages.
        source: The document that the declaration was derived from.
        content: The markers around the content, or None.
        ends: The end-of-turn tokens.
    """

    part: Reasoning | Messages
    source: Source
    content: Wrapper | None = None
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolEntry:
    """The part of a format that describes tool calls.

    Attributes:
        part: The declaration of the calls, or the layout of all messages.
        source: The document that the declaration was derived from.
        ends: The end-of-turn tokens.
        reasoning: The reasoning of the same model family, which is used if only the name of the
            tool calls is given. It is set if the models open the reasoning themselves, because the
            prompt then does not show whether they reason.
    """

    part: ToolSection | Messages
    source: Source
    ends: tuple[str, ...] = ()
    reasoning: ReasoningEntry | None = None
