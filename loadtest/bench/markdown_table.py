"""Markdown tables for reports."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with one header row and aligned columns."""
    lines = [list(head), *map(list, rows)]
    widths = [max(3, *(len(line[at]) for line in lines)) for at in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def short(message: str) -> str:
    r"""Return a message as one line of at most 150 characters without "|", for a table cell.

    Example: `short("a\nb | c")` returns `"a b / c"`.
    """
    text = re.sub(r"\s+", " ", message).replace("|", "/")
    return text if len(text) <= 150 else text[:147] + "..."
