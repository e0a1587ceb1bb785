"""The `nereid` command.

Each subcommand is a module of this package with the functions `add_parser` and `run`.
"""

import argparse
from collections.abc import Sequence

import nereid_client
from nereid_client.cli import (
    chat_command,
    install_server_command,
    serve_command,
    template_command,
)
from nereid_client.console import CliError, complain


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns: the exit code: 0 after success, 1 after a failure, 2 for a wrong argument or setting.
    """
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except CliError as error:
        complain(f"nereid {args.command}: {error}")
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="nereid",
        description="Serve Hugging Face models on a Triton server, with an OpenAI-compatible API.",
        epilog="`nereid COMMAND --help` describes the flags of a command.",
    )
    version = f"nereid {nereid_client.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (serve_command, chat_command, template_command, install_server_command):
        command.add_parser(commands)
    return parser
