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
        max_blocks = min(
            self._num_leading_cached(table) if window is None else len(table)
            for window, table in zip(self.windows, tables, strict=True)
        )
        cached_runs = self._cached_runs_by_window(tables)
        # Try the longest prefix first.
        for num_blocks in range(max_blocks, 0, -1):
            if can_end_after(num_blocks) and self._has_needed_blocks(cached_runs, num_blocks):
                return self._prefix_tables(tables, num_blocks)
        return [[] for _ in self.windows]

    def _num_leading_cached(self, table: list[int]) -> int:
        """Return the number of blocks before the first null block.

        With full attention, a token needs every block before it, so a cached prefix cannot be
        longer. Example: [4, 9, null, 6] gives 2.
        """
        return table.index(self.null_block) if self.null_block in table else len(table)

    def _prefix_tables(self, tables: list[list[int]], num_blocks: int) -> list[list[int]]:
        """Return the first `num_blocks` blocks of each table.

        The null block replaces the blocks before the window of the next token.
        """
        return [
            self._hide_blocks_before_window(table[:num_blocks], window)
            for table, window in zip(tables, self.windows, strict=True)
        ]

    def _cached_runs_by_window(self, tables: list[list[int]]) -> dict[AttentionWindow, list[int]]:
        """For each attention window, return the lengths of the runs of cached blocks.

        A run is a series of consecutive cached blocks. Element i of a list is the length of the run
        that ends at block i, or 0 if block i is not cached. Groups of layers with the same window
        share one list, which contains the smallest lengths.

        Example: two groups have the same window and the tables [4, null, 9] and [7, 3, 6]. Their
        lists are [1, 0, 1] and [1, 2, 3], so the result contains [1, 0, 1].
        """
        by_window: dict[AttentionWindow, list[int]] = {}
        for window, table in zip(self.windows, tables, strict=True):
            if window is None:
                continue
            runs = _cached_runs(table, self.null_block)
            if window in by_window:
                runs = [min(pair) for pair in zip(by_window[window], runs, strict=True)]
            by_window[window] = runs
        return by_window

    def _has_needed_blocks(
        self, cached_runs: dict[AttentionWindow, list[int]], num_blocks: int
    ) -> bool:
        """Return whether each group with a window has all blocks that the next token needs.

        The next token directly follows a prefix. The token needs the blocks from the start of its
        attention window to the end of the prefix, but at least the last block of the prefix.

        Example: the prefix has 6 blocks, and the window starts in block 4. The blocks 4 and 5 must
        be cached, so the run of consecutive cached blocks that ends with block 5 must have at least
        2 blocks.

        Args:
            cached_runs: the result of `_cached_runs_by_window`. For each window, element i of the
                list is the number of consecutive cached blocks that end with block i.
            num_blocks: the number of blocks in the prefix.
        """
        for window, runs in cached_runs.items():
            num_needed = max(1, num_blocks - self._first_visible_block(window, num_blocks))
            if runs[num_blocks - 1] < num_needed:
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


def _cached_runs(table: list[int], null_block: int) -> list[int]:
    """For each block, return the length of the run of cached blocks that ends at this block.

    A run is a series of consecutive cached blocks. The length is 0 if the block itself is not
    cached. The null block represents a block that is not cached. Example: the table
    [4, null, 9, 6] gives [1, 0, 1, 2].
    """
    run = 0
    runs = []
    for block in table:
        run = 0 if block == null_block else run + 1
        runs.append(run)
    return runs
