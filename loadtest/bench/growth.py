# SPDX-License-Identifier: Apache-2.0
"""Measure how the time of a decode step grows, and draw charts in docs/history/growth.

    python -m loadtest.bench.growth [--shapes demo 0.1b] [--steps 24] [--out docs/history/growth]
    python -m loadtest.bench.growth --charts-only          # draw the charts again from growth.json

A model shape that is not measured keeps its figures in growth.json.

One quantity grows at a time: the sequences in the batch, the tokens of the context, the waiting
requests, or the tokens of the answer. The clock is the CPU time of this process with one thread,
because other work on the machine affects CPU time less than wall time. The module bench_scheduler
measures the time of plan, batch building, sampling and commit.
"""

import argparse
import datetime
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from nereid_backend import Engine, EngineConfig, SamplingParams
from transformers.utils import logging

from loadtest.bench import bench, bench_scheduler

DEMO = Path(__file__).parents[2] / "demo" / "chat"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (32, 128, 512, 1024, 2048)
WAITING = (0, 10, 100, 1000, 10_000)
OVERHEAD = (1, 4, 16, 64, 256, 1000)
_CONTEXT = 64  # tokens of context, unless the context is what grows
_ROUNDS = 2

# For each shape: the length of an answer, and the number of sequences that run at once.
ANSWERS = {"demo": (1536, 4), "0.1b": (384, 1)}

Point = dict[str, float]


