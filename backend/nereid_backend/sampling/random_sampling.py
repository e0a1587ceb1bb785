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
from nereid_backend.sampling.filter_threshold import filter_threshold
from nereid_backend.sampling.probability_filters import (
    column,
    filter_rows,
    keep_top_k,
    keep_top_p,
)
from nereid_backend.sampling.random_numbers import uniform_numbers
from nereid_backend.sampling.sampling_table import SamplingRows
from nereid_backend.sampling.weighted_selection import select_indices

# The first attempt to sample a token examines only the `_LIKELIEST` likeliest tokens. Usually,
# top_k and top_p remove all other tokens.
_LIKELIEST = 64
# On a GPU, this many of the likeliest tokens are examined. A row is uncertain if its filters may
# also keep tokens that were not examined. Such a row must be sampled again, while the next step may
# already be running. If the token changes, that next step must be discarded. A large number makes
# uncertain rows rare, and costs a GPU little additional time.
_LIKELIEST_DEFERRED = 512
# On a CPU, the second attempt to sample a token examines the `_LIKELIEST_SECOND` likeliest tokens.
# The CPU kernel finds these tokens in a third of the time that is needed to sort all tokens.
_LIKELIEST_SECOND = 2048
# A second attempt is made only if the total probability of the tokens that were examined in the
# first attempt is at least `_MIN_TOTAL_PROB`. If it is smaller, the distribution is so flat that a
# second attempt would usually fail, too.
_MIN_TOTAL_PROB = 0.4
# Logits are divided by the temperature, so the temperature must not be 0.
_MIN_TEMPERATURE = 1e-6


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
            rows: [num_positions] of the dtype `sampling_table.ROW`, the sampling parameters of the
                positions.
        """
        # The random number is computed from the seed of a request and the number of its output
        # tokens. Therefore, the random number does not depend on the other requests of the step.
        counters = np.array([position.num_output_tokens for position in positions], dtype=np.uint64)
        # The arrays are copied, because a field of a structured array is not contiguous.
        return cls(
            temperature=rows["temperature"].clip(min=_MIN_TEMPERATURE),
            top_p=rows["top_p"].copy(),
            top_k=rows["top_k"].copy(),
            min_p=rows["min_p"].copy(),
            uniform=uniform_numbers(rows["seed"], counters),
        )

    def has_filters(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return, for each position, whether a filter can remove a token, [num_positions] bool.

        The filters are top_k, top_p and min_p.
        """
        return self.has_top_k(vocab_size) | (self.top_p < 1) | (self.min_p > 0)

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

    def in_batch(self, batch_rows: NDArray[np.int64]) -> "UncertainRows":
        """Return a copy whose row indices refer to the whole batch, not to a part of the batch.

        `batch_rows` contains the index in the batch of each row of the part. Example: the part
        consists of the rows [1, 4] of a batch, and `rows` is [1]. In the result, `rows` is [4].
        """
        return UncertainRows(batch_rows[self.rows], self.is_certain)


