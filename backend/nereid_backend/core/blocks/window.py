# SPDX-License-Identifier: Apache-2.0
"""Attention windows. They limit the number of earlier tokens that a token can attend to.

A layer can limit attention to a sliding window or to fixed attention chunks. The attention layers
of a model are divided into groups. A sequence has one block table for each group, and a block
stores the keys and values of one group. If every layer of a group has a limit, no token attends to
a position before the largest window or chunk of the group. The blocks before this window or chunk
are freed while the sequence runs. The following example shows the block tables of two groups. The
second group has a window that spans three blocks:

    [ 0 ][ 2 ][ 8 ][ 3 ][ 7 ][ 5 ]      full attention
    [null][null][ 9 ][ 1 ][ 6 ][ 4 ]    window

In the second group, the next token attends to the last tokens of block 9 and to all later tokens.
The first two blocks were freed, so the table contains two null blocks (`BlockPool.null_block`). The
blocks of all groups have the same size and come from one pool, so every group can use a freed
block.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The attention window of one group of layers: how far back the layers can attend.

    The class is used only if every layer of the group has a limit.

    Attributes:
        limits: the distinct limits of the layers, in tokens. A limit is a pair (size of the sliding
            window, size of an attention chunk). At least one number of a pair is not None. The
            class `LayerWindow` in attention/layers.py describes these sizes.
    """

    limits: tuple[tuple[int | None, int | None], ...]

    def first_visible(self, position: int) -> int:
        """Return the smallest position that the token at `position` attends to in any layer.

        If `position` increases, the result never decreases. Example: with a sliding window of 4
        tokens, the token at position 10 attends to positions 7 to 10, so the result is 7.
        """
        first_positions = []
        for window, chunk in self.limits:
            first = 0 if window is None else max(0, position - (window - 1))
            chunk_start = 0 if chunk is None else position - position % chunk
            first_positions.append(max(first, chunk_start))
        return min(first_positions)

    @property
    def max_visible_tokens(self) -> int:
        """The largest number of tokens that one token attends to, including itself."""
        return max(min(limit for limit in pair if limit is not None) for pair in self.limits)

    def max_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the largest number of blocks that one sequence can use in this group of layers.

        Args:
            num_tokens: the largest number of tokens that one step computes for one sequence.
            block_size: the number of tokens in one block.
        """
        return -(-(self.max_visible_tokens + num_tokens) // block_size) + 1


def max_sequence_blocks(
    windows: Sequence[AttentionWindow | None],
    num_tokens: int,
    max_step_tokens: int | None,
    block_size: int,
) -> int:
    """Return the largest number of blocks that one sequence can use at the same time.

    The attention layers of a model are divided into groups, and a sequence has its own blocks in
    each group. In a group with an attention window, the blocks before the window are freed.

    Example with 16 tokens in a block and 100 tokens in a step: a sequence of 1000 tokens has 63
    blocks in a group with full attention. In a group with a window of 64 tokens, the sequence has
    at most 12 blocks.

    Args:
        windows: the window of each group; None for a group with full attention.
        num_tokens: the number of tokens of the sequence.
        max_step_tokens: the largest number of tokens that one step computes for one sequence; None
            if one step may compute all tokens of a sequence.
        block_size: the number of tokens in one block.
    """
    num_all_blocks = -(-num_tokens // block_size)  # rounded up
    max_blocks = 0
    for window in windows:
        if window is None or max_step_tokens is None:
            max_blocks += num_all_blocks
        else:
            max_blocks += min(num_all_blocks, window.max_blocks(max_step_tokens, block_size))
    return max_blocks
