# SPDX-License-Identifier: Apache-2.0
"""Random sampling with temperature, min_p, top_k and top_p.

The probabilities are summed in the order of the vocabulary, and a uniform random number selects a
token from these cumulative sums. The tokens are not sorted by probability, because rounding could
then swap two tokens with nearly equal probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.device_transfer import upload
from nereid_backend.sampling import native_logits
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.probability_filters import (
    column,
    filter_rows,
    keep_top_k,
    keep_top_p,
)
from nereid_backend.sampling.random_numbers import uniform_numbers
from nereid_backend.sampling.sampling_table import SamplingRows
from nereid_backend.sampling.weighted_selection import select_indices

# The number of likeliest tokens that the first attempt to sample a token examines. Usually, top_k
# and top_p remove all other tokens.
_LIKELIEST = 64
# The number of likeliest tokens that are examined on a GPU. It is larger than `_LIKELIEST`, because
# a GPU examines more tokens in little additional time, and because fewer rows are then uncertain.
# An uncertain row must be sampled again. At that time, the next step may already be running. If the
# token changes, the next step must be discarded.
_LIKELIEST_DEFERRED = 512
# The number of likeliest tokens that a second attempt examines on a CPU. The CPU kernel finds these
# tokens in a third of the time that sorting all tokens takes.
_LIKELIEST_SECOND = 2048
# A second attempt is made only if the tokens that the first attempt examined have at least the
# total probability `_MIN_TOTAL_PROB`. If the total is smaller, the distribution is so flat that a
# second attempt would usually fail, too.
_MIN_TOTAL_PROB = 0.4


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters and random numbers for a batch of positions.

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
    def of(cls, positions: Sequence[Position], rows: SamplingRows) -> "SamplingBatch":
        """Return the sampling parameters and random numbers of `positions`.

        Args:
            positions: the positions whose tokens are sampled.
            rows: [num_positions], the sampling parameters that `SamplingTable.read` returned.
        """
        counters = np.array([position.num_output_tokens for position in positions], dtype=np.uint64)
        return cls(
            temperature=rows["temperature"].clip(min=1e-6),
            top_p=rows["top_p"].copy(),
            top_k=rows["top_k"].copy(),
            min_p=rows["min_p"].copy(),
            uniform=uniform_numbers(rows["seed"], counters),
        )

    def has_top_k(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return, for each position, whether top_k can remove a token, [num_positions] bool."""
        return (self.top_k > 0) & (self.top_k < vocab_size)

    def rows(self, index: NDArray[np.int64]) -> "SamplingBatch":
        """Return the parameters and random numbers of the positions that `index` selects."""
        return SamplingBatch(
            self.temperature[index],
            self.top_p[index],
            self.top_k[index],
            self.min_p[index],
            self.uniform[index],
        )


class UncertainRows(NamedTuple):
    """Rows whose sampled tokens may be wrong.

    Only the likeliest tokens of these rows were examined. If the filters of a row also keep other
    tokens, the row must be sampled again from all tokens.

    Attributes:
        rows: the indices of the rows.
        is_certain: [len(rows)] bool, on the device. If False, the row must be sampled again.
    """

    rows: NDArray[np.int64]
    is_certain: Tensor


