"""Functions that print messages of the `nereid` command, and the exception `CliError`."""

import sys
from collections.abc import Callable

_format_line: Callable[[str], str] = str


class CliError(Exception):
    """The command cannot continue, and ends with exit code 2.

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
    """Let `format_line` convert each line before `say` and `complain` write it."""
    global _format_line  # the format belongs to the standard output of the process
    _format_line = format_line
