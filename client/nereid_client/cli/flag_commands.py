"""Runs the commands `serve`, `chat`, `template` and `install-server`, which use argparse.

Each of these commands is a module of this package with the functions `add_parser` and `run`. The
pages about the settings and the command line are generated from the flags of these commands.
"""

import argparse
import difflib
import importlib
from collections.abc import Sequence

# The modules of the commands. A module is imported when its command runs. The imports of all
# commands would make the start of each command slower by 0.3 s.
_MODULES = {
    "serve": "nereid_client.cli.serve_command",
    "chat": "nereid_client.cli.chat_command",
    "template": "nereid_client.cli.template_command",
    "install-server": "nereid_client.cli.install_server_command",
}


def run_flags(argv: Sequence[str]) -> int:
    """Run a command with its arguments, and return the exit code.

    Raises:
        CliError: the command cannot continue.
        SystemExit: an argument is wrong, or --help is given.
    """
    args = parse_arguments(argv)
    return int(args.run(args))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the name of a command and its arguments.

    Raises: SystemExit if an argument is wrong, or if --help is given.
    """
    command = argv[:1]  # a list with the name of the command, or [] if there is no argument
    parser = build_parser(command)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_explain_unknown(args, unknown[0]))
    # argparse also accepts arguments for tritonserver that are not after "--". Such an argument is
    # an error, for example the path in `nereid serve checkpoints/llm`.
    accepted = getattr(args, "tritonserver_args", [])
    after_dashes = argv[argv.index("--") + 1 :] if "--" in argv else []
    if len(accepted) > len(after_dashes):
        parser.error(
            f"{args.command} does not have the argument {accepted[0]}. Give a checkpoint with "
            "--model, and arguments for tritonserver after --."
        )
    return args


def build_parser(names: Sequence[str] = tuple(_MODULES)) -> argparse.ArgumentParser:
    """Return an argument parser for the commands in `names`. The default is all commands."""
    parser = argparse.ArgumentParser(
        prog="nereid",
        description="Serve Hugging Face models on a Triton server, with an OpenAI-compatible API.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        importlib.import_module(_MODULES[name]).add_parser(commands)
    for command_parser in commands.choices.values():
        # `_explain_unknown` compares an unknown flag with the flags of the command.
        command_parser.set_defaults(flags=list(command_parser._option_string_actions))
    return parser


def _explain_unknown(args: argparse.Namespace, argument: str) -> str:
    """Return the error message for an argument that a command does not accept.

    Example: for `nereid serve --max-model-length 2048`, the message suggests `--max-model-len`.
    """
    flag = argument.split("=")[0]
    message = f"{args.command} does not have the argument {flag}."
    nearest = difflib.get_close_matches(flag, args.flags, 1)
    if nearest:
        message += f" Did you mean {nearest[0]}?"
    message += f" `nereid {args.command} --help` lists the flags."
    if args.command == "serve":
        message += " Settings without a flag are environment variables with the prefix NEREID_."
    return message
