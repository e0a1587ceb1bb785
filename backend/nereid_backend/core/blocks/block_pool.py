# SPDX-License-Identifier: Apache-2.0
"""The pool that allocates the blocks of the KV cache.

The table shows a pool with 7 blocks:

    block      0   1   2   3   4   5   6
    ref count  1   0   1   2   0   0   1      the number of block tables that contain the block
    cached     x   x           x              the prefix cache can find the block
    free       5                              a stack: the block that was freed last is used first
    idle       1 4                            cached, but in no block table (eviction_order.py)

The pool allocates free blocks first. If there are not enough free blocks, the pool also allocates
idle blocks. When the pool allocates an idle block, the block is removed from the prefix cache.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from nereid_backend.core.blocks.eviction_order import EvictionOrder, SessionKey

# If sessions retain at most this fraction of all blocks, all other cached blocks are evicted first.
# If sessions retain more blocks, the oldest cached block is evicted first, even if a session
# retains this block.
_MAX_RETAINED_SHARE = 0.75


class BlockPool:
    """A fixed number of KV cache blocks. Each block has a reference count.

    Attributes:
        num_blocks: the number of blocks.
        idle: the cached blocks that no block table contains, and the sessions that retain blocks.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a pool of free blocks. Sessions use `clock`, which returns a time in seconds."""
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # The list is a stack: the last block of the list is allocated first. The list starts in
        # reverse order, so that block 0 is allocated before block 1.
        self._free = list(range(num_blocks - 1, -1, -1))
        self.idle: EvictionOrder[int] = EvictionOrder(int(num_blocks * _MAX_RETAINED_SHARE), clock)
        # All cached blocks, both idle blocks and blocks in block tables.
        self._cached: set[int] = set()
        self._on_reuse: Callable[[int], None] | None = None

    @property
    def null_block(self) -> int:
        """The id that block tables contain in place of a freed block. No block has this id."""
        return self.num_blocks

    @property
    def num_free(self) -> int:
        """The number of blocks that no block table contains."""
        return len(self._free) + len(self.idle)

    @property
    def num_used(self) -> int:
        """The number of blocks that at least one block table contains."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """The number of blocks that the prefix cache can find."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks of the KV cache and return the ids of the blocks.

        Free blocks are allocated first, and then the oldest idle blocks. An idle block is in the
        prefix cache, but no sequence uses it. Each allocated block gets the reference count 1.
        The caller must make sure that `count` is at most `num_free`.

        Example: the stack of free blocks is [5, 3], with 3 on top. The idle blocks are [1, 4], with
        the oldest first. `allocate(3)` returns [3, 5, 1].
        """
        assert count <= self.num_free, (
            f"{count} blocks were requested, but only {self.num_free} blocks are free."
        )
        num_from_free = min(count, len(self._free))
        blocks = [self._free.pop() for _ in range(num_from_free)]
        while len(blocks) < count:
            blocks.append(self._evict_idle())  # removes the oldest idle block from the prefix cache
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def _evict_idle(self) -> int:
        """Remove the oldest idle block from the prefix cache, and return its id."""
        block = self.idle.pop()
        self._cached.remove(block)
        if self._on_reuse is not None:
            self._on_reuse(block)
        return block

    def acquire(self, blocks: Sequence[int]) -> None:
        """Increment the reference count of each block.

        Call this method before the blocks are added to a block table. Each block must be idle or
        already in another block table.
        """
        for block in blocks:
            if self._ref_counts[block] == 0:
                self.idle.remove(block)
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Decrement the reference count of each block, because a sequence stops using it.

        If the reference count of a block becomes 0, the block can be allocated again. The block
        becomes idle if the prefix cache contains it, and free otherwise. The blocks are released
        from the last to the first. Cached blocks at the end of a sequence are therefore allocated
        again before cached blocks at its beginning.
        """
        for block in reversed(blocks):
            ref_count = self._ref_counts[block] - 1
            assert ref_count >= 0, f"Block {block} was released, but no block table contains it."
            self._ref_counts[block] = ref_count
            if ref_count > 0:
                continue
            if block in self._cached:
                self.idle.add(block)
            else:
                self._free.append(block)

    def count_idle(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` have the reference count 0."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def mark_cached(self, block: int) -> None:
        """Mark a block as cached.

        A cached block becomes idle, not free, when the reference count of the block becomes 0.
        """
        assert self._ref_counts[block] > 0, f"Block {block} is in no block table."
        self._cached.add(block)

    def retain(self, blocks: Iterable[int], key: SessionKey, seconds: float) -> None:
        """Let a session retain cached blocks; see `EvictionOrder.retain`."""
        self.idle.retain((block for block in blocks if block in self._cached), key, seconds)

    def unmark_cached(self, block: int) -> None:
        """Mark a block as not cached. The block becomes free if no block table contains it."""
        self._cached.discard(block)
        is_idle = block in self.idle
        self.idle.forget(block)
        if is_idle:
            self._free.append(block)

    def on_reuse(self, callback: Callable[[int], None]) -> None:
        """Set the function that is called when a cached block is allocated for new tokens.

        The function is called with the id of the block.
        """
        self._on_reuse = callback

    def check(self, block_tables: Iterable[Sequence[int]] | None = None) -> None:
        """Check that every block is free, is idle, or is in a block table.

        Args:
            block_tables: all block tables, which may contain the null block. If given, `check`
                compares the reference counts with the tables.

        Raises:
            AssertionError: if a block is lost, is free twice, or has a wrong reference count.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "The stack of free blocks contains a block twice."
        assert free.isdisjoint(self._cached), "A free block is marked as cached."
        assert self._cached.issuperset(self.idle), "An idle block is not marked as cached."
        for block, ref_count in enumerate(self._ref_counts):
            is_unused = block in free or block in self.idle
            assert (ref_count == 0) == is_unused, (
                f"Block {block} has the reference count {ref_count}, but the block is "
                f"{'free or idle' if is_unused else 'neither free nor idle'}."
            )
        if block_tables is None:
            return
        num_uses = Counter(block for table in block_tables for block in table)
        expected_ref_counts = [num_uses[block] for block in range(self.num_blocks)]
        assert expected_ref_counts == self._ref_counts, (
            "The reference counts do not match the block tables."
        )
