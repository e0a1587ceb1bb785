"""The workload of the engine comparison, and how its times are measured.

This module runs in the environment of each engine, so it needs only the standard library.

The program of an engine takes two arguments: a checkpoint and a workload as JSON. It loads the
checkpoint, runs the workload and prints one JSON object as its last line. Peak memory is that of
the program's process.
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


class Peer(Protocol):
    """A loaded engine that is measured."""

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""


def main(load: Callable[[str, dict[str, Any]], Peer]) -> None:
    """Load the checkpoint, measure the workload, and print the results."""
    path, workload = sys.argv[1], json.loads(sys.argv[2])
    started = time.perf_counter()
    peer = load(path, workload)
    result: dict[str, Any] = {"load_s": time.perf_counter() - started}
    rng = random.Random(0)
    clock = clock_of(workload)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [
            [rng.randrange(3, workload["vocab_size"]) for _ in range(length)] for _ in range(count)
        ]

    peer.generate(prompts(1, 16), 4)
    result["prefill"] = {
        str(length): rate(
            length,
            [spent(clock, peer, prompts(1, length), 1) for _ in range(workload["repeat"])],
        )
        for length in workload["prefill"]
    }
    result["decode"] = {
        str(batch): decode_rate(peer, prompts, batch, workload) for batch in workload["decode"]
    }
    facts = getattr(peer, "facts", None)
    if facts is not None:
        result |= facts()
    result["peak_bytes"] = peak_bytes()
    print(json.dumps(result), flush=True)
    close = getattr(peer, "close", None)
    if close is not None:
        close()


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes.

    The function reads VmHWM, because `getrusage` also includes the process that started this one.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


def clock_of(workload: dict[str, Any]) -> Callable[[], float]:
    """Return the clock that measures the workload.

    The clock measures wall time by default, and CPU time of this process with {"clock": "cpu"}. On
    a machine with other work, CPU time varies less. With more than one thread, it has no meaning.
    """
    return time.process_time if workload.get("clock") == "cpu" else time.perf_counter


def spent(clock: Callable[[], float], peer: Peer, prompts: list[list[int]], amount: int) -> float:
    """Return the seconds in which the engine generates `amount` tokens for each prompt."""
    started = clock()
    peer.generate(prompts, amount)
    return clock() - started


def rate(amount: int, times: Sequence[float]) -> float:
    """Return an amount divided by the median of `times` (in seconds)."""
    return amount / statistics.median(times)


def decode_rate(
    peer: Peer,
    prompts: Callable[[int, int], list[list[int]]],
    batch: int,
    workload: dict[str, Any],
) -> float:
    """Return the tokens/s of decode.

    The time of decode is the time of whole answers minus the time of the prompts. Return 0 if this
    difference is smaller than the variation of the prompts' times. Longer answers or more
    repetitions help in this case.
    """
    times = []
    clock = clock_of(workload)
    if workload.get("warm"):
        # Work that happens once for each batch size, such as capturing a graph, is not measured.
        peer.generate(prompts(batch, workload["context"]), workload["answer"])
    for _ in range(workload["repeat"]):
        texts = prompts(batch, workload["context"])
        whole = spent(clock, peer, texts, workload["answer"])
        # The prompts are new, because a prefix cache would otherwise contain them.
        times.append(whole - spent(clock, peer, prompts(batch, workload["context"]), 1))
    if statistics.median(times) <= 0:
        return 0.0
    return rate(batch * (workload["answer"] - 1), times)
