"""Measure the time of parsing, in microseconds per character, for each format of tool calls.

    python -m loadtest.bench.bench_parsers [--sizes 1000 16000 128000] [--chunks 1 4] [--runs 3]

Each cell shows the best of several runs. A run parses one tool call whose arguments have the given
number of characters. The text is fed in chunks of one character or of four, which is about the
length of a token.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from collections.abc import Callable

from nereid_parsers import Format, StreamParser, fold, get_format

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

# For each row of the table: the name of the format, and the text before and after the argument.
BODIES: dict[str, tuple[str, str, str]] = {
    "JSON object": (
        "hermes",
        '<tool_call>\n{"name": "write_file", "arguments": {"text": "',
        '"}}\n</tool_call>',
    ),
    "JSON array": (
        "granite",
        '<|tool_call|>[{"name": "write_file", "arguments": {"text": "',
        '"}}]',
    ),
    "bare JSON": ("llama3_json", '{"name": "write_file", "parameters": {"text": "', '"}}'),
    "name, then JSON": (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{"text": "',
        '"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "tagged": (
        "qwen3_coder",
        "<tool_call>\n<function=write_file>\n<parameter=text>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "Python-style": ("pythonic", '[write_file(text="', '")]'),
    "bare keys": (
        "functiongemma",
        "<start_function_call>call:write_file{text:<escape>",
        "<escape>}<end_function_call>",
    ),
    "nested elements": (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="write_file">\n]<]minimax[>[<text>',
        "]<]minimax[>[</text>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    ),
    "messages": (
        "gpt-oss",
        '<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>{"text": "',
        '"}<|call|>',
    ),
    "content": ("hermes", "", ""),
    "reasoning": ("qwen3", "<think>\n", "\n</think>\n\n"),
}


def once(fmt: Format, text: str, chunk: int) -> float:
    """Return the CPU seconds of parsing `text` in chunks of `chunk` characters."""
    pieces = [text[at : at + chunk] for at in range(0, len(text), chunk)]
    parser = StreamParser(fmt, tools=TOOLS)
    feed = parser.feed
    started = time.process_time()
    for piece in pieces:
        feed(piece)
    parser.finish()
    return time.process_time() - started


def best(run: Callable[[], float], runs: int) -> float:
    """Return the shortest time of several runs, with the garbage collector disabled."""
    gc.collect()
    gc.disable()
    try:
        return min(run() for _ in range(runs))
    finally:
        gc.enable()


def check(fmt: Format, text: str, size: int) -> None:
    """Raise AssertionError if the parser does not recognise the text as the intended message.

    Without this check, the benchmark could measure text that the parser treats as plain content.
    """
    parser = StreamParser(fmt, tools=TOOLS)
    message = fold([*parser.feed(text), *parser.finish()])
    found = [message.content or "", message.reasoning or ""]
    found += [call.arguments for call in message.tool_calls]
    assert max(map(len, found)) + 1 >= size, (fmt.name, message)


def main() -> None:
    """Measure all formats, and print a table."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = flags.add_argument
    sizes = [1_000, 16_000, 128_000]
    add("--sizes", type=int, nargs="+", default=sizes, help="characters of the argument")
    add("--chunks", type=int, nargs="+", default=[1, 4], help="characters of each chunk")
    add("--runs", type=int, default=5, help="number of runs, of which the best one counts")
    arguments = flags.parse_args()
    print(
        f"Python {platform.python_version()}. Cells show microseconds per character, the best of "
        f"{arguments.runs} runs. The columns `growth` divide the last size's time by the first's."
    )
    cells = [f"{chunk} ch, {size}" for chunk in arguments.chunks for size in arguments.sizes]
    heads = [*cells, *(f"growth, {chunk} ch" for chunk in arguments.chunks)]
    print("| format | " + " | ".join(heads) + " |")
    print("|---" * (len(heads) + 1) + "|")
    for label, (name, before, after) in BODIES.items():
        fmt = get_format(name)
        row: list[str] = []
        growth: list[str] = []
        for chunk in arguments.chunks:
            costs = []
            for size in arguments.sizes:
                text = before + (TEXT * (size // len(TEXT) + 1))[:size] + after
                check(fmt, text, size)
                seconds = best(lambda f=fmt, t=text, c=chunk: once(f, t, c), arguments.runs)
                costs.append(seconds / len(text) * 1e6)
            row += [f"{cost:.2f}" for cost in costs]
            growth.append(f"{costs[-1] / costs[0]:.2f}")
        print(f"| {label} | " + " | ".join([*row, *growth]) + " |")


if __name__ == "__main__":
    main()
