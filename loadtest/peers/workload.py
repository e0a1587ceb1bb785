# SPDX-License-Identifier: Apache-2.0
"""What every contestant of the benchmark does, and how its times are taken.

Runs in each contestant's own environment, so it needs nothing beyond the standard library.

A contestant is a program `NAME.py CHECKPOINT WORKLOAD`: it loads the checkpoint, goes through the
workload (JSON) and prints one JSON object as its last line. Peak memory is the process's own.
"""

import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


class Contestant(Protocol):
    """A system under test, loaded."""

    def start(self, prompts: list[list[int]]) -> None:
        """Go through the prompts and generate one token for each."""

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Answer all prompts at once, greedily, with exactly so many tokens each."""


def main(load: Callable[[str, dict[str, Any]], Contestant]) -> None:
    """Run the program: load the checkpoint, measure, print."""
    path, workload = sys.argv[1], json.loads(sys.argv[2])
    started = time.perf_counter()
    contestant = load(path, workload)
    result: dict[str, Any] = {"load_s": time.perf_counter() - started}
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [
            [rng.randrange(3, workload["vocab_size"]) for _ in range(length)] for _ in range(count)
        ]

    contestant.generate(prompts(1, 16), 4)
    result["prefill"] = {
        str(length): rate(
            length, [spent(contestant.start, prompts(1, length)) for _ in range(workload["repeat"])]
        )
        for length in workload["prefill"]
    }
    result["decode"] = {
        str(batch): decode_rate(contestant, prompts, batch, workload)
        for batch in workload["decode"]
    }
    mixed = getattr(contestant, "mixed", None)
    if mixed is not None and workload["mixed"]:
        result["mixed"] = arrivals(mixed, workload, rng)
    facts = getattr(contestant, "facts", None)
    if facts is not None:
        result |= facts()
    result["peak_bytes"] = peak_bytes()
    print(json.dumps(result), flush=True)
    close = getattr(contestant, "close", None)
    if close is not None:
        close()


def peak_bytes() -> int:
    """The most memory that this program has taken.

    What the system calls a process's largest size counts that of the program which started it, too.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


def spent(function: Callable[..., object], *args: object) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    function(*args)
    return time.perf_counter() - started


def rate(amount: int, times: Sequence[float]) -> float:
    """Amount per second at the median time."""
    return amount / statistics.median(times)


def decode_rate(
    contestant: Contestant,
    prompts: Callable[[int, int], list[list[int]]],
    batch: int,
    workload: dict[str, Any],
) -> float:
    """Tokens per second after the first ones: whole answers' time less that of the prompts.

    0 where the prompts' own time differed by more than that: longer answers, or more repeats, tell.
    """
    times = []
    if workload.get("warm"):
        # What is done once for a batch of this size, as capturing its kernels, is not measured.
        contestant.generate(prompts(batch, workload["context"]), workload["answer"])
    for _ in range(workload["repeat"]):
        texts = prompts(batch, workload["context"])
        whole = spent(contestant.generate, texts, workload["answer"])
        # Fresh prompts of the same size, lest a cache of prefixes answer them.
        times.append(whole - spent(contestant.start, prompts(batch, workload["context"])))
    if statistics.median(times) <= 0:
        return 0.0
    return rate(batch * (workload["answer"] - 1), times)


def arrivals(
    mixed: Callable[..., dict[str, Any]], workload: dict[str, Any], rng: random.Random
) -> dict[str, Any]:
    """Requests that arrive at random times with prompts and answers of many lengths."""
    plan, now = [], 0.0
    for _ in range(workload["mixed"]["requests"]):
        now += rng.expovariate(workload["mixed"]["per_second"])
        prompt = [
            rng.randrange(3, workload["vocab_size"])
            for _ in range(rng.randrange(16, workload["context"]))
        ]
        plan.append((now, prompt, rng.randrange(8, workload["answer"])))
    return mixed(plan)


def summary(first_token_s: list[float], num_tokens: int, seconds: float) -> dict[str, Any]:
    """What a contestant reports of arrivals: seconds from arrival to first token, and the rate."""
    ordered = sorted(first_token_s)
    return {
        "ttft_p50_s": statistics.median(ordered),
        "ttft_p95_s": ordered[int(0.95 * (len(ordered) - 1))],
        "tokens_per_s": num_tokens / seconds,
    }
