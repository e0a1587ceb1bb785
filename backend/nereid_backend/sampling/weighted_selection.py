# SPDX-License-Identifier: Apache-2.0
"""Selects a random index in each row of a matrix of weights."""

import torch
from torch import Tensor

# A row with at least _MIN_BLOCKS * _BLOCK weights is divided into blocks of _BLOCK weights.
_BLOCK = 512
_MIN_BLOCKS = 32


def select_indices(weights: Tensor, uniform: Tensor) -> Tensor:
    """Select one index in each row, using the random number of the row.

    The target of a row is its random number times the sum of its weights. The result is the first
    index at which the cumulative weights exceed the target. Example: the weights [1, 0, 3] have the
    cumulative weights [1, 1, 4]. The random number 0.5 gives the target 2, so the result is 2. The
    random number 0.2 gives the target 0.8, so the result is 0.

    A wide row is divided into blocks. First, the block that contains the result is found from the
    cumulative sums of the blocks. Then, the weights of this block are cumulated. This is faster
    than cumulating the weights of the whole row.

    Args:
        weights: [n, width], not negative.
        uniform: [n, 1] float64, the random numbers, in [0, 1).

    Returns:
        Indices [n] int64.
    """
    if weights.shape[1] // _BLOCK >= _MIN_BLOCKS:
        return _select_by_blocks(weights, uniform)
    cumulated = weights.cumsum(-1)
    return _search(cumulated, _scaled_to_total(uniform, cumulated))


def _select_by_blocks(weights: Tensor, uniform: Tensor) -> Tensor:
    """Select one index in each row of a wide matrix, using the random number of the row.

    A row is divided into blocks. First the block and then the index within the block is selected.
    `select_indices` documents the result.

    Shapes: weights [n, width], uniform [n, 1].
    """
    # Find the block that contains the selected index. `_search` returns the first index at which
    # the cumulative weights exceed the target.
    cumulated = _block_sums(weights).cumsum(-1)
    target = _scaled_to_total(uniform, cumulated)
    block = _search(cumulated, target)[:, None]  # [n, 1]
    # Find the selected index within the block.
    previous_block = (block - 1).clamp(min=0)
    sum_before_block = torch.where(block > 0, cumulated.gather(1, previous_block), 0.0)
    block_weights = _weights_of_block(weights, block)
    index_in_block = _search(block_weights.cumsum(-1), target - sum_before_block)
    return block.squeeze(1) * _BLOCK + index_in_block


def _block_sums(weights: Tensor) -> Tensor:
    """Return the sum of the weights in each block, [n, blocks].

    The last block also contains the remainder of the row. Example: with blocks of 2 weights, the
    row [1, 2, 3, 4, 5] has the sums [3, 12].
    """
    num_rows, width = weights.shape
    num_blocks = width // _BLOCK
    num_divided = num_blocks * _BLOCK
    sums = weights[:, :num_divided].view(num_rows, num_blocks, _BLOCK).sum(-1)
    sums[:, -1] += weights[:, num_divided:].sum(-1)
    return sums


def _weights_of_block(weights: Tensor, block: Tensor) -> Tensor:
    """Return the weights of one block of each row. `block` contains the index of each row's block.

    The last block can be longer than the other blocks, but the result must have the same width in
    all rows. The result therefore has the width of the last block, and zeros follow the weights of
    a shorter block. Example: with blocks of 2 weights, the block 0 of [1, 2, 3, 4, 5] gives
    [1, 2, 0], and the block 1 gives [3, 4, 5].

    Shapes: weights [n, width], block [n, 1].
    """
    width = weights.shape[1]
    last_block = width // _BLOCK - 1
    last_block_width = width - last_block * _BLOCK
    columns = block * _BLOCK + torch.arange(last_block_width, device=weights.device)
    block_weights = weights.gather(1, columns)
    # In the last block of a row, all columns belong to the block. In any other block, the columns
    # after the first `_BLOCK` columns belong to the next block, so their weights are set to 0.
    is_last_block = block == last_block
    block_weights[:, _BLOCK:] *= is_last_block
    return block_weights


def _scaled_to_total(uniform: Tensor, cumulated: Tensor) -> Tensor:
    """Multiply the random number of each row by the total weight of the row. Return [n, 1] float32.

    `cumulated` contains the cumulative weights of each row, so its last column is the total.
    """
    return (uniform * cumulated[:, -1:].double()).float()


def _search(cumulated: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first cumulative sum above `target` in each row, [n] int64."""
    total = cumulated[:, -1:]
    # Rounding can make the target equal to the total, but no cumulative sum exceeds the total.
    # Therefore, the target is limited to the largest float that is less than the total.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, target.contiguous(), right=True).squeeze(1)
    return index.clamp_(max=cumulated.shape[1] - 1)
