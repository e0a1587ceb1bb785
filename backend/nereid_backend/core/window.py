# SPDX-License-Identifier: Apache-2.0
"""The attention window of a model: how many earlier tokens a token can attend to.

If every layer of a model uses a sliding window or attention chunks, no token attends to a position
before the largest of them. The blocks before that position are freed while the sequence runs.
Example with a window that spans three blocks, drawn as a block table:

    [null][null][ 9 ][ 1 ][ 6 ][ 4 ]
                  ^ the next token attends from the end of block 9 on; the first two were freed

A block table contains the null block (`BlockPool.null_block`) in place of each freed block.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The positions that the layers of a model can attend to.

    Attributes:
        limits: one pair (sliding window, attention chunk) for each kind of layer, both in tokens.
            At least one number of each pair is not None, as in `Span` of the attention layers.
    """

    limits: tuple[tuple[int | None, int | None], ...]

    def first_visible(self, position: int) -> int:
        """Return the first position that the token at `position` attends to in any layer.

        The result never decreases when `position` increases. Example: with a sliding window of 4
        tokens, the token at position 10 attends to positions 7 to 10, so the result is 7.
        """
        firsts = []
        for window, chunk in self.limits:
            first = 0 if window is None else max(0, position - (window - 1))
            firsts.append(first if chunk is None else max(first, position - position % chunk))
        return min(firsts)

    @property
    def max_visible_tokens(self) -> int:
        """The largest number of tokens that one token attends to, including itself."""
        return max(min(limit for limit in pair if limit is not None) for pair in self.limits)

    def max_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return how many blocks a sequence holds at most.

        Args:
            num_tokens: the largest number of the sequence's tokens in one step.
            block_size: tokens in one block.
        """
        return -(-(self.max_visible_tokens + num_tokens) // block_size) + 1