def sample_rows(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample one token for each row. The random number of the row selects the token.

    First the temperature is applied, and then the filters min_p, top_k and top_p, in this order.

    Args:
        logits: [n, vocab_size], any float dtype. If a row contains NaN or infinity, the token of
            the row is arbitrary.
        batch: the sampling parameters and random numbers of the rows.

    Returns:
        Token ids [n] int64.
    """
    # With defers=False, the rows whose tokens may be wrong are sampled again in this call.
    token_ids, _uncertain_rows = sample_or_defer(logits, batch, defers=False)
    return token_ids


def sample_or_defer(
    logits: Tensor, batch: SamplingBatch, *, defers: bool
) -> tuple[Tensor, UncertainRows | None]:
    """Sample one token for each row. Also return the rows whose tokens may be wrong.

    For speed, only the likeliest tokens of a row with filters are examined. If the filters may also
    keep other tokens, the row is uncertain and must be sampled again.

    Args:
        logits: [n, vocab_size], any float dtype.
        batch: the sampling parameters and random numbers of the rows.
        defers: whether the caller samples the uncertain rows again. If True, this function need not
            wait for the GPU. If False, this function itself samples them again.

    Returns:
        The token ids, [n] int64, and the rows that may be uncertain: if `defers` is True, these are
        all rows with a filter. The second item is None if there are no such rows.
    """
    is_filtered = batch.has_filters(vocab_size=logits.shape[1])
    if not is_filtered.any():
        return _sample_unfiltered(logits, batch), None
    if is_filtered.all():
        return _sample_filtered(logits, batch, defers=defers)
    return _sample_separately(logits, batch, is_filtered, defers=defers)


def _sample_separately(
    logits: Tensor,
    batch: SamplingBatch,
    is_filtered: NDArray[np.bool_],
    *,
    defers: bool,
) -> tuple[Tensor, UncertainRows | None]:
    """Sample the rows with filters (top_k, top_p, min_p) and the rows without filters separately.

    Args:
        logits: [n, vocab_size].
        batch: the sampling parameters and random numbers of the rows.
        is_filtered: [n] bool, whether each row has a filter. Some rows have one, and others do not.
        defers: see `sample_or_defer`.

    Returns:
        The token ids of all rows, [n] int64, and the uncertain rows; see `sample_or_defer`.
    """
    filtered = np.flatnonzero(is_filtered)
    unfiltered = np.flatnonzero(~is_filtered)
    filtered_index = upload(filtered, logits.device)
    unfiltered_index = upload(unfiltered, logits.device)
    filtered_ids, uncertain = _sample_filtered(
        logits[filtered_index], batch.rows(filtered), defers=defers
    )
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    token_ids[filtered_index] = filtered_ids
    token_ids[unfiltered_index] = _sample_unfiltered(
        logits[unfiltered_index], batch.rows(unfiltered)
    )
    return token_ids, None if uncertain is None else uncertain.in_batch(filtered)


def _sample_unfiltered(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample one token for each row from the whole vocabulary, without filters."""
    if native_logits.has_kernels_for(logits):
        return native_logits.sample(logits, batch.temperature, batch.uniform)
    return _select(_probs(logits, batch), batch)


def _probs(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the probabilities after the temperature is applied, [n, vocab_size] float32."""
    return (logits.float() / column(batch.temperature, logits)).softmax(-1)


def _sample_filtered(
    logits: Tensor, batch: SamplingBatch, *, defers: bool
) -> tuple[Tensor, UncertainRows | None]:
    """Sample one token for each row. Every row has a filter; see `sample_or_defer`."""
    if defers:
        return _sample_once(logits, batch)
    return _sample_until_certain(logits, batch), None


def _sample_once(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, UncertainRows]:
    """Sample one token for each row from the likeliest tokens, without waiting for the GPU.

    Every row has a filter: top_k, top_p or min_p. The filters usually remove all tokens except a
    few of the likeliest tokens. If the filters of a row also keep a token that was not examined,
    the row is uncertain: its sampled token may be wrong.

    Returns:
        The token ids, [n] int64, and an UncertainRows object with all rows. The object contains a
        tensor on the device, which is False for each row that must be sampled again.
    """
    attempt = _sample_from_likeliest(logits, batch, _LIKELIEST_DEFERRED)
    return attempt.token_ids, UncertainRows(np.arange(len(logits)), attempt.is_certain)


def _sample_until_certain(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample one token for each row, and return the token ids, [n] int64. Every row has a filter.

    The token of a row is certain if the filters remove all tokens that were not examined. There are
    up to three attempts. Each attempt samples only rows that are not certain yet:

    1. Examine the `_LIKELIEST` likeliest tokens of the row.
    2. Only on a CPU with compiled kernels: examine the `_LIKELIEST_SECOND` likeliest tokens.
    3. Examine all tokens.
    """
    attempt = _sample_from_likeliest(logits, batch, _LIKELIEST)
    if native_logits.has_kernels_for(logits):
        attempt = _after_second_attempt(logits, batch, attempt)
    uncertain_rows = _true_rows(~attempt.is_certain)
    if len(uncertain_rows) == 0:
        return attempt.token_ids
    uncertain_batch = batch.rows(uncertain_rows.cpu().numpy())
    probs = _probs(logits[uncertain_rows], uncertain_batch)
    new_ids = _sample_from_all(probs, uncertain_batch)
    return attempt.token_ids.index_copy(0, uncertain_rows, new_ids)


class _Attempt(NamedTuple):
    """The result of sampling from only the likeliest tokens of each row.

    Attributes:
        token_ids: [n] int64, the sampled tokens.
        is_certain: [n] bool, True if the filters of the row keep only tokens that were examined.
        total_probs: [n] float32, the total probability of the examined tokens.
    """

    token_ids: Tensor
    is_certain: Tensor
    total_probs: Tensor


def _after_second_attempt(logits: Tensor, batch: SamplingBatch, first: _Attempt) -> _Attempt:
    """Sample again the rows whose tokens are uncertain. Return the results of all rows.

    After the first attempt, a row is uncertain if its filters may keep tokens that the attempt has
    not examined. The second attempt examines more tokens. Rows with a flat distribution are not
    sampled again: if the examined tokens of the first attempt have a small total probability, a
    second attempt would usually fail, too.

    The logits must be on the CPU.
    """
    is_flat = first.total_probs < _MIN_TOTAL_PROB
    rows = _true_rows(~first.is_certain & ~is_flat)
    if len(rows) == 0:
        return first
    second = _sample_from_likeliest(logits[rows], batch.rows(rows.numpy()), _LIKELIEST_SECOND)
    return _Attempt(
        token_ids=first.token_ids.index_copy(0, rows, second.token_ids),
        is_certain=first.is_certain.index_copy(0, rows, second.is_certain),
        total_probs=first.total_probs.index_copy(0, rows, second.total_probs),
    )


def _true_rows(is_selected: Tensor) -> Tensor:
    """Return the indices of the elements that are True in a boolean tensor [n]."""
    return is_selected.nonzero().squeeze(1)


def _sample_from_likeliest(logits: Tensor, batch: SamplingBatch, width: int) -> _Attempt:
    """Sample one token for each row from the `width` likeliest tokens of the row.

    If the filters of a row may also keep less likely tokens, the sampled token may be wrong. In
    this case, `is_certain` of the result is False. `total_probs` of the result is the total
    probability of the examined tokens, by which the caller decides whether to examine more tokens.
    """
    width = min(width, logits.shape[1])
    # [n, width], with the likeliest token first.
    probs, token_ids = _likeliest(logits, batch, width)
    threshold = filter_threshold(
        probs,
        min_p=column(batch.min_p, probs),
        top_k=column(batch.top_k, probs),
        top_p=column(batch.top_p, probs),
    )
    kept_probs = probs * (probs >= threshold.probs)
    # `_select` adds up the probabilities from left to right until the sum exceeds a number that
    # depends on the random number. Sort the examined tokens by id, so that a random number selects
    # the same token here as in the whole vocabulary. `columns` are indices into the sorted tokens.
    token_ids, order = token_ids.sort(dim=-1)
    columns = _select(kept_probs.gather(1, order), batch)
    sampled_ids = token_ids.gather(1, columns[:, None]).squeeze(1)
    return _Attempt(
        token_ids=sampled_ids,
        is_certain=threshold.is_certain.squeeze(1),
        total_probs=probs.sum(-1),
    )


def _likeliest(logits: Tensor, batch: SamplingBatch, width: int) -> tuple[Tensor, Tensor]:
    """Return the probabilities and the ids of the `width` likeliest tokens of each row.

    Both tensors are [n, width] and in descending order of the probabilities.
    """
    if not native_logits.has_kernels_for(logits):
        probs, token_ids = _probs(logits, batch).topk(width, dim=-1)
        return probs, token_ids
    probs, token_ids = native_logits.likeliest(logits, batch.temperature, width)
    # If a row has fewer than `width` possible tokens, the kernel fills the rest of the row with the
    # id -1 and the probability 0. Replace -1 with a valid id, because the caller uses the ids as
    # indices.
    return probs, token_ids.clamp_(min=0)


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
    """Select one index in each row of `weights` with the row's random number. Return [n] int64."""
    return select_indices(weights, column(batch.uniform, weights))
