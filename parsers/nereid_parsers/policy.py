"""Policies: the rules for cases that the declaration of a format does not decide."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TextRule(Enum):
    """The rule for content next to tool calls.

    FREE         Content may precede, separate and follow the calls. The parser returns all of it.
    CALLS_FIRST  Calls must start directly after the reasoning (or at the start of the output), and
                 only white space may separate them. After the first other text, everything is
                 content.
    """

    FREE = "free"
    CALLS_FIRST = "calls_first"


class StrayClose(Enum):
    """The meaning of a closing marker if no reasoning was opened and the prompt is not known.

    TEXT       The closing marker is content.
    REASONING  The text before the closing marker is reasoning. The parser holds text back until a
               marker shows whether the text is reasoning.
    """

    TEXT = "text"
    REASONING = "reasoning"


class UnknownTool(Enum):
    """The treatment of a call to a function that is not among the request's `tools`.

    If the request has no tools, every call is forwarded.

    FORWARD  Return the call.
    DROP     Discard the call and log a warning.
    CONTENT  Return the text of the call as content.
    """

    FORWARD = "forward"
    DROP = "drop"
    CONTENT = "content"


class BrokenArguments(Enum):
    """The treatment of arguments that are not valid JSON.

    With both REPAIR rules, the arguments of a call are returned as one delta after the call has
    ended, because a delta cannot be withdrawn.

    RAW             Return the arguments unchanged, piece by piece.
    REPAIR_OR_RAW   Repair the arguments with partial-json-parser. If that fails, return them
                    unchanged.
    REPAIR_OR_DROP  Repair the arguments with partial-json-parser. If that fails, discard the call
                    and log a warning.
    """

    RAW = "raw"
    REPAIR_OR_RAW = "repair_or_raw"
    REPAIR_OR_DROP = "repair_or_drop"


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules for cases that the declaration of a format does not decide."""

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
