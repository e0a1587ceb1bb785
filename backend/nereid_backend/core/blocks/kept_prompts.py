# SPDX-License-Identifier: Apache-2.0
"""A request keeps the blocks of its prompt until all its sequences have started to use the blocks.

If a request has several sequences, the first of them computes the prompt. The other sequences share
the blocks of the prompt as soon as they get a row. Until then, the request keeps these blocks, even
if the first sequence ends.
"""

from collections import abc
from collections.abc import Iterator
from itertools import chain

from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.window import AttentionWindow
from nereid_backend.core.request import Request
from nereid_backend.core.sequence import Sequence


class KeptPrompts:
    """Keeps the prompt blocks of requests in `Request.block_tables`, and later releases them."""

    def __init__(
        self, pool: BlockPool, block_size: int, windows: abc.Sequence[AttentionWindow | None]
    ) -> None:
        """Create an empty collection of prompt blocks.

        If a request has several sequences, its first sequence computes the prompt. The request then
        keeps the blocks of the prompt until the other sequences have started to run.

        Args:
            pool: the pool of the blocks.
            block_size: the number of tokens in one block.
            windows: the attention window of each group of layers; None for a group with full
                attention.
        """
        self._pool = pool
        self._block_size = block_size
        self._windows = windows
        # The requests that keep the blocks of their prompts. The request that has kept its blocks
        # for the longest time comes first. The dict is used as an ordered set.
        self._requests: dict[Request, None] = {}

    def keep(self, request: Request, leader: Sequence) -> None:
        """Store in `request` the prompt blocks of `leader`, the sequence that computed the prompt.

        Example with one group of layers: the prompt has 10 tokens, block_size is 4, and the
        leader's block table is [4, 9, 1, 6]. The request keeps the blocks [4, 9, 1].

        Mutates: `request.block_tables`.
        """
        request.block_tables = self._prompt_tables(leader)
        self._pool.acquire(self._blocks_of(request))
        self._requests[request] = None

    def _prompt_tables(self, leader: Sequence) -> list[list[int]]:
        """For each group of layers, return a block table with the prompt blocks of a sequence.

        The sequence `leader` has just computed the prompt. In a group with an attention window, the
        null block (a placeholder) replaces the blocks before the window of the last prompt token.
        """
        last_position = leader.num_prompt_tokens - 1
        last_block = last_position // self._block_size
        tables = []
        for window, table in zip(self._windows, leader.block_tables, strict=True):
            # The other sequences of the request compute only the last prompt token again, so they
            # need only the blocks that this token attends to. These blocks still exist, because
            # `leader` has just used them for the same token.
            first_position = 0 if window is None else window.first_visible(last_position)
            first_needed = first_position // self._block_size
            null_blocks = [self._pool.null_block] * first_needed
            tables.append(null_blocks + table[first_needed : last_block + 1])
        return tables

    def drop(self, request: Request) -> None:
        """Release the prompt blocks that a request keeps. Do nothing if the request keeps none."""
        if request in self._requests:
            del self._requests[request]
            self._pool.release(self._blocks_of(request))
            request.block_tables = []

    def drop_oldest(self) -> bool:
        """Release the prompt blocks of the request that has kept its blocks for the longest time.

        Returns:
            False if no request keeps blocks.
        """
        if not self._requests:
            return False
        self.drop(next(iter(self._requests)))
        return True

    def drop_with(self, blocks: set[int]) -> None:
        """Release the prompt blocks of each request that keeps at least one of `blocks`."""
        for request in list(self._requests):
            if not blocks.isdisjoint(chain(*request.block_tables)):
                self.drop(request)

    def block_tables(self) -> Iterator[list[int]]:
        """Yield the block tables in which requests keep the blocks of their prompts."""
        return chain(*(request.block_tables for request in self._requests))

    def _blocks_of(self, request: Request) -> list[int]:
        """Return the ids of the blocks that a request keeps, without placeholders."""
        return [block for block in chain(*request.block_tables) if block != self._pool.null_block]
