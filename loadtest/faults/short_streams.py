"""Show where the memory of the engine goes when thousands of short requests end one after another.

    python -m loadtest.faults.short_streams                         # 3,000 requests
    python -m loadtest.faults.short_streams --no-prefix-caching     # blocks are reused at once
    python -m loadtest.faults.short_streams --kv-cache-mib 64       # the growth ends at 64 MiB

The KV cache is reserved at the start, but the kernel provides a page only when it is first written.
With prefix caching, the blocks of a request that has ended keep their content, and a new request
gets blocks that were never used before cached ones are overwritten. The resident memory therefore
grows by the size of each new block until the whole KV cache was used once. The program prints the
growth and the part of it that the KV cache explains.
"""

import argparse
import ctypes
import random
import re
import sys
from pathlib import Path

from nereid_backend import Engine, EngineConfig, SamplingParams

from loadtest import command_line

_MODEL = Path(__file__).resolve().parents[2] / "demo" / "chat"
_MIB = 2**20
_BATCH_SIZE = 8
_PROMPT_TOKENS = 24
_NUM_WARM_UP_REQUESTS = 100
_NUM_ROWS = 6
_PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)


def resident_mib() -> float:
    """Return the resident memory of this process in MiB, without the pages of files."""
    status = Path("/proc/self/status").read_text()
    sizes_kib = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)
    return sum(map(int, sizes_kib)) / 1024


def run_requests(engine: Engine, rng: random.Random, count: int) -> None:
    """Run `count` requests with random prompts, in batches of 8."""
    prompts = [[rng.randrange(5, 2000) for _ in range(_PROMPT_TOKENS)] for _ in range(count)]
    for begin in range(0, count, _BATCH_SIZE):
        engine.generate(prompts[begin : begin + _BATCH_SIZE], _PARAMS)


def main() -> int:
    """Run the requests, print a table, and return the exit code."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--kv-cache-mib", type=int, default=1024)
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    config = EngineConfig(
        model=str(_MODEL),
        kv_cache_memory=args.kv_cache_mib * _MIB,
        enable_prefix_caching=args.prefix_caching,
        num_threads=1,
    )
    engine = Engine(config, lambda _: None)
    block_mib = args.kv_cache_mib / engine.info.num_blocks
    rng = random.Random(0)
    run_requests(engine, rng, _NUM_WARM_UP_REQUESTS)  # the libraries allocate their own memory
    ctypes.CDLL(None).malloc_trim(0)
    start_mib, start_blocks = resident_mib(), _num_cached_blocks(engine)
    print(f"{'requests':>8} {'memory':>10} {'growth':>10} {'of it in new blocks':>20}")
    num_requests = args.requests // _NUM_ROWS
    for row in range(1, _NUM_ROWS + 1):
        run_requests(engine, rng, num_requests)
        mib = resident_mib()
        blocks_mib = (_num_cached_blocks(engine) - start_blocks) * block_mib
        growth = f"{mib:6.0f} MiB {mib - start_mib:6.0f} MiB {blocks_mib:16.0f} MiB"
        print(f"{row * num_requests:8} {growth}", flush=True)
    return 0


def _num_cached_blocks(engine: Engine) -> int:
    return int(engine.sessions.statistics()["num_cached_blocks"])


if __name__ == "__main__":
    sys.exit(main())
