"""The `nereid` command: a typer application with all subcommands."""

import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import nereid_client
from nereid_client.cli.bench_command import bench
from nereid_client.cli.convert_command import convert
from nereid_client.cli.doctor_command import doctor, show_config
from nereid_client.cli.flag_commands import run_flags
from nereid_client.cli.request_commands import complete, embed, models, rerank
from nereid_client.console import CliError, complain, discard_output, say

__all__ = ["app", "run"]

_FLAG_COMMANDS = {
    "serve": "Serve models with the Triton server and the OpenAI frontend.",
    "chat": "Chat with a served model in this terminal.",
    "template": "Show the chat format that is inferred from a template or a checkpoint.",
    "install-server": "Install the embedded Triton server and its launcher.",
}
"""Maps each command that uses argparse to a description of the command."""


class _FlagCommand(TyperCommand):
    """A typer command that does not parse its arguments, not even "--" and "--help".

    argparse parses the arguments later.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's own type
        """Store the arguments in the context."""
        ctx.args = list(args)
        return ctx.args  # type: ignore[no-any-return]


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line. If the standard output cannot be written, print the reason.

    Args:
        argv: the arguments after the name of the program. By default, those of this process.

    Returns: the exit code. 0 means success. 1 means that a command has run and reports a failure,
        such as a failed check. 2 means a wrong argument or a wrong setting.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Text from a model can contain any character. If the terminal's encoding is ASCII, the
    # character U+65E5 is printed as `\u65e5`.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(arguments, prog_name="nereid")
    except CliError as error:  # only a subcommand raises this error, so there is an argument
        complain(f"nereid {arguments[0]}: {error}")
        return error.exit_code
    except OSError as error:
        is_error_of_file = error.filename is not None  # the standard output has no file name
        if is_error_of_file:
            raise
        discard_output(sys.stdout)
        complain(
            f"nereid {arguments[0]}: the output cannot be written ({error.strerror}). Write it to "
            "a file on a disk that has free space."
        )
        return 1
    except SystemExit as ended:  # typer ends a command with this exception
        return int(ended.code or 0)
    return 0


app = typer.Typer(
    help="Serve Hugging Face models on a Triton server, with an OpenAI-compatible API.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_given: bool) -> None:
    if is_given:
        say(f"nereid {nereid_client.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _run_flag_command(context: typer.Context) -> None:
    raise typer.Exit(run_flags([str(context.info_name), *context.args]))


for _name, _help in _FLAG_COMMANDS.items():
    app.command(_name, help=_help, cls=_FlagCommand, add_help_option=False)(_run_flag_command)
for _command in (complete, embed, rerank, models, bench, convert):
    app.command()(_command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(doctor)

_config = typer.Typer(help="Show the settings of the OpenAI frontend.", no_args_is_help=True)
_config.command("show")(show_config)
_config.callback()(lambda: None)
app.add_typer(_config, name="config")
