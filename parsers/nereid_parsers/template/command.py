"""The command `template`: what a chat template says of a model's format.

parser = commands.add_parser("template", help=command.HELP)
command.add_arguments(parser)          # sets `run`, which takes the parsed options
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nereid_parsers.template.checkpoint import format_for_checkpoint
from nereid_parsers.template.report import Paint, Report, report_json, report_of, report_text

HELP = "infer the chat format of a template or checkpoint, and show how"

_COLOURS = {
    "title": "\x1b[1m",
    "name": "\x1b[34m",
    "reasoning": "\x1b[36m",
    "content": "\x1b[32m",
    "call": "\x1b[33m",
    "markup": "\x1b[2m",
    "added": "\x1b[42;30m",
    "removed": "\x1b[41;37m",
    "reason": "\x1b[31m",
}
_PLAIN = "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; `run` is set as the default of that name."""
    parser.description = __doc__.partition("\n")[0] if __doc__ else None
    parser.add_argument(
        "words",
        nargs="+",
        metavar="[inspect] FILE|CHECKPOINT",
        help="a file with a Jinja template, or a checkpoint's folder",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--html", metavar="FILE", help="write one page to look at in a browser")
    parser.add_argument("--colour", choices=("auto", "always", "never"), default="auto")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; 0, or 1 where a rendering did not read back, 2 for a wrong call.

    Raises: NereidParsersError for a path that is neither template nor checkpoint.
    """
    words: list[str] = options.words
    if words[0] == "inspect" and len(words) > 1:
        words = words[1:]
    if len(words) != 1:
        sys.stderr.write(f"template: one file or checkpoint, not {len(words)}\n")
        return 2
    report = inspect(words[0])
    if options.html:
        from nereid_parsers.template.page import report_page

        Path(options.html).write_text(report_page(report), encoding="utf-8")
    if options.json:
        sys.stdout.write(report_json(report))
    elif not options.html:
        sys.stdout.write(report_text(report, _painter(options.colour)))
    return 1 if any(sample.differs for sample in report.samples) else 0


def inspect(path: str) -> Report:
    """What is to be shown of a template's file or a checkpoint's folder."""
    chosen = format_for_checkpoint(path)
    return report_of(path, f"{chosen.source}: {chosen.why}", chosen.format, chosen.analysis)


def _painter(colour: str) -> Paint:
    is_coloured = colour == "always" or (colour == "auto" and sys.stdout.isatty())

    def paint(kind: str, text: str) -> str:
        if not is_coloured or not text:
            return text
        return f"{_COLOURS.get(kind, '')}{text}{_PLAIN}"

    return paint
