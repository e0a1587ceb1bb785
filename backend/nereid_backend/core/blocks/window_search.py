# SPDX-License-Identifier: Apache-2.0
"""Finds the longest cached prefix of a sequence if the model has attention windows; see window.py.

The token after a prefix attends only to the last blocks of the prefix. Blocks before the window of
this token may be missing in the cache. Example of two groups of layers, in which "-" is a block
that is not cached:

    [ 4 ][ 9 ][ 1 ][ - ]     full attention
    [ - ][ - ][ 6 ][ 2 ]     the window spans one block

The longest prefix has three blocks, because the first group has only three blocks. The second group
needs only block 6 of this prefix.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from nereid_backend.core.blocks.window import AttentionWindow


@dataclass(frozen=True, slots=True)
class WindowSearch:
    """Finds the longest prefix of a sequence that is cached for every group of layers.

    Attributes:
        windows: the attention window of each group of layers; None for a group with full attention.
        block_size: the number of tokens in one block.
        null_block: the id that represents a block that is not cached, or that is not needed.
    """

    windows: tuple[AttentionWindow | None, ...]
    block_size: int
    null_block: int

    def longest_prefix(
        self, tables: list[list[int]], can_end_after: Callable[[int], bool]
    ) -> list[list[int]]:
        """Return the blocks of the longest prefix that is cached in every group of layers.

        A prefix is cached if the cache has all blocks to which the next token attends. In the
        result, the null block replaces the blocks before the window of this token.

        Example with one group: block_size is 4, and the window has 4 tokens. The table is
        [null, 8, 5]. The token at position 12 attends to positions 9 to 12, and position 9 is in
        the third block. The result is [[null, null, 5]].

        Args:
            tables: for each group, the cached blocks of the sequence in token order. The null block
                replaces each block that is not cached.
            can_end_after: a function that returns whether the prefix may have a given number of
                blocks. Example: a recurrent model can continue only after a block at whose end its
                state was saved.
        """
        # Maps each window to a list. Element i of the list is the index of the last missing block
        # among the blocks 0 to i; -1 if none of these blocks is missing.
        last_missing = self._last_missing_by_window(tables)
        max_blocks = len(tables[0])
        if None in last_missing:
            # `last_missing[None]` describes the layers with full attention. In these layers, the
            # next token needs every block of the prefix, so the prefix must end before the first
            # missing block.
            max_blocks = _num_leading_cached(last_missing[None])
        # Try the longest prefix first.
        for num_blocks in range(max_blocks, 0, -1):
            if can_end_after(num_blocks) and self._has_needed_blocks(last_missing, num_blocks):
                return self._prefix_tables(tables, num_blocks)
        return [[] for _ in self.windows]

    def _prefix_tables(self, tables: list[list[int]], num_blocks: int) -> list[list[int]]:
        """Return the first `num_blocks` blocks of each table.

        The null block replaces the blocks before the window of the next token.
        """
        return [
            self._hide_blocks_before_window(table[:num_blocks], window)
            for table, window in zip(tables, self.windows, strict=True)
        ]

    def _last_missing_by_window(
        self, tables: list[list[int]]
    ) -> dict[AttentionWindow | None, list[int]]:
        """For each attention window and each block, find the last missing block up to this block.

        `tables` has one table for each group of layers. The groups with one window share one list.
        A block is missing if a table of these groups contains the null block. Element i of the list
        is the largest index j <= i of a missing block; -1 if there is none.

        Example: two groups have the same window and the tables [4, null, 9] and [null, 3, 6]. The
        list is [0, 1, 1].
        """
        by_window: dict[AttentionWindow | None, list[int]] = {}
        for window, table in zip(self.windows, tables, strict=True):
            last_missing = _last_missing(table, self.null_block)
            if window in by_window:
                last_missing = list(map(max, by_window[window], last_missing))
            by_window[window] = last_missing
        return by_window

    def _has_needed_blocks(
        self, last_missing_by_window: dict[AttentionWindow | None, list[int]], num_blocks: int
    ) -> bool:
        """Return whether the cache has all blocks that the first token after a prefix needs.

        The token needs the blocks from the start of its attention window to the end of the prefix.
        The last block of the prefix is required even if the window starts after this block, because
        a prefix whose end is not in the cache does not count as cached. The condition must be true
        for every attention window of the model.

        Args:
            last_missing_by_window: for each window, a list. Element i is the index of the last
                block among the blocks 0 to i that is not cached; -1 if all of them are cached.
            num_blocks: the number of blocks in the prefix.
        """
        last_block = num_blocks - 1
        for window, last_missing in last_missing_by_window.items():
            first_needed = min(self._first_visible_block(window, num_blocks), last_block)
            # `last_missing[last_block]` is the last missing block of the prefix, so all blocks
            # after it are cached.
            is_needed_block_missing = last_missing[last_block] >= first_needed
            if is_needed_block_missing:
                return False
        return True

    def _hide_blocks_before_window(
        self, table: list[int], window: AttentionWindow | None
    ) -> list[int]:
        """Return a copy of `table` with placeholders for the blocks before the attention window.

        The window belongs to the token that directly follows the blocks of the table.
        """
        num_hidden = self._first_visible_block(window, len(table))
        return [self.null_block] * num_hidden + table[num_hidden:]

    def _first_visible_block(self, window: AttentionWindow | None, num_blocks: int) -> int:
        """Return the index of the first block to which the next token attends.

        The next token directly follows the first `num_blocks` blocks.
        """
        if window is None:
            return 0
        return window.first_visible(num_blocks * self.block_size) // self.block_size


def _last_missing(table: list[int], null_block: int) -> list[int]:
    """For each index i, return the largest j <= i with table[j] == null_block; -1 if there is none.

    Example: the table [4, null, 9, 6] gives [-1, 1, 1, 1].
    """
    last_missing = -1
    result = []
    for index, block in enumerate(table):
        if block == null_block:
            last_missing = index
        result.append(last_missing)
    return result


def _num_leading_cached(last_missing: list[int]) -> int:
    """Return the number of blocks before the first missing block; see `_last_missing`.

    Example: [-1, 1, 1, 1] gives 1.
    """
    # The list is sorted, and it contains -1 for each block before the first missing block.
    return bisect_right(last_missing, -1)
