"""Command-line program that lists formats, parses model output and analyses chat templates."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
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
from nereid_parsers.stream.tracer import Trace
from nereid_parsers.template import command as template_command
from nereid_parsers.template.report import Paint

_EXIT_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected command, such as `parse`, and return the exit status.

    The exit status is 2 if an error has occurred, and 1 if the program that reads the output has
    ended. For each command, the argument parser sets `options.run` to the function that runs the
    command.

    Args:
        arguments: The command-line arguments, without the program's name. If None, `sys.argv` is
            used.
    """
    options = _create_argument_parser().parse_args(arguments)
    _prepare_standard_streams()
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # example: the output is piped to `head`
        _discard_output()
        return 1
    except (NereidParsersError, OSError, ValueError) as error:
        is_output_error = isinstance(error, OSError) and error.filename is None
        if is_output_error:  # No file is named, so stdout cannot be written: the disk is full.
            _discard_output()
        sys.stderr.write(f"nereid_parsers: {_describe_error(error)}\n")
        return _EXIT_ERROR


def _describe_error(error: Exception) -> str:
    """Return the error message for the user. If a file cannot be read, name the file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"The file {error.filename} cannot be read ({error.strerror})."
    return str(error)


def _prepare_standard_streams() -> None:
    r"""Decode stdin as UTF-8, and write escape sequences for characters that stdout cannot encode.

    Example: a terminal with the encoding ASCII shows the character "日" as "\u65e5".
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Discard the output that has not been written yet.

    Python flushes stdout when it exits. This would fail, because stdout cannot be written.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _create_argument_parser() -> argparse.ArgumentParser:
    """Return an argument parser with the subcommands `formats`, `parse` and `template`.

    Parsing the arguments of a command sets `run` to the function that runs this command. The module
    `template_command` declares the arguments of the command `template`.
    """
    parser = argparse.ArgumentParser(prog="python -m nereid_parsers", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_formats_arguments(commands.add_parser("formats", help="list the names of all formats"))
    _add_parse_arguments(
        commands.add_parser(
            "parse", help="parse a transcript and show its reasoning, content, calls and markup"
        )
    )
    template_command.add_arguments(commands.add_parser("template", help=template_command.HELP))
    return parser


def _add_formats_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `formats` to `parser`."""
    parser.add_argument(
        "--table", action="store_true", help="print a Markdown table that includes the sources"
    )
    parser.set_defaults(run=_run_formats)


def _add_parse_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `parse` to `parser`."""
    parser.add_argument("file", metavar="FILE", help="file with the model's text; - reads stdin")
    parser.add_argument(
        "--format",
        required=True,
        metavar="NAME",
        help="name of the format, or two names as REASONING+TOOLS (example: qwen3+hermes)",
    )
    parser.add_argument("--tools", metavar="FILE", help="JSON file with the OpenAI tools list")
    parser.add_argument("--prompt", metavar="FILE", help="file with the rendered prompt")
    parser.add_argument(
        "--stream",
        type=int,
        metavar="N",
        help="parse N characters at a time, and show the events of each piece",
    )
    parser.add_argument(
        "--strict", action="store_true", help="use the strict policy instead of the lenient one"
    )
    parser.add_argument(
        "--colour",
        choices=("auto", "always", "never"),
        default="auto",
        help="when to colour the output; auto: only on a terminal (default: auto)",
    )
    parser.set_defaults(run=_run_parse)


def _run_formats(options: argparse.Namespace) -> int:
    """Print the names of all chat formats, and return the exit status."""
    if options.table:
        _print("| name | for | source |\n|---|---|---|")
    for row in listing():
        if options.table:
            _print(f"| {row.label} | {row.kind} | {row.source} |")
        else:
            _print(f"{row.kind:9}  {row.label}")
    return 0


def _run_parse(options: argparse.Namespace) -> int:
    """Parse model output from a file or stdin, print the result, and return the exit status.

    With the option `--stream`, the events of each piece of the text are printed. Without this
    option, the whole text is printed with one colour for each classification (reasoning, content,
    call or markup), followed by the parsed message.
    """
    paint = template_command.paint_for(options.colour)  # A function that colours a text.
    if options.stream is None:
        _print_whole_text(paint, options)
    else:
        _print_stream(paint, options)
    return 0


def _print_whole_text(paint: Paint, options: argparse.Namespace) -> None:
    """Parse the whole text. Print the text in colour, and then print the parsed message.

    `options` are the options of the command `parse`.
    """
    coloured_pieces: list[str] = []

    def add_piece(kind: str, piece: str) -> None:
        """Colour a piece of the text. `kind` is the type of the piece, such as `content`."""
        coloured_pieces.append(paint(kind, piece))

    parser = _create_stream_parser(options, trace=add_piece)
    text = _read(options.file)
    message = fold([*parser.feed(text), *parser.finish()])
    _print("".join(coloured_pieces))
    _print()
    _print_message(paint, message)


def _print_stream(paint: Paint, options: argparse.Namespace) -> None:
    """Parse the text in pieces. After each piece, print the parser's events.

    `options` are the options of the command `parse`. The option `--stream` is the number of
    characters in each piece.

    Raises:
        ValueError: The number of characters in each piece is less than 1.
    """
    size: int = options.stream
    if size < 1:
        raise ValueError(
            f"--stream {size}: the number of characters in each piece must be at least 1"
        )
    parser = _create_stream_parser(options)
    text = _read(options.file)
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        _print(paint("markup", f"> {piece!r}"))
        _print_events(paint, parser.feed(piece))
    _print(paint("markup", "> end"))
    _print_events(paint, parser.finish())


def _create_stream_parser(options: argparse.Namespace, trace: Trace | None = None) -> StreamParser:
    """Create a `StreamParser` from the command-line options of the command `parse`.

    The parser numbers the generated ids of tool calls (`call_0`, `call_1`), so that the output is
    the same each time. The parser passes each piece of the text to `trace`.
    """
    tools = _read_tools(options.tools) if options.tools else None
    prompt = _read(options.prompt) if options.prompt else None
    numbers = itertools.count()
    return StreamParser(
        _format_by_name(options.format),
        tools=tools,
        prompt=prompt,
        policy=STRICT if options.strict else LENIENT,
        new_id=lambda: f"call_{next(numbers)}",
        trace=trace,
    )


def _print(line: str = "") -> None:
    """Write one line of text to stdout."""
    sys.stdout.write(line + "\n")


def _format_by_name(name: str) -> Format:
    """Return the chat format called `name`. A name such as `qwen3+hermes` combines two formats."""
    reasoning, plus, tools = name.partition("+")
    return get_format(reasoning=reasoning, tools=tools) if plus else get_format(name)


def _read(path: str) -> str:
    """Return the text of the file at `path`. If `path` is `-`, return the text from stdin.

    Raise ValueError that names the path if the text is not UTF-8.
    """
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8 ({error}). Convert it to UTF-8.") from None


def _read_json(path: str) -> Any:  # noqa: ANN401  # JSON may contain any type
    """Read a JSON file and return its value. Raise ValueError if the file is not valid JSON."""
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The file {path} is not valid JSON: {error}") from error


def _read_tools(path: str) -> list[dict[str, Any]]:
    """Return the tools in a JSON file. Raise ValueError if the file is no list of objects."""
    tools = _read_json(path)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"The file {path} must contain a list of tools, such as "
            '[{"type": "function", "function": {"name": "f", "parameters": {}}}].'
        )
    return tools


