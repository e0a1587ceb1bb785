"""The command `template`. It shows how the format of a chat template was inferred.

Programs with subcommands add the command with

    parser = commands.add_parser("template", help=command.HELP)
    command.add_arguments(parser)

and call `options.run(options)` with the parsed options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nereid_parsers.errors import FormatError, NereidParsersError
from nereid_parsers.template.checkpoint import format_for_checkpoint
from nereid_parsers.template.checkpoint_files import read_checkpoint
from nereid_parsers.template.page import report_page
from nereid_parsers.template.report import (
    Paint,
    Report,
    no_colour,
    report_json,
    report_of,
    report_text,
)

HELP = "infer the chat format of a template or checkpoint, and show the comparisons behind it"
_DESCRIPTION = (
    "Infer the chat format of a Jinja template or of a checkpoint. The report shows the renderings "
    "that were compared, the format, samples that were parsed with it, and what could not be "
    "decided. The exit status is 0 if the parser returned every sample as it was rendered, 1 if "
    "it did not, and 2 for wrong arguments."
)

# Maps each kind of text in a report to the terminal escape sequence that sets its colour.
_COLOURS = {
    "title": "\x1b[1m",
    "name": "\x1b[34m",
    "reasoning": "\x1b[36m",
    "content": "\x1b[32m",
    "call": "\x1b[33m",
    "markup": "\x1b[2m",
    "added": "\x1b[42;30m",
    "removed": "\x1b[41;37m",
    "problem": "\x1b[31m",
}
_RESET = "\x1b[0m"

# The exit statuses of the command.
_PARSED_CORRECTLY = 0
_PARSED_WRONGLY = 1
_WRONG_ARGUMENTS = 2


class _StorePaths(argparse.Action):
    """Stores the paths of the command line, without the optional first word "inspect"."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        _option: str | None = None,
    ) -> None:
        """Store the paths in `values` as `namespace.paths`. Remove the word "inspect" before them.

        Examples: the arguments `inspect FILE` and `FILE` both give ["FILE"]. If "inspect" is the
        only argument, it is the path of a file.
        """
        first, *others = list(values or ())
        starts_with_command = first == "inspect" and bool(others)
        namespace.paths = others if starts_with_command else [first, *others]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `template` to `parser`.

    `parser.parse_args()` then returns options with the attribute `run`, the function that runs the
    command.
    """
    parser.description = _DESCRIPTION
    # `template inspect FILE` and `template FILE` run the same command. A subparser would require
    # the word "inspect".
    parser.add_argument(
        "paths",
        action=_StorePaths,
        nargs="+",
        metavar="[inspect] FILE|CHECKPOINT",
        help="a file that contains a Jinja template, or the folder of a checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write the report as one HTML page to FILE, instead of printing it as text",
    )
    parser.add_argument(
        "--colour",
        choices=("auto", "always", "never"),
        default="auto",
        help="when to print colours; auto prints them on a terminal only (default: auto)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the report on a template or a checkpoint, and return the exit status of the command.

    The status is 0 if all sample messages of the report were parsed correctly, 1 if a sample was
    parsed wrongly, and 2 if the arguments are wrong.

    Raises:
        NereidParsersError: The path is neither a template nor a checkpoint, or the HTML file cannot
            be written.
    """
    path, *further_paths = options.paths
    if further_paths:
        sys.stderr.write(
            "template: the command accepts exactly one file or checkpoint, "
            f"but {len(options.paths)} were given: {', '.join(options.paths)}\n"
        )
        return _WRONG_ARGUMENTS
    chosen = format_for_checkpoint(path)
    if chosen.source == "plain":  # No file declares a format.
        _check_is_checkpoint(path)
    why = f"Source of the format: {chosen.source}. {chosen.why}"
    report = report_of(path, why, chosen.format, chosen.analysis)
    _write_report(report, options)
    is_parsed_wrongly = any(sample.differs for sample in report.samples)
    return _PARSED_WRONGLY if is_parsed_wrongly else _PARSED_CORRECTLY


def _check_is_checkpoint(path: str) -> None:
    """Raise FormatError if a folder has neither a chat template nor the file config.json."""
    has_template = read_checkpoint(path).template is not None
    if not has_template and not Path(path, "config.json").is_file():
        raise FormatError(
            f"The folder {path} has no chat template and no config.json. Give the folder of a "
            "checkpoint."
        )


def _write_report(report: Report, options: argparse.Namespace) -> None:
    """Write a report. With --html, write HTML to the given file. With --json, write JSON to stdout.

    Without these two options, write the report as text to stdout.

    Raises:
        NereidParsersError: The HTML file cannot be written.
    """
    if options.html:
        try:
            Path(options.html).write_text(report_page(report), encoding="utf-8")
        except OSError as error:
            raise NereidParsersError(
                f"--html: the file {options.html} cannot be written ({error.strerror}). Give the "
                "path of a file in a folder that you may write to."
            ) from error
    if options.json:
        sys.stdout.write(report_json(report))
    if not options.html and not options.json:
        sys.stdout.write(report_text(report, paint_for(options.colour)))


def paint_for(colour: str) -> Paint:
    r"""Return a function that adds terminal colours to the texts of a report.

    Example: `paint_for("always")("title", "Format")` returns "\x1b[1mFormat\x1b[0m". A terminal
    shows this text in bold.

    Args:
        colour: The value of the option --colour. With "never", the function adds no colours. With
            "auto", the function adds colours only if stdout is a terminal.
    """
    is_coloured = colour == "always" or (colour == "auto" and sys.stdout.isatty())
    if not is_coloured:
        return no_colour

    def paint(kind: str, text: str) -> str:
        """Add a terminal colour to `text`. The colour depends on `kind`, such as "title"."""
        return f"{_COLOURS.get(kind, '')}{text}{_RESET}" if text else text

    return paint