def main() -> int:
    """Measure the requested shapes, write growth.json, and draw the charts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(ANSWERS), default=list(ANSWERS))
    parser.add_argument(
        "--steps", type=int, default=24, help="number of steps to measure at each point"
    )
    parser.add_argument("--out", type=Path, default=DEMO.parents[1] / "docs" / "history" / "growth")
    parser.add_argument(
        "--charts-only", action="store_true", help="draw the charts from an existing growth.json"
    )
    args = parser.parse_args()
    data = args.out / "growth.json"
    if not args.charts_only:
        torch.set_num_threads(1)
        logging.disable_progress_bar()
        args.out.mkdir(parents=True, exist_ok=True)
        report = json.loads(data.read_text()) if data.exists() else {"shapes": {}}
        for shape in args.shapes:
            report["shapes"][shape] = measure(shape, args.steps)
        report |= {"machine": machine(), "overhead": overhead()}
        data.write_text(json.dumps(report, indent=1) + "\n")
    from loadtest.bench.growth_charts import draw

    draw(json.loads(data.read_text()), args.out)
    return 0


def machine() -> dict[str, str]:
    """Return the date, the processor, the version of torch and the clock."""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "processor": bench.processor(),
        "torch": torch.__version__,
        "clock": "CPU time of the process, one thread",
    }


def overhead() -> dict[int, dict[str, Point]]:
    """Return the time of each part outside the model, for each number of sequences."""
    return {
        count: {
            part: summary(seconds)
            for part, seconds in bench_scheduler.measure(count, 0, 200).items()
        }
        for count in OVERHEAD
    }


def measure(shape: str, steps: int) -> dict[str, dict[int, Point]]:
    """Return the points of every chart for the model shape `shape`."""
    with tempfile.TemporaryDirectory(prefix="nereid-growth-") as folder:
        path = DEMO
        if shape != "demo":
            path = Path(folder) / shape
            bench.make_checkpoint(path, shape, "bfloat16")
        return measure_shape(str(path), shape, steps)


def measure_shape(path: str, shape: str, steps: int) -> dict[str, dict[int, Point]]:
    """Return the points of every chart for the checkpoint at `path`."""
    print_progress(f"{shape}: batch, context, output")
    engine = Engine(EngineConfig(path, num_threads=1, max_model_len=4096, max_num_seqs=64))
    length, num_writing = ANSWERS[shape]
    found = {
        "batch": points(BATCHES, lambda n: decode(engine, n, _CONTEXT, steps)),
        "context": points(CONTEXTS, lambda n: decode(engine, 1, n, steps)),
        "output": output_points(engine, num_writing, length),
    }
    # Measure the same context lengths as prompts, to separate the cost of a long context from the
    # cost of a long answer.
    found["output_as_prompt"] = points(
        [_CONTEXT + at for at in list(found["output"])[::3]],
        lambda n: decode(engine, num_writing, n, steps),
        offset=-_CONTEXT,
    )
    engine.close()
    print_progress(f"{shape}: waiting")
    engine = Engine(
        EngineConfig(
            path, num_threads=1, max_model_len=4096, max_num_seqs=8, max_num_waiting=2 * WAITING[-1]
        )
    )
    found["waiting"] = points(WAITING, lambda n: decode(engine, 8, _CONTEXT, steps, num_waiting=n))
    engine.close()
    return found


def points(
    values: "tuple[int, ...] | list[int]", take: Callable[[int], list[float]], offset: int = 0
) -> dict[int, Point]:
    """Return a summary for each value.

    The values are measured in rounds, so that a busy minute does not affect only one value.
    """
    found: dict[int, list[float]] = {value: [] for value in values}
    for _ in range(_ROUNDS):
        for value in values:
            found[value] += take(value)
    return {value + offset: summary(seconds) for value, seconds in found.items()}


def decode(
    engine: Engine, num_sequences: int, length: int, steps: int, num_waiting: int = 0
) -> list[float]:
    """Return the seconds of `steps` decode steps.

    Args:
        engine: an engine without requests.
        num_sequences: number of running sequences.
        length: number of tokens in each prompt.
        steps: number of decode steps to measure.
        num_waiting: number of further requests that wait during the steps.
    """
    params = SamplingParams(temperature=0.0, max_tokens=steps + 64, ignore_eos=True)
    start(engine, num_sequences, length, params)
    for number in range(num_waiting):
        engine.add_request(f"waits-{number}", prompt_of(engine, number, 16), params)
    seconds = [timed_step(engine) for _ in range(steps)]
    stats = engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (num_sequences, num_waiting)
    for number in reversed(range(num_waiting)):
        engine.abort(f"waits-{number}")
    clear(engine, num_sequences)
    return seconds


def output_points(engine: Engine, num_sequences: int, length: int) -> dict[int, Point]:
    """Return step times along long answers; each point summarises a twelfth of the answer."""
    params = SamplingParams(temperature=0.0, max_tokens=length + 64, ignore_eos=True)
    start(engine, num_sequences, _CONTEXT, params)
    seconds = [timed_step(engine) for _ in range(length)]
    clear(engine, num_sequences)
    span = length // 12
    return {at + span // 2: summary(seconds[at : at + span]) for at in range(0, length, span)}


def start(engine: Engine, num_sequences: int, length: int, params: SamplingParams) -> None:
    """Add requests, run steps until every request has its first token, and run three more."""
    for number in range(num_sequences):
        engine.add_request(f"runs-{number}", prompt_of(engine, number, length), params)
    silent = {f"runs-{number}" for number in range(num_sequences)}
    while silent:
        silent -= {update.request_id for update in engine.step()}
    for _ in range(3):
        engine.step()


def clear(engine: Engine, num_sequences: int) -> None:
    """Abort the running requests."""
    for number in range(num_sequences):
        engine.abort(f"runs-{number}")
    engine.step()
    assert not engine.has_work()


def prompt_of(engine: Engine, number: int, length: int) -> list[int]:
    """Return a random prompt that depends only on `number` and `length`."""
    rng = random.Random(number)
    return [rng.randrange(3, engine.info.vocab_size) for _ in range(length)]


def timed_step(engine: Engine) -> float:
    """Run one step, and return its CPU time in seconds."""
    started = time.process_time()
    engine.step()
    return time.process_time() - started


def summary(seconds: list[float]) -> Point:
    """Return the median, the 10th and the 90th percentile."""
    tenths = statistics.quantiles(seconds, n=10)
    return {"median": statistics.median(seconds), "p10": tenths[0], "p90": tenths[-1]}


def print_progress(name: str) -> None:
    """Print the name of the current measurement."""
    print(name, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
