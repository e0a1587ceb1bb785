# SPDX-License-Identifier: Apache-2.0
"""The attention window of a model, which limits how many earlier tokens a token can attend to.

A layer can limit attention to a sliding window or to fixed attention chunks. If every layer of a
model has such a limit, no token attends to a position before the largest window or chunk. The
blocks before that position are freed while the sequence runs. Example of a block table with a
window that spans three blocks:

    [null][null][ 9 ][ 1 ][ 6 ][ 4 ]

The next token attends to positions from the end of block 9 on. The first two blocks were freed, so
the table contains the null block (`BlockPool.null_block`) in place of each.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The attention limits of the layers of a model.

    The class is used only if every layer of the model has a limit.

    Attributes:
        limits: one pair (sliding window, attention chunk) for each kind of layer, in tokens. At
            least one number of each pair is not None. The numbers are those of the class
            `LayerWindow` in attention/layers.py.
    """

    limits: tuple[tuple[int | None, int | None], ...]

    def first_visible(self, position: int) -> int:
        """Return the first position that the token at `position` attends to in any layer.

        If `position` increases, the result never decreases. Example: with a sliding window of 4
        tokens, the token at position 10 attends to positions 7 to 10, so the result is 7.
        """
        firsts = []
        for window, chunk in self.limits:
            first = 0 if window is None else max(0, position - (window - 1))
            firsts.append(first if chunk is None else max(first, position - position % chunk))
        return min(firsts)

    @property
    def max_visible_tokens(self) -> int:
        """The largest number of tokens that one token attends to. The token itself is counted."""
        return max(min(limit for limit in pair if limit is not None) for pair in self.limits)

    def max_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the largest number of blocks that a sequence has at the same time.

        Args:
            num_tokens: the largest number of tokens that one step computes of one sequence.
            block_size: tokens in one block.
        """
        return -(-(self.max_visible_tokens + num_tokens) // block_size) + 1
