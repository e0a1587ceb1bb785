"""What the `nereid` command tells its user: lines on stdout and stderr, and how it ends early."""

import sys


class CliError(Exception):
    """The command can't go on. The message is one line that says what to do; the exit code is 2."""


def say(line: str = "") -> None:
    """Write one line to stdout now, also when it is a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def complain(line: str) -> None:
    """Write one line to stderr now."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
