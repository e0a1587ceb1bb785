"""Output of the `nereid` command, and the exception that ends it early."""

import sys


class CliError(Exception):
    """The command cannot continue, and ends with exit code 2.

    The message is one line that names the problem and the remedy.
    """


def say(line: str = "") -> None:
    """Write a line to stdout, and flush it because stdout may be a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def complain(line: str) -> None:
    """Write a line to stderr, and flush it."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
