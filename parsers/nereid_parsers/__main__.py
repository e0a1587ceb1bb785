"""The command line of nereid_parsers: lists formats, parses texts and analyses chat templates."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from nereid_parsers.template.report import Paint

_EXIT_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments select, and return its exit status.

    The exit status is 2 if an error has occurred.

    Args:
        arguments: The command-line arguments, without the program's name. If None, `sys.argv` is
            used.
    """
    options = _create_argument_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (NereidParsersError, OSError, ValueError) as error:
        sys.stderr.write(f"nereid_parsers: {error}\n")
        return _EXIT_ERROR


def _create_argument_parser() -> argparse.ArgumentParser:
    """Create the parser of the command-line arguments."""
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
    if options.table:
        _print("| name | for | source |\n|---|---|---|")
    for row in listing():
        if options.table:
            _print(f"| {row.label} | {row.kind} | {row.source} |")
        else:
            _print(f"{row.kind:9}  {row.label}")
    return 0


def _run_parse(options: argparse.Namespace) -> int:
    """Parse a transcript, print the result, and return the exit status."""
    if options.stream is not None and options.stream < 1:
        raise ValueError(
            f"--stream {options.stream}: the number of characters in each piece must be at least 1"
        )
    paint = command.paint_for(options.colour)
    tools = _read_json(options.tools) if options.tools else None
    prompt = _read(options.prompt) if options.prompt else None
    text = _read(options.file)
    classified: list[tuple[str, str]] = []  # pairs such as ("content", "Hello")
    numbers = itertools.count()
    parser = StreamParser(
        _format_by_name(options.format),
        tools=tools,
        prompt=prompt,
        policy=STRICT if options.strict else LENIENT,
        new_id=lambda: f"call_{next(numbers)}",
        trace=lambda kind, piece: classified.append((kind, piece)),
    )
    if options.stream is not None:
        _print_stream(paint, parser, text, options.stream)
        return 0
    message = fold([*parser.feed(text), *parser.finish()])
    _print("".join(paint(kind, piece) for kind, piece in classified))
    _print()
    _print_message(paint, message)
    return 0


def _print(line: str = "") -> None:
    """Write one line of text to stdout."""
    sys.stdout.write(line + "\n")


def _format_by_name(name: str) -> Format:
    """Return the format with the given name. A name such as `qwen3+hermes` combines two formats."""
    reasoning, plus, tools = name.partition("+")
    return get_format(reasoning=reasoning, tools=tools) if plus else get_format(name)


def _read(path: str) -> str:
    """Return the text of the file at `path`. If `path` is `-`, return the text from stdin."""
    return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")


def _read_json(path: str) -> Any:  # noqa: ANN401  # JSON may contain any type
    """Read a JSON file and return its value. Raise ValueError if the file is not valid JSON."""
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise ValueError(f"The file {path} is not valid JSON: {error}") from error


def _print_stream(paint: Paint, parser: StreamParser, text: str, size: int) -> None:
    """Parse `text` in pieces of `size` characters, and print the events of each piece."""
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        _print(paint("markup", f"> {piece!r}"))
        _print_events(paint, parser.feed(piece))
    _print(paint("markup", "> end"))
    _print_events(paint, parser.finish())


def _print_events(paint: Paint, events: list[Event]) -> None:
    """Print one line for each event, for example `  content    'Hello'`."""
    for event in events:
        fault: str | None = None
        match event:
            case ReasoningDelta(text):
                line = paint("reasoning", f"reasoning  {text!r}")
            case ContentDelta(text, fault):
                line = paint("content", f"content    {text!r}")
            case ToolCallStart(index, call_id, name):
                line = paint("call", f"call {index}     {name}  ({call_id})")
            case ArgumentsDelta(index, text):
                line = paint("call", f"     {index}     {text!r}")
            case ToolCallEnd(index, fault):
                line = paint("call", f"     {index}     end")
        note = "  " + paint("reason", f"[{fault}]") if fault else ""
        _print("  " + line + note)


def _print_message(paint: Paint, message: Message) -> None:
    """Print the reasoning, the content and the tool calls of a message on separate lines."""
    if message.reasoning is not None:
        _print(paint("reasoning", f"reasoning  {message.reasoning!r}"))
    if message.content is not None:
        _print(paint("content", f"content    {message.content!r}"))
    for call in message.tool_calls:
        line = f"call       {call.name} {call.arguments}  ({call.id})"
        _print(paint("call", line))


if __name__ == "__main__":
    sys.exit(main())
