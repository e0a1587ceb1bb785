# SPDX-License-Identifier: Apache-2.0
"""Tables for the pages in docs."""

import re
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def short(message: str) -> str:
    """A message that fits a cell."""
    text = re.sub(r"\s+", " ", message).replace("|", "/")
    return text if len(text) <= 150 else text[:147] + "..."
