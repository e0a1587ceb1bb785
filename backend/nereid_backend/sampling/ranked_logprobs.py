# SPDX-License-Identifier: Apache-2.0
"""How sure the model was: log-probabilities under its own distribution, before anything changes it.

In float32, whatever the model computes in. Ranks count tokens whose logits are strictly larger.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.device_transfer import upload
from nereid_backend.sampling import native_logits
from nereid_backend.sampling.logsumexp import row_facts


class RankedRows(NamedTuple):
    """Log-probabilities at some positions, where they were computed.

    Attributes:
        ids: [n, 1 + most wanted] int64, the token that stands there and the likeliest ones.
        values: float32, of each of them.
        ranks: [n] int64, of the tokens that stand there.
        num_top: how many of the likeliest tokens each row wants.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor
    num_top: Sequence[int]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `read` needs on the CPU."""
        return self.ids, self.values, self.ranks

    def read(self, ids: Tensor, values: Tensor, ranks: Tensor) -> list[TokenLogprobs]:
        """What is reported of each row, from the three tensors on the CPU."""
        return [
            TokenLogprobs(row_ids[: count + 1], row_values[: count + 1], rank)
            for row_ids, row_values, rank, count in zip(
                ids.tolist(), values.tolist(), ranks.tolist(), self.num_top, strict=True
            )
        ]


def slices(num_rows: int, vocab_size: int, device: torch.device) -> list[slice]:
    """Cut rows of logits into pieces that are worked on one after another.

    What is computed from logits is as large as they are. On a CPU a piece of a few megabytes stays
    in the caches and in memory that the allocator has at hand, which is four times as fast as
    whole batches of a large vocabulary; on a GPU pieces only bound the memory.
    """
    elements = 2**20 if device.type == "cpu" else 2**26
    size = max(1, elements // vocab_size)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def rank_tokens(
    logits: Tensor, logsumexp: Tensor, token_ids: Tensor, num_top: Sequence[int]
) -> RankedRows:
    """Log-probabilities of one token a row and of the likeliest ones there.

    On a GPU nothing is waited for.

    Args:
        logits: [n, vocab_size] float32, the model's own.
        logsumexp: [n] float32, of logits.
        token_ids: [n] int64.
        num_top: how many of the likeliest tokens each row wants.
    """
    own = logits.gather(1, token_ids[:, None])
    is_likelier = logits > own
    if logits.device.type == "cpu":
        # Row by row it is counted without making integers of everything first.
        ranks = torch.tensor([int(row.count_nonzero()) + 1 for row in is_likelier])
    else:
        ranks = is_likelier.sum(-1) + 1
    width = min(max(num_top), logits.shape[1])
    ids = torch.cat((token_ids[:, None], _likeliest(logits, width)), dim=1)
    values = logits.gather(1, ids) - logsumexp[:, None]
    return RankedRows(ids, values, ranks, num_top)


def _likeliest(logits: Tensor, width: int) -> Tensor:
    """The tokens with the largest logits, these first: [n, width] int64."""
    if width > 0 and native_logits.can_read(logits):
        ones = np.ones(len(logits), dtype=np.float32)
        _, token_ids = native_logits.likeliest(logits, ones, width)
        if (token_ids >= 0).all():
            return token_ids
    return logits.topk(width, dim=-1).indices


def rank_prompt(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[RankedRows]:
    """Log-probabilities of a prompt's tokens, in pieces.

    Args:
        logits: [n, vocab_size], any float dtype, each row from before its token.
        token_ids: the n tokens.
        num_top: how many of the likeliest tokens to report beside each.
    """
    found: list[RankedRows] = []
    targets = upload(np.array(token_ids), logits.device)
    for piece in slices(len(token_ids), logits.shape[1], logits.device):
        rows = logits[piece]
        facts, counts = row_facts(rows), [num_top] * len(rows)
        found.append(rank_tokens(rows.float(), facts.logsumexp, targets[piece], counts))
    return found
