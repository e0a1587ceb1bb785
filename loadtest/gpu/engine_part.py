"""Measure the engine on a model with random weights, as a part of the GPU benchmarks.

    python -m loadtest.gpu.engine_part --shape 8b --settings '{"async_scheduling": true}'
    python -m loadtest.gpu.engine_part --shape 8b --profile         # where the time of steps goes
    python -m loadtest.gpu.engine_part --shape 8b --arrivals        # requests at random times
    python -m loadtest.gpu.engine_part --shape 8b --generate-batch  # transformers instead

Each result is one line of JSON; see lines.py. With the environment variable NEREID_REHEARSE, the
model is tiny and runs on the CPU.
"""

import argparse
import gc
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nereid_backend import Engine, SamplingParams
from nereid_backend.attention.cpu import compile_kernels
from nereid_backend.model import load_weights
from torch.profiler import ProfilerActivity, profile

from loadtest import command_line
from loadtest.bench.random_models import SHAPES
from loadtest.gpu.lines import LogLines, Rank, emit, report_progress
from loadtest.gpu.random_engine import random_engine, random_model
from loadtest.gpu.step_times import StepTimes

IS_REHEARSAL = bool(os.environ.get("NEREID_REHEARSE"))
# The number of kernels that a profile shows. The kernels with the longest times are shown.
_NUM_KERNELS = 15
# For each kind of kernel, some texts that occur in the names of the kernels.
_KINDS = {
    "attention": ("decode_kernel", "prefill_kernel", "reduce_kernel", "store_kernel", "flash"),
    "matrix products": ("gemm", "gemv", "cutlass", "nvjet", "xmma", "splitk"),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
        prompts: the lengths of the prompts whose time to first token is measured.
        context: the tokens of each prompt before decode.
        answer: the tokens of each answer.
        batches: the numbers of sequences that decode together.
        rates: the mean numbers of requests per second. The requests arrive at random times.
        seconds: the duration of the arrivals.
    """

    prompts: tuple[int, ...] = (2048, 4096)
    context: int = 512
    answer: int = 64
    batches: tuple[int, ...] = (1, 64, 256)
    rates: tuple[float, ...] = (8.0, 24.0)
    seconds: float = 15.0


_TINY = Sizes((64,), 16, 4, (1, 3), (8.0,), 1.0)


def main() -> None:
    """Measure what the command line selects."""
    args = arguments().parse_args()
    logging.getLogger("nereid_backend").addHandler(LogLines())
    logging.getLogger("nereid_backend").setLevel(logging.INFO)
    sizes, shape = (_TINY, "demo") if IS_REHEARSAL else (Sizes(), args.shape)
    dtype = "float32" if IS_REHEARSAL else "bfloat16"
    device = torch.device("cpu" if IS_REHEARSAL else "cuda:0")
    if args.generate_batch:
        measure_generate_batch(shape, dtype, device, sizes)
        return
    settings = {"device": str(device), "num_threads": min(8, os.cpu_count() or 1)}
    if IS_REHEARSAL:
        # A rehearsal tests this program. Building the CPU kernels would only make the rehearsal
        # longer.
        compile_kernels.COMPILERS = ()
        # As on a GPU, weights are not packed. Inductor cannot compile the layout of oneDNN.
        settings |= {"kv_cache_memory": "64MiB", "num_threads": 1, "prepack": False}
        # The check would refuse float8 weights on a CPU, but torch can compute their products.
        load_weights._check_weight_dtype = lambda *_: None
    settings |= json.loads(args.settings)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = random_engine(
            Path(folder), shape, dtype, report_progress, fused_norms=args.fused_norms, **settings
        )
    measured = Measured(engine, sizes)
    emit(
        Rank.DETAIL,
        f"loaded in {time.perf_counter() - started:.0f} s",
        stages=engine.info.seconds,
        attention=engine.info.attention,
    )
    measured.generate(1, 16, 4)
    measured.decode()
    measured.prefill()
    if args.profile:
        measured.profiles()
    if args.arrivals:
        measured.arrivals()
    engine.close()


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b", help="shape of the model")
    parser.add_argument("--settings", default="{}", help="settings of the engine as JSON")
    parser.add_argument("--fused-norms", action="store_true", help="use torch's fused RMSNorm")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--arrivals", action="store_true")
    parser.add_argument("--generate-batch", action="store_true")
    return parser


class Measured:
    """The measurements of one engine."""

    def __init__(self, engine: Engine, sizes: Sizes) -> None:
        """Start to measure the steps of `engine`."""
        self._engine = engine
        self._sizes = sizes
        self._times = StepTimes(engine)
        self._rng = random.Random(0)

    def generate(self, count: int, context: int, answer: int) -> float:
        """Generate answers for `count` random prompts, and return the seconds."""
        prompts = self._prompts(count, context)
        started = time.perf_counter()
        outputs = self._engine.generate(prompts, self._params(answer))
        assert all(len(output.outputs[0].token_ids) == answer for output in outputs)
        return time.perf_counter() - started

    def decode(self) -> None:
        """Measure decode steps with each number of sequences."""
        sizes = self._sizes
        for batch in sizes.batches:
            # The first run compiles kernels and captures graphs.
            self.generate(batch, sizes.context, sizes.answer)
            self._times.spent.clear()
            before = self._num_replays()
            whole = self.generate(batch, sizes.context, sizes.answer)
            steps = self._times.summary([batch]).get(str(batch))
            rate = batch * sizes.answer / whole
            if steps is None:
                emit(Rank.WRONG, f"{batch} sequences: no pure decode step was measured")
                continue
            emit(
                Rank.VERDICT,
                f"{batch} sequences: a decode step takes {steps['step_ms']:.2f} ms, of which the "
                f"host works {steps['host_ms']:.2f} and launches {steps['forward_ms']:.2f}; "
                f"{batch / steps['step_ms'] * 1e3:.0f} tokens/s in decode, {rate:.0f} with prompts "
                f"of {sizes.context}; {self._num_replays() - before} replays",
                batch=batch,
                tokens_per_s=rate,
                **steps,
            )

    def prefill(self) -> None:
        """Measure the time to first token of single prompts."""
        for length in self._sizes.prompts:
            times = [self.generate(1, length, 1) for _ in range(4)][1:]
            emit(
                Rank.VERDICT,
                f"prompt of {length} tokens: {statistics.median(times) * 1e3:.1f} ms to the first "
                "token",
                length=length,
                milliseconds=statistics.median(times) * 1e3,
            )

    def profiles(self) -> None:
        """Show the longest kernels of decode steps, of a mixed step and of a prompt."""
        sizes = self._sizes
        most = sizes.batches[-1]
        prompt = sizes.prompts[0]
        for batch in (1, most):
            self._start(batch)
            self._profile(f"8 decode steps of {batch} sequences", self._eight_steps)
            self._drain()
        self._start(most)
        self._engine.add_request("mixed", self._prompts(1, sizes.context)[0], self._params(1))
        self._profile(f"a step of {most} decodes and a prompt", self._engine.step)
        self._drain()
        self._profile(f"a prompt of {prompt}", lambda: self.generate(1, prompt, 1))

    def arrivals(self) -> None:
        """Measure requests that arrive at random times, with prompts of different lengths."""
        for rate in self._sizes.rates:
            first, gaps = self._serve(rate)
            if not first or not gaps:
                emit(Rank.WRONG, f"{rate:g} requests/s: no request was answered")
                continue
            emit(
                Rank.VERDICT,
                f"{rate:g} requests/s: time to first token p50 {_quantile(first, 0.5):.0f} ms, p95 "
                f"{_quantile(first, 0.95):.0f} ms; time between tokens p50 "
                f"{_quantile(gaps, 0.5):.1f} ms, p99 {_quantile(gaps, 0.99):.1f} ms",
                rate=rate,
                num_requests=len(first),
            )

    def _serve(self, rate: float) -> tuple[list[float], list[float]]:
        """Serve arrivals. Return the milliseconds to first tokens and between later tokens."""
        sizes = self._sizes
        times: list[float] = []
        now = 0.0
        while (now := now + self._rng.expovariate(rate)) < sizes.seconds:
            times.append(now)
        prompts = [
            self._prompts(1, self._rng.randrange(sizes.context // 8, sizes.context * 2))[0]
            for _ in times
        ]
        begun = time.perf_counter()
        last: dict[str, float] = {}
        first: list[float] = []
        gaps: list[float] = []
        index = 0
        while index < len(times) or self._engine.has_work():
            now = time.perf_counter() - begun
            while index < len(times) and times[index] <= now:
                params = self._params(sizes.answer)
                self._engine.add_request(str(index), prompts[index], params)
                index += 1
            if not self._engine.has_work():
                time.sleep(min(0.005, times[index] - now))
                continue
            updates = self._engine.step()
            now = time.perf_counter() - begun
            for update in updates:
                name = update.request_id
                if name in last:
                    gaps.append((now - last[name]) * 1e3)
                else:
                    first.append((now - times[int(name)]) * 1e3)
                last[name] = now
        return first, gaps

    def _profile(self, name: str, work: Callable[[], object]) -> None:
        """Print the longest kernels of some work, and the share of each kind of kernel."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities = [ProfilerActivity.CUDA]
            torch.cuda.synchronize()
        with profile(activities=activities) as recorded:
            started = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            whole_us = (time.perf_counter() - started) * 1e6
        spent: dict[str, list[float]] = defaultdict(list)
        for event in recorded.events() or []:
            duration = event.device_time if torch.cuda.is_available() else event.self_cpu_time_total
            spent[event.name].append(duration)
        kinds: dict[str, float] = defaultdict(float)
        for kernel, durations in spent.items():
            kinds[_kind_of(kernel)] += sum(durations)
        busy_us = sum(kinds.values())
        shares = ", ".join(f"{kind} {part / whole_us:.0%}" for kind, part in sorted(kinds.items()))
        gaps = max(0.0, 1 - busy_us / whole_us)
        emit(
            Rank.VERDICT,
            f"{name}: {whole_us / 1e3:.2f} ms, {sum(map(len, spent.values()))} kernels; {shares}, "
            f"gaps {gaps:.0%}",
        )
        longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:_NUM_KERNELS]
        for kernel, durations in longest:
            emit(
                Rank.FIGURE,
                f"{name}: {sum(durations):.0f} us in {len(durations)} calls of {kernel[:90]}",
            )

    def _eight_steps(self) -> None:
        for _ in range(8):
            self._engine.step()

    def _start(self, batch: int) -> None:
        """Add requests, and run the steps that compute their prompts."""
        for number, prompt in enumerate(self._prompts(batch, self._sizes.context)):
            self._engine.add_request(f"p{number}", prompt, self._params(4 * self._sizes.answer))
        num_running = 0
        while num_running < batch:
            num_running = len(self._engine.step())

    def _drain(self) -> None:
        while self._engine.has_work():
            self._engine.step()

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        vocab = self._engine.info.vocab_size
        return [[self._rng.randrange(3, vocab) for _ in range(length)] for _ in range(count)]

    def _params(self, answer: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)

    def _num_replays(self) -> int:
        graphs: Any = getattr(self._engine._parts.runner._path, "graphs", None)
        return 0 if graphs is None else int(graphs.num_replays)


