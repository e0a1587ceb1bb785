# SPDX-License-Identifier: Apache-2.0
"""The prefix cache. It finds computed blocks that a new request can reuse.

The hash of a full block is computed from its tokens and from the hash of the previous block. If two
blocks have the same hash, their sequences therefore have the same tokens up to the end of these
blocks. Example with 16 tokens in a block:

    s = H'(salt, adapter) -> h0 = H(s, tokens 0..15) -> h1 = H(h0, tokens 16..31) -> ...

A block is idle if no block table contains the block. An idle block remains in the cache until the
pool allocates the block for other tokens (eviction_order.py). If all blocks of a sequence become
idle at the same time, the pool allocates the last block first. The keys and values in a cached
block are exactly those that the model would compute, so the cache does not change answers.

If a model has several groups of layers (window.py), a sequence has one block in each group for the
same tokens. These blocks have the same hash. A prefix counts as cached if every group has the
blocks that the next token attends to. A group with full attention needs all blocks of the prefix. A
group with an attention window needs only the last blocks of the prefix.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections import abc
from collections.abc import Callable

from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.eviction_order import SessionKey
from nereid_backend.core.blocks.state_snapshots import StateSnapshots
from nereid_backend.core.blocks.window import AttentionWindow
from nereid_backend.core.sequence import Sequence

# Users share the cache. With short hashes, an attacker could construct two prompts with equal
# hashes and thereby read another user's blocks.
_HASH_BYTES = 16


class PrefixCache:
    """Maps the hash of a full block to the id of the block.

    Attributes:
        num_queried_tokens: the number of tokens that all requests looked up in the cache.
        num_hit_tokens: the number of tokens that all requests found in the cache.
        snapshots: the snapshots of recurrent states; None if the model has no recurrent state. If
            there are snapshots, a cached prefix always ends at a block with a snapshot.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        windows: abc.Sequence[AttentionWindow | None] = (None,),
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """Create an empty cache for the blocks of `pool`. Each block has `block_size` tokens.

        `windows` contains one attention window for each group of layers, or None for a group with
        full attention.
        """
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.snapshots = snapshots
        # The hashes of the blocks that must still be written to disk; None if there is no cache on
        # disk.
        self.unsaved: dict[bytes, None] | None = None
        # The hashes of the blocks that must be deleted from the cache on disk.
        self.invalid: list[bytes] = []
        self._before_reuse: Callable[[bytes, int], object] | None = None
        self._pool = pool
        self._block_size = block_size
        self._windows = tuple(windows)
        self._has_windows = any(window is not None for window in windows)
        # For each group of layers, one dict that maps a hash to the id of the block.
        self._blocks: list[dict[bytes, int]] = [{} for _ in windows]
        self._hashes: dict[int, bytes] = {}
        pool.on_reuse(self._drop)

    def find(self, sequence: Sequence) -> list[list[int]]:
        """Find the longest cached prefix of a sequence, and return the blocks of this prefix.

        The result has one block table for each group, and all tables have the same length. The last
        token is never part of the prefix, because sampling needs the logits of the last token. In a
        group with an attention window, the null block replaces leading blocks that are not needed.

        Example with one group: the sequence has 48 tokens, and block_size is 16. The cache contains
        the first two blocks of the sequence as the blocks 7 and 2, so the result is [[7, 2]]. The
        third block is never part of the result, because it contains the last token.
        """
        hashes = self._block_hashes(sequence, (len(sequence.token_ids) - 1) // self._block_size)
        if self._has_windows:
            return self._find_visible(hashes)
        block_table: list[int] = []
        cached_blocks = self._blocks[0]
        for block_hash in hashes:
            block = cached_blocks.get(block_hash)
            if block is None:
                break
            block_table.append(block)
        if self.snapshots is None:
            return [block_table]
        # A recurrent model can continue only from a snapshot, so the blocks after the last snapshot
        # are computed again. Because `branch_position` is set, a new snapshot is saved at the end
        # of the cached blocks. The next request with this prefix can then reuse all these blocks.
        sequence.branch_position = len(block_table) * self._block_size
        while block_table and hashes[len(block_table) - 1] not in self.snapshots:
            block_table.pop()
        return [block_table]

    def save_on_disk(self, before_reuse: Callable[[bytes, int], object]) -> None:
        """Record the hashes of new blocks in `unsaved`, so that the blocks can be saved on disk.

        The model must have only one group of layers.

        Args:
            before_reuse: called with the hash and the id of an unsaved block before the pool
                allocates the block for other tokens.
        """
        assert len(self._windows) == 1, "The cache on disk stores one block for each hash."
        self.unsaved = {}
        self._before_reuse = before_reuse
        if self.snapshots is not None:
            self.snapshots.unsaved = {}

    def prefix_hashes(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the full blocks that do not contain the last token of a sequence.

        Example with 16 tokens in a block: a sequence of 48 tokens gives two hashes, and a sequence
        of 49 tokens gives three hashes.
        """
        return self._block_hashes(sequence, (len(sequence.token_ids) - 1) // self._block_size)

    def block_of(self, block_hash: bytes) -> int | None:
        """Return the id of the block with this hash in the first group of layers, or None."""
        return self._blocks[0].get(block_hash)

    def insert(self, hashes: list[bytes]) -> list[tuple[bytes, int]]:
        """Allocate blocks for tokens that were computed earlier, and add them to the cache.

        The caller must write the content of the blocks before the next step. The model must have
        only one group of layers.

        Args:
            hashes: the hashes of the leading blocks of a sequence. If some of these blocks are
                cached already, they are not evicted.

        Returns:
            The hash and the id of each new block. If there are not enough free blocks, only the
            first blocks are added.
        """
        blocks = self._blocks[0]
        held = [blocks[block_hash] for block_hash in hashes if block_hash in blocks]
        self._pool.hold(held)
        missing = [block_hash for block_hash in hashes if block_hash not in blocks]
        missing = missing[: self._pool.num_free]
        new = list(zip(missing, self._pool.allocate(len(missing)), strict=True))
        for block_hash, block in new:
            blocks[block_hash] = block
            self._hashes[block] = block_hash
            self._pool.mark_cached(block)
        self._pool.release([*held, *(block for _, block in new)])
        return new

    def cached_blocks(self, hashes: list[bytes]) -> set[int]:
        """Return the ids of the cached blocks whose hashes are in `hashes`."""
        return {blocks[one] for blocks in self._blocks for one in hashes if one in blocks}

    def add(self, sequence: Sequence) -> None:
        """Add the computed full blocks of a sequence to the cache."""
        num_full = sequence.num_computed_tokens // self._block_size
        if num_full <= sequence.num_findable_blocks:
            return
        hashes = self._block_hashes(sequence, num_full)
        for blocks, table in zip(self._blocks, sequence.block_tables, strict=True):
            for index in range(sequence.num_findable_blocks, num_full):
                # If two requests computed the same tokens, keep only the block that was added
                # first.
                block_hash = hashes[index]
                if block_hash in blocks:
                    continue
                block = table[index]
                blocks[block_hash] = block
                self._hashes[block] = block_hash
                self._pool.mark_cached(block)
                if self.unsaved is not None:
                    self.unsaved[block_hash] = None
        sequence.num_findable_blocks = num_full
        if self.snapshots is not None:
            self.snapshots.add(sequence)

    def retain(self, sequence: Sequence) -> None:
        """Add the cached blocks and snapshots of a sequence to the session of its request."""
        params = sequence.params
        key = SessionKey(params.client_id, params.prompt_cache_key)
        end = sequence.num_findable_blocks
        retained = []
        for blocks, first in zip(self._blocks, sequence.num_dropped_blocks, strict=True):
            hashes = sequence.block_hashes[first:end]
            # The order is reversed, because the last block of the sequence must be evicted first.
            retained += [blocks[one] for one in reversed(hashes) if one in blocks]
        self._pool.retain(retained, key, params.retention_s)
        if self.snapshots is not None:
            hashes = sequence.block_hashes[min(sequence.num_dropped_blocks) : end]
            self.snapshots.retain(hashes, key, params.retention_s)

    def extend_session(self, key: SessionKey, seconds: float) -> bool:
        """Retain the cached prefixes of a session for at least `seconds` more seconds.

        Return False if the session does not exist.
        """
        if self.snapshots is not None:
            self.snapshots.extend(key, seconds)
        return self._pool.idle.extend(key, seconds)

    def drop_session(self, key: SessionKey) -> int:
        """Remove the cached blocks of a session, and return the number of removed blocks.

        Blocks that a running sequence uses are not removed. The removed blocks are deleted from the
        cache on disk, too.
        """
        blocks = self._pool.idle.idle_items(key)
        for block in blocks:
            self.forget(block)
        return len(blocks)

    def drop_all(self) -> int:
        """Remove all cached blocks except those of running sequences. Return the number removed."""
        blocks = list(self._pool.idle)
        for block in blocks:
            self.forget(block)
        return len(blocks)

    def forget(self, block: int) -> None:
        """Remove a block from the cache, and mark the block as not cached in the pool."""
        if self.unsaved is not None and block in self._hashes:
            self.unsaved.pop(self._hashes[block], None)
            self.invalid.append(self._hashes[block])
        self._drop(block)
        self._pool.unmark_cached(block)

    def check(self) -> None:
        """Check that the hashes and the cached blocks match.

        Raises:
            AssertionError: if the hashes and the cached blocks do not match.
        """
        assert sum(map(len, self._blocks)) == len(self._hashes) == self._pool.num_cached
        for blocks in self._blocks:
            assert all(self._hashes[block] == block_hash for block_hash, block in blocks.items())

    def _find_visible(self, hashes: list[bytes]) -> list[list[int]]:
        """Find the longest cached prefix if the model has attention windows.

        Return one block table for each group of layers. The next token after a prefix attends only
        to the blocks in its window. The prefix counts as cached if the cache contains these blocks
        in every group of layers. The null block replaces the blocks before the window.

        Example with one group: block_size is 4, and the window has 4 tokens. The sequence has 3
        full blocks, and the cache contains the second and the third block as the blocks 8 and 5.
        The token at position 12 attends to positions 9 to 12, and position 9 is in the third block.
        The result is [[null, null, 5]].
        """
        null = self._pool.null_block
        tables = [[blocks.get(one, null) for one in hashes] for blocks in self._blocks]
        missing = self._missing_blocks(tables)
        # A group of layers with full attention needs all blocks of the prefix.
        longest = bisect_right(missing.pop(None), -1) if None in missing else len(hashes)
        for num_blocks in range(longest, 0, -1):
            if self.snapshots is not None and hashes[num_blocks - 1] not in self.snapshots:
                continue
            has_all_blocks = all(
                last[num_blocks - 1] < min(self._first_block(window, num_blocks), num_blocks - 1)
                for window, last in missing.items()
            )
            if has_all_blocks:
                firsts = [self._first_block(window, num_blocks) for window in self._windows]
                return [
                    [null] * first + table[first:num_blocks]
                    for first, table in zip(firsts, tables, strict=True)
                ]
        return [[] for _ in self._windows]

    def _missing_blocks(self, tables: list[list[int]]) -> dict[AttentionWindow | None, list[int]]:
        """Find the missing blocks of the groups. The result maps a window to a list.

        Consider the tables of all groups with this window. Element i of the list is the largest
        index j <= i at which one of these tables contains the null block, or -1. Example: two
        groups have the same window and the tables [4, null, 9] and [null, 3, 6]. The list is
        [0, 1, 1].
        """
        missing: dict[AttentionWindow | None, list[int]] = {}
        for window, table in zip(self._windows, tables, strict=True):
            last = _last_missing(table, self._pool.null_block)
            missing[window] = list(map(max, missing.get(window, last), last))
        return missing

    def _first_block(self, window: AttentionWindow | None, num_blocks: int) -> int:
        """Return the index of the first block to which the next token attends.

        The next token directly follows the first `num_blocks` blocks.
        """
        if window is None:
            return 0
        return window.first_visible(num_blocks * self._block_size) // self._block_size

    def _drop(self, block: int) -> None:
        block_hash = self._hashes.pop(block, None)
        if block_hash is not None:
            if self.unsaved is not None and block_hash in self.unsaved:
                del self.unsaved[block_hash]
                assert self._before_reuse is not None
                self._before_reuse(block_hash, block)
            # A block belongs to exactly one group of layers.
            del next(one for one in self._blocks if one.get(block_hash) == block)[block_hash]
            if self.snapshots is not None:
                self.snapshots.delete(block_hash)

    def _block_hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """Return the hashes of the first `count` full blocks of a sequence.

        The hashes are stored in `sequence.block_hashes`. A stored hash never changes, because
        tokens are only appended to a sequence.
        """
        hashes = sequence.block_hashes
        if not hashes and count > 0:
            hashes.append(self._hash_block(_first_hash(sequence), sequence, 0))
        for index in range(len(hashes), count):
            hashes.append(self._hash_block(hashes[-1], sequence, index))
        return hashes[:count]

    def _hash_block(self, previous_hash: bytes, sequence: Sequence, index: int) -> bytes:
        """Return the hash of block number `index` of a sequence.

        If the keys and values of the block depend on images, the hash depends on the images, too.
        """
        end = (index + 1) * self._block_size
        token_ids = sequence.token_ids[index * self._block_size : end]
        content = previous_hash + array("q", token_ids).tobytes()
        images = sequence.images
        key = b"" if images is None or end <= images.first_token else images.digest
        return hashlib.blake2b(content, digest_size=_HASH_BYTES, key=key).digest()


def _last_missing(table: list[int], null_block: int) -> list[int]:
    """For each index i, return the largest j <= i for which table[j] is the null block, or -1.

    Example: the table [4, null, 9, 6] gives [-1, 1, 1, 1].
    """
    last_missing = -1
    result = []
    for index, block in enumerate(table):
        if block == null_block:
            last_missing = index
        result.append(last_missing)
    return result


def _first_hash(sequence: Sequence) -> bytes:
    """Return the hash from which the hash of a sequence's first block is computed.

    The result depends on the salt and the adapter of the sequence. Because of the personalisation
    string, the result is never equal to the hash of a block.
    """
    text = sequence.params.cache_salt.encode("utf-8", "surrogatepass")
    key = b"" if sequence.adapter is None else sequence.adapter.digest
    return hashlib.blake2b(text, digest_size=_HASH_BYTES, key=key, person=b"salt").digest()
