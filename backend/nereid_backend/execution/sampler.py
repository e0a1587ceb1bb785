# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, for all requests of a step at once.

Random numbers do not come from a generator with a state, but from a hash of the request's seed and
of how many tokens it has so far. A request's draws are therefore the same whatever else is in the
batch, and the same again when it is computed a second time after a preemption.

One uniform number picks a token from the cumulated probabilities in vocabulary order: unlike an
order by probability, that one does not change when two nearly equal probabilities swap places.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.core.request import Request
from nereid_backend.core.step import Sampled

# How many of the likeliest tokens are looked at first to find the nucleus of top_p.
_NUCLEUS_GUESS = 16

NOT_FINITE = "the model's logits are not finite numbers; its weights or this dtype may overflow"


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of some requests, one element each.

    Attributes:
        temperature: above 0.
        top_k: 0 is off.
        uniform: [0, 1), the random number of this draw.
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]


def sample(logits: Tensor, requests: list[Request]) -> list[Sampled]:
    """Choose one token for each request.

    Args:
        logits: [num_requests, vocab_size], any float dtype. Not changed.
        requests: whose logits these are, before their new token is appended.

    Returns:
        One Sampled each; one with an error where the logits are not finite.
    """
    logits = logits.float()
    allowed = _without_early_stops(logits, requests)
    token_ids = allowed.argmax(-1)
    random = [i for i, request in enumerate(requests) if not request.params.is_greedy]
    if random:
        batch = _sampling_batch([requests[i] for i in random])
        rows = torch.tensor(random, device=logits.device)
        chosen = draw(allowed if len(random) == len(requests) else allowed[rows], batch)
        token_ids = token_ids.index_copy(0, rows, chosen)
    logprobs = logits.log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)
    finite = logprobs.isfinite()
    return [
        Sampled([token_id], [logprob]) if is_finite else Sampled([], [], NOT_FINITE)
        for token_id, logprob, is_finite in zip(
            token_ids.tolist(), logprobs.tolist(), finite.tolist(), strict=True
        )
    ]


def draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one token a row: temperature, then min_p, top_k and top_p, then the random number.

    Shapes: logits [n, vocab_size] float32; returns [n] int64. Rows of logits that are not finite
    give any token.
    """
    device = logits.device

    def column(values: NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)[:, None]

    probs = (logits / column(batch.temperature)).softmax(-1)
    if batch.min_p.any():
        floor = probs.amax(-1, keepdim=True) * column(batch.min_p)
        probs = probs.masked_fill(probs < floor, 0.0)
    vocab_size = logits.shape[-1]
    needs_top_k = (batch.top_k > 0) & (batch.top_k < vocab_size)
    if needs_top_k.any():
        rows = torch.from_numpy(needs_top_k.nonzero()[0]).to(device)
        kept = _keep_top_k(probs[rows], column(batch.top_k[needs_top_k]))
        probs = probs.index_copy(0, rows, kept)
    needs_top_p = batch.top_p < 1
    if needs_top_p.any():
        rows = torch.from_numpy(needs_top_p.nonzero()[0]).to(device)
        kept = _keep_top_p(probs[rows], column(batch.top_p[needs_top_p]))
        probs = probs.index_copy(0, rows, kept)
    cumulated = probs.cumsum(-1)
    total = cumulated[:, -1:]
    target = (column(batch.uniform) * total.double()).float()
    # Rounding may reach the total itself, after which there is no token.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, target, right=True).squeeze(1)
    return index.clamp_(max=vocab_size - 1)


def uniform_numbers(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each seed and counter, always the same for the same pair.

    Source: the output function of SplitMix64 (Steele, Lea, Flood 2014), applied to the seed's hash
    plus the counter's multiple of the golden gamma.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix64(_mix64(seeds + gamma) + (counters + np.uint64(1)) * gamma)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _sampling_batch(requests: list[Request]) -> SamplingBatch:
    params = [request.params for request in requests]
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    counters = np.array([request.num_output_tokens for request in requests], dtype=np.uint64)
    return SamplingBatch(
        temperature=np.array([p.temperature for p in params], dtype=np.float32).clip(min=1e-6),
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        top_k=np.array([max(0, p.top_k) for p in params], dtype=np.int64),
        min_p=np.array([p.min_p for p in params], dtype=np.float32),
        uniform=uniform_numbers(seeds, counters),
    )


def _without_early_stops(logits: Tensor, requests: list[Request]) -> Tensor:
    """Logits with the stop tokens of requests below their min_tokens put out of reach."""
    rows: list[int] = []
    columns: list[int] = []
    for row, request in enumerate(requests):
        if request.num_output_tokens < request.params.min_tokens:
            stops = [token_id for token_id in request.stop_token_ids if token_id < logits.shape[1]]
            rows += [row] * len(stops)
            columns += stops
    if not rows:
        return logits
    index = (
        torch.tensor(rows, device=logits.device),
        torch.tensor(columns, device=logits.device),
    )
    return logits.index_put(index, logits.new_tensor(float("-inf")))


def _keep_top_k(probs: Tensor, top_k: Tensor) -> Tensor:
    """Zero all but the top_k [n, 1] largest of each row; ties with the last one stay."""
    largest = probs.topk(int(top_k.max()), dim=-1).values
    return probs.masked_fill(probs < largest.gather(1, top_k - 1), 0.0)


def _keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the nucleus of each row; ties with its last token stay.

    A nucleus is mostly a few tokens, which are found faster than a vocabulary is sorted; only rows
    whose few likeliest tokens do not reach top_p are sorted.
    """
    target = top_p * probs.sum(-1, keepdim=True)
    likeliest = probs.topk(min(_NUCLEUS_GUESS, probs.shape[-1]), dim=-1).values
    threshold, is_reached = _nucleus(likeliest, target)
    rows = (~is_reached).nonzero().squeeze(1)
    if len(rows) > 0:
        threshold[rows], _ = _nucleus(_sorted_descending(probs[rows]), target[rows])
    return probs.masked_fill(probs < threshold, 0.0)


def _nucleus(largest: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The least probability [n, 1] in each row's nucleus, and whether largest holds it whole."""
    reached = largest.cumsum(-1)
    # A token belongs to the nucleus when those before it do not reach the target.
    size = (reached - largest < target).sum(-1, keepdim=True).clamp_(min=1)
    return largest.gather(1, size - 1), (reached[:, -1:] >= target).squeeze(1)


def _sorted_descending(probs: Tensor) -> Tensor:
    if probs.device.type != "cpu":
        return probs.sort(dim=-1, descending=True).values
    # numpy sorts with vector instructions, more than ten times as fast as torch on a CPU.
    return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
