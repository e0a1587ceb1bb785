"""Measure how much time each part of a decode step takes on a CPU.

    python -m loadtest.bench.profile_step --shape 0.1b --batches 1 16

The engine uses compile_forward. The kernels record their own time, and timers around methods of the
engine measure the other parts of a step.
"""

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.attention.cpu.cpu_library import KernelTimes
from nereid_backend.paths.packed import PackedPath
from nereid_backend.paths.step_batch import BatchBuilder
from nereid_backend.step_runner import Runner

from loadtest.bench.markdown_table import table
from loadtest.bench.random_models import SHAPES, make_checkpoint
from loadtest.bench.random_prompts import random_prompt
from loadtest.bench.timing import CallTimer
from loadtest.command_line import Option, parse_command_line

# The number of decode steps that are ignored, because they run with cold caches.
_NUM_COLD_STEPS = 4

_OPTIONS = {
    "--shape": Option("0.1b", "shape of the model", sorted(SHAPES)),
    "--dtype": Option("bfloat16", "dtype of the model", ["float32", "bfloat16"]),
    "--weight-dtype": Option("auto", "weight_dtype of the engine, for example int4"),
    "--batches": Option([1, 16], "batch sizes"),
    "--context": Option(512, "tokens of each prompt"),
    "--steps": Option(100, "steps to measure for each batch size"),
    "--threads": Option(2, "number of threads"),
}


class StepParts(NamedTuple):
    """The milliseconds of one step and of its parts, in the order of the table's columns."""

    step: float
    linear_layers: float
    attention: float
    rest_of_the_model: float
    sampling: float
    batch: float
    plan_and_commit: float


class StepProfiler:
    """Measures the parts of an engine's steps."""

    def __init__(self, engine: Engine) -> None:
        """Start to measure the steps of `engine`."""
        # The engine has no public attribute for its KV cache.
        path: Any = engine._parts.runner._path
        self._kernels = KernelTimes()
        path._cache.kernel_times = self._kernels
        self._engine = engine
        self._timer = CallTimer()
        self._timer.measure(engine, "step", "step")
        self._timer.measure(BatchBuilder, "build", "build")
        self._timer.measure(PackedPath, "forward", "forward")
        for name in ("start", "sample", "finish"):
            self._timer.measure(Runner, name, "run")

    def step(self) -> tuple[int, StepParts]:
        """Run one step. Return the number of answered requests, and the times of the step."""
        self._timer.seconds.clear()
        self._kernels.linear_ns = self._kernels.attention_ns = 0
        updates = self._engine.step()
        linear, attention = self._kernels.linear_ns / 1e6, self._kernels.attention_ns / 1e6
        step, run, forward, build = (
            self._timer.seconds[name] * 1e3 for name in ("step", "run", "forward", "build")
        )
        # The time of `forward` includes the time of `build`. The time of `run` includes both times.
        rest_of_the_model = forward - build - linear - attention
        parts = StepParts(
            step=step,
            linear_layers=linear,
            attention=attention,
            rest_of_the_model=rest_of_the_model,
            sampling=run - forward,
            batch=build,
            plan_and_commit=step - run,
        )
        return len(updates), parts


def main() -> None:
    """Measure all batch sizes, and print a table."""
    args = parse_command_line(__doc__, _OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), args.shape, args.dtype)
        config = EngineConfig(
            folder,
            dtype=args.dtype,
            weight_dtype=args.weight_dtype,
            num_threads=args.threads,
            compile_forward=True,
            num_speculative_tokens=0,
        )
        engine = Engine(config, progress=print)
        profiler = StepProfiler(engine)
        rows = []
        for batch_size in args.batches:
            add_requests(engine, batch_size, args)
            medians = median_parts(engine, profiler, batch_size)
            rows.append([str(batch_size), *(f"{median:.2f}" for median in medians)])
        engine.close()
    print("\nThe table shows the median milliseconds of a decode step and of its parts.\n")
    print(table(["sequences", *(name.replace("_", " ") for name in StepParts._fields)], rows))


def add_requests(engine: Engine, count: int, args: argparse.Namespace) -> None:
    """Add requests with random prompts to the engine."""
    rng = random.Random(0)
    max_tokens = args.steps + 2 * _NUM_COLD_STEPS
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for number in range(count):
        prompt = random_prompt(rng, engine.info.vocab_size, args.context)
        engine.add_request(str(number), prompt, params)


def median_parts(engine: Engine, profiler: StepProfiler, batch_size: int) -> StepParts:
    """Answer all requests, and return the median of each part of the decode steps."""
    decode_steps = []
    while engine.has_work():
        num_answered, parts = profiler.step()
        # A step with fewer answered requests still computes prompts.
        if num_answered == batch_size:
            decode_steps.append(parts)
    columns = zip(*decode_steps[_NUM_COLD_STEPS:], strict=True)
    return StepParts(*map(statistics.median, columns))


if __name__ == "__main__":
    main()
