"""Measure the engine on a model with random weights, as a part of the GPU benchmarks.

    python -m loadtest.gpu.engine_part --shape 8b --settings '{"async_scheduling": true}'
    python -m loadtest.gpu.engine_part --shape 8b --profile         # where the time of steps goes
    python -m loadtest.gpu.engine_part --shape 8b --arrivals        # requests at random times
    python -m loadtest.gpu.engine_part --shape 8b --generate-batch  # transformers instead

Each result is one line of JSON; see lines.py. With the environment variable NEREID_REHEARSE, the
model is tiny and runs on the CPU.
"""

import argparse
import collections
import gc
import itertools
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nereid_backend import Engine, SamplingParams
from nereid_backend.attention.cpu import compile_kernels
from nereid_backend.model import load_weights
from torch.profiler import ProfilerActivity, profile

from loadtest.bench.random_models import SHAPES
from loadtest.bench.random_prompts import random_prompt
from loadtest.command_line import Option, parse_command_line
from loadtest.gpu.lines import LogLines, Rank, emit, report_progress
from loadtest.gpu.random_engine import random_engine, random_model
from loadtest.gpu.step_times import StepTimes

IS_REHEARSAL = bool(os.environ.get("NEREID_REHEARSE"))
# The number of kernels that a profile shows. The kernels with the longest times are shown.
_NUM_KERNELS = 15
# The page size of the KV cache of transformers.
_PAGE_TOKENS = 32
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


_TINY = Sizes(prompts=(64,), context=16, answer=4, batches=(1, 3), rates=(8.0,), seconds=1.0)
OPTIONS = {
    "--shape": Option("0.6b", "shape of the model", SHAPES),
    "--settings": Option("{}", "settings of the engine as JSON"),
    "--fused-norms": Option(False, "use torch's fused RMSNorm"),
    "--profile": Option(False, "show the longest kernels of steps"),
    "--arrivals": Option(False, "measure requests that arrive at random times"),
    "--generate-batch": Option(False, "measure transformers instead"),
}


def main() -> None:
    """Measure what the command line selects."""
    args = parse_command_line(__doc__, OPTIONS)
    logging.getLogger("nereid_backend").addHandler(LogLines())
    logging.getLogger("nereid_backend").setLevel(logging.INFO)
    sizes, shape = (_TINY, "demo") if IS_REHEARSAL else (Sizes(), args.shape)
    dtype = "float32" if IS_REHEARSAL else "bfloat16"
    device = torch.device("cpu" if IS_REHEARSAL else "cuda:0")
    if args.generate_batch:
        measure_generate_batch(shape, dtype, device, sizes)
        return
    measured = Measured(load_engine(args, shape, dtype, device), sizes)
    measured.generate(batch=1, context=16, answer=4)  # the first call is slow
    measured.decode()
    measured.prefill()
    if args.profile:
        measured.profiles()
    if args.arrivals:
        measured.arrivals()
    measured.close()


def load_engine(args: argparse.Namespace, shape: str, dtype: str, device: torch.device) -> Engine:
    """Return an engine with random weights, and print the seconds of the load."""
    settings = {"device": str(device), "num_threads": min(8, os.cpu_count() or 1)}
    if IS_REHEARSAL:
        settings |= prepare_rehearsal()
    settings |= json.loads(args.settings)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = random_engine(
            Path(folder), shape, dtype, report_progress, fused_norms=args.fused_norms, **settings
        )
    seconds = time.perf_counter() - started
    info = engine.info
    text = f"loaded in {seconds:.0f} s"
    emit(Rank.DETAIL, text, stages=info.seconds, attention=info.attention)
    return engine


def prepare_rehearsal() -> dict[str, Any]:
    """Let this process run GPU settings on a CPU, and return the settings of a small engine."""
    # Building the CPU kernels would only make the rehearsal longer.
    compile_kernels.COMPILERS = ()
    # The check would refuse float8 weights on a CPU, but torch can compute their products.
    load_weights._check_weight_dtype = lambda *_: None
    # As on a GPU, weights are not packed. Inductor cannot compile the layout of oneDNN.
    return {"kv_cache_memory": "64MiB", "num_threads": 1, "prepack": False}


