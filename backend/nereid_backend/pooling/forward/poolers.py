# SPDX-License-Identifier: Apache-2.0
"""Combines the token vectors of a text into one vector. This is called pooling.

All computations use float32, even if the model has another data type, because pooling takes little
time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Three numbers for each text: the index of the first pooled token, the index after the last pooled
# token, and the number of the text's tokens before the first pooled token (the tokens of its
# prompt). Each range contains at least one token. Example: [(0, 5, 0), (6, 9, 1)] pools the tokens
# 0 to 4, and the tokens 6 to 8. The token 5 is the prompt of the second text.
Ranges = list[tuple[int, int, int]]


def pool(hidden: Tensor, ranges: Ranges, poolers: tuple[str, ...]) -> Tensor:
    """Combine the token vectors of each text into one vector.

    Args:
        hidden: the token vectors of all texts, [num_tokens, hidden_size].
        ranges: the pooled tokens of each text.
        poolers: the names of pooling methods. The results of several methods are concatenated.

    Returns:
        The pooled vectors, float32 [num_texts, len(poolers) * hidden_size].
    """
    pooled = [_POOLERS[name](hidden, ranges) for name in poolers]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1)


def _rows(index: list[int], hidden: Tensor) -> Tensor:
    """Return the vectors of the tokens with the indices `index`, float32 [n, hidden_size]."""
    return hidden[torch.tensor(index, device=hidden.device)].float()


def _sums(hidden: Tensor, ranges: Ranges, weights: list[Tensor] | None) -> Tensor:
    """For each range of tokens, return the sum of the token vectors in this range.

    If `weights` is given, the sum is weighted.
    """
    parts = []
    for number, (start, end, _) in enumerate(ranges):
        rows = hidden[start:end].float()
        parts.append(rows.sum(0) if weights is None else weights[number] @ rows)
    return torch.stack(parts)


def _lens(hidden: Tensor, ranges: Ranges) -> Tensor:
    """Return the number of pooled tokens of each text, [num_texts, 1]."""
    return torch.tensor([end - start for start, end, _ in ranges], device=hidden.device)[:, None]


def _weighted_mean(hidden: Tensor, ranges: Ranges) -> Tensor:
    """Return a weighted mean of the token vectors of each text.

    The first token has the weight 1, the second token has the weight 2, and so on. The tokens of a
    prompt are counted, too. Example: if a prompt has 3 tokens, the first pooled token has the
    weight 4.
    """
    weights = [
        torch.arange(
            prompt_len + 1,
            prompt_len + end - start + 1,
            device=hidden.device,
            dtype=torch.float32,
        )
        for start, end, prompt_len in ranges
    ]
    totals = torch.stack([text_weights.sum() for text_weights in weights])[:, None]
    return _sums(hidden, ranges, weights) / totals


_POOLERS: dict[str, Callable[[Tensor, Ranges], Tensor]] = {
    "cls": lambda hidden, ranges: _rows([start for start, _, _ in ranges], hidden),
    "lasttoken": lambda hidden, ranges: _rows([end - 1 for _, end, _ in ranges], hidden),
    "mean": lambda hidden, ranges: _sums(hidden, ranges, None) / _lens(hidden, ranges),
    "mean_sqrt_len_tokens": lambda hidden, ranges: (
        _sums(hidden, ranges, None) / _lens(hidden, ranges).sqrt()
    ),
    "weightedmean": _weighted_mean,
    "max": lambda hidden, ranges: torch.stack(
        [hidden[start:end].float().amax(0) for start, end, _ in ranges]
    ),
}
