"""Measure how the time of a decode step on a CPU is divided between its parts.

    python -m loadtest.bench.profile_step --shape 0.1b --batches 1 16

The engine uses compile_forward. Its kernels record their own time, and timers around the parts of a
step measure the rest.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.attention.cpu.cpu_library import KernelTimes

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.bench.random_models import SHAPES, make_checkpoint

PARTS = ("linear layers", "attention", "rest of the model", "sampling", "batch", "plan and commit")


class Parts:
    """The milliseconds of each part of an engine's steps.

    Attributes:
        steps: for each step since the list was last cleared, the milliseconds of each of PARTS.
    """

    def __init__(self, engine: Engine) -> None:
        """Start to measure the steps of `engine`."""
        runner: Any = engine._parts.runner
        path = runner._path
        self._cache = path._cache
        self._cache.kernel_times = KernelTimes()
        self._seconds: dict[str, float] = {}
        self.steps: list[list[float]] = []
        self._wrap(path._builder, "build")
        self._wrap(path, "forward")
        for name in ("start", "sample", "finish"):
            self._wrap(runner, name, "run")
        self._step = self._timed(engine.step, "step")

    def step(self) -> Any:  # noqa: ANN401 - as the engine's
        """Run one step of the engine, store its times in `steps`, and return its updates."""
        spent, self._seconds = self._cache.kernel_times, {}
        spent.linear_ns = spent.attention_ns = 0
        updates = self._step()
        found = {name: seconds * 1e3 for name, seconds in self._seconds.items()}
        kernels = [spent.linear_ns / 1e6, spent.attention_ns / 1e6]
        forward, build, run = (found.get(name, 0.0) for name in ("forward", "build", "run"))
        self.steps.append(
            [*kernels, forward - build - sum(kernels), run - forward, build, found["step"] - run]
        )
        return updates

    def _wrap(self, owner: object, name: str, part: str | None = None) -> None:
        setattr(owner, name, self._timed(getattr(owner, name), part or name))

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: object, **kwargs: object) -> object:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

        return timed


def main() -> None:
    """Measure all batch sizes, and print a table."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    dtypes = ["float32", "bfloat16"]
    add("--shape", default="0.1b", choices=sorted(SHAPES), help="shape of the model")
    add("--dtype", default="bfloat16", choices=dtypes, help="dtype of the model")
    add("--weight-dtype", default="auto", help="weight_dtype of the engine, for example int4")
    add("--batches", type=int, nargs="+", default=[1, 16], help="batch sizes")
    add("--context", type=int, default=512, help="tokens of each prompt")
    add("--steps", type=int, default=100, help="steps to measure for each batch size")
    add("--threads", type=int, default=2, help="number of threads")
    args = parser.parse_args()
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
        parts = Parts(engine)
        rows = [[str(batch), *medians(engine, parts, batch, args)] for batch in args.batches]
        engine.close()
    print("\nThe table shows the median milliseconds of a decode step and of its parts.\n")
    print(table(["sequences", "step", *PARTS], rows))


def medians(engine: Engine, parts: Parts, batch: int, args: argparse.Namespace) -> list[str]:
    """Return the median milliseconds of a whole decode step and of each of PARTS, as text."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=args.steps + 8, ignore_eos=True)
    for number in range(batch):
        prompt = [rng.randrange(3, engine.info.vocab_size) for _ in range(args.context)]
        engine.add_request(str(number), prompt, params)
    while engine.has_work():
        if len(parts.step()) < batch:
            # This step still processed prompts, so it is not a pure decode step.
            parts.steps.pop()
    # The first steps are left out, because they may contain prompts or run with cold caches.
    steps = [[sum(step), *step] for step in parts.steps[4:]]
    parts.steps.clear()
    return [f"{statistics.median(column):.2f}" for column in zip(*steps, strict=True)]


if __name__ == "__main__":
    main()
