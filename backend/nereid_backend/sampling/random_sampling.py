# SPDX-License-Identifier: Apache-2.0
"""Random sampling: temperature, min_p, top_k and top_p, followed by a random number.

The random numbers do not come from a generator with state. Each one is a hash of the request's seed
and of the number of tokens in its output. A request therefore gets the same random numbers whatever
other requests run beside it, and again when it is computed a second time after a preemption.

One uniform number selects a token from the cumulative probabilities in the order of the vocabulary.
That order does not change when two nearly equal probabilities swap their ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.device_transfer import upload
from nereid_backend.sampling import native_logits
from nereid_backend.sampling.draft_verification import Position

Numbers = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int64]

# The numbers of likeliest tokens that usually include all tokens that top_k and top_p leave. The
# second number applies if uncertain rows are deferred, that is on a GPU: reading more tokens is
# cheap there, but a step that was computed with a wrong token is lost.
_LIKELIEST, _LIKELIEST_DEFERRED = 64, 512
# The second attempt for rows with a flat distribution: the CPU kernel finds this many tokens in a
# third of the time that sorting all tokens takes. The attempt is worthwhile only if the first
# tokens hold at least the share _LEAST_HELD of the probability.
_LIKELIEST_UNSURE, _LEAST_HELD = 2048, 0.4

# Rows of at least _MIN_BLOCKS blocks of _BLOCK tokens are searched block by block.
_BLOCK, _MIN_BLOCKS = 512, 32


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of some positions, one element for each.

    Attributes:
        temperature: greater than 0.
        top_p: see `SamplingParams`.
        top_k: 0 turns the filter off.
        min_p: see `SamplingParams`.
        uniform: the random number of the position, in [0, 1).
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]

    @classmethod
    def of(cls, positions: Sequence[Position]) -> "SamplingBatch":
        """Return the sampling parameters and random numbers of some positions."""
        params = [position.request.params for position in positions]
        seeds = np.array([position.request.seed for position in positions], dtype=np.uint64)
        counters = np.array([position.num_output_tokens for position in positions], dtype=np.uint64)
        return cls(
            temperature=np.array([p.temperature for p in params], dtype=np.float32).clip(min=1e-6),
            top_p=np.array([p.top_p for p in params], dtype=np.float32),
            top_k=np.array([max(0, p.top_k) for p in params], dtype=np.int64),
            min_p=np.array([p.min_p for p in params], dtype=np.float32),
            uniform=uniform_numbers(seeds, counters),
        )

    def rows(self, index: NDArray[np.int64]) -> "SamplingBatch":
        """Return the elements at `index`."""
        return SamplingBatch(
            self.temperature[index],
            self.top_p[index],
            self.top_k[index],
            self.min_p[index],
            self.uniform[index],
        )


class UncertainRows(NamedTuple):
    """Rows that may have been sampled from too few tokens.

    Attributes:
        rows: the indices of the rows.
        is_known: [len(rows)] bool, on the device. False if the row must be sampled again.
    """

    rows: NDArray[np.int64]
    is_known: Tensor


def draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one random token for each row.

    Temperature is applied first, then min_p, top_k and top_p, then the random number.

    Args:
        logits: [n, vocab_size], any float dtype. A row that is not finite gives an arbitrary token.
        batch: the sampling parameters of the rows.

    Returns:
        Token ids [n] int64.
    """
    return draw_or_defer(logits, batch, defers=False)[0]


def draw_or_defer(
    logits: Tensor, batch: SamplingBatch, *, defers: bool
) -> tuple[Tensor, UncertainRows | None]:
    """Draw one random token for each row; see `draw`.

    Args:
        logits: [n, vocab_size], any float dtype.
        batch: the sampling parameters of the rows.
        defers: whether the caller samples uncertain rows again. If not, no row is uncertain.

    Returns:
        Token ids [n] int64, and the uncertain rows, if any.
    """
    is_cut = (batch.top_k > 0) & (batch.top_k < logits.shape[1])
    is_filtered = is_cut | (batch.top_p < 1) | (batch.min_p > 0)
    if not is_filtered.any():
        return _draw_unfiltered(logits, batch), None
    rows = np.flatnonzero(is_filtered)
    if is_filtered.all():
        token_ids, is_known = _draw_filtered(logits, batch, defers=defers)
        return token_ids, None if is_known is None else UncertainRows(rows, is_known)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    index = upload(rows, logits.device)
    drawn, is_known = _draw_filtered(logits[index], batch.rows(rows), defers=defers)
    token_ids[index] = drawn
    others = np.flatnonzero(~is_filtered)
    index = upload(others, logits.device)
    token_ids[index] = _draw_unfiltered(logits[index], batch.rows(others))
    return token_ids, None if is_known is None else UncertainRows(rows, is_known)


