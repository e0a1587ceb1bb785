# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decode step goes on a CPU: one table, measured in the engine as it runs.

    python -m loadtest.bench.profile_step --shape 0.1b --batches 1 16

The engine is compiled (`compile_forward`); its kernels add up their own time, and the rest is taken
by timers around the parts of a step.
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
from nereid_backend.attention.cpu.cpu_attention import Spent

from loadtest.bench.bench import SHAPES, make_checkpoint
from loadtest.bench.markdown_table import table

PARTS = ("linear layers", "attention", "rest of the model", "sampling", "batch", "plan and commit")


class Parts:
    """Milliseconds of the parts of an engine's steps.

    Attributes:
        steps: a list of milliseconds, in the order of PARTS, for each step since they were cleared.
    """

    def __init__(self, engine: Engine) -> None:
        """Measure an engine from now on."""
        runner: Any = engine._runner
        path = runner._path
        self._cache = path._cache
        self._cache.spent = Spent()
        self._seconds: dict[str, float] = {}
        self.steps: list[list[float]] = []
        self._wrap(path._builder, "build")
        self._wrap(path, "forward")
        self._wrap(runner, "run")
        self._step = self._timed(engine.step, "step")

    def step(self) -> Any:  # noqa: ANN401 - as the engine's
        """One step of the engine."""
        spent, self._seconds = self._cache.spent, {}
        spent.linear_ns = spent.attention_ns = 0
        updates = self._step()
        found = {name: seconds * 1e3 for name, seconds in self._seconds.items()}
        kernels = [spent.linear_ns / 1e6, spent.attention_ns / 1e6]
        forward, build, run = (found.get(name, 0.0) for name in ("forward", "build", "run"))
        self.steps.append(
            [*kernels, forward - build - sum(kernels), run - forward, build, found["step"] - run]
        )
        return updates

    def _wrap(self, owner: object, name: str) -> None:
        setattr(owner, name, self._timed(getattr(owner, name), name))

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: object, **kwargs: object) -> object:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

        return timed


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.1b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=100, help="steps measured for each batch")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), args.shape, args.dtype)
        config = EngineConfig(
            folder, dtype=args.dtype, num_threads=args.threads, compile_forward=True
        )
        engine = Engine(config, progress=print)
        parts = Parts(engine)
        rows = [[str(batch), *medians(engine, parts, batch, args)] for batch in args.batches]
        engine.close()
    print("\nmilliseconds of a step of decodes, medians\n")
    print(table(["sequences", "step", *PARTS], rows))


def medians(engine: Engine, parts: Parts, batch: int, args: argparse.Namespace) -> list[str]:
    """The whole step and its parts."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=args.steps + 8, ignore_eos=True)
    for number in range(batch):
        prompt = [rng.randrange(3, engine.info.vocab_size) for _ in range(args.context)]
        engine.add_request(str(number), prompt, params)
    while engine.has_work():
        if len(parts.step()) < batch:
            # A step of prompts.
            parts.steps.pop()
    # The first ones still have prompts among them, or cold caches.
    steps = [[sum(step), *step] for step in parts.steps[4:]]
    parts.steps.clear()
    return [f"{statistics.median(column):.2f}" for column in zip(*steps, strict=True)]


if __name__ == "__main__":
    main()