@dataclass(slots=True)
class Arrival:
    """A request that arrives at a random time. Times are seconds after the start.

    Attributes:
        due_s: the time of the arrival.
        prompt: the token ids of the prompt.
        token_times: the time of each update with tokens of the answer.
    """

    due_s: float
    prompt: list[int]
    token_times: list[float] = field(default_factory=list)


class Measured:
    """The measurements of one engine."""

    def __init__(self, engine: Engine, sizes: Sizes) -> None:
        """Start to measure the steps of `engine`."""
        self._engine = engine
        self._sizes = sizes
        self._times = StepTimes(engine)
        self._rng = random.Random(0)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def generate(self, batch: int, context: int, answer: int) -> float:
        """Generate `batch` answers of `answer` tokens to random prompts, and return the seconds."""
        prompts = self._prompts(batch, context)
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
            num_replays_before = self._num_replays()
            seconds = self.generate(batch, sizes.context, sizes.answer)
            steps = self._times.medians_ms(batch)
            if steps is None:
                emit(Rank.WRONG, f"{batch} sequences: no pure decode step was measured")
                continue
            rate = batch * sizes.answer / seconds
            num_replays = self._num_replays() - num_replays_before
            emit(
                Rank.VERDICT,
                f"{batch} sequences: a decode step takes {steps['step_ms']:.2f} ms, of which the "
                f"host works {steps['host_ms']:.2f} and launches {steps['forward_ms']:.2f}; "
                f"{batch / steps['step_ms'] * 1e3:.0f} tokens/s in decode, {rate:.0f} with prompts "
                f"of {sizes.context}; {num_replays} replays",
                batch=batch,
                tokens_per_s=rate,
                **steps,
            )

    def prefill(self) -> None:
        """Measure the time to first token of single prompts."""
        for length in self._sizes.prompts:
            self.generate(batch=1, context=length, answer=1)  # the first call is slow
            times = [self.generate(batch=1, context=length, answer=1) for _ in range(3)]
            median_ms = statistics.median(times) * 1e3
            text = f"prompt of {length} tokens: {median_ms:.1f} ms to the first token"
            emit(Rank.VERDICT, text, length=length, milliseconds=median_ms)

    def profiles(self) -> None:
        """Show the longest kernels of decode steps, of a mixed step and of a prompt."""
        sizes = self._sizes
        largest_batch, length = sizes.batches[-1], sizes.prompts[0]
        for batch in (1, largest_batch):
            self._start(batch)
            self._profile(f"8 decode steps of {batch} sequences", self._run_eight_steps)
            self._drain()
        self._start(largest_batch)
        self._engine.add_request("mixed", self._prompts(1, sizes.context)[0], self._params(1))
        self._profile(f"a step of {largest_batch} decodes and a prompt", self._engine.step)
        self._drain()
        self._profile(f"a prompt of {length}", lambda: self.generate(1, length, 1))

    def arrivals(self) -> None:
        """Measure requests that arrive at random times, with prompts of different lengths."""
        for rate in self._sizes.rates:
            answered = [one for one in self._serve(self._arrivals(rate)) if one.token_times]
            first_ms = [(one.token_times[0] - one.due_s) * 1e3 for one in answered]
            gaps_ms = [
                (later - earlier) * 1e3
                for one in answered
                for earlier, later in itertools.pairwise(one.token_times)
            ]
            if not gaps_ms:
                emit(Rank.WRONG, f"{rate:g} requests/s: no request was answered")
                continue
            first_p50, first_p95 = np.percentile(first_ms, (50, 95))
            gap_p50, gap_p99 = np.percentile(gaps_ms, (50, 99))
            emit(
                Rank.VERDICT,
                f"{rate:g} requests/s: time to first token p50 {first_p50:.0f} ms, p95 "
                f"{first_p95:.0f} ms; time between tokens p50 {gap_p50:.1f} ms, p99 "
                f"{gap_p99:.1f} ms",
                rate=rate,
                num_requests=len(answered),
            )

    def _arrivals(self, rate: float) -> list[Arrival]:
        """Return requests that arrive at random times, `rate` requests per second on average."""
        times: list[float] = []
        due_s = self._rng.expovariate(rate)
        while due_s < self._sizes.seconds:
            times.append(due_s)
            due_s += self._rng.expovariate(rate)
        shortest, longest = self._sizes.context // 8, self._sizes.context * 2
        return [
            Arrival(due_s, self._prompts(1, self._rng.randrange(shortest, longest))[0])
            for due_s in times
        ]

    def _serve(self, arrivals: list[Arrival]) -> list[Arrival]:
        """Add each request when it is due, run steps, and return the requests with their times."""
        waiting = collections.deque(enumerate(arrivals))
        params = self._params(self._sizes.answer)
        started = time.perf_counter()
        while waiting or self._engine.has_work():
            now_s = time.perf_counter() - started
            while waiting and waiting[0][1].due_s <= now_s:
                number, arrival = waiting.popleft()
                self._engine.add_request(str(number), arrival.prompt, params)
            if not self._engine.has_work():
                time.sleep(min(0.005, waiting[0][1].due_s - now_s))
                continue
            updates = self._engine.step()
            step_end_s = time.perf_counter() - started
            for update in updates:
                arrivals[int(update.request_id)].token_times.append(step_end_s)
        return arrivals

    def _profile(self, name: str, work: Callable[[], object]) -> None:
        """Print the longest kernels of some work, and the share of each kind of kernel."""
        recorded, seconds = _profiled(work)
        durations_us: dict[str, list[float]] = defaultdict(list)
        for event in recorded.events() or []:
            duration = event.device_time if torch.cuda.is_available() else event.self_cpu_time_total
            durations_us[event.name].append(duration)
        kinds_us: dict[str, float] = defaultdict(float)
        for kernel, durations in durations_us.items():
            kinds_us[_kind_of(kernel)] += sum(durations)
        whole_us = seconds * 1e6
        shares = ", ".join(f"{kind} {us / whole_us:.0%}" for kind, us in sorted(kinds_us.items()))
        gaps = max(0.0, 1 - sum(kinds_us.values()) / whole_us)
        num_calls = sum(map(len, durations_us.values()))
        emit(
            Rank.VERDICT,
            f"{name}: {seconds * 1e3:.2f} ms, {num_calls} kernels; {shares}, gaps {gaps:.0%}",
        )
        longest = sorted(durations_us.items(), key=lambda item: -sum(item[1]))[:_NUM_KERNELS]
        for kernel, durations in longest:
            calls = f"{sum(durations):.0f} us in {len(durations)} calls of {kernel[:90]}"
            emit(Rank.FIGURE, f"{name}: {calls}")

    def _run_eight_steps(self) -> None:
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
        """Run steps until all requests have ended."""
        while self._engine.has_work():
            self._engine.step()

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        vocab_size = self._engine.info.vocab_size
        return [random_prompt(self._rng, vocab_size, length) for _ in range(count)]

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
    vocab_size = model.config.vocab_size
    prompts = [random_prompt(rng, vocab_size, sizes.context) for _ in range(batch)]
    num_tokens = batch * (sizes.context + sizes.answer + 64)
    pages = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=num_tokens // _PAGE_TOKENS + 1,
        max_batch_tokens=max(512, batch),
    )
    generation = GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=sizes.answer
    )
    for run in (1, 2):
        started = time.perf_counter()
        model.generate_batch(
            inputs=prompts, generation_config=generation, continuous_batching_config=pages
        )
        rate = batch * sizes.answer / (time.perf_counter() - started)
        gc.collect()
        emit(
            Rank.VERDICT,
            f"generate_batch of transformers, {batch} sequences, run {run}: {rate:.0f} "
            f"tokens/s with prompts of {sizes.context}",
            tokens_per_s=rate,
        )


def _profiled(work: Callable[[], object]) -> tuple[profile, float]:
    """Run some work. Return the profile of its kernels, and the seconds."""
    has_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU
    if has_gpu:
        torch.cuda.synchronize()
    with profile(activities=[activity]) as recorded:
        started = time.perf_counter()
        work()
        if has_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return recorded, seconds


def _kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    lowered = kernel.lower()
    for kind, names in _KINDS.items():
        if any(name in lowered for name in names):
            return kind
    return "other kernels"


if __name__ == "__main__":
    main()
