# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and ranks of tokens under the model's own distribution.

The log-probabilities are computed from the model's own logits, before masks, penalties and
temperature are applied. The log-probabilities are float32 for every dtype of the model. The rank of
a token is 1 plus the number of tokens with larger logits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.device_transfer import upload
from nereid_backend.sampling import native_logits

# The largest number of logits in one slice, on a CPU and on a GPU. The function `slices` divides
# the rows of logits into such slices.
_SLICE_LOGITS_CPU = 2**20
_SLICE_LOGITS_GPU = 2**26


class RankedRows(NamedTuple):
    """The log-probabilities and ranks of tokens, as tensors on the device.

    Each row belongs to one position.

    Attributes:
        ids: [n, 1 + width] int64. The first column contains the token at each position. The other
            columns contain the likeliest tokens.
        values: [n, 1 + width] float32, the log-probabilities of the tokens in `ids`.
        ranks: [n] int64, the rank of the token at each position.
        num_top: for each row, the number of likeliest tokens that `read` returns.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor
    num_top: Sequence[int]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors `ids`, `values` and `ranks`. `read` needs copies of them on the CPU."""
        return self.ids, self.values, self.ranks

    def read(self, ids: Tensor, values: Tensor, ranks: Tensor) -> list[TokenLogprobs]:
        """Return the log-probabilities of each row, given CPU copies of `self.tensors`."""
        reports: list[TokenLogprobs] = []
        rows = zip(ids.tolist(), values.tolist(), ranks.tolist(), self.num_top, strict=True)
        for row_ids, row_values, rank, num_top in rows:
            # The first column contains the token at the position. The other columns contain the
            # likeliest tokens.
            width = 1 + num_top
            reports.append(TokenLogprobs(row_ids[:width], row_values[:width], rank))
        return reports


def slices(num_rows: int, vocab_size: int, device: torch.device) -> list[slice]:
    """Divide the rows of logits into slices. The caller processes one slice after another.

    Intermediate results are as large as the logits of a slice. On a CPU, slices of a few megabytes
    save time, because the intermediate results fit into the caches. For a batch with a large
    vocabulary, this is four times as fast as processing all rows at once. On a GPU, slices only
    limit the memory.

    Example: a slice can have 2 rows. 5 rows are divided into the slices 0:2, 2:4 and 4:5.
    """
    max_logits = _SLICE_LOGITS_CPU if device.type == "cpu" else _SLICE_LOGITS_GPU
    size = max(1, max_logits // vocab_size)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def rank_tokens(
    logits: Tensor, logsumexp: Tensor, token_ids: Tensor, num_top: Sequence[int]
) -> RankedRows:
    """Return the log-probability and the rank of one given token in each row of logits.

    The rank of a token is 1 plus the number of likelier tokens. Also return the likeliest tokens of
    each row and their log-probabilities. This function does not wait for a GPU.

    Args:
        logits: [n, vocab_size] float32, the model's own logits.
        logsumexp: [n] float32, the logsumexp of each row of `logits`.
        token_ids: [n] int64, the token of each row.
        num_top: for each row, the number of likeliest tokens to report.
    """
    token_logits = logits.gather(1, token_ids[:, None])
    ranks = 1 + _num_true(logits > token_logits)
    # All rows get the same width: the largest number of likeliest tokens that is requested for any
    # row.
    width = min(max(num_top), logits.shape[1])
    # The first column contains the given token, and the other columns contain the likeliest tokens.
    ids = torch.cat((token_ids[:, None], _likeliest(logits, width)), dim=1)
    values = logits.gather(1, ids) - logsumexp[:, None]
    return RankedRows(ids, values, ranks, num_top)


def _num_true(mask: Tensor) -> Tensor:
    """Return the number of true elements in each row of a boolean tensor, [n] int64."""
    if mask.device.type != "cpu":
        return mask.sum(-1)
    # `sum` would first convert the whole mask to int64, but `count_nonzero` does not.
    return torch.tensor([int(row.count_nonzero()) for row in mask])


def _likeliest(logits: Tensor, width: int) -> Tensor:
    """Return the tokens with the largest logits in descending order, [n, width] int64."""
    if width > 0 and native_logits.has_kernels_for(logits):
        temperatures = np.ones(len(logits), dtype=np.float32)
        _, token_ids = native_logits.likeliest(logits, temperatures, width)
        # The kernel returns the id -1 if a row has fewer than `width` possible tokens, because some
        # logits are NaN or -inf.
        if (token_ids >= 0).all():
            return token_ids
    return logits.topk(width, dim=-1).indices


def rank_prompt(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[RankedRows]:
    """Return the log-probabilities of prompt tokens, and of the likeliest tokens at each position.

    The tokens are processed in slices, to limit the memory. The result has one item for each slice.

    Args:
        logits: [n, vocab_size], any float dtype. The logits of row i predict token i.
        token_ids: the n tokens.
        num_top: the number of likeliest tokens to report for each token.
    """
    ranked: list[RankedRows] = []
    targets = upload(np.array(token_ids), logits.device)
    for part in slices(len(token_ids), logits.shape[1], logits.device):
        rows = logits[part]
        logsumexp = native_logits.argmax_logsumexp(rows).logsumexp
        num_top_of_rows = [num_top] * len(rows)
        ranked.append(rank_tokens(rows.float(), logsumexp, targets[part], num_top_of_rows))
    return ranked
