"""The rules for unexpected output, such as arguments that are not valid JSON."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TextRule(Enum):
    """What the parser does with content before, between and after tool calls.

    FREE         Content may precede, separate and follow tool calls. The parser returns all
                 content.
    CALLS_FIRST  Tool calls must start directly after the reasoning, or at the start of the output.
                 Only white space may separate tool calls. After any other text, the whole rest of
                 the message is content.
    """

    FREE = "free"
    CALLS_FIRST = "calls_first"


class StrayClose(Enum):
    """What the parser does if a closing marker, such as `</think>`, has no opening marker.

    The rule applies only if the prompt is not known.

    TEXT       The closing marker is content, unless the format's opener is `Opener.EITHER`.
    REASONING  The text before the closing marker is reasoning. The parser stores all text until the
               first marker, because this marker shows whether the stored text is reasoning.
    """

    TEXT = "text"
    REASONING = "reasoning"


class UnknownTool(Enum):
    """What the parser does if a tool call names a function that is not in the request's `tools`.

    If the request has no tools, the parser returns every tool call.

    FORWARD  Return the tool call.
    DROP     Discard the tool call and log a warning.
    CONTENT  Return the text of the tool call as content.
    """

    FORWARD = "forward"
    DROP = "drop"
    CONTENT = "content"


class BrokenArguments(Enum):
    """What the parser does if the arguments of a tool call are not valid JSON.

    RAW             Return the arguments unchanged, piece by piece.
    REPAIR_OR_RAW   Repair the arguments with partial-json-parser. If the repair fails, return the
                    arguments unchanged.
    REPAIR_OR_DROP  Repair the arguments with partial-json-parser. If the repair fails, discard the
                    tool call and log a warning.

    With the two REPAIR rules, the parser returns all arguments of a tool call in one delta when the
    tool call has ended, because a delta cannot be withdrawn.
    """

    RAW = "raw"
    REPAIR_OR_RAW = "repair_or_raw"
    REPAIR_OR_DROP = "repair_or_drop"


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules for unexpected output, such as a call of an unknown function."""

    text: TextRule = TextRule.FREE
    stray_close: StrayClose = StrayClose.TEXT
    unknown_tool: UnknownTool = UnknownTool.FORWARD
    broken_arguments: BrokenArguments = BrokenArguments.RAW


LENIENT = Policy()
STRICT = Policy(
    text=TextRule.CALLS_FIRST,
    stray_close=StrayClose.REASONING,
    broken_arguments=BrokenArguments.REPAIR_OR_DROP,
)
