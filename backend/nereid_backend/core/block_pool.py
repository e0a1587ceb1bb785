# SPDX-License-Identifier: Apache-2.0
"""The blocks of the KV cache: reference counts, free blocks and cached blocks.

    block      0   1   2   3   4   5   6
    ref count  1   0   1   2   0   0   1      the number of block tables that contain the block
    cached     x   x           x              the prefix cache can find the block
    free       5                              a stack: the block that was freed last is used first
    idle       1 4                            cached, but in no block table; the oldest comes first

The pool allocates free blocks first and idle blocks after them. When it allocates an idle block,
the prefix cache forgets the tokens of that block.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """A fixed number of blocks, each with a reference count."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # Blocks are popped from the end, so block 0 is allocated first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self._on_reuse: Callable[[int], None] = _ignore

    @property
    def null_block(self) -> int:
        """The id that replaces a freed block in a block table; no block has this id."""
        return self.num_blocks

    @property
    def num_free(self) -> int:
        """The number of blocks that no block table contains."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """The number of blocks that at least one block table contains."""
        return self.num_blocks - self.num_free

    @property
    def num_kept(self) -> int:
        """The number of blocks that the prefix cache can find."""
        return len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with a reference count of 1.

        The caller must check num_free first.
        """
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
        """Increment the reference count of each block. No block may be free."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._idle[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Decrement the reference count of each block.

        A block whose count becomes 0 becomes idle if it is cached, and free otherwise. The blocks
        are released from the last to the first, so that the end of a sequence is reused before its
        beginning.
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
        """Return how many of `blocks` have a reference count of 0."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def keep(self, block: int) -> None:
        """Mark a block as cached: it becomes idle, not free, when its reference count is 0."""
        assert self._ref_counts[block] > 0, f"block {block} is not held"
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """Mark a block as not cached. An idle block becomes free."""
        self._kept.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def on_reuse(self, callback: Callable[[int], None]) -> None:
        """Call `callback` with the id of each cached block that is allocated for new tokens."""
        self._on_reuse = callback

    def check(self, block_tables: Iterable[Sequence[int]] | None = None) -> None:
        """Verify that every block is exactly one of free, idle and in use.

        Args:
            block_tables: all block tables. If given, the reference counts are compared with them.
                The tables may contain the null block.

        Raises:
            AssertionError: if a block is lost, free twice, or has a wrong reference count.
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
