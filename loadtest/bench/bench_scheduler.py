# SPDX-License-Identifier: Apache-2.0
"""What a step costs outside the model: plan, batch building, sampling and commit.

    python -m loadtest.bench.bench_scheduler [--steps 300]

The model is a tensor of random logits, which is not counted. Its vocabulary is small and all choose
greedily, so that "sample" is mostly what the sampler keeps count of. "step" is all four, and
"ahead" the same work where the next step is begun before this one's tokens are read
(async_scheduling): a GPU that is busy for longer never waits.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from nereid_backend import SamplingParams
from nereid_backend.async_steps import AsyncSteps
from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.request import Request
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import StepPlan
from nereid_backend.paths.step_batch import BatchBuilder
from nereid_backend.runner import Runner
from nereid_backend.step_failures import StepFailures
from torch import Tensor

T = TypeVar("T")

PARTS = ("plan", "build", "sample", "commit", "step", "ahead")
_BLOCK_SIZE = 16
_PROMPT = 64
_VOCAB = 256


def main() -> None:
    """Print one row for each number of running and waiting requests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="steps measured in each row")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print("milliseconds of CPU time a step, median and 99th percentile")
    print(f"{'running':>8} {'waiting':>8}" + "".join(f"{part:>14}" for part in PARTS))
    for num_running, num_waiting in ((1, 0), (16, 0), (64, 0), (1000, 0), (1000, 10_000)):
        found = measure(num_running, num_waiting, steps)
        found["step"] = [sum(parts) for parts in zip(*found.values(), strict=True)]
        found["ahead"] = measure_ahead(num_running, num_waiting, steps)
        spreads = "".join(f"{_spread(found[part]):>14}" for part in PARTS)
        print(f"{num_running:8} {num_waiting:8}{spreads}")


class _RandomPath:
    """Builds each step's batch as the real paths do; random logits stand for the model."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self._builder = BatchBuilder(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=_BLOCK_SIZE,
            null_block=0,
        )
        self._max_num_seqs = max_num_seqs
        self.build_s = 0.0
        self.model_s = 0.0
        # Whether the last step was one of decodes alone, of all that may run.
        self.was_full = False

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """See AheadPath."""
        device = torch.device("cpu")
        batch, self.build_s = timed(lambda: self._builder.build(plan, device, sampled))
        logits, self.model_s = timed(lambda: torch.rand(batch.num_logits, _VOCAB))
        self.was_full = len(plan.chunks) == plan.num_tokens == self._max_num_seqs
        return logits

    def clear(self, request: Request) -> None:
        """See ForwardPath."""


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """A call's result and its seconds of this thread's CPU time."""
    started = time.thread_time()
    result = work()
    return result, time.thread_time() - started


def measure(num_running: int, num_waiting: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each part of each step, by name, while all running requests decode."""
    scheduler, path = _begin(num_running, num_waiting, steps)
    runner = Runner(path)
    found: dict[str, list[float]] = {part: [] for part in PARTS[:4]}
    while len(found["plan"]) < steps:
        plan, plan_s = timed(scheduler.plan)
        result, run_s = timed(lambda: runner.run(plan))  # noqa: B023 - called at once
        _, commit_s = timed(lambda: scheduler.commit(plan, result))  # noqa: B023 - the same
        if path.was_full:
            sample_s = run_s - path.build_s - path.model_s
            for part, seconds in zip(
                found, (plan_s, path.build_s, sample_s, commit_s), strict=True
            ):
                found[part].append(seconds)
    assert scheduler.num_waiting == num_waiting
    return found


def measure_ahead(num_running: int, num_waiting: int, steps: int) -> list[float]:
    """Seconds of each step that is planned ahead, while all running requests decode."""
    scheduler, path = _begin(num_running, num_waiting, steps)
    look_ahead = AsyncSteps(scheduler, Runner(path), StepFailures(1), lambda _: None)
    found: list[float] = []
    while len(found) < steps:
        _, step_s = timed(look_ahead.step)
        if path.was_full:
            found.append(step_s - path.model_s)
    return found


def _begin(num_running: int, num_waiting: int, steps: int) -> tuple[Scheduler, _RandomPath]:
    """Requests, of which so many may run, and a path for them."""
    blocks = num_running * (-(-(_PROMPT + steps) // _BLOCK_SIZE) + 2)
    scheduler = Scheduler(
        BlockPool(blocks),
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(4096, num_running),
    )
    length = _PROMPT + 10 * steps
    rng = random.Random(0)
    for number in range(num_running + num_waiting):
        prompt = [rng.randrange(_VOCAB) for _ in range(_PROMPT)]
        params = SamplingParams(temperature=0.0)
        scheduler.add(Request(str(number), prompt, params, max_total_tokens=length))
    return scheduler, _RandomPath(num_running, length)


def _spread(seconds: list[float]) -> str:
    percentile = statistics.quantiles(seconds, n=100)[98]
    return f"{statistics.median(seconds) * 1e3:.2f} {percentile * 1e3:.2f}"


if __name__ == "__main__":
    main()
