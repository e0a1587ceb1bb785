# SPDX-License-Identifier: Apache-2.0
"""Random sampling with temperature, min_p, top_k and top_p.

There is no random number generator with a state. Each random number is a hash of the request's seed
and the number of tokens in its output. The random numbers of a request therefore do not depend on
other requests. If a request is computed a second time after a preemption, it gets the same numbers.

A uniform random number selects a token from the cumulative probabilities in the order of the
vocabulary. That order does not change if rounding swaps the ranks of two nearly equal
probabilities.
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

# The number of likeliest tokens that are examined first. These tokens usually include all tokens
# that top_k and top_p leave. The second number applies if uncertain rows are deferred, which is the
# case on a GPU. There, examining more tokens costs little, but a wrong token makes the next step
# useless.
_LIKELIEST, _LIKELIEST_DEFERRED = 64, 512
# On a CPU, a row with a flat distribution gets a second attempt with _LIKELIEST_UNSURE tokens. The
# CPU kernel finds them in a third of the time that sorting all tokens takes. The attempt is made
# only if the tokens of the first attempt have at least the total probability _LEAST_HELD.
_LIKELIEST_UNSURE, _LEAST_HELD = 2048, 0.4

# If a row has at least _MIN_BLOCKS blocks of _BLOCK tokens, the row is searched block by block.
_BLOCK, _MIN_BLOCKS = 512, 32


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters and random numbers of some positions.

    Each array has one element for each position.

    Attributes:
        temperature: the temperature, greater than 0.
        top_p: see `SamplingParams`.
        top_k: see `SamplingParams`; 0 turns the filter off.
        min_p: see `SamplingParams`.
        uniform: the random number, in [0, 1).
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]

    @classmethod
    def of(cls, positions: Sequence[Position]) -> "SamplingBatch":
        """Return the sampling parameters and random numbers of some positions."""
        params = [position.sequence.params for position in positions]
        seeds = np.array([position.sequence.seed for position in positions], dtype=np.uint64)
        counters = np.array([position.num_output_tokens for position in positions], dtype=np.uint64)
        return cls(
            temperature=np.array([p.temperature for p in params], dtype=np.float32).clip(min=1e-6),
            top_p=np.array([p.top_p for p in params], dtype=np.float32),
            top_k=np.array([max(0, p.top_k) for p in params], dtype=np.int64),
            min_p=np.array([p.min_p for p in params], dtype=np.float32),
            uniform=uniform_numbers(seeds, counters),
        )

    def rows(self, index: NDArray[np.int64]) -> "SamplingBatch":
        """Return the parameters and random numbers of the positions at `index`."""
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
        is_known: [len(rows)] bool, on the device. If False, the row must be sampled again.
    """

    rows: NDArray[np.int64]
    is_known: Tensor


def draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one random token for each row.

    The filters are applied in the order temperature, min_p, top_k, top_p.

    Args:
        logits: [n, vocab_size], any float dtype. If a row contains NaN or infinity, its token is
            arbitrary.
        batch: the sampling parameters and random numbers of the rows.

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
        batch: the sampling parameters and random numbers of the rows.
        defers: whether the caller samples uncertain rows again. If False, no row is uncertain.

    Returns:
        Token ids [n] int64, and the uncertain rows. The second item is None if no row is uncertain.
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
    """Draw one token for each row from all tokens. The rows have no filters."""
    if native_logits.can_read(logits):
        return native_logits.draw(logits, batch.temperature, batch.uniform)
    return _pick(_probs(logits, batch), batch)


def _probs(logits: Tensor, batch: SamplingBatch) -> Tensor:
    return (logits.float() / _column(batch.temperature, logits)).softmax(-1)