def _draw_unfiltered(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw from rows that have no filter."""
    if native_logits.can_read(logits):
        return native_logits.draw(logits, batch.temperature, batch.uniform)
    return _pick(_probs(logits, batch), batch)


def _probs(logits: Tensor, batch: SamplingBatch) -> Tensor:
    return (logits.float() / _column(batch.temperature, logits)).softmax(-1)


def _draw_filtered(
    logits: Tensor, batch: SamplingBatch, *, defers: bool
) -> tuple[Tensor, Tensor | None]:
    """Draw from rows with top_k, top_p or min_p, which usually leave only a few tokens.

    The tokens that remain are looked for among the likeliest tokens of a row. A row for which
    these may not be enough is either sampled from all tokens, or left to the caller if `defers`.

    Returns:
        Token ids [n] int64. If `defers`, also [n] bool, which is False where the caller must sample
        again.
    """
    if defers:
        chosen, is_known, _ = _draw_from_likeliest(logits, batch, _LIKELIEST_DEFERRED)
        return chosen, is_known
    chosen, is_known, held = _draw_from_likeliest(logits, batch, _LIKELIEST)
    if native_logits.can_read(logits):
        rows = (~is_known & (held >= _LEAST_HELD)).nonzero().squeeze(1)
        if len(rows) > 0:
            some = batch.rows(rows.numpy())
            found = _draw_from_likeliest(logits[rows], some, _LIKELIEST_UNSURE)
            chosen[rows], is_known[rows], _ = found
    rows = (~is_known).nonzero().squeeze(1)
    if len(rows) > 0:
        some = batch.rows(rows.cpu().numpy())
        chosen[rows] = _draw_from_all(_probs(logits[rows], some), some)
    return chosen, None


def _draw_from_likeliest(
    logits: Tensor, batch: SamplingBatch, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from the `width` likeliest tokens of each row.

    Returns:
        Token ids [n] int64; whether the filters leave only tokens among the likeliest, [n] bool;
        and the total probability of the likeliest tokens, [n] float32.
    """
    width = min(width, logits.shape[1])
    if native_logits.can_read(logits):
        values, token_ids = native_logits.likeliest(logits, batch.temperature, width)
        token_ids.clamp_(min=0)  # missing tokens have the id -1 and no weight, but are indexed
    else:
        values, token_ids = _probs(logits, batch).topk(width, dim=-1)
    top_k, top_p = _column(batch.top_k, values), _column(batch.top_p, values)
    kth = values.gather(1, top_k.clamp(1, width) - 1)
    cut = torch.maximum(
        torch.where((top_k > 0) & (top_k <= width), kth, 0),
        values[:, :1] * _column(batch.min_p, values),
    )
    kept = values * (values >= cut)
    # top_p is a share of `total`: of all tokens if the other filters cut nothing, else of the
    # remaining tokens. That total is known only if the cut lies within the likeliest tokens. The
    # nucleus is known only if its end lies within them.
    total = torch.where(cut > 0, kept.sum(-1, keepdim=True), 1.0)
    is_known = ((cut == 0) & (top_k <= 0)) | (values[:, -1:] < cut)
    size = (kept.cumsum(-1) - kept < top_p * total).sum(-1, keepdim=True).clamp_(min=1)
    threshold = torch.where(top_p < 1, torch.maximum(kept.gather(1, size - 1), cut), cut)
    # Tokens as likely as the last one are kept, so all of these must be among the likeliest.
    is_known &= values[:, -1:] < threshold
    token_ids, order = token_ids.sort(dim=-1)
    kept = (kept * (kept >= threshold)).gather(1, order)
    chosen = token_ids.gather(1, _pick(kept, batch)[:, None]).squeeze(1)
    return chosen, is_known.squeeze(1), values.sum(-1)


def _draw_from_all(probs: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw from all tokens of each row, after min_p, top_k and top_p."""
    vocab_size = probs.shape[1]
    if batch.min_p.any():
        floor = probs.amax(-1, keepdim=True) * _column(batch.min_p, probs)
        probs = probs.masked_fill(probs < floor, 0.0)
    needs_top_k = (batch.top_k > 0) & (batch.top_k < vocab_size)
    if needs_top_k.any():
        probs = _filter_rows(probs, needs_top_k, _keep_top_k, batch.top_k)
    needs_top_p = batch.top_p < 1
    if needs_top_p.any():
        probs = _filter_rows(probs, needs_top_p, _keep_top_p, batch.top_p)
    return _pick(probs, batch)


def _pick(weights: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the index at which each row's random number falls among its cumulative weights.

    A wide row is divided into blocks. The sums of the blocks are cumulated first and then one
    block, which is faster than cumulating the whole row.

    Args:
        weights: [n, width], not negative.
        batch: the sampling parameters, of which only the random numbers are used.

    Returns:
        Indices [n] int64.
    """
    num_blocks = weights.shape[1] // _BLOCK
    uniform = _column(batch.uniform, weights)
    if num_blocks < _MIN_BLOCKS:
        cumulated = weights.cumsum(-1)
        return _search(cumulated, _share(cumulated, uniform))
    # The last block also contains the remainder of the row.
    width = weights.shape[1] - (num_blocks - 1) * _BLOCK
    blocks = weights[:, : num_blocks * _BLOCK]
    sums = blocks.view(len(weights), num_blocks, _BLOCK).sum(-1)
    sums[:, -1] += weights[:, num_blocks * _BLOCK :].sum(-1)
    cumulated = sums.cumsum(-1)
    target = _share(cumulated, uniform)
    block = _search(cumulated, target)[:, None]
    before = torch.where(block > 0, cumulated.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = weights.gather(1, block * _BLOCK + torch.arange(width, device=weights.device))
    inside[:, _BLOCK:] *= block == num_blocks - 1
    return block.squeeze(1) * _BLOCK + _search(inside.cumsum(-1), target - before)


def _share(cumulated: Tensor, uniform: Tensor) -> Tensor:
    """Return the share `uniform` of each row's total, [n, 1]."""
    return (uniform * cumulated[:, -1:].double()).float()


def _search(cumulated: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first cumulative sum above the target in each row, [n] int64."""
    total = cumulated[:, -1:]
    # Rounding could give the total itself, and no cumulative sum is above the total.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, target.contiguous(), right=True).squeeze(1)
    return index.clamp_(max=cumulated.shape[1] - 1)


def _column(values: Numbers, like: Tensor) -> Tensor:
    return upload(values, like.device)[:, None]


def uniform_numbers(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each pair of seed and counter.

    Equal pairs give equal numbers.

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


def _filter_rows(
    probs: Tensor,
    is_wanted: NDArray[np.bool_],
    keep: Callable[[Tensor, Numbers], Tensor],
    values: Numbers,
) -> Tensor:
    """Apply a filter to the rows for which `is_wanted` is True."""
    if is_wanted.all():
        return keep(probs, values)
    rows = upload(is_wanted.nonzero()[0], probs.device)
    return probs.index_copy(0, rows, keep(probs[rows], values[is_wanted]))


def _keep_top_k(probs: Tensor, top_k: Numbers) -> Tensor:
    """Set all but the `top_k` [n] largest probabilities of each row to 0.

    Tokens that are as likely as the last of these are kept too.
    """
    largest = probs.topk(int(top_k.max()), dim=-1).values
    return probs.masked_fill(probs < largest.gather(1, _column(top_k - 1, probs)), 0.0)


def _keep_top_p(probs: Tensor, top_p: Numbers) -> Tensor:
    """Set all probabilities outside the nucleus of each row to 0.

    Tokens that are as likely as the last token of the nucleus are kept too.
    """
    rising = _sorted(probs)
    cumulated = rising.cumsum(-1)
    # A token belongs to the nucleus if the likelier tokens sum to less than top_p of the total,
    # that is, if the token and the less likely ones sum to more than the rest.
    rest = (1 - _column(top_p, probs)) * cumulated[:, -1:]
    first = torch.searchsorted(cumulated, rest, right=True).clamp_(max=probs.shape[1] - 1)
    return probs * (probs >= rising.gather(1, first))


def _sorted(probs: Tensor) -> Tensor:
    if probs.device.type != "cpu":
        return probs.sort(dim=-1).values
    # numpy sorts with vector instructions, which is more than ten times as fast as torch on a CPU.
    return torch.from_numpy(np.sort(probs.numpy(), axis=-1))
