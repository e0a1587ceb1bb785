"""Measure the time to parse a message, in microseconds per character, for formats of tool calls.

    python -m loadtest.bench.bench_parsers [--sizes 1000 16000 128000] [--chunks 1 4] [--runs 3]

Each cell shows the time of the fastest of several runs. A run parses one tool call with an argument
of the given number of characters, or a message with content or reasoning of this length. The parser
gets the text in chunks of one character or of four characters. A token has about four characters.
"""

import argparse
import gc
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from nereid_parsers import Format, StreamParser, fold, get_format

from loadtest.bench.markdown_table import print_table
from loadtest.command_line import Option, parse_command_line

TEXT = "The quick brown fox said 'no' and left: 7 < 9 & so on, at 5 o'clock. "
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
            },
        },
    }
]

_OPTIONS = {
    "--sizes": Option([1_000, 16_000, 128_000], "characters of the argument"),
    "--chunks": Option([1, 4], "characters of each chunk"),
    "--runs": Option(5, "number of runs, of which the best one counts"),
}


class Message(NamedTuple):
    """A message whose parsing is measured. A long text is inserted between `before` and `after`."""

    format_name: str
    before: str
    after: str

    def with_text(self, size: int) -> str:
        """Return the message with an inserted text of `size` characters."""
        repeated = TEXT * (size // len(TEXT) + 1)
        return self.before + repeated[:size] + self.after


# Maps the label of each row of the table to its message.
MESSAGES = {
    "JSON object": Message(
        "hermes",
        '<tool_call>\n{"name": "write_file", "arguments": {"text": "',
        '"}}\n</tool_call>',
    ),
    "JSON array": Message(
        "granite",
        '<|tool_call|>[{"name": "write_file", "arguments": {"text": "',
        '"}}]',
    ),
    "bare JSON": Message("llama3_json", '{"name": "write_file", "parameters": {"text": "', '"}}'),
    "name, then JSON": Message(
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{"text": "',
        '"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "tagged": Message(
        "qwen3_coder",
        "<tool_call>\n<function=write_file>\n<parameter=text>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "Python-style": Message("pythonic", '[write_file(text="', '")]'),
    "bare keys": Message(
        "functiongemma",
        "<start_function_call>call:write_file{text:<escape>",
        "<escape>}<end_function_call>",
    ),
    "nested elements": Message(
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="write_file">\n]<]minimax[>[<text>',
        "]<]minimax[>[</text>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    ),
    "messages": Message(
        "gpt-oss",
        '<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>{"text": "',
        '"}<|call|>',
    ),
    "content": Message("hermes", "", ""),
    "reasoning": Message("qwen3", "<think>\n", "\n</think>\n\n"),
}


def parsing_s(fmt: Format, text: str, chunk: int) -> float:
    """Parse `text` in chunks of `chunk` characters, and return the CPU time in seconds."""
    pieces = [text[start : start + chunk] for start in range(0, len(text), chunk)]
    parser = StreamParser(fmt, tools=TOOLS)
    feed = parser.feed
    started = time.process_time()
    for piece in pieces:
        feed(piece)
    parser.finish()
    return time.process_time() - started


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, because its runs would be part of the measured time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check(fmt: Format, text: str, size: int) -> None:
    """Raise AssertionError if the parser does not recognise the text as the intended message.

    Without this check, the benchmark could measure text that the parser treats as plain content.
    """
    parser = StreamParser(fmt, tools=TOOLS)
    message = fold([*parser.feed(text), *parser.finish()])
    parsed = [message.content or "", message.reasoning or ""]
    parsed += [call.arguments for call in message.tool_calls]
    # The parser removes a space at the end of reasoning.
    assert max(map(len, parsed)) >= size - 1, (fmt.name, message)


def character_us(message: Message, size: int, chunk: int, num_runs: int) -> float:
    """Return the time in microseconds that parsing one character takes in the fastest run.

    The inserted text has `size` characters. The parser gets `chunk` characters at a time.
    """
    fmt = get_format(message.format_name)
    text = message.with_text(size)
    check(fmt, text, size)
    with no_garbage_collection():
        seconds = min(parsing_s(fmt, text, chunk) for _ in range(num_runs))
    return seconds / len(text) * 1e6


def row(label: str, args: argparse.Namespace) -> list[str]:
    """Measure one message, and return its row of the table."""
    cells, growth = [], []
    for chunk in args.chunks:
        costs = [character_us(MESSAGES[label], size, chunk, args.runs) for size in args.sizes]
        cells += [f"{cost:.2f}" for cost in costs]
        growth.append(f"{costs[-1] / costs[0]:.2f}")
    return [label, *cells, *growth]


def main() -> None:
    """Measure all messages, and print a table."""
    args = parse_command_line(__doc__, _OPTIONS)
    print(
        f"Python {platform.python_version()}. Cells show microseconds per character, the best of "
        f"{args.runs} runs. The columns `growth` divide the last size's time by the first's."
    )
    head = ["format", *(f"{chunk} ch, {size}" for chunk in args.chunks for size in args.sizes)]
    head += [f"growth, {chunk} ch" for chunk in args.chunks]
    print_table(head, (row(label, args) for label in MESSAGES))


if __name__ == "__main__":
    main()
