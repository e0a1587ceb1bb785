"""Measure the time of a step outside the model: planning, batch building, sampling and commit.

    python -m loadtest.bench.bench_scheduler [--steps 300]

Random logits stand for the model, and their time is not counted. The vocabulary is small and all
requests are greedy, so the column "sample" mostly shows the bookkeeping of the sampler. The column
"step" is the sum of the four parts. The column "ahead" shows the same work with async_scheduling,
where a step starts before the tokens of the previous step are read. A GPU never waits for the CPU
if its forward pass takes longer than the time in "ahead".
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from nereid_backend import SamplingParams
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import StepPlan
from nereid_backend.engine.step_loop import StepLoop
from nereid_backend.paths.step_batch import BatchBuilder
from nereid_backend.serving.process.process_entry import reduce_garbage_collection
from nereid_backend.step_runner import Runner
from torch import Tensor

from loadtest import command_line

T = TypeVar("T")

PARTS = ("plan", "build", "sample", "commit", "step", "ahead")
_BLOCK_SIZE = 16
_PROMPT = 64
_VOCAB = 256


def main() -> None:
    """Print one row for each number of running and waiting requests."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps measured in each row")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    # The engine process also calls this function after loading.
    reduce_garbage_collection()
    print("Each cell shows the milliseconds of CPU time of a step: median and 99th percentile.")
    print(f"{'running':>8} {'waiting':>8}" + "".join(f"{part:>14}" for part in PARTS))
    for num_running, num_waiting in ((1, 0), (16, 0), (64, 0), (256, 0), (1000, 0), (1000, 10_000)):
        found = measure(num_running, num_waiting, steps)
        found["step"] = [sum(parts) for parts in zip(*found.values(), strict=True)]
        found["ahead"] = measure_ahead(num_running, num_waiting, steps)
        spreads = "".join(f"{_spread(found[part]):>14}" for part in PARTS)
        print(f"{num_running:8} {num_waiting:8}{spreads}")


class _RandomPath:
    """A forward path that builds real batches and returns random logits instead of running a model.

    Attributes:
        build_s: the CPU seconds in which the last batch was built.
        model_s: the CPU seconds in which the last random logits were computed. Callers subtract
            this time.
        was_full: whether the last step decoded one token for each of `max_num_seqs` sequences.
    """

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
        self.was_full = False

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Build the batch of a plan, and return random logits (see `ForwardPath.forward`)."""
        device = torch.device("cpu")
        batch, self.build_s = timed(lambda: self._builder.build(plan, device, sampled))
        logits, self.model_s = timed(lambda: torch.rand(batch.num_logits, _VOCAB))
        self.was_full = len(plan.chunks) == plan.num_tokens == self._max_num_seqs
        return logits

    def clear(self, sequence: Sequence) -> None:
        """Do nothing, because this path stores nothing for a request."""


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Call a function. Return its result, and the CPU time of this thread in seconds."""
    started = time.thread_time()
    result = work()
    return result, time.thread_time() - started


def measure(num_running: int, num_waiting: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each part of a step, for steps in which all running requests decode."""
    scheduler, path = _begin(num_running, num_waiting, steps)
    runner = Runner(path)
    found: dict[str, list[float]] = {part: [] for part in PARTS[:4]}
    while len(found["plan"]) < steps:
        plan, plan_s = timed(scheduler.plan)
        result, run_s = timed(lambda: runner.run(plan))  # noqa: B023 - called at once
        _, commit_s = timed(lambda: scheduler.commit(plan, result))  # noqa: B023 - called at once
        if path.was_full:
            sample_s = run_s - path.build_s - path.model_s
            for part, seconds in zip(
                found, (plan_s, path.build_s, sample_s, commit_s), strict=True
            ):
                found[part].append(seconds)
    assert scheduler.num_waiting == num_waiting
    return found


def measure_ahead(num_running: int, num_waiting: int, steps: int) -> list[float]:
    """Measure steps with async_scheduling in which all requests decode. Return their seconds."""
    scheduler, path = _begin(num_running, num_waiting, steps)
    loop = StepLoop(scheduler, Runner(path), max_step_failures=1, is_async=True)
    found: list[float] = []
    while len(found) < steps:
        _, step_s = timed(loop.step)
        if path.was_full:
            found.append(step_s - path.model_s)
    return found


def _begin(num_running: int, num_waiting: int, steps: int) -> tuple[Scheduler, _RandomPath]:
    """Return a scheduler with `num_running + num_waiting` new requests, and a forward path for it.

    The scheduler runs at most `num_running` requests at a time.
    """
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
        scheduler.add(Sequence(str(number), prompt, params, max_total_tokens=length))
    return scheduler, _RandomPath(num_running, length)


def _spread(seconds: list[float]) -> str:
    percentile = statistics.quantiles(seconds, n=100)[98]
    return f"{statistics.median(seconds) * 1e3:.2f} {percentile * 1e3:.2f}"


if __name__ == "__main__":
    main()
