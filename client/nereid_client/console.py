"""Prints the messages of the `nereid` command, and defines the exception `CliError`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_format_line: Callable[[str], str] = str
_is_output_required = True


class CliError(Exception):
    """The `nereid` command cannot continue. It ends with exit code 2.

    The message is one line that names the problem and the remedy.

    Attributes:
        exit_code: the exit code of the command.
    """

    exit_code = 2


class FailureError(CliError):
    """The arguments of the `nereid` command are valid, but it failed. It ends with exit code 1."""

    exit_code = 1


def say(line: str = "") -> None:
    """Write a line to stdout, and flush it because stdout may be a pipe."""
    _write(sys.stdout, line)


def complain(line: str) -> None:
    """Write a line to stderr, and flush it."""
    _write(sys.stderr, line)


@contextmanager
def continue_without_output() -> Iterator[None]:
    """Ignore lines that cannot be written, until the `with` block ends.

    A server must continue to run, and must end all its processes, even if its terminal is closed,
    the program that reads its output has ended, or the disk is full.
    """
    global _is_output_required
    _is_output_required = False
    try:
        yield
    finally:
        _is_output_required = True


def _write(stream: TextIO, line: str) -> None:
    try:
        stream.write(f"{_format_line(line)}\n")
        stream.flush()
    except OSError as error:
        if _is_output_required:
            raise
        if isinstance(error, BrokenPipeError):  # nobody will ever read the output
            discard_output(stream)


def discard_output(stream: TextIO) -> None:
    """Discard the text that a stream has not written yet, and all later text.

    Python flushes the standard output at its exit. If the output cannot be written, the flush would
    fail, and the exit code would be 120.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def set_line_format(format_line: Callable[[str], str]) -> None:
    """Set a function that converts each line before `say` or `complain` writes the line."""
    global _format_line  # the format applies to everything that this process prints
    _format_line = format_line
