"""Microseconds that sampling takes of a step, by batch size, vocabulary and what requests ask for.

    python -m loadtest.bench.bench_sampler                      # one thread, float32 logits
    python -m loadtest.bench.bench_sampler --device cuda --dtype bfloat16

Each figure is the median of --repeat steps, which alternate between the cases so that what else
runs on the machine counts little; in brackets its ratio to greedy in the same run. Every request of
a batch asks for the same. Logits are peaked as those of a trained model: a few tokens have most of
the probability. "flat" ones spread it over thousands, the worst case for top_p. Masks are there
already: filling them runs beside the forward pass.
"""

import argparse
import statistics
import time
from collections.abc import Mapping

import numpy as np
import torch
from nereid_backend import SamplingParams
from nereid_backend.core.request import Request
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.sampler import Sampler
from nereid_backend.sampling.token_masks import StepMasks

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
    """One kind of request, a batch of them."""

    def __init__(self, name: str, batch: int, vocab_size: int, text_len: int) -> None:
        self._sampler = Sampler()
        rng = np.random.default_rng(0)
        self._requests = []
        for row in range(batch):
            prompt = rng.integers(0, vocab_size, text_len).tolist()
            params = SamplingParams(**CASES[name])  # type: ignore[arg-type]
            request = Request("r", prompt, params, max_total_tokens=10**9, seed=row)
            request.row = row
            self._requests.append(request)
        self._masks = StepMasks()
        if "masks" in name:
            width = -(-vocab_size // 32)
            words = rng.integers(-(2**31), 2**31, (batch, width)).astype(np.int32)
            self._masks.words.update(enumerate(words))

    @torch.inference_mode()
    def step(self, logits: torch.Tensor) -> float:
        """Sample one token for each request and append it; returns microseconds."""
        # On a CPU the time of this thread alone: others on the machine count less.
        clock = time.perf_counter if logits.is_cuda else time.thread_time
        if logits.is_cuda:
            torch.cuda.synchronize()
        started = clock()
        positions = [Position(request, []) for request in self._requests]
        sampled_tokens = self._sampler.sample(logits, positions, self._masks)
        spent = clock() - started
        for request, token_id in zip(self._requests, sampled_tokens.token_ids, strict=True):
            request.token_ids.append(token_id)
        return spent * 1e6


def _logits(batch: int, vocab_size: int, args: argparse.Namespace, seed: int) -> torch.Tensor:
    """[batch, vocab_size], the first two seeds peaked."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, vocab_size, generator=generator) * 2
    if seed < 2:
        peaks = torch.randint(vocab_size, (batch, 20), generator=generator)
        height = 10 + 10 * torch.rand(batch, 20, generator=generator)
        logits.scatter_(1, peaks, height)
    return logits.to(args.device, args.dtype)


def measure(batch: int, vocab_size: int, args: argparse.Namespace) -> dict[str, float]:
    """Median microseconds of a step by case."""
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
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocabs", type=int, nargs="+", default=[2048, 32_000, 151_936])
    parser.add_argument("--text-len", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", type=lambda name: getattr(torch, name))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.device}, {args.dtype}, {args.threads} threads, texts of {args.text_len} tokens")
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
