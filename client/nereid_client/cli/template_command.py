"""`nereid template inspect`: report which formats a checkpoint's chat template uses."""

import argparse

from nereid_parsers.errors import NereidParsersError
from nereid_parsers.template import command

from nereid_client.console import CliError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand `template`."""
    parser = commands.add_parser("template", help=command.HELP)
    command.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a report about the chat template, and return the exit code.

    Raises: CliError if the path is neither a template nor a checkpoint.
    """
    try:
        return command.run(args)
    except NereidParsersError as error:
        raise CliError(str(error)) from error
