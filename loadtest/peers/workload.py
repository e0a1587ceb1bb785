"""The workload of the engine comparison, and the functions that measure an engine.

This module runs in the Python environment of each engine, so it needs only the standard library.

The program of an engine takes three arguments: the folder of a checkpoint, a `Workload` as JSON and
the engine's settings as JSON. The program loads the checkpoint, runs the workload and prints one
JSON object as the last line. The peak memory is the peak of the program's process.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loadtest.bench.process_memory import status_bytes
from loadtest.bench.random_prompts import random_prompt
from loadtest.bench.timing import Clock, seconds_of

Prompts = list[list[int]]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """The work that each engine does."""

    dtype: Literal["float32", "bfloat16"]  # the dtype of the weights
    threads: int
    vocab_size: int
    prefill: Sequence[int]  # the lengths of the single prompts whose computation is measured
    decode: Sequence[int]  # the batch sizes in which the generation of tokens is measured
    context: int  # the length of each prompt in the measurements of decode
    answer: int  # the number of generated tokens in the measurements of decode
    repeat: int  # the number of measurements
    # With the CPU clock, the CPU time of the process is measured instead of wall time. On a machine
    # with other work, CPU time varies less than wall time. CPU time has no meaning with more than
    # one thread.
    has_cpu_clock: bool = False

    @property
    def clock(self) -> Clock:
        """The clock that measures the workload."""
        return time.process_time if self.has_cpu_clock else time.perf_counter


class Peer:
    """A loaded engine that is measured."""

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""
        raise NotImplementedError

    def memory(self) -> dict[str, float]:
        """Return the bytes of the weights and of the KV cache, if the engine reports them."""
        return {}

    def close(self) -> None:
        """Stop the threads that would keep the program running."""


def main(load: Callable[[str, Workload, Settings], Peer]) -> None:
    """Load the checkpoint, measure the workload, and print the results."""
    path = sys.argv[1]
    workload = Workload(**json.loads(sys.argv[2]))
    settings = json.loads(sys.argv[3])
    started = time.perf_counter()
    peer = load(path, workload, settings)
    load_s = time.perf_counter() - started
    measurement = Measurement(peer, workload)
    measurement.warm_up()
    report = {
        "load_s": load_s,
        "prefill": {str(length): measurement.prefill_rate(length) for length in workload.prefill},
        "decode": {str(size): measurement.decode_rate(size) for size in workload.decode},
        **peer.memory(),
        # `getrusage` would also include the process that started this one.
        "peak_bytes": status_bytes("self", "VmHWM"),
    }
    print(json.dumps(report), flush=True)
    peer.close()


class Measurement:
    """Measures one engine. Each prompt is new, because a prefix cache would contain old prompts."""

    def __init__(self, peer: Peer, workload: Workload) -> None:
        self._peer = peer
        self._workload = workload
        self._rng = random.Random(0)

    def warm_up(self) -> None:
        """Generate a few tokens, because the first call of an engine loads code."""
        self._peer.generate(self._new_prompts(1, 16), 4)

    def prefill_rate(self, length: int) -> float:
        """Return the speed in tokens/s at which a prompt of `length` tokens is computed."""
        times = [self._generation_s(1, length, 1) for _ in range(self._workload.repeat)]
        return length / statistics.median(times)

    def decode_rate(self, batch_size: int) -> float:
        """Return the speed of decode in tokens/s.

        The time of decode is the time of whole answers minus the time of the prompts and first
        tokens. Return 0 if this difference is not positive, because the times of the prompts vary
        too much. In this case, measure longer answers or repeat the measurement more often.
        """
        context, answer = self._workload.context, self._workload.answer
        times = []
        for _ in range(self._workload.repeat):
            whole_s = self._generation_s(batch_size, context, answer)
            times.append(whole_s - self._generation_s(batch_size, context, 1))
        decode_s = statistics.median(times)
        return batch_size * (answer - 1) / decode_s if decode_s > 0 else 0.0

    def _generation_s(self, batch_size: int, length: int, num_tokens: int) -> float:
        """Return the seconds that the engine needs to answer `batch_size` new prompts.

        Each prompt has `length` tokens, and each answer has `num_tokens` tokens.
        """
        prompts = self._new_prompts(batch_size, length)
        return seconds_of(lambda: self._peer.generate(prompts, num_tokens), self._workload.clock)

    def _new_prompts(self, count: int, length: int) -> Prompts:
        vocab_size = self._workload.vocab_size
        return [random_prompt(self._rng, vocab_size, length) for _ in range(count)]
