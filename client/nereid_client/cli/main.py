"""The `nereid` command: START HERE for the command line.

Each command is a module of this package with `add_parser` and `run`.
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
    """Run the command line; the result is the exit code: 0, 1 for a failure, 2 for a wrong call."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except CliError as error:
        complain(f"nereid {args.command}: {error}")
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Every command and its flags."""
    parser = argparse.ArgumentParser(
        prog="nereid",
        description="Serve Hugging Face models on a Triton server, with the OpenAI API in front.",
    )
    version = f"nereid {nereid_client.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (serve_command, chat_command, template_command, install_server_command):
        command.add_parser(commands)
    return parser
