"""Measure the time of sampling in a step, by batch size, vocabulary size and sampling parameters.

    python -m loadtest.bench.bench_sampler                      # one thread, float32 logits
    python -m loadtest.bench.bench_sampler --device cuda --dtype bfloat16

Each cell shows the median microseconds of --repeat steps and, in brackets, the ratio to greedy
sampling in the same run. The cases take turns, so that other work on the machine affects the ratios
little. All requests of a batch have the same sampling parameters. The logits are peaked like those
of a trained model: a few tokens have most of the probability. The case "flat" spreads the
probability over thousands of tokens, which is the worst case for top_p. The time to fill grammar
masks is not included, because the engine fills masks during the forward pass.
"""

import argparse
import statistics
import time
from collections.abc import Mapping

import numpy as np
import torch
from nereid_backend import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.sampler import Sampler
from nereid_backend.sampling.token_masks import StepMasks

from loadtest import command_line

CASES: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "random": {},
    "random, top_p 0.9": {"top_p": 0.9},
    "flat, top_p 0.9": {"top_p": 0.9},
    "random, top_k 50": {"top_k": 50},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "greedy, logprobs 20": {"temperature": 0.0, "logprobs": 20},
    "greedy, masks": {"temperature": 0.0},
    "random, masks": {},
}


class Case:
    """A batch of requests with the same sampling parameters."""

    def __init__(self, name: str, batch: int, vocab_size: int, text_len: int) -> None:
        self._sampler = Sampler()
        rng = np.random.default_rng(0)
        self._requests = []
        for row in range(batch):
            prompt = rng.integers(0, vocab_size, text_len).tolist()
            params = SamplingParams(**CASES[name])  # type: ignore[arg-type]
            sequence = Sequence("r", prompt, params, max_total_tokens=10**9, seed=row)
            sequence.row = row
            self._requests.append(sequence)
        self._masks = StepMasks()
        if "masks" in name:
            width = -(-vocab_size // 32)
            words = rng.integers(-(2**31), 2**31, (batch, width)).astype(np.int32)
            self._masks.by_position.update(enumerate(words))

    @torch.inference_mode()
    def step(self, logits: torch.Tensor) -> float:
        """Sample and append one token for each request, and return the microseconds of sampling."""
        # On a CPU, the clock is the CPU time of this thread, because other work on the machine
        # affects CPU time less than wall time.
        clock = time.perf_counter if logits.is_cuda else time.thread_time
        if logits.is_cuda:
            torch.cuda.synchronize()
        started = clock()
        positions = [Position(sequence, []) for sequence in self._requests]
        sampled_tokens = self._sampler.sample(logits, positions, self._masks)
        spent = clock() - started
        for sequence, token_id in zip(self._requests, sampled_tokens.token_ids, strict=True):
            sequence.token_ids.append(token_id)
        return spent * 1e6


def _logits(batch: int, vocab_size: int, args: argparse.Namespace, seed: int) -> torch.Tensor:
    """Return random logits, [batch, vocab_size]. They are peaked if `seed` is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, vocab_size, generator=generator) * 2
    if seed < 2:
        peaks = torch.randint(vocab_size, (batch, 20), generator=generator)
        height = 10 + 10 * torch.rand(batch, 20, generator=generator)
        logits.scatter_(1, peaks, height)
    return logits.to(args.device, args.dtype)


def measure(batch: int, vocab_size: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the median microseconds of a step for each case."""
    variants = [_logits(batch, vocab_size, args, seed) for seed in range(4)]
    cases = {name: Case(name, batch, vocab_size, args.text_len) for name in CASES}
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(args.repeat + 2):
        for name, case in cases.items():
            time_us = case.step(variants[number % 2 + 2 * name.startswith("flat")])
            if number >= 2:
                spent[name].append(time_us)
    return {name: statistics.median(times) for name, times in spent.items()}


def main() -> None:
    """Measure all batch sizes and vocabularies, and print a table."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    sizes = [2048, 32_000, 151_936]
    add("--batches", type=int, nargs="+", default=[1, 16, 64], help="batch sizes")
    add("--vocabs", type=int, nargs="+", default=sizes, help="vocabulary sizes")
    add("--text-len", type=int, default=512, help="tokens of each prompt")
    add("--threads", type=int, default=1, help="number of threads")
    add("--repeat", type=int, default=15, help="number of steps, of which the median counts")
    add("--device", default="cpu", help="device of the logits: cpu or cuda")
    add(
        "--dtype",
        default="float32",
        type=lambda name: getattr(torch, name),
        help="dtype of the logits, such as bfloat16",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"{args.device}, {args.dtype}, {args.threads} threads, prompts of {args.text_len} tokens. "
        "Cells show microseconds and, in brackets, the ratio to greedy sampling."
    )
    print("| vocabulary | batch | " + " | ".join(CASES) + " |")
    print("|---" * (len(CASES) + 2) + "|")
    for vocab_size in args.vocabs:
        for batch in args.batches:
            times = measure(batch, vocab_size, args)
            base = times["greedy"]
            cells = [f"{us:.0f} ({us / base:.1f})" for us in times.values()]
            print(f"| {vocab_size} | {batch} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
