"""Prints the messages of the `nereid` command, and defines the exception `CliError`."""

import sys
from collections.abc import Callable

_format_line: Callable[[str], str] = str


class CliError(Exception):
    """The `nereid` command cannot continue. It ends with exit code 2.

    The message is one line that names the problem and the remedy.
    """


def say(line: str = "") -> None:
    """Write a line to stdout, and flush it because stdout may be a pipe."""
    sys.stdout.write(f"{_format_line(line)}\n")
    sys.stdout.flush()


def complain(line: str) -> None:
    """Write a line to stderr, and flush it."""
    sys.stderr.write(f"{_format_line(line)}\n")
    sys.stderr.flush()


def set_line_format(format_line: Callable[[str], str]) -> None:
    """Set a function that converts each line before `say` or `complain` writes the line."""
    global _format_line  # the format applies to everything that this process prints
    _format_line = format_line
