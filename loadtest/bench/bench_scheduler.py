"""Measure the time of a step outside the model: planning, batch building, sampling and commit.

    python -m loadtest.bench.bench_scheduler [--steps 300]

Random logits replace the output of a model, and the time to generate them is not counted. The
vocabulary is small and all requests are greedy, so the column "sample" mostly shows the bookkeeping
of the sampler. The column "step" is the sum of the four parts. The column "ahead" shows the time of
the same work with async_scheduling, where a step starts before the tokens of the previous step are
read. A GPU never waits for the CPU if its forward pass takes longer than the time in "ahead".
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

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

from loadtest.bench.markdown_table import print_table
from loadtest.bench.random_prompts import random_prompt
from loadtest.command_line import Option, parse_command_line

T = TypeVar("T")

_BLOCK_SIZE = 16
_SPARE_BLOCKS = 2
_PROMPT_LENGTH = 64
_VOCAB_SIZE = 256
# Each pair is the number of running requests and the number of waiting requests.
_LOADS = ((1, 0), (16, 0), (64, 0), (256, 0), (1000, 0), (1000, 10_000))


class StepParts(NamedTuple):
    """The CPU seconds of the parts of one step."""

    plan: float
    build: float
    sample: float
    commit: float


def main() -> None:
    """Print one row for each number of running and waiting requests."""
    options = {"--steps": Option(300, "steps measured in each row")}
    num_steps = parse_command_line(__doc__, options).steps
    torch.set_num_threads(1)
    # The engine process also calls this function after the model has been loaded.
    reduce_garbage_collection()
    print("Each cell shows the milliseconds of CPU time of a step: median and 99th percentile.\n")
    head = ["running", "waiting", *StepParts._fields, "step", "ahead"]
    print_table(head, (row(*load, num_steps) for load in _LOADS))


def row(num_running: int, num_waiting: int, num_steps: int) -> list[str]:
    """Measure steps with these numbers of requests, and return a row of the table."""
    steps = measure(num_running, num_waiting, num_steps)
    columns = [*zip(*steps, strict=True), [sum(step) for step in steps]]
    columns.append(measure_ahead(num_running, num_waiting, num_steps))
    return [str(num_running), str(num_waiting), *map(_median_and_99th, columns)]


class _RandomPath:
    """A forward path that builds real batches and returns random logits instead of running a model.

    Attributes:
        build_s: the CPU seconds that building the last batch took.
        model_s: the CPU seconds that generating the last random logits took. Callers subtract this
            time.
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
        logits, self.model_s = timed(lambda: torch.rand(batch.num_logits, _VOCAB_SIZE))
        self.was_full = len(plan.chunks) == plan.num_tokens == self._max_num_seqs
        return logits

    def clear(self, sequence: Sequence) -> None:
        """Do nothing, because this path stores nothing for a request."""


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Call a function. Return its result, and the CPU time of this thread in seconds."""
    started = time.thread_time()
    result = work()
    return result, time.thread_time() - started


def measure(num_running: int, num_waiting: int, num_steps: int) -> list[StepParts]:
    """Return the times of steps in which all running requests decode."""
    scheduler, path = _start(num_running, num_waiting, num_steps)
    runner = Runner(path)
    steps: list[StepParts] = []
    while len(steps) < num_steps:
        plan, plan_s = timed(scheduler.plan)
        result, run_s = timed(partial(runner.run, plan))
        _, commit_s = timed(partial(scheduler.commit, plan, result))
        if path.was_full:
            sample_s = run_s - path.build_s - path.model_s
            steps.append(StepParts(plan_s, path.build_s, sample_s, commit_s))
    assert scheduler.num_waiting == num_waiting
    return steps


def measure_ahead(num_running: int, num_waiting: int, num_steps: int) -> list[float]:
    """Return the times of steps with async_scheduling in which all running requests decode."""
    scheduler, path = _start(num_running, num_waiting, num_steps)
    loop = StepLoop(scheduler, Runner(path), max_step_failures=1, is_async=True)
    times: list[float] = []
    while len(times) < num_steps:
        _, step_s = timed(loop.step)
        if path.was_full:
            times.append(step_s - path.model_s)
    return times


def _start(num_running: int, num_waiting: int, num_steps: int) -> tuple[Scheduler, _RandomPath]:
    """Return a scheduler with `num_running + num_waiting` new requests, and a forward path for it.

    The scheduler runs at most `num_running` requests at a time, and no request ends within
    `num_steps` steps.
    """
    blocks_per_request = math.ceil((_PROMPT_LENGTH + num_steps) / _BLOCK_SIZE) + _SPARE_BLOCKS
    scheduler = Scheduler(
        BlockPool(num_running * blocks_per_request),
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(4096, num_running),
    )
    # The limit must not end a request early. A request generates more than `num_steps` tokens,
    # because steps with prompts are not measured, but it never generates ten times as many.
    max_length = _PROMPT_LENGTH + 10 * num_steps
    rng = random.Random(0)
    for number in range(num_running + num_waiting):
        prompt = random_prompt(rng, _VOCAB_SIZE, _PROMPT_LENGTH)
        params = SamplingParams(temperature=0.0)
        scheduler.add(Sequence(str(number), prompt, params, max_total_tokens=max_length))
    return scheduler, _RandomPath(num_running, max_length)


def _median_and_99th(seconds: Iterable[float]) -> str:
    """Return the median and the 99th percentile in milliseconds. Example: "0.52 1.10"."""
    percentiles = statistics.quantiles(seconds, n=100)
    return f"{percentiles[49] * 1e3:.2f} {percentiles[98] * 1e3:.2f}"


if __name__ == "__main__":
    main()
