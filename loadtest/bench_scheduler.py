# SPDX-License-Identifier: Apache-2.0
"""What a step costs the scheduler: plan and commit, by running and by waiting requests.

python loadtest/bench_scheduler.py [--steps 300]
"""

import argparse
import statistics
import time

from nereid_backend import SamplingParams
from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.request import Request
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import Sampled, StepPlan, StepResult

_BLOCK_SIZE = 16
_PROMPT = 64


def main() -> None:
    """Print one row for each number of running and waiting requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps measured in each row")
    steps = parser.parse_args().steps
    print("milliseconds a step, median and 99th percentile")
    print(f"{'running':>8} {'waiting':>8} {'plan':>14} {'commit':>14}")
    for num_running, num_waiting in ((10, 0), (100, 0), (1000, 0), (1000, 10_000), (2000, 10_000)):
        plans, commits = measure(num_running, num_waiting, steps)
        print(f"{num_running:8} {num_waiting:8} {_spread(plans):>14} {_spread(commits):>14}")


def measure(num_running: int, num_waiting: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each plan() and of each commit() while all running requests decode."""
    blocks = num_running * (-(-(_PROMPT + steps) // _BLOCK_SIZE) + 2)
    scheduler = Scheduler(
        BlockPool(blocks),
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(4096, num_running),
    )
    for number in range(num_running + num_waiting):
        prompt = [number % 997] * _PROMPT
        scheduler.add(
            Request(str(number), prompt, SamplingParams(), max_total_tokens=_PROMPT + 10 * steps)
        )
    while scheduler.num_running < num_running or scheduler.plan().num_tokens > num_running:
        plan = scheduler.plan()
        scheduler.commit(plan, _answers(plan))
    plans, commits = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert len(plan.chunks) == num_running
        result = _answers(plan)
        sampled = time.perf_counter()
        scheduler.commit(plan, result)
        plans.append(planned - begin)
        commits.append(time.perf_counter() - sampled)
    assert scheduler.num_waiting == num_waiting
    return plans, commits


def _answers(plan: StepPlan) -> StepResult:
    return StepResult([Sampled([7], [-0.5]) for chunk in plan.chunks if chunk.samples])


def _spread(seconds: list[float]) -> str:
    percentile = statistics.quantiles(seconds, n=100)[98]
    return f"{statistics.median(seconds) * 1e3:.2f} {percentile * 1e3:.2f}"


if __name__ == "__main__":
    main()
