# SPDX-License-Identifier: Apache-2.0
"""The filters top_k and top_p, applied to the probabilities of all tokens.

random_sampling.py applies these filters only if the likeliest tokens of a row are not sufficient.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.device_transfer import upload

Numbers = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int64]


def column(values: Numbers, like: Tensor) -> Tensor:
    """Copy `values`, which has one number for each row, to the device of `like`.

    The result is a column of the shape [n, 1].
    """
    return upload(values, like.device)[:, None]


def filter_rows(
    probs: Tensor,
    is_selected: NDArray[np.bool_],
    keep: Callable[[Tensor, Numbers], Tensor],
    values: Numbers,
) -> Tensor:
    """Apply a filter only to the selected rows, and return all rows.

    Args:
        probs: [n, vocab_size]. Not changed.
        is_selected: [n] bool.
        keep: the filter, `keep_top_k` or `keep_top_p`, which sets the probabilities of the removed
            tokens to 0.
        values: [n], the parameter of the filter for each row.
    """
    if is_selected.all():
        return keep(probs, values)  # does not need to copy the rows
    rows = upload(np.flatnonzero(is_selected), probs.device)
    filtered_rows = keep(probs[rows], values[is_selected])
    return probs.index_copy(0, rows, filtered_rows)


def keep_top_k(probs: Tensor, top_k: Numbers) -> Tensor:
    """Keep the `top_k` likeliest tokens of each row. Set the other probabilities to 0.

    If a token has the same probability as the last kept token, this token is kept, too. Example:
    top_k=2 turns [0.1, 0.6, 0.3] into [0, 0.6, 0.3].

    Shapes: probs [n, vocab_size], top_k [n].
    """
    max_top_k = int(top_k.max())
    largest = probs.topk(max_top_k, dim=-1).values
    smallest_kept = largest.gather(1, column(top_k - 1, probs))
    return probs.masked_fill(probs < smallest_kept, 0.0)


def keep_top_p(probs: Tensor, top_p: Numbers) -> Tensor:
    """Keep the tokens in the nucleus of each row. Set the other probabilities to 0.

    The nucleus is the smallest set of likeliest tokens whose probabilities sum to at least `top_p`
    times the sum of the row. If a token has the same probability as the last token of the nucleus,
    this token is kept, too. Example: top_p=0.8 turns [0.1, 0.6, 0.3] into [0, 0.6, 0.3].

    Shapes: probs [n, vocab_size], top_p [n].
    """
    ascending = _sorted(probs)
    cumulated = ascending.cumsum(-1)
    # Remove as many of the least likely tokens as possible. The removed probabilities may sum to at
    # most `max_removed`. The remaining tokens are the nucleus.
    total = cumulated[:, -1:]
    max_removed = (1 - column(top_p, probs)) * total
    num_removed = torch.searchsorted(cumulated, max_removed, right=True)
    # In ascending order, the first token after the removed tokens is the least likely token of the
    # nucleus. The last token, which is the likeliest, is always kept.
    index_of_smallest_kept = num_removed.clamp(max=probs.shape[1] - 1)
    smallest_kept = ascending.gather(1, index_of_smallest_kept)
    return probs * (probs >= smallest_kept)


def _sorted(probs: Tensor) -> Tensor:
    """Return the probabilities of each row in ascending order."""
    if probs.device.type != "cpu":
        return probs.sort(dim=-1).values
    # On a CPU, numpy sorts with vector instructions and is more than ten times as fast as torch.
    return torch.from_numpy(np.sort(probs.numpy(), axis=-1))