def measure_generate_batch(shape: str, dtype: str, device: torch.device, sizes: Sizes) -> None:
    """Measure the continuous batching of transformers on the same model."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model: Any = random_model(shape, getattr(torch, dtype), device, "sdpa")
    rng = random.Random(0)
    batch = sizes.batches[-1]
    prompts = [
        [rng.randrange(3, model.config.vocab_size) for _ in range(sizes.context)]
        for _ in range(batch)
    ]
    tokens = batch * (sizes.context + sizes.answer + 64)
    pages = ContinuousBatchingConfig(
        page_size=32, num_blocks=tokens // 32 + 1, max_batch_tokens=max(512, batch)
    )
    for attempt in range(2):
        started = time.perf_counter()
        generation = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=sizes.answer
        )
        model.generate_batch(
            inputs=prompts, generation_config=generation, continuous_batching_config=pages
        )
        rate = batch * sizes.answer / (time.perf_counter() - started)
        gc.collect()
        emit(
            Rank.VERDICT,
            f"generate_batch of transformers, {batch} sequences, run {attempt + 1}: {rate:.0f} "
            f"tokens/s with prompts of {sizes.context}",
            tokens_per_s=rate,
        )


def _kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    lowered = kernel.lower()
    for kind, names in _KINDS.items():
        if any(name in lowered for name in names):
            return kind
    return "other kernels"


def _quantile(values: list[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
