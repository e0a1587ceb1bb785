"""Measure how the prefix cache shortens the time to the first token of a chat's second turn.

    python -m loadtest.bench.bench_prefix_cache --shape 0.1b --tokens 8000

Each round begins a new chat with random tokens. The second turn repeats the prompt and the answer
of the first turn, and adds a short message. The program measures the time to the first token of
both turns. If --disk is given, the program then stops the engine, starts a new engine with the same
folder of cached tokens, and measures the second turn again.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nereid_backend import Engine, EngineConfig, SamplingParams

from loadtest.bench.markdown_table import table
from loadtest.bench.random_models import SHAPES, make_checkpoint
from loadtest.bench.random_prompts import random_prompt
from loadtest.command_line import Option, parse_command_line

_PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
_NUM_ADDED_TOKENS = 60

_OPTIONS = {
    "--shape": Option("0.1b", "shape of the model", sorted(SHAPES)),
    "--dtype": Option("float32", "dtype of the model", ["float32", "bfloat16"]),
    "--tokens": Option(8000, "tokens of the first prompt"),
    "--rounds": Option(3, "number of chats"),
    "--threads": Option(1, "number of threads"),
    "--disk": Option(False, "also measure the cache on disk after a restart"),
}


class Turn(NamedTuple):
    """One turn of a chat: the token ids of prompt and answer, and the time to the first token."""

    prompt: list[int]
    answer: list[int]
    first_token_s: float
    num_cached: int  # the prompt tokens that the engine found in its cache


def main() -> None:
    """Measure the turns, and print a table."""
    args = parse_command_line(__doc__, _OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        model, cache = Path(folder, args.shape), Path(folder, "cache")
        make_checkpoint(model, args.shape, args.dtype)
        first, second = measure_chats(model, cache, args)
        before = median_time(first)
        head = ["model", "first turn, ms", "second turn, ms", "ratio", "cached tokens"]
        row = [args.shape, f"{before * 1e3:.0f}", *cells(second, before)]
        if args.disk:
            again = measure_again(model, cache, second, args)
            head += ["after a restart, ms", "ratio", "cached tokens"]
            row += cells(again, before)
    print(f"\nMedian time to the first token of a chat with {args.tokens} tokens.\n")
    print(table(head, [row]))


def measure_chats(
    model: Path, cache: Path, args: argparse.Namespace
) -> tuple[list[Turn], list[Turn]]:
    """Start an engine, and answer both turns of new chats. Return the first and second turns."""
    rng = random.Random(0)
    engine = open_engine(model, cache, args)
    vocab_size = engine.info.vocab_size
    first, second = [], []
    for _ in range(args.rounds):
        turn = answer_prompt(engine, random_prompt(rng, vocab_size, args.tokens))
        message = random_prompt(rng, vocab_size, _NUM_ADDED_TOKENS)
        first.append(turn)
        second.append(answer_prompt(engine, [*turn.prompt, *turn.answer, *message]))
    engine.close()
    return first, second


def measure_again(
    model: Path, cache: Path, turns: Sequence[Turn], args: argparse.Namespace
) -> list[Turn]:
    """Start a new engine, and answer the prompts of `turns` again.

    The prompts share no prefix, so the engine reads the cached tokens of each prompt from the disk.
    """
    engine = open_engine(model, cache, args)
    again = [answer_prompt(engine, turn.prompt) for turn in turns]
    engine.close()
    return again


def open_engine(model: Path, cache: Path, args: argparse.Namespace) -> Engine:
    """Return an engine. With --disk, the engine has a cache on disk in the folder `cache`."""
    config = EngineConfig(
        str(model),
        dtype=args.dtype,
        num_threads=args.threads,
        prefix_cache_disk=str(cache) if args.disk else None,
    )
    return Engine(config, progress=lambda _: None)


def answer_prompt(engine: Engine, prompt: list[int]) -> Turn:
    """Generate the answer to one prompt, and return the measured turn."""
    started = time.perf_counter()
    engine.add_request("chat", prompt, _PARAMS)
    first_token_s, num_cached = 0.0, 0
    answer: list[int] = []
    while engine.has_work():
        for update in engine.step():
            if not answer:
                first_token_s = time.perf_counter() - started
                num_cached = update.num_cached_tokens
            answer += update.new_token_ids
    return Turn(prompt, answer, first_token_s, num_cached)


def median_time(turns: Sequence[Turn]) -> float:
    """Return the median time to the first token in seconds."""
    return statistics.median(turn.first_token_s for turn in turns)


def cells(turns: Sequence[Turn], before: float) -> list[str]:
    """Return three cells of the table for some turns.

    The cells contain the median time to the first token in ms, the ratio of this time to `before`
    (in seconds), and the number of cached tokens. Example: for turns of 20 ms, and if `before` is
    0.1, the cells are `["20", "1/5.0", "8032"]`.
    """
    seconds = median_time(turns)
    return [f"{seconds * 1e3:.0f}", f"1/{before / seconds:.1f}", str(turns[-1].num_cached)]


if __name__ == "__main__":
    main()
