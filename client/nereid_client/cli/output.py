"""Options and functions that several commands share, such as functions that print tables."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nereid_client.cli.api_client import DEFAULT_URL
from nereid_client.console import CliError, say

UrlOption = Annotated[str, typer.Option("--url", help="The URL of the OpenAI API.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="The name of the model. The default is the first one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

__all__ = [
    "DEFAULT_URL",
    "JsonOption",
    "ModelOption",
    "UrlOption",
    "print_json",
    "print_table",
    "read_stdin",
    "texts_or_stdin",
    "write_model_text",
]

# Matches the characters that control a terminal. Tabs and line breaks are harmless, so they do not
# match.
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def print_json(value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Print a value as JSON."""
    say(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a title and a table.

    Args:
        columns: the titles of the columns.
        rows: the values of each row. Floats are printed with three decimals. If a column has only
            numbers, they are aligned to the right.
        title: a line above the table. "" prints no such line.
    """
    table = Table()
    for index, column in enumerate(columns):
        are_numbers = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if are_numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_format_cell, row))
    console = Console()
    if title:
        console.print(title, markup=False, highlight=False)
    console.print(table)


def _format_cell(value: object) -> str:
    r"""Return the text of a table cell. Escape "[", which begins markup of the library rich.

    Example: 0.25 returns "0.250", and "[a]" returns "\[a]".
    """
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text.replace("[", r"\[")


def write_model_text(text: str) -> None:
    r"""Write generated text to the standard output.

    If the standard output is a terminal, control characters are replaced, because generated text
    could otherwise change the clipboard or hide other text. Example: the terminal shows the text
    "\x1b[2J" instead of clearing the screen.
    """
    if sys.stdout.isatty():
        text = _CONTROL_CHARACTER.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    sys.stdout.write(text)


def read_stdin() -> str:
    """Return the standard input, without white space at the beginning and the end.

    Raises: CliError if the standard input is a terminal or has no text.
    """
    text = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    if not text:
        raise CliError("No text is given. Give the text as an argument, or pipe it.")
    return text


def texts_or_stdin(texts: Sequence[str]) -> list[str]:
    """Return `texts`, or the non-blank lines of the standard input if `texts` is empty.

    Raises: CliError if there is no text.
    """
    if texts:
        return list(texts)
    return [line.strip() for line in read_stdin().splitlines() if line.strip()]
