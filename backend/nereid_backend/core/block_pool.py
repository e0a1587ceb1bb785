# SPDX-License-Identifier: Apache-2.0
"""The KV cache's blocks: who holds which, and which are worth finding again.

    block    0   1   2   3   4   5   6
    count    1   0   1   2   0   0   1        n: in n block tables
    kept     x   x           x                its tokens can be looked up (see prefix_cache.py)
    free     5                                a stack: the block freed last is used next
    idle     1 4                              nobody holds them, but they are kept: oldest first

A block belongs to those whose block tables name it and to nobody else; the pool counts. Blocks are
taken from the free ones, then from the idle ones, whose tokens are then forgotten.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """A fixed number of blocks, each with a count of its holders."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # Popped from the end, so that block 0 goes first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self._on_reuse: Callable[[int], None] = _ignore

    @property
    def null_block(self) -> int:
        """Stands in tables for a block that was given back; one behind the last, never held."""
        return self.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    @property
    def num_kept(self) -> int:
        """Blocks whose tokens can be looked up, held or not."""
        return len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Take blocks; the caller has made sure that there are enough (num_free)."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        first = max(0, len(self._free) - count)
        blocks = self._free[first:]
        blocks.reverse()
        del self._free[first:]
        while len(blocks) < count:
            block, _ = self._idle.popitem(last=False)
            self._kept.remove(block)
            self._on_reuse(block)
            blocks.append(block)
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a hold on each block; all are held already, or idle."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._idle[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block; those that nobody else holds become free or idle.

        The last ones become so first: of a sequence's blocks, its tail is reused before its head.
        """
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            assert count >= 0, f"block {block} is free already"
            self._ref_counts[block] = count
            if count > 0:
                continue
            if block in self._kept:
                self._idle[block] = None
            else:
                self._free.append(block)

    def count_idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def keep(self, block: int) -> None:
        """From now on, a held block is worth finding again when nobody holds it."""
        assert self._ref_counts[block] > 0, f"block {block} is not held"
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """A block is not worth finding any more, if it ever was."""
        self._kept.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def on_reuse(self, callback: Callable[[int], None]) -> None:
        """Have a function called with each kept block that is taken for something else."""
        self._on_reuse = callback

    def check(self, block_tables: Iterable[Sequence[int]] | None = None) -> None:
        """Verify that every block is either free, idle or held, once each.

        Args:
            block_tables: all tables there are; then the counts are compared with them, too. The
                null block may be in them.

        Raises:
            AssertionError: a block is lost, free twice, or counted wrongly.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert free.isdisjoint(self._kept), "a free block is kept"
        assert self._kept.issuperset(self._idle), "an idle block is not kept"
        for block, count in enumerate(self._ref_counts):
            is_free = block in free or block in self._idle
            assert (count == 0) == is_free, f"block {block}: {count} holders"
        if block_tables is None:
            return
        held = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                if block != self.null_block:
                    held[block] += 1
        assert held == self._ref_counts, "the counts differ from the block tables"


def _ignore(block: int) -> None:
    del block
