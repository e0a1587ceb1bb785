# SPDX-License-Identifier: Apache-2.0
"""How far back a model looks, and so which blocks of a sequence it will not look at again.

A model of which every layer has a window or chunks looks back no further than the widest of them.
Blocks before that are given back while the sequence runs:

    window of 3 blocks     [   ][   ][ 9 ][ 1 ][ 6 ][ 4 ]
                                       ^ the next token sees the end of 9; what was before is freed

In block tables stands the null block (BlockPool.null_block) for what was given back.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sight:
    """How far back any layer of a model looks.

    Attributes:
        limits: the layers' different windows and chunks, one pair for each kind of layer, at least
            one; at least one of each pair is a number, as in the attention layers' Span.
    """

    limits: tuple[tuple[int | None, int | None], ...]

    def first_seen(self, position: int) -> int:
        """The first position that a token at this position sees in some layer.

        Never becomes less for later tokens.
        """
        firsts = []
        for window, chunk in self.limits:
            first = 0 if window is None else max(0, position - (window - 1))
            firsts.append(first if chunk is None else max(first, position - position % chunk))
        return min(firsts)

    @property
    def most_seen(self) -> int:
        """Tokens that one token sees at most, itself included."""
        return max(min(limit for limit in pair if limit is not None) for pair in self.limits)

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks that a sequence holds at most while it computes so many tokens a step."""
        return -(-(self.most_seen + num_tokens) // block_size) + 1