def _print_events(paint: Paint, events: list[Event]) -> None:
    """Print each event on one line. If an event has a `reason`, print the reason in brackets.

    Example: `  content    '<tool_call> is a tag'  [no call follows the marker]`.
    """
    for event in events:
        fault = event.reason if isinstance(event, ContentDelta | ToolCallEnd) else None
        note = "  " + paint("reason", f"[{fault}]") if fault else ""
        _print("  " + _event_line(paint, event) + note)


def _event_line(paint: Paint, event: Event) -> str:
    """Return the coloured line that describes an event, for example `content    'Hello'`.

    The lines of a tool call contain its index: `call 0     f  (call_0)`, `     0     end`.
    """
    match event:
        case ReasoningDelta(text):
            return paint("reasoning", _labelled("reasoning", repr(text)))
        case ContentDelta(text):
            return paint("content", _labelled("content", repr(text)))
        case ToolCallStart(index, call_id, name):
            return paint("call", _numbered("call", index, f"{name}  ({call_id})"))
        case ArgumentsDelta(index, text):
            return paint("call", _numbered("", index, repr(text)))
        case ToolCallEnd(index):
            return paint("call", _numbered("", index, "end"))


def _labelled(label: str, text: str) -> str:
    """Return a line that consists of a label and a text, such as `content    'Hello'`."""
    return f"{label:<11}{text}"


def _numbered(label: str, index: int, text: str) -> str:
    """Return a line that consists of a label, the index of a tool call, and a text: `call 0     f`.

    The label may be empty. The text begins in the same column as in the lines of `_labelled`.
    """
    return f"{label:<4} {index}     {text}"


def _print_message(paint: Paint, message: Message) -> None:
    """Print the reasoning, the content and the tool calls of a message on separate lines."""
    if message.reasoning is not None:
        _print(paint("reasoning", _labelled("reasoning", repr(message.reasoning))))
    if message.content is not None:
        _print(paint("content", _labelled("content", repr(message.content))))
    for call in message.tool_calls:
        text = f"{call.name} {call.arguments}  ({call.id})"
        _print(paint("call", _labelled("call", text)))


if __name__ == "__main__":
    sys.exit(main())
