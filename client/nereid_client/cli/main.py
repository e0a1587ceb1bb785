"""The entry point of the `nereid` command. The module application.py has all subcommands."""

from collections.abc import Sequence

_EXIT_CODE_OF_SIGINT = 130
"""The exit code that shells use for a program that SIGINT (Ctrl-C) has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code; see `application.run`."""
    try:
        # The import takes most of the first second. It is inside this function, so that Ctrl-C ends
        # the program without a traceback during the import, too.
        from nereid_client.cli.application import run

        return run(argv)
    except KeyboardInterrupt:
        return _EXIT_CODE_OF_SIGINT
