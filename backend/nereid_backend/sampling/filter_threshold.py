# SPDX-License-Identifier: Apache-2.0
"""Computes which of the likeliest tokens remain after the filters min_p, top_k and top_p.

In this module, "the examined tokens" are the likeliest tokens of a row. Their probabilities are in
`probs`, [n, width], in descending order. The parameters of the filters are columns, [n, 1].
"""

from typing import NamedTuple

import torch
from torch import Tensor


class FilterThreshold(NamedTuple):
    """A threshold probability for each row. Tokens with smaller probabilities are removed.

    Attributes:
        probs: [n, 1] float32, the smallest probability that the filters keep; 0 if they remove no
            token.
        is_certain: [n, 1] bool. False if the filters may also keep tokens that were not examined.
    """

    probs: Tensor
    is_certain: Tensor


def filter_threshold(
    probs: Tensor, *, min_p: Tensor, top_k: Tensor, top_p: Tensor
) -> FilterThreshold:
    """Return the smallest probability that min_p, top_k and top_p keep in each row.

    Only the `width` likeliest tokens of each row are examined. A result is certain if the filters
    remove all tokens that were not examined.

    Example: the probabilities are 0.5, 0.3, 0.15 and 0.05. top_k=3 keeps the first three tokens,
    whose sum is 0.95. With top_p=0.8, the kept tokens must sum to at least 0.8 * 0.95 = 0.76. The
    first two tokens are sufficient, because their sum is 0.8. The result is 0.3.

    Args:
        probs: [n, width], the largest probabilities of each row in descending order.
        min_p: [n, 1]; 0 turns the filter off.
        top_k: [n, 1]; 0 turns the filter off.
        top_p: [n, 1]; 1 turns the filter off.
    """
    # The threshold of min_p and top_k, which are applied before top_p.
    floor = _min_p_top_k_threshold(probs, min_p, top_k)
    kept = probs * (probs >= floor.probs)
    total = _total_kept(kept, floor)
    top_p_threshold = torch.maximum(_smallest_in_nucleus(kept, top_p * total), floor.probs)
    threshold = torch.where(top_p < 1, top_p_threshold, floor.probs)
    is_certain = floor.is_certain & _removes_all_tokens_outside(probs, threshold)
    return FilterThreshold(threshold, is_certain)


def _total_kept(kept: Tensor, floor: FilterThreshold) -> Tensor:
    """Return the total probability of the tokens that min_p and top_k keep in each row, [n, 1].

    If the threshold `floor` is 0, min_p and top_k keep the whole vocabulary, so the total is 1.
    Otherwise, the total is the sum of `kept`. The sum may be too small if `floor` is not certain,
    because the filters may then also keep tokens that were not examined.

    Args:
        kept: [n, width], the probabilities of the examined tokens; 0 for the removed tokens.
        floor: the threshold of min_p and top_k.
    """
    return torch.where(floor.probs > 0, kept.sum(-1, keepdim=True), 1.0)


def _min_p_top_k_threshold(probs: Tensor, min_p: Tensor, top_k: Tensor) -> FilterThreshold:
    """Return the smallest probability that min_p and top_k keep in each row.

    min_p removes the tokens whose probability is less than min_p times the largest probability.
    Example: the probabilities are 0.5, 0.3, 0.15 and 0.05. min_p=0.5 alone gives the threshold
    0.5 * 0.5 = 0.25, and top_k=3 alone gives 0.15. With both filters, the threshold is 0.25.

    Args:
        probs: [n, width], the largest probabilities of each row in descending order.
        min_p: [n, 1]; 0 turns the filter off.
        top_k: [n, 1]; 0 turns the filter off.

    Returns:
        The threshold of each row. `is_certain` is True if the total probability of the tokens that
        the two filters keep is known, which top_p requires. Example: `probs` contains 64 tokens and
        top_k is 100. Only 64 of the 100 kept tokens are in `probs`, so `is_certain` is False.
    """
    largest = probs[:, :1]
    # The threshold of top_k is 0 if top_k is off or exceeds the number of tokens in `probs`. The
    # threshold of min_p is 0 if min_p is off.
    threshold = torch.maximum(_kth_largest(probs, top_k), largest * min_p)
    return FilterThreshold(threshold, is_certain=_is_total_known(probs, threshold, top_k))


def _is_total_known(probs: Tensor, threshold: Tensor, top_k: Tensor) -> Tensor:
    """For each row, return whether the total probability of the kept tokens is known.

    The kept tokens are the tokens that min_p and top_k keep. Their total probability is known in
    two cases:
    - Both filters are off, so the total is 1.
    - The filters remove all tokens outside `probs`, so the total is a sum of numbers in `probs`.

    Example: `probs` contains 64 tokens, min_p is off and top_k is 100. The total is not known,
    because `probs` contains only 64 of the 100 kept tokens.

    Args:
        probs: [n, width], the largest probabilities of each row in descending order.
        threshold: [n, 1], the smallest probability that min_p and top_k keep. 0 means that no token
            is removed, or that the number is unknown, because top_k exceeds `width`.
        top_k: [n, 1]; 0 turns the filter off.

    Returns:
        [n, 1] bool.
    """
    # If top_k is off, the threshold is the threshold of min_p. The threshold of min_p is 0 only if
    # min_p is off, too.
    are_both_off = (top_k <= 0) & (threshold == 0)
    return are_both_off | _removes_all_tokens_outside(probs, threshold)


def _kth_largest(probs: Tensor, top_k: Tensor) -> Tensor:
    """Return the smallest probability that top_k keeps in each row, [n, 1] float32.

    The result is 0 if top_k is turned off. The result is also 0 if top_k exceeds the width of
    `probs`, because `probs` then does not contain the smallest probability that top_k keeps.

    Shapes: probs [n, width] in descending order, top_k [n, 1].
    """
    width = probs.shape[1]
    kth_largest = probs.gather(1, top_k.clamp(1, width) - 1)
    is_in_probs = (top_k > 0) & (top_k <= width)
    return torch.where(is_in_probs, kth_largest, 0)


def _smallest_in_nucleus(probs: Tensor, min_sum: Tensor) -> Tensor:
    """Return the smallest probability in the nucleus of each row, [n, 1] float32.

    The nucleus is the smallest set of likeliest tokens whose probabilities sum to at least
    `min_sum`. Example: the probabilities 0.5, 0.3 and 0.15 and the sum 0.76 give 0.3.

    Shapes: probs [n, width] in descending order, min_sum [n, 1].
    """
    # A token belongs to the nucleus if the total probability of all likelier tokens is less than
    # `min_sum`.
    sum_of_likelier = probs.cumsum(-1) - probs
    is_in_nucleus = sum_of_likelier < min_sum
    # Rounding must not remove the likeliest token.
    nucleus_size = is_in_nucleus.sum(-1, keepdim=True).clamp_(min=1)
    return probs.gather(1, nucleus_size - 1)


def _removes_all_tokens_outside(probs: Tensor, threshold: Tensor) -> Tensor:
    """For each row, return whether the filters remove all tokens that are not in `probs`.

    The tokens that were not examined are at most as likely as the last examined token. They are
    certainly removed if the last examined token is removed, too.

    Shapes: probs [n, width] in descending order, threshold [n, 1], result [n, 1].
    """
    last_examined = probs[:, -1:]
    return last_examined < threshold