def _draw_filtered(
    logits: Tensor, batch: SamplingBatch, *, defers: bool
) -> tuple[Tensor, Tensor | None]:
    """Draw one token for each row. The rows have at least one of top_k, top_p and min_p.

    The filters usually leave only a few tokens, so only the likeliest tokens of a row are examined.
    If these tokens may not be enough for a row, the row is uncertain. Uncertain rows are sampled
    from all tokens. If `defers` is True, the caller has to do this.

    Returns:
        Token ids [n] int64, and [n] bool, which is False if the caller must sample the row again.
        The second item is None if `defers` is False.
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
    """Draw one token for each row from the `width` likeliest tokens.

    Returns:
        Three tensors: token ids [n] int64; whether the filters leave only tokens that are among the
        likeliest, [n] bool; and the total probability of the likeliest tokens, [n] float32.
    """
    width = min(width, logits.shape[1])
    if native_logits.can_read(logits):
        values, token_ids = native_logits.likeliest(logits, batch.temperature, width)
        # Missing tokens have the id -1 and the weight 0. They get a valid id, because the caller
        # uses the result as an index.
        token_ids.clamp_(min=0)
    else:
        values, token_ids = _probs(logits, batch).topk(width, dim=-1)
    top_k, top_p = _column(batch.top_k, values), _column(batch.top_p, values)
    kth = values.gather(1, top_k.clamp(1, width) - 1)
    cut = torch.maximum(
        torch.where((top_k > 0) & (top_k <= width), kth, 0),
        values[:, :1] * _column(batch.min_p, values),
    )
    kept = values * (values >= cut)
    # top_p refers to the total probability of the tokens that the other filters leave. If the other
    # filters remove no token, the total is 1. Otherwise, the total is known only if the likeliest
    # tokens include all tokens that the other filters leave.
    total = torch.where(cut > 0, kept.sum(-1, keepdim=True), 1.0)
    is_known = ((cut == 0) & (top_k <= 0)) | (values[:, -1:] < cut)
    size = (kept.cumsum(-1) - kept < top_p * total).sum(-1, keepdim=True).clamp_(min=1)
    threshold = torch.where(top_p < 1, torch.maximum(kept.gather(1, size - 1), cut), cut)
    # Tokens that are as likely as the last token of the nucleus are kept, too. The row is certain
    # only if the least likely examined token is below the threshold.
    is_known &= values[:, -1:] < threshold
    token_ids, order = token_ids.sort(dim=-1)
    kept = (kept * (kept >= threshold)).gather(1, order)
    chosen = token_ids.gather(1, _pick(kept, batch)[:, None]).squeeze(1)
    return chosen, is_known.squeeze(1), values.sum(-1)


def _draw_from_all(probs: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one token for each row from all tokens, after min_p, top_k and top_p."""
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
    """Select an index in each row with the row's random number.

    The result is the first index at which the cumulative weights exceed the random number times the
    sum of the row. If a row is wide, it is divided into blocks. Only the sums of the blocks and the
    weights of one block are cumulated, which is faster than cumulating the whole row.

    Args:
        weights: [n, width], not negative.
        batch: the random numbers of the rows. The other fields are not used.

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
    """Return `uniform` times the total of each row, [n, 1]."""
    return (uniform * cumulated[:, -1:].double()).float()


def _search(cumulated: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first cumulative sum above `target` in each row, [n] int64."""
    total = cumulated[:, -1:]
    # Rounding could make the target equal to the total, but no cumulative sum is above the total.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, target.contiguous(), right=True).squeeze(1)
    return index.clamp_(max=cumulated.shape[1] - 1)


def _column(values: Numbers, like: Tensor) -> Tensor:
    return upload(values, like.device)[:, None]


def uniform_numbers(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a random number in [0, 1) for each pair of a seed and a counter.

    Equal pairs give equal numbers.

    Source: SplitMix64 (Steele, Lea, Flood 2014). The counter's multiple of the golden gamma is
        added to
    the hash of the seed, and the output function is applied to the sum.
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
    """Set all probabilities of each row to 0 except the `top_k` [n] largest.

    If other tokens are as likely as the last of these, they are kept, too.
    """
    largest = probs.topk(int(top_k.max()), dim=-1).values
    return probs.masked_fill(probs < largest.gather(1, _column(top_k - 1, probs)), 0.0)


def _keep_top_p(probs: Tensor, top_p: Numbers) -> Tensor:
    """Set all probabilities outside the nucleus of each row to 0.

    The nucleus is the smallest set of likeliest tokens whose probabilities sum to at least top_p.
    If other tokens are as likely as the last token of the nucleus, they are kept, too.
    """
    rising = _sorted(probs)
    cumulated = rising.cumsum(-1)
    # A token belongs to the nucleus if the likelier tokens sum to less than top_p times the total.
    # This is equivalent: the token and the less likely tokens sum to more than `rest`.
    rest = (1 - _column(top_p, probs)) * cumulated[:, -1:]
    first = torch.searchsorted(cumulated, rest, right=True).clamp_(max=probs.shape[1] - 1)
    return probs * (probs >= rising.gather(1, first))


def _sorted(probs: Tensor) -> Tensor:
    if probs.device.type != "cpu":
        return probs.sort(dim=-1).values
    # On a CPU, numpy sorts with vector instructions and is more than ten times as fast as torch.
    return torch.from_numpy(np.sort(probs.numpy(), axis=-1))