def sample_rows(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample one token for each row. The random number of the row selects the token.

    The filters are applied in the order temperature, min_p, top_k, top_p.

    Args:
        logits: [n, vocab_size], any float dtype. If a row contains NaN or infinity, the token of
            the row is arbitrary.
        batch: the sampling parameters and random numbers of the rows.

    Returns:
        Token ids [n] int64.
    """
    return sample_or_defer(logits, batch, defers=False)[0]


def sample_or_defer(
    logits: Tensor, batch: SamplingBatch, *, defers: bool
) -> tuple[Tensor, UncertainRows | None]:
    """Sample one token for each row; see `sample_rows`.

    Args:
        logits: [n, vocab_size], any float dtype.
        batch: the sampling parameters and random numbers of the rows.
        defers: whether the caller samples uncertain rows again. If False, this function itself
            samples them again, so no row is uncertain.

    Returns:
        Token ids [n] int64, and the uncertain rows. The second item is None if no row is uncertain.
    """
    vocab_size = logits.shape[1]
    is_filtered = batch.has_top_k(vocab_size) | (batch.top_p < 1) | (batch.min_p > 0)
    if not is_filtered.any():
        return _sample_unfiltered(logits, batch), None
    filtered = np.flatnonzero(is_filtered)
    if is_filtered.all():
        token_ids, is_certain = _sample_filtered(logits, batch, defers=defers)
    else:
        # Sample the rows with filters and the rows without filters separately.
        unfiltered = np.flatnonzero(~is_filtered)
        filtered_index = upload(filtered, logits.device)
        unfiltered_index = upload(unfiltered, logits.device)
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        token_ids[filtered_index], is_certain = _sample_filtered(
            logits[filtered_index], batch.rows(filtered), defers=defers
        )
        token_ids[unfiltered_index] = _sample_unfiltered(
            logits[unfiltered_index], batch.rows(unfiltered)
        )
    uncertain = None if is_certain is None else UncertainRows(filtered, is_certain)
    return token_ids, uncertain


def _sample_unfiltered(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample one token for each row from the whole vocabulary, without filters."""
    if native_logits.can_read(logits):
        return native_logits.sample(logits, batch.temperature, batch.uniform)
    return _select(_probs(logits, batch), batch)


def _probs(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the probabilities after the temperature is applied, [n, vocab_size] float32."""
    return (logits.float() / column(batch.temperature, logits)).softmax(-1)


def _sample_filtered(
    logits: Tensor, batch: SamplingBatch, *, defers: bool
) -> tuple[Tensor, Tensor | None]:
    """Sample one token for each row. Each row uses at least one of top_k, top_p and min_p.

    The filters usually keep only a few tokens, so only the likeliest tokens of a row are examined.
    If the filters may keep other tokens, too, the row is uncertain and must be sampled again. If
    `defers` is True, the caller has to do this. Otherwise, this function samples the row from all
    tokens; on a CPU, it first tries a larger number of likeliest tokens.

    Returns:
        A pair. The first item contains the token ids, [n] int64. The second item is [n] bool. It is
        False for each row that the caller must sample again. If `defers` is False, the second item
        is None.
    """
    if defers:
        deferred = _sample_from_likeliest(logits, batch, _LIKELIEST_DEFERRED)
        return deferred.token_ids, deferred.is_certain
    attempt = _sample_from_likeliest(logits, batch, _LIKELIEST)
    if native_logits.can_read(logits):
        _try_again(logits, batch, attempt)
    uncertain_rows = _true_rows(~attempt.is_certain)
    if len(uncertain_rows) > 0:
        uncertain_batch = batch.rows(uncertain_rows.cpu().numpy())
        probs = _probs(logits[uncertain_rows], uncertain_batch)
        attempt.token_ids[uncertain_rows] = _sample_from_all(probs, uncertain_batch)
    return attempt.token_ids, None


class _Attempt(NamedTuple):
    """The tokens that were sampled from the likeliest tokens of each row.

    Attributes:
        token_ids: [n] int64, the sampled tokens.
        is_certain: [n] bool, True if the filters of the row keep only tokens that were examined.
        total_probs: [n] float32, the total probability of the examined tokens.
    """

    token_ids: Tensor
    is_certain: Tensor
    total_probs: Tensor


def _try_again(logits: Tensor, batch: SamplingBatch, attempt: _Attempt) -> None:
    """Sample the uncertain rows of an attempt a second time, from a larger number of likely tokens.

    Rows with a very flat distribution are not sampled again; see `_MIN_TOTAL_PROB`. The logits must
    be on the CPU.

    Mutates: the tensors of `attempt`.
    """
    is_promising = attempt.total_probs >= _MIN_TOTAL_PROB
    rows = _true_rows(~attempt.is_certain & is_promising)
    if len(rows) > 0:
        second = _sample_from_likeliest(logits[rows], batch.rows(rows.numpy()), _LIKELIEST_SECOND)
        attempt.token_ids[rows] = second.token_ids
        attempt.is_certain[rows] = second.is_certain


def _true_rows(is_selected: Tensor) -> Tensor:
    """Return the indices of the elements that are True in a boolean tensor [n]."""
    return is_selected.nonzero().squeeze(1)


def _sample_from_likeliest(logits: Tensor, batch: SamplingBatch, width: int) -> _Attempt:
    """Sample one token for each row from the `width` likeliest tokens of the row.

    The token of a row may be wrong if the filters of the row also keep less likely tokens. In this
    case, `_Attempt.is_certain` is False.
    """
    width = min(width, logits.shape[1])
    if native_logits.can_read(logits):
        probs, token_ids = native_logits.likeliest(logits, batch.temperature, width)
        # If a row has fewer than `width` tokens, its last ids are -1 and their probabilities are 0.
        # Replace -1 by a valid id, because the caller uses the ids as indices.
        token_ids.clamp_(min=0)
    else:
        probs, token_ids = _probs(logits, batch).topk(width, dim=-1)
    threshold, is_certain = _smallest_kept_prob(probs, batch)
    # Sort the examined tokens by id, because the random number selects a token in the order of the
    # vocabulary.
    token_ids, order = token_ids.sort(dim=-1)
    kept_probs = probs * (probs >= threshold)
    columns = _select(kept_probs.gather(1, order), batch)
    sampled_ids = token_ids.gather(1, columns[:, None]).squeeze(1)
    return _Attempt(sampled_ids, is_certain.squeeze(1), probs.sum(-1))


def _smallest_kept_prob(probs: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Return the smallest probability that the filters keep in each row.

    Example: the probabilities are 0.5, 0.3, 0.15 and 0.05. top_k=3 keeps the first three tokens.
    Their sum is 0.95. With top_p=0.8, the kept tokens must sum to at least 0.8 * 0.95 = 0.76. The
    first two tokens are sufficient, because their sum is 0.8. The result is 0.3.

    Args:
        probs: [n, width], the largest probabilities of each row in descending order.
        batch: the filters of the rows.

    Returns:
        The smallest probability that the filters keep, [n, 1] float32, and a tensor [n, 1] bool.
        The second tensor is False for a row if the filters may keep tokens that are not in `probs`.
    """
    top_p = column(batch.top_p, probs)
    smallest = probs[:, -1:]
    floor, is_certain = _top_k_min_p_threshold(probs, batch)
    kept = probs * (probs >= floor)
    # top_p refers to the total probability of the tokens that min_p and top_k keep. If these two
    # filters remove no token, the total is 1. Otherwise, the total is known only if `probs`
    # contains all tokens that min_p and top_k keep.
    total = torch.where(floor > 0, kept.sum(-1, keepdim=True), 1.0)
    # The nucleus contains the tokens that top_p keeps. A token belongs to the nucleus if the total
    # probability of all likelier tokens is less than `top_p * total`.
    sum_of_likelier = kept.cumsum(-1) - kept
    is_in_nucleus = sum_of_likelier < top_p * total
    nucleus_size = is_in_nucleus.sum(-1, keepdim=True).clamp_(min=1)
    last_of_nucleus = kept.gather(1, nucleus_size - 1)
    threshold = torch.where(top_p < 1, torch.maximum(last_of_nucleus, floor), floor)
    # The row is certain only if the least likely token in `probs` is below the threshold.
    # Otherwise, the filters might also keep tokens that are not in `probs`.
    return threshold, is_certain & (smallest < threshold)


def _top_k_min_p_threshold(probs: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Return a threshold for each row. top_k and min_p remove all tokens below the threshold.

    Example: the probabilities are 0.5, 0.3, 0.15 and 0.05. top_k=3 alone gives the threshold 0.15,
    and min_p=0.5 alone gives 0.5 * 0.5 = 0.25. With both filters, the threshold is 0.25.

    Args:
        probs: [n, width], the largest probabilities of each row in descending order.
        batch: the filters of the rows.

    Returns:
        Two tensors. The first tensor contains the thresholds, [n, 1] float32. The threshold is 0 if
        the row has neither filter. The second tensor is [n, 1] bool. It is True if top_k and min_p
        remove no token of the row, and also if they keep only tokens that are in `probs`.
    """
    width = probs.shape[1]
    top_k = column(batch.top_k, probs)
    kth_largest = probs.gather(1, top_k.clamp(1, width) - 1)
    # If top_k exceeds `width`, `probs` does not include the smallest probability that top_k keeps.
    is_in_probs = (top_k > 0) & (top_k <= width)
    top_k_threshold = torch.where(is_in_probs, kth_largest, 0)
    largest, smallest = probs[:, :1], probs[:, -1:]
    min_p_threshold = largest * column(batch.min_p, probs)
    threshold = torch.maximum(top_k_threshold, min_p_threshold)
    removes_nothing = (threshold == 0) & (top_k <= 0)
    keeps_only_probs = smallest < threshold
    return threshold, removes_nothing | keeps_only_probs


def _sample_from_all(probs: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample one token for each row after applying min_p, top_k and top_p to all tokens.

    `probs` is [n, vocab_size]. The result is [n] int64.
    """
    vocab_size = probs.shape[1]
    if batch.min_p.any():
        floor = probs.amax(-1, keepdim=True) * column(batch.min_p, probs)
        probs = probs.masked_fill(probs < floor, 0.0)
    needs_top_k = batch.has_top_k(vocab_size)
    if needs_top_k.any():
        probs = filter_rows(probs, needs_top_k, keep_top_k, batch.top_k)
    needs_top_p = batch.top_p < 1
    if needs_top_p.any():
        probs = filter_rows(probs, needs_top_p, keep_top_p, batch.top_p)
    return _select(probs, batch)


def _select(weights: Tensor, batch: SamplingBatch) -> Tensor:
    """Select one index in each row of `weights` by the row's random number. Returns [n] int64."""
    return select_indices(weights, column(batch.uniform, weights))
