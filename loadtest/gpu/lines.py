"""The lines that the parts of a GPU benchmark print: one JSON object for each result.

A part prints every result as soon as it has it, so that the results of a part that hangs or
crashes later are not lost.
"""

import enum
import json
import logging
import re
from typing import Any

# Matches a line that reports that a feature cannot be used. A line that reports only that one
# library is not used does not match.
_REFUSAL = re.compile(
    r"\b(is|are) not (compiled|replayed|used|replaced)\b|CUDA graphs are off|No more CUDA graphs"
    r"|Attention runs without GPU kernels"
)


class Rank(enum.IntEnum):
    """The place of a line in the summary of a call. Lines with the lowest rank come first."""

    WRONG = 0
    """A kernel that differs from its reference, or a part that failed."""
    VERDICT = 1
    """A result on which a decision depends."""
    FIGURE = 2
    """A further measurement."""
    DETAIL = 3
    """A fact that explains the other lines."""


def emit(rank: Rank, text: str, **data: Any) -> None:  # noqa: ANN401 - any JSON values
    """Print one result as a line of JSON.

    Args:
        rank: the place of the line in the summary.
        text: the result as a sentence or a clause.
        data: the figures of the result.
    """
    print(json.dumps({"rank": int(rank), "text": text, "data": data}), flush=True)


def parsed(output: str) -> list[dict[str, Any]]:
    """Return the results in the output of a part. Other and incomplete lines are skipped."""
    found = []
    for line in output.splitlines():
        if not line.startswith('{"rank": '):
            continue
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def report_progress(line: str) -> None:
    """Print a line about the load. If the line reports that a feature is not used, the part fails.

    Example: "the forward pass is not compiled: no compiler was found". Otherwise, the report would
    contain measurements without the feature under the name of the feature.
    """
    emit(Rank.WRONG if _REFUSAL.search(line) else Rank.DETAIL, line)


class LogLines(logging.Handler):
    """Prints the log lines of the engine, such as the measurements of attention libraries."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one log line."""
        report_progress(record.getMessage())
