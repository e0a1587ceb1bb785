"""Measure how much time the prefix cache saves until the first token of a chat's second turn.

    python -m loadtest.bench.bench_prefix_cache --shape 0.1b --tokens 8000
    python -m loadtest.bench.bench_prefix_cache --models /models/one /models/two --rounds 3

Each round begins a new chat with random tokens. The second turn repeats the prompt and the answer
of the first turn, and adds a short message. The program measures the time to the first token of
both turns. If --disk is given, the program then stops the engine, starts a new engine on the same
folder, and measures the second turn again.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from nereid_backend import Engine, EngineConfig, SamplingParams

from loadtest import command_line
from loadtest.bench.bench import SHAPES, make_checkpoint
from loadtest.bench.markdown_table import table

_PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def main() -> None:
    """Measure all models, and print a table."""
    args = arguments().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = [Path(model) for model in args.models]
        if not models:
            models = [Path(folder) / args.shape]
            make_checkpoint(models[0], args.shape, args.dtype)
        rows = []
        for model in models:
            rows.append(measure_model(model, args))
            print(rows[-1], file=sys.stderr, flush=True)
    names = ["model", "first turn, ms", "second turn, ms", "ratio", "cached tokens"]
    if args.disk:
        names += ["after a restart, ms", "ratio", "cached tokens"]
    print(f"\nMedian time to the first token of a chat with {args.tokens} tokens.\n")
    print(table(names, rows))


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="*", default=[], help="folders of checkpoints, instead of --shape")
    add("--shape", default="0.1b", choices=sorted(SHAPES), help="shape of the model")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="dtype of the model")
    add("--tokens", type=int, default=8000, help="tokens of the first prompt")
    add("--added", type=int, default=60, help="tokens that the second turn adds")
    add("--rounds", type=int, default=3, help="number of chats")
    add("--threads", type=int, default=1, help="number of threads")
    add("--disk", action="store_true", help="also measure the cache on disk after a restart")
    return parser


def measure_model(model: Path, args: argparse.Namespace) -> list[str]:
    """Return the row of the table for one model."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(model, folder, args)
        first: list[float] = []
        second: list[float] = []
        restarted: list[float] = []
        num_cached = num_cached_on_disk = 0
        prompts = []
        for _ in range(args.rounds):
            prompt = random_tokens(engine, rng, args.tokens)
            seconds, answer, _ = time_to_first_token(engine, prompt)
            first.append(seconds)
            prompt = [*prompt, *answer, *random_tokens(engine, rng, args.added)]
            seconds, _, num_cached = time_to_first_token(engine, prompt)
            second.append(seconds)
            prompts.append(prompt)
        engine.close()
        if args.disk:
            engine = open_engine(model, folder, args)
            for prompt in prompts:
                # The prompts share no prefix, so the cached tokens of each prompt are read from the
                # disk.
                seconds, _, num_cached_on_disk = time_to_first_token(engine, prompt)
                restarted.append(seconds)
            engine.close()
    before = statistics.median(first)
    row = [model.name, f"{before * 1e3:.0f}", *compare(second, before), str(num_cached)]
    if args.disk:
        row += [*compare(restarted, before), str(num_cached_on_disk)]
    return row


def open_engine(model: Path, folder: str, args: argparse.Namespace) -> Engine:
    """Return an engine. If --disk is given, the engine has a cache on disk in `folder`."""
    disk = {"prefix_cache_disk": folder} if args.disk else {}
    config = EngineConfig(str(model), dtype=args.dtype, num_threads=args.threads, **disk)
    return Engine(config, progress=lambda _: None)


def compare(seconds: list[float], before: float) -> tuple[str, str]:
    """Return the median of `seconds` in milliseconds, and the median divided by `before`."""
    median = statistics.median(seconds)
    return f"{median * 1e3:.0f}", f"1/{before / median:.1f}"


def random_tokens(engine: Engine, rng: random.Random, count: int) -> list[int]:
    """Return `count` random token ids."""
    return [rng.randrange(3, engine.info.vocab_size) for _ in range(count)]


def time_to_first_token(engine: Engine, prompt: list[int]) -> tuple[float, list[int], int]:
    """Return the seconds to the first token, the answer, and the number of cached tokens."""
    start = time.perf_counter()
    engine.add_request("chat", prompt, _PARAMS)
    seconds = 0.0
    answer: list[int] = []
    num_cached = 0
    while engine.has_work():
        for update in engine.step():
            if not answer:
                seconds = time.perf_counter() - start
                num_cached = update.num_cached_tokens
            answer += update.new_token_ids
    return seconds, answer, num_cached


if __name__ == "__main__":
    main()
