"""The command line: `python -m nereid_parsers formats` and `... parse`, to look at transcripts."""

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

_COLOURS = {
    "reasoning": "\x1b[36m",
    "content": "\x1b[32m",
    "call": "\x1b[33m",
    "markup": "\x1b[2m",
    "reason": "\x1b[31m",
}
_PLAIN = "\x1b[0m"


class Pen:
    """Writes lines, in colour where that is wanted."""

    def __init__(self, out: TextIO, colour: str) -> None:
        self._out = out
        self._is_coloured = colour == "always" or (colour == "auto" and out.isatty())

    def paint(self, kind: str, text: str) -> str:
        """The text in its kind's colour."""
        return f"{_COLOURS[kind]}{text}{_PLAIN}" if self._is_coloured else text

    def line(self, text: str = "") -> None:
        """Write a line."""
        self._out.write(text + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    options = _flags().parse_args(arguments)
    try:
        return int(options.run(options))
    except (NereidParsersError, OSError, ValueError) as error:
        sys.stderr.write(f"nereid_parsers: {error}\n")
        return 2


def _flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="python -m nereid_parsers", description=__doc__)
    commands = flags.add_subparsers(required=True, metavar="COMMAND")
    formats = commands.add_parser("formats", help="list the formats that have names")
    formats.add_argument("--table", action="store_true", help="as a Markdown table, with sources")
    formats.set_defaults(run=_formats)
    parse = commands.add_parser("parse", help="parse a transcript and show what is what")
    parse.add_argument("file", metavar="FILE", help="the text that a model wrote; - for stdin")
    parse.add_argument("--format", required=True, metavar="NAME", help="a name, or REASONING+TOOLS")
    parse.add_argument("--tools", metavar="FILE", help="JSON file: the OpenAI tools list")
    parse.add_argument("--prompt", metavar="FILE", help="the rendered prompt")
    parse.add_argument("--stream", type=int, metavar="N", help="feed N characters at a time")
    parse.add_argument("--strict", action="store_true", help="the strict policy")
    parse.add_argument("--colour", choices=("auto", "always", "never"), default="auto")
    parse.set_defaults(run=_parse)
    command.add_arguments(commands.add_parser("template", help=command.HELP))
    return flags


def _formats(options: argparse.Namespace) -> int:
    pen = Pen(sys.stdout, "never")
    if options.table:
        pen.line("| name | for | source |\n|---|---|---|")
    for row in listing():
        if options.table:
            pen.line(f"| {row.label} | {row.kind} | {row.source} |")
        else:
            pen.line(f"{row.kind:9}  {row.label}")
    return 0


def _named(name: str) -> Format:
    reasoning, plus, tools = name.partition("+")
    return get_format(reasoning=reasoning, tools=tools) if plus else get_format(name)


def _read(name: str) -> str:
    return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")


def _parse(options: argparse.Namespace) -> int:
    pen = Pen(sys.stdout, options.colour)
    tools: Any = json.loads(_read(options.tools)) if options.tools else None
    prompt = _read(options.prompt) if options.prompt else None
    text = _read(options.file)
    spans: list[tuple[str, str]] = []
    numbers = itertools.count()
    parser = StreamParser(
        _named(options.format),
        tools=tools,
        prompt=prompt,
        policy=STRICT if options.strict else LENIENT,
        new_id=lambda: f"call_{next(numbers)}",
        trace=lambda kind, piece: spans.append((kind, piece)),
    )
    if options.stream is None:
        message = fold([*parser.feed(text), *parser.finish()])
        pen.line("".join(pen.paint(kind, piece) for kind, piece in spans))
        pen.line()
        _show_message(pen, message)
        return 0
    if options.stream < 1:
        raise ValueError(f"--stream: {options.stream} is not a number of characters")
    for at in range(0, len(text), options.stream):
        piece = text[at : at + options.stream]
        pen.line(pen.paint("markup", f"> {piece!r}"))
        _show_events(pen, parser.feed(piece))
    pen.line(pen.paint("markup", "> end"))
    _show_events(pen, parser.finish())
    return 0


def _show_events(pen: Pen, events: list[Event]) -> None:
    for event in events:
        match event:
            case ReasoningDelta(text):
                pen.line("  " + pen.paint("reasoning", f"reasoning  {text!r}"))
            case ContentDelta(text, reason):
                pen.line("  " + pen.paint("content", f"content    {text!r}") + _why(pen, reason))
            case ToolCallStart(index, call_id, name):
                pen.line("  " + pen.paint("call", f"call {index}     {name}  ({call_id})"))
            case ArgumentsDelta(index, text):
                pen.line("  " + pen.paint("call", f"     {index}     {text!r}"))
            case ToolCallEnd(index, reason):
                pen.line("  " + pen.paint("call", f"     {index}     end") + _why(pen, reason))


def _why(pen: Pen, reason: str | None) -> str:
    return "  " + pen.paint("reason", f"[{reason}]") if reason else ""


def _show_message(pen: Pen, message: Message) -> None:
    if message.reasoning is not None:
        pen.line(pen.paint("reasoning", f"reasoning  {message.reasoning!r}"))
    if message.content is not None:
        pen.line(pen.paint("content", f"content    {message.content!r}"))
    for call in message.tool_calls:
        pen.line(pen.paint("call", f"call       {call.name} {call.arguments}  ({call.id})"))


if __name__ == "__main__":
    sys.exit(main())
