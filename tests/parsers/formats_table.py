"""Write docs/reference/format-names.md from the registry.

python tests/parsers/formats_table.py
"""

from pathlib import Path

from nereid_parsers.formats.registry import listing

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "reference" / "format-names.md"

HEAD = """# Names of chat formats

The tables on this page list the names that `NEREID_REASONING_PARSER`, `NEREID_TOOL_PARSER` and the Python function `get_format` accept. Most checkpoints work without such a name, because Nereid infers the format from the chat template ([Chat formats](../explanation/formats.md)).

Names are compared without regard to case, and the characters `-`, `_` and `.` are interchangeable. In Python, `get_format("name")` returns the format that has the given name, and `get_format(reasoning="...", tools="...")` combines two formats.

`python tests/parsers/formats_table.py` generates this page.

"""  # noqa: E501 - each paragraph of the page is one line


def table(kind: str) -> str:
    """Return the table of the formats of one kind, "reasoning" or "tools"."""
    lines = ["| Name | Other names |", "|---|---|"]
    for row in listing():
        if row.kind == kind:
            others = ", ".join(f"`{alias}`" for alias in row.aliases)
            lines.append(f"| `{row.name}` | {others} |")
    return "\n".join(lines) + "\n"


def text() -> str:
    """Return the text of the page."""
    return f"{HEAD}## Reasoning\n\n{table('reasoning')}\n## Tool calls\n\n{table('tools')}"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
