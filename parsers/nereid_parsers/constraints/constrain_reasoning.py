"""Determines the state of the reasoning at the start of the constrained output."""

from __future__ import annotations

from enum import Enum

from nereid_parsers.declarations import FormatData, Stage
from nereid_parsers.errors import ConstraintError
from nereid_parsers.stream.parser import OutputStart


class ReasoningState(Enum):
    """The state of the reasoning at the start of the output, for example open or already closed.

    OPEN      The prompt opens the reasoning, so the constrained text starts inside the reasoning.
    POSSIBLE  The model may open the reasoning.
    ENDED     The prompt already contains reasoning that has been closed.
    EXCLUDED  The structural tag describes only the text after the reasoning.
    """

    OPEN = "open"
    POSSIBLE = "possible"
    ENDED = "ended"
    EXCLUDED = "excluded"


def reasoning_state(start: OutputStart, skip_reasoning: bool) -> ReasoningState:
    """Return the state of the reasoning at the start of the output, for example OPEN.

    Example: if the prompt ends with `<think>`, the reasoning is OPEN.

    `skip_reasoning` is true if the structural tag describes only the text after the reasoning.
    """
    if skip_reasoning:
        return ReasoningState.EXCLUDED
    if start.stage is Stage.REASONING:
        return ReasoningState.OPEN
    if start.has_reasoned:
        return ReasoningState.ENDED
    return ReasoningState.POSSIBLE


def unclosed_reasoning_error(fmt: FormatData) -> ConstraintError:
    """Return the error for a prompt that opens reasoning in a format without a closing marker."""
    return ConstraintError(
        f"The prompt ends inside the reasoning, but the format {fmt.name!r} has no marker that "
        "ends the reasoning. The output after such a prompt cannot be constrained."
    )
