"""Markdown tables for reports."""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with one header row and aligned columns."""
    body = list(rows)
    # Markdown requires at least three dashes below each header.
    widths = [max(3, *map(len, column)) for column in zip(head, *body, strict=True)]
    rule = ["-" * width for width in widths]
    lines = [map(str.ljust, cells, widths) for cells in (head, rule, *body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table. Before the table, print each row to standard error as progress.

    Args:
        head: the header of each column.
        rows: the rows. If a generator measures the rows, a line appears after each measurement.
    """

    def shown() -> Iterator[Sequence[str]]:
        for row in rows:
            print(row, file=sys.stderr, flush=True)
            yield row

    print(table(head, shown()))


def short(message: str) -> str:
    r"""Return a message as one line of at most 150 characters without "|", for a table cell.

    Example: `short("a\nb | c")` returns `"a b / c"`.
    """
    text = re.sub(r"\s+", " ", message).replace("|", "/")
    return text if len(text) <= 150 else text[:147] + "..."
