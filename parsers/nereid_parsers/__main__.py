"""Command line of nereid_parsers: list formats, parse transcripts, analyse chat templates."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from nereid_parsers.errors import NereidParsersError
from nereid_parsers.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Message,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
    fold,
)
from nereid_parsers.format import LENIENT, STRICT, Format
from nereid_parsers.formats.registry import get_format, listing
from nereid_parsers.stream.parser import StreamParser
from nereid_parsers.template import command

_EXIT_ERROR = 2
_COLOURS = {
    "reasoning": "\x1b[36m",
    "content": "\x1b[32m",
    "call": "\x1b[33m",
    "markup": "\x1b[2m",
    "fault": "\x1b[31m",
}
_RESET_COLOUR = "\x1b[0m"


class Printer:
    """Writes lines of text, with colours on a terminal or on demand."""

    def __init__(self, out: TextIO, colour: str) -> None:
        """Create a printer.

        Args:
            out: The file to which the lines are written.
            colour: "always", "never" or "auto" (colours only if `out` is a terminal).
        """
        self._out = out
        self._has_colour = colour == "always" or (colour == "auto" and out.isatty())

    def coloured(self, kind: str, text: str) -> str:
        """Return `text` in the colour of `kind`, which is one of the keys of `_COLOURS`."""
        return f"{_COLOURS[kind]}{text}{_RESET_COLOUR}" if self._has_colour else text

    def line(self, text: str = "") -> None:
        """Write one line of text."""
        self._out.write(text + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, or 2 after an error.

    Args:
        arguments: The arguments, without the name of the program. None means the arguments of this
            process.
    """
    options = _create_argument_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (NereidParsersError, OSError, ValueError) as error:
        sys.stderr.write(f"nereid_parsers: {error}\n")
        return _EXIT_ERROR


def _create_argument_parser() -> argparse.ArgumentParser:
    """Return the argument parser of the command line."""
    arguments = argparse.ArgumentParser(prog="python -m nereid_parsers", description=__doc__)
    commands = arguments.add_subparsers(required=True, metavar="COMMAND")

    formats = commands.add_parser("formats", help="list the names of all formats")
    formats.add_argument(
        "--table", action="store_true", help="print a Markdown table that includes the sources"
    )
    formats.set_defaults(run=_run_formats)

    parse = commands.add_parser(
        "parse", help="parse a transcript and show its reasoning, content, calls and markup"
    )
    parse.add_argument("file", metavar="FILE", help="file with the model's text; - reads stdin")
    parse.add_argument(
        "--format",
        required=True,
        metavar="NAME",
        help="name of the format, or two names as REASONING+TOOLS (example: qwen3+hermes)",
    )
    parse.add_argument("--tools", metavar="FILE", help="JSON file with the OpenAI tools list")
    parse.add_argument("--prompt", metavar="FILE", help="file with the rendered prompt")
    parse.add_argument(
        "--stream",
        type=int,
        metavar="N",
        help="parse N characters at a time, and show the events of each piece",
    )
    parse.add_argument(
        "--strict", action="store_true", help="use the strict policy instead of the lenient one"
    )
    parse.add_argument(
        "--colour",
        choices=("auto", "always", "never"),
        default="auto",
        help="when to colour the output; auto: only on a terminal (default: auto)",
    )
    parse.set_defaults(run=_run_parse)

    command.add_arguments(commands.add_parser("template", help=command.HELP))
    return arguments


def _run_formats(options: argparse.Namespace) -> int:
    """Print the names of all formats, and return the exit status."""
    printer = Printer(sys.stdout, "never")
    if options.table:
        printer.line("| name | for | source |\n|---|---|---|")
    for row in listing():
        if options.table:
            printer.line(f"| {row.label} | {row.kind} | {row.source} |")
        else:
            printer.line(f"{row.kind:9}  {row.label}")
    return 0


def _run_parse(options: argparse.Namespace) -> int:
    """Parse a transcript, print the result, and return the exit status."""
    if options.stream is not None and options.stream < 1:
        raise ValueError(
            "--stream is the number of characters in each piece, which must be at least 1, but is "
            f"{options.stream}"
        )
    printer = Printer(sys.stdout, options.colour)
    tools = _read_json(options.tools) if options.tools else None
    prompt = _read(options.prompt) if options.prompt else None
    text = _read(options.file)
    classified: list[tuple[str, str]] = []
    numbers = itertools.count()
    parser = StreamParser(
        _format_by_name(options.format),
        tools=tools,
        prompt=prompt,
        policy=STRICT if options.strict else LENIENT,
        new_id=lambda: f"call_{next(numbers)}",
        trace=lambda kind, piece: classified.append((kind, piece)),
    )
    if options.stream is None:
        message = fold([*parser.feed(text), *parser.finish()])
        printer.line("".join(printer.coloured(kind, piece) for kind, piece in classified))
        printer.line()
        _print_message(printer, message)
    else:
        _print_stream(printer, parser, text, options.stream)
    return 0


def _format_by_name(name: str) -> Format:
    """Return the format with the given name. A name such as `qwen3+hermes` combines two formats."""
    reasoning, plus, tools = name.partition("+")
    return get_format(reasoning=reasoning, tools=tools) if plus else get_format(name)


def _read(path: str) -> str:
    """Return the text of a file, or of stdin if `path` is `-`."""
    return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")


def _read_json(path: str) -> Any:  # noqa: ANN401  # JSON may hold any type
    """Return the value in a JSON file. Raise ValueError if the file is not valid JSON."""
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise ValueError(f"The file {path} is not valid JSON: {error}") from error


def _print_stream(printer: Printer, parser: StreamParser, text: str, size: int) -> None:
    """Parse `text` in pieces of `size` characters, and print the events of each piece."""
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        printer.line(printer.coloured("markup", f"> {piece!r}"))
        _print_events(printer, parser.feed(piece))
    printer.line(printer.coloured("markup", "> end"))
    _print_events(printer, parser.finish())


def _print_events(printer: Printer, events: list[Event]) -> None:
    """Print one line for each event, for example `  content    'Hello'`."""
    for event in events:
        fault: str | None = None
        match event:
            case ReasoningDelta(text):
                line = printer.coloured("reasoning", f"reasoning  {text!r}")
            case ContentDelta(text, fault):
                line = printer.coloured("content", f"content    {text!r}")
            case ToolCallStart(index, call_id, name):
                line = printer.coloured("call", f"call {index}     {name}  ({call_id})")
            case ArgumentsDelta(index, text):
                line = printer.coloured("call", f"     {index}     {text!r}")
            case ToolCallEnd(index, fault):
                line = printer.coloured("call", f"     {index}     end")
        note = "  " + printer.coloured("fault", f"[{fault}]") if fault else ""
        printer.line("  " + line + note)


def _print_message(printer: Printer, message: Message) -> None:
    """Print the parts of a message, each on its own line."""
    if message.reasoning is not None:
        printer.line(printer.coloured("reasoning", f"reasoning  {message.reasoning!r}"))
    if message.content is not None:
        printer.line(printer.coloured("content", f"content    {message.content!r}"))
    for call in message.tool_calls:
        line = f"call       {call.name} {call.arguments}  ({call.id})"
        printer.line(printer.coloured("call", line))


if __name__ == "__main__":
    sys.exit(main())
