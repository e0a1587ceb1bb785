# SPDX-License-Identifier: Apache-2.0
"""What 8-bit weights and 8-bit keys and values change: tokens per second of CPU time, and memory.

    python -m loadtest.bench.bench_int8 --dtype bfloat16 --batches 1 4 16

Random weights of bench.py's shapes, one thread, the settings in turn in every round.
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
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.1b")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=256, help="prompt length")
    parser.add_argument("--tokens", type=int, default=16, help="answer length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
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
        print(f"{args.shape}, {args.dtype}, prompts of {args.context}; tokens per CPU second\n")
        print("| setting | " + " | ".join(heads) + " | weights | cache bytes a token |")
        print("|---|" + "---|" * (len(heads) + 2))
        for name, rates in measure(engines, args).items():
            info = engines[name].info
            per_token = info.kv_cache_bytes / (info.num_blocks + 1) / info.block_size
            cells = " | ".join(f"{rate:.1f}" for rate in rates)
            print(f"| {name} | {cells} | {info.weights_bytes / 2**20:.0f} MiB | {per_token:.0f} |")


def measure(engines: dict[str, Engine], args: argparse.Namespace) -> dict[str, list[float]]:
    """By setting: prompt tokens, then answer tokens, per CPU second, at each batch size; best."""
    best = {name: [0.0] * (2 * len(args.batches)) for name in engines}
    for number in range(args.rounds):
        for column, size in enumerate(args.batches):
            rng = random.Random(number)
            prompts = [[rng.randrange(3, 2000) for _ in range(args.context)] for _ in range(size)]
            for name, engine in engines.items():
                spent = [seconds(engine, prompts, count) for count in (1, args.tokens + 1)]
                # The second time its prompt is found in the prefix cache, but for the last block.
                rates = size * args.context / spent[0], size * args.tokens / spent[1]
                for place, rate in zip((column, column + len(args.batches)), rates, strict=True):
                    best[name][place] = max(best[name][place], rate)
    return best


def seconds(engine: Engine, prompts: list[list[int]], num_tokens: int) -> float:
    """CPU time of answering all prompts at once."""
    start = time.process_time()
    engine.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    )
    return time.process_time() - start


if __name__ == "__main__":
    main()
