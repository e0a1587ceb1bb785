# SPDX-License-Identifier: Apache-2.0
"""Markdown tables for reports."""

import re
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with one header row."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def short(message: str) -> str:
    r"""Return a message as one line of at most 150 characters without "|", for a table cell.

    Example: `short("a\nb | c")` returns `"a b / c"`.
    """
    text = re.sub(r"\s+", " ", message).replace("|", "/")
    return text if len(text) <= 150 else text[:147] + "..."
