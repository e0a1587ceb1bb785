# SPDX-License-Identifier: Apache-2.0
"""Measure the effect of 8-bit weights and an 8-bit KV cache on speed and memory.

    python -m loadtest.bench.bench_int8 --dtype bfloat16 --batches 1 4 16

The program uses random weights in the shapes of bench.py and one thread. In every round, each
setting is measured once. Speed is given in tokens per second of CPU time.
"""

import argparse
import logging
import random
import tempfile
import time
from pathlib import Path

from nereid_backend import Engine, EngineConfig, SamplingParams

from loadtest.bench.bench import SHAPES, make_checkpoint

SETTINGS: dict[str, dict[str, str]] = {
    "auto": {},
    "int8 weights": {"weight_dtype": "int8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "both": {"weight_dtype": "int8", "kv_cache_dtype": "int8"},
}


def main() -> None:
    """Measure every setting, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    settings = list(SETTINGS)
    add("--shape", choices=SHAPES, default="0.1b", help="shape of the model, as in bench.py")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="dtype of the model")
    add("--batches", type=int, nargs="+", default=[1, 4, 16], help="batch sizes")
    add("--context", type=int, default=256, help="tokens of each prompt")
    add("--tokens", type=int, default=16, help="tokens of each answer")
    add("--rounds", type=int, default=3, help="number of rounds, of which the best one counts")
    add("--settings", nargs="+", choices=settings, default=settings, help="settings to compare")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / args.shape
        make_checkpoint(path, args.shape, args.dtype)
        engines = {
            name: Engine(EngineConfig(str(path), dtype=args.dtype, num_threads=1, **SETTINGS[name]))
            for name in args.settings
        }
        heads = [f"{what} {size}" for what in ("prompt", "decode") for size in args.batches]
        print(
            f"The model has the shape {args.shape} and the dtype {args.dtype}. Each prompt has "
            f"{args.context} tokens. Speeds are in tokens per second of CPU time.\n"
        )
        print("| setting | " + " | ".join(heads) + " | weights | cache bytes per token |")
        print("|---|" + "---|" * (len(heads) + 2))
        for name, rates in measure(engines, args).items():
            info = engines[name].info
            per_token = info.kv_cache_bytes / (info.num_blocks + 1) / info.block_size
            cells = " | ".join(f"{rate:.1f}" for rate in rates)
            print(f"| {name} | {cells} | {info.weights_bytes / 2**20:.0f} MiB | {per_token:.0f} |")


def measure(engines: dict[str, Engine], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the highest rates of each setting, in tokens per second of CPU time.

    Each list contains the rates of prompt tokens for each batch size, then those of answer tokens.
    """
    best = {name: [0.0] * (2 * len(args.batches)) for name in engines}
    for number in range(args.rounds):
        for column, size in enumerate(args.batches):
            rng = random.Random(number)
            prompts = [[rng.randrange(3, 2000) for _ in range(args.context)] for _ in range(size)]
            for name, engine in engines.items():
                spent = [seconds(engine, prompts, count) for count in (1, args.tokens + 1)]
                # The second call finds all blocks of the prompt except the last one in the prefix
                # cache, so its time is mostly that of the decode steps.
                rates = size * args.context / spent[0], size * args.tokens / spent[1]
                for place, rate in zip((column, column + len(args.batches)), rates, strict=True):
                    best[name][place] = max(best[name][place], rate)
    return best


def seconds(engine: Engine, prompts: list[list[int]], num_tokens: int) -> float:
    """Return the CPU time in seconds that an engine needs to answer all prompts in one batch."""
    start = time.process_time()
    engine.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    )
    return time.process_time() - start


if __name__ == "__main__":
    main()
