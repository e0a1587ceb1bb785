"""Measure the time of sampling for several batch sizes, vocabularies and sampling parameters.

    python -m loadtest.bench.bench_sampler --batches 16 --vocabs 151936

Each cell shows the median microseconds of --repeat steps and, in brackets, the ratio to greedy
sampling in the same run. In each step, all cases are measured one after the other, so that other
work on the machine affects the ratios little. All requests of a batch have the same sampling
parameters. In most cases, a few tokens have most of the probability, as in a trained model. In the
case "flat", the probability is spread over thousands of tokens, which is the worst case for top_p.
The time to fill grammar masks is not included, because the engine fills masks during the forward
pass.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from nereid_backend import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.sampler import Sampler
from nereid_backend.sampling.token_masks import StepMasks

from loadtest.bench.markdown_table import print_table
from loadtest.command_line import Option, parse_command_line

_NUM_WARM_UPS = 2
_NO_LIMIT = 10**9

_OPTIONS = {
    "--batches": Option([1, 16, 64], "batch sizes"),
    "--vocabs": Option([2048, 32_000, 151_936], "vocabulary sizes"),
    "--text-len": Option(512, "tokens of each prompt"),
    "--threads": Option(1, "number of threads"),
    "--repeat": Option(15, "number of steps, of which the median counts"),
}


class Case(NamedTuple):
    """A kind of batch, whose requests all have the same fields of `SamplingParams`."""

    params: Mapping[str, float]
    has_masks: bool = False  # whether each request has a grammar mask
    has_peaks: bool = True  # whether a few tokens have most of the probability


_GREEDY = {"temperature": 0.0}
CASES = {
    "greedy": Case(_GREEDY),
    "random": Case({}),
    "random, top_p 0.9": Case({"top_p": 0.9}),
    "flat, top_p 0.9": Case({"top_p": 0.9}, has_peaks=False),
    "random, top_k 50": Case({"top_k": 50}),
    "greedy, penalties": Case({**_GREEDY, "repetition_penalty": 1.1, "presence_penalty": 0.5}),
    "greedy, logprobs 20": Case({**_GREEDY, "logprobs": 20}),
    "greedy, masks": Case(_GREEDY, has_masks=True),
    "random, masks": Case({}, has_masks=True),
}


class Batch:
    """The requests of one case, and a sampler for them."""

    def __init__(self, case: Case, size: int, vocab_size: int, prompt_length: int) -> None:
        self._sampler = Sampler()
        self._masks = StepMasks()
        rng = np.random.default_rng(0)
        params = SamplingParams(**case.params)  # type: ignore[arg-type]
        self._requests = []
        for row in range(size):
            prompt = rng.integers(0, vocab_size, prompt_length).tolist()
            sequence = Sequence("r", prompt, params, max_total_tokens=_NO_LIMIT, seed=row)
            sequence.row = row
            self._requests.append(sequence)
        if case.has_masks:
            self._masks.by_position.update(enumerate(random_masks(rng, size, vocab_size)))

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor) -> float:
        """Sample and append one token for each request, and return the microseconds of sampling.

        The clock is the CPU time of this thread, because other work on the machine affects CPU time
        less than wall time.
        """
        positions = [Position(sequence, []) for sequence in self._requests]
        started = time.thread_time()
        sampled = self._sampler.sample(logits, positions, self._masks)
        spent_s = time.thread_time() - started
        for sequence, token_id in zip(self._requests, sampled.token_ids, strict=True):
            sequence.token_ids.append(token_id)
        return spent_s * 1e6


def random_masks(rng: np.random.Generator, size: int, vocab_size: int) -> "np.ndarray[Any, Any]":
    """Return masks that allow about half of the tokens, [size, words], one bit for each token."""
    num_words = math.ceil(vocab_size / 32)
    return rng.integers(-(2**31), 2**31, (size, num_words)).astype(np.int32)


def random_logits(batch_size: int, vocab_size: int, *, has_peaks: bool, seed: int) -> torch.Tensor:
    """Return random logits, [batch_size, vocab_size].

    If `has_peaks` is true, 20 tokens in each row are much more likely than the other tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch_size, vocab_size, generator=generator) * 2
    if has_peaks:
        token_ids = torch.randint(vocab_size, (batch_size, 20), generator=generator)
        heights = 10 + 10 * torch.rand(batch_size, 20, generator=generator)
        logits.scatter_(1, token_ids, heights)
    return logits


def measure(batch_size: int, vocab_size: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the median time of sampling in one step, in microseconds, for each case."""
    # Two tensors of logits alternate, because the logits of a model change from step to step.
    peaked = [random_logits(batch_size, vocab_size, has_peaks=True, seed=seed) for seed in (0, 1)]
    flat = [random_logits(batch_size, vocab_size, has_peaks=False, seed=seed) for seed in (2, 3)]
    batches = {
        name: Batch(case, batch_size, vocab_size, args.text_len) for name, case in CASES.items()
    }
    spent_us: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(_NUM_WARM_UPS + args.repeat):
        for name, batch in batches.items():
            logits = peaked if CASES[name].has_peaks else flat
            spent_us[name].append(batch.sample(logits[number % 2]))
    return {name: statistics.median(times[_NUM_WARM_UPS:]) for name, times in spent_us.items()}


def row(vocab_size: int, batch_size: int, args: argparse.Namespace) -> list[str]:
    """Measure all cases with one batch size and vocabulary, and return a row of the table."""
    times = measure(batch_size, vocab_size, args)
    cells = [f"{spent:.0f} ({spent / times['greedy']:.1f})" for spent in times.values()]
    return [str(vocab_size), str(batch_size), *cells]


def main() -> None:
    """Measure all batch sizes and vocabularies, and print a table."""
    args = parse_command_line(__doc__, _OPTIONS)
    torch.set_num_threads(args.threads)
    print(
        f"{args.threads} threads, prompts of {args.text_len} tokens. "
        "Cells show microseconds and, in brackets, the ratio to greedy sampling."
    )
    pairs = itertools.product(args.vocabs, args.batches)
    rows = (row(vocab_size, batch_size, args) for vocab_size, batch_size in pairs)
    print_table(["vocabulary", "batch", *CASES], rows)


if __name__ == "__main__":
    main()
