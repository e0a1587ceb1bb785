# SPDX-License-Identifier: Apache-2.0
"""The KV cache's blocks: who holds which.

    block    0   1   2   3   4   5   6
    count    1   0   1   2   0   0   1        0: free, n: in n block tables
    free     1 4 5                            a stack: the block freed last is used next

A block belongs to the requests whose block tables name it and to nobody else; the pool counts.
"""

from collections.abc import Iterable, Sequence


class BlockPool:
    """A fixed number of blocks, each with a count of its holders."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # Popped from the end, so that block 0 goes first.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take blocks; the caller has made sure that there are enough (num_free)."""
        assert count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        if count == 0:
            return []
        blocks = self._free[-count:]
        blocks.reverse()
        del self._free[-count:]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block; those that nobody else holds become free."""
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            assert count >= 0, f"block {block} is free already"
            self._ref_counts[block] = count
            if count == 0:
                self._free.append(block)

    def check(self, block_tables: Iterable[Sequence[int]] | None = None) -> None:
        """Verify that every block is either free or held, once each.

        Args:
            block_tables: all tables there are; then the counts are compared with them, too.

        Raises:
            AssertionError: a block is lost, free twice, or counted wrongly.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, count in enumerate(self._ref_counts):
            assert (count == 0) == (block in free), f"block {block}: {count} holders"
        if block_tables is None:
            return
        held = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                held[block] += 1
        assert held == self._ref_counts, "the counts differ from the block tables"
