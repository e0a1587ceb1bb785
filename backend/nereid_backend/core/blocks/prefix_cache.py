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
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field

from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.eviction_order import SessionKey
from nereid_backend.core.blocks.state_snapshots import StateSnapshots
from nereid_backend.core.blocks.window import AttentionWindow
from nereid_backend.core.blocks.window_search import WindowSearch
from nereid_backend.core.sequence import Sequence

# Users share the cache. If the hashes were short, an attacker could construct two prompts with
# equal hashes and thereby read another user's blocks.
_HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class DiskChanges:
    """The changes to the prefix cache that must still be applied to the cache on disk.

    Attributes:
        before_reuse: called with the hash and the id of an unsaved block before the pool allocates
            the block for other tokens. This call is the last chance to save the block.
        unsaved: the hashes of the blocks that must still be written to disk. The dict is used as an
            ordered set, so all its values are None.
        invalid: the hashes of the blocks that must be deleted from disk.
    """

    before_reuse: Callable[[bytes, int], object]
    unsaved: dict[bytes, None] = field(default_factory=dict)
    invalid: list[bytes] = field(default_factory=list)

    def save_before_reuse(self, block_hash: bytes, block: int) -> None:
        """If a block is in `unsaved`, remove the block from `unsaved` and call `before_reuse`."""
        if block_hash in self.unsaved:
            del self.unsaved[block_hash]
            self.before_reuse(block_hash, block)

    def invalidate(self, block_hash: bytes) -> None:
        """Record that a block must not be written to disk, and must be deleted from disk."""
        self.unsaved.pop(block_hash, None)
        self.invalid.append(block_hash)


class PrefixCache:
    """Maps the hash of a full block to the id of the block.

    Attributes:
        num_queried_tokens: the number of tokens that all requests looked up in the cache.
        num_hit_tokens: the number of tokens that all requests found in the cache.
        snapshots: the snapshots of recurrent states; None if the model has no recurrent state. If
            there are snapshots, a cached prefix always ends at a block with a snapshot.
        disk_changes: the changes that must still be made on disk; None if there is no cache on
            disk.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        windows: abc.Sequence[AttentionWindow | None] = (None,),
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """Create an empty cache.

        Args:
            pool: the pool of the blocks that are cached.
            block_size: the number of tokens in one block.
            windows: the attention window of each group of layers; None for a group with full
                attention.
            snapshots: the snapshots of recurrent states; None if the model has no recurrent state.
        """
        # `BlockTables` increases these two numbers when a sequence starts to run.
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.snapshots = snapshots
        self.disk_changes: DiskChanges | None = None  # set by `start_recording_new_blocks`
        self._pool = pool
        self._block_size = block_size
        self._windows = tuple(windows)
        # If at least one group has an attention window, `_window_search` finds the cached prefixes.
        self._has_windows = any(window is not None for window in windows)
        self._window_search = WindowSearch(self._windows, block_size, pool.null_block)
        # For each group of layers, a dict that maps the hash of a block to the id of the block.
        self._blocks: list[dict[bytes, int]] = [{} for _ in windows]
        # Maps the id of a cached block to its hash.
        self._hashes: dict[int, bytes] = {}
        # The pool calls `_drop` before it allocates a cached block for other tokens. `_drop`
        # removes the block from the cache.
        pool.on_reuse(self._drop)

    def find(self, sequence: Sequence) -> list[list[int]]:
        """Find the longest cached prefix of a sequence, and return the blocks of this prefix.

        The result has one block table for each group of layers, and all tables have the same
        length. The last token is never part of the prefix, because sampling needs the logits of the
        last token. If the model has a recurrent state, the prefix ends at a saved copy of the state
        (a snapshot). In a group with an attention window, the null block (a placeholder) replaces
        the blocks before the window.

        Example with one group: the sequence has 48 tokens, and block_size is 16. The cache contains
        the first two blocks of the sequence as the blocks 7 and 2, so the result is [[7, 2]]. The
        third block is never part of the result, because it contains the last token.

        Mutates: `sequence.block_hashes`, and `sequence.end_of_cached_blocks` if the model has a
            recurrent state and no attention windows.
        """
        hashes = self.prefix_hashes(sequence)
        if self._has_windows:
            return self._find_with_windows(hashes)
        cached_blocks = self._leading_cached_blocks(hashes)
        if self.snapshots is None:
            return [cached_blocks]
        # Let this sequence save its recurrent state at the end of the cached blocks, so that the
        # next request with this prefix can reuse all cached blocks.
        sequence.end_of_cached_blocks = len(cached_blocks) * self._block_size
        num_reusable = self._num_blocks_to_snapshot(hashes[: len(cached_blocks)])
        return [cached_blocks[:num_reusable]]

    def _num_blocks_to_snapshot(self, hashes: list[bytes]) -> int:
        """Return the number of blocks before the last snapshot, or 0 if there is no snapshot.

        A recurrent model can continue only from a saved recurrent state (a snapshot). Example: the
        hashes are [a, b, c], and there are snapshots after a and b. The result is 2.
        """
        assert self.snapshots is not None
        for num_blocks in range(len(hashes), 0, -1):
            if hashes[num_blocks - 1] in self.snapshots:
                return num_blocks
        return 0

    def _leading_cached_blocks(self, hashes: list[bytes]) -> list[int]:
        """Return the ids of a sequence's first blocks. Stop at the first block that is not cached.

        `hashes` contains the hashes of the leading blocks. The model must have only one group of
        layers. Example: the hashes are [a, b, c], and the cache contains a as block 7 and c as
        block 2. The result is [7].
        """
        cached_blocks = self._blocks[0]
        leading_blocks = []
        for block_hash in hashes:
            block = cached_blocks.get(block_hash)
            if block is None:
                break
            leading_blocks.append(block)
        return leading_blocks

    def start_recording_new_blocks(self, before_reuse: Callable[[bytes, int], object]) -> None:
        """Start to record which blocks are new, so that the caller can save these blocks on disk.

        From now on, the cache adds the hash of each new block to `disk_changes.unsaved`. If the
        model has a recurrent state, `snapshots` records the new copies of the state, too. The
        caller removes a hash when the block is saved. The model must have only one group of layers.

        Args:
            before_reuse: called with the hash and the id of an unsaved block before the content of
                the block is overwritten.
        """
        assert len(self._windows) == 1, "The cache on disk stores one block for each hash."
        self.disk_changes = DiskChanges(before_reuse)
        if self.snapshots is not None:
            self.snapshots.start_recording()

    def prefix_hashes(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of all blocks before the block that contains the last token.

        Example with 16 tokens in a block: a sequence of 48 tokens gives two hashes, and a sequence
        of 49 tokens gives three hashes.
        """
        return self._block_hashes(sequence, (len(sequence.token_ids) - 1) // self._block_size)

    def block_of(self, block_hash: bytes) -> int | None:
        """Return the id of the block with this hash in the first group of layers, or None."""
        return self._blocks[0].get(block_hash)

    def insert(self, hashes: list[bytes]) -> list[tuple[bytes, int]]:
        """Allocate blocks for tokens that were computed earlier, and add the blocks to the cache.

        The call prepares the cache for blocks that were saved on disk. The caller must write the
        content of the new blocks before the next step. The model must have only one group of
        layers.

        Args:
            hashes: the hashes of the leading blocks of a sequence. If some of these blocks are
                cached already, they are not evicted.

        Returns:
            The hash and the id of each new block. If there are not enough free blocks, only the
            first blocks are added.
        """
        cached_blocks = self._blocks[0]  # maps hashes to the blocks of the only group of layers
        already_cached = [cached_blocks[h] for h in hashes if h in cached_blocks]
        missing_hashes = [h for h in hashes if h not in cached_blocks]
        # Acquire the blocks that are already cached, so that `allocate` does not evict them.
        self._pool.acquire(already_cached)
        new_hashes = missing_hashes[: self._pool.num_free]
        new_blocks = self._pool.allocate(len(new_hashes))
        for block_hash, block in zip(new_hashes, new_blocks, strict=True):
            self._mark_cached(cached_blocks, block_hash, block)
        # Release all these blocks, because no sequence uses them yet. The blocks are marked as
        # cached, so they keep their content until they are evicted.
        self._pool.release([*already_cached, *new_blocks])
        return list(zip(new_hashes, new_blocks, strict=True))

    def _mark_cached(self, cached_blocks: dict[bytes, int], block_hash: bytes, block: int) -> None:
        """Add a block to the cache.

        Mutates: `cached_blocks`, the dict of the block's group of layers.
        """
        cached_blocks[block_hash] = block
        self._hashes[block] = block_hash
        self._pool.mark_cached(block)

    def cached_blocks(self, hashes: list[bytes]) -> set[int]:
        """Return the ids of the cached blocks whose hashes are in `hashes`."""
        return {blocks[h] for blocks in self._blocks for h in hashes if h in blocks}

    def add(self, sequence: Sequence) -> None:
        """Add the computed full blocks of a sequence to the cache, so that requests can reuse them.

        Example: block_size is 16, and 40 tokens are computed. The first two blocks are full. If the
        first block was added by an earlier call, only the second block is added.

        Mutates: `sequence.block_hashes`, and `sequence.num_blocks_in_cache`, which is the number of
            leading blocks in the cache.
        """
        first_new = sequence.num_blocks_in_cache
        num_full_blocks = sequence.num_computed_tokens // self._block_size
        if num_full_blocks <= first_new:
            return
        new_hashes = self._block_hashes(sequence, num_full_blocks)[first_new:]
        for cached_blocks, table in zip(self._blocks, sequence.block_tables, strict=True):
            # The last step has completed the new blocks. They are not null blocks, because a block
            # is freed only in a later step, when the attention window has moved past the block.
            new_blocks = table[first_new:num_full_blocks]
            for block_hash, block in zip(new_hashes, new_blocks, strict=True):
                self._add_computed(cached_blocks, block_hash, block)
        sequence.num_blocks_in_cache = num_full_blocks
        if self.snapshots is not None:
            self.snapshots.add(sequence)  # the recurrent state, if the last step has copied it

    def _add_computed(self, cached_blocks: dict[bytes, int], block_hash: bytes, block: int) -> None:
        """Add a computed block to the cache, and record that it must be written to disk.

        Do nothing if the cache already contains a block with the same tokens, which another request
        has computed.

        Mutates: `cached_blocks`, the dict of the block's group of layers.
        """
        if block_hash in cached_blocks:
            return
        self._mark_cached(cached_blocks, block_hash, block)
        if self.disk_changes is not None:
            self.disk_changes.unsaved[block_hash] = None

    def retain(self, sequence: Sequence) -> None:
        """Let the request's session retain the cached blocks and saved states of a sequence.

        A session is identified by the client and the `prompt_cache_key` of its requests. For the
        next `retention_s` seconds, retained blocks are evicted only after all other blocks. Blocks
        that the sequence has freed are not retained, because no token attends to them.
        """
        params = sequence.params
        key = SessionKey(params.client_id, params.prompt_cache_key)
        self._pool.retain(self._blocks_last_first(sequence), key, params.retention_s)
        if self.snapshots is not None:
            # The first snapshot is evicted first. The next request of the session probably
            # continues after the last snapshot, and does not need the earlier ones.
            hashes = _hashes_of_used_blocks(sequence)
            self.snapshots.retain(hashes, key, params.retention_s)

    def _blocks_last_first(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks that a sequence still uses. The last block comes first.

        The order is the eviction order: a block is useless if an earlier block is missing.
        """
        hashes = sequence.block_hashes[: sequence.num_blocks_in_cache]
        blocks: list[int] = []
        for cached_blocks, num_freed in zip(self._blocks, sequence.num_null_blocks, strict=True):
            last_first = reversed(hashes[num_freed:])
            blocks += [cached_blocks[h] for h in last_first if h in cached_blocks]
        return blocks

    def extend_session(self, key: SessionKey, seconds: float) -> bool:
        """Retain the cached prefixes of a session for at least the next `seconds` seconds.

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
        """Remove the cached blocks that no sequence uses, and return the number of these blocks."""
        blocks = list(self._pool.idle)
        for block in blocks:
            self.forget(block)
        return len(blocks)

    def forget(self, block: int) -> None:
        """Remove a block from the cache, and mark the block as not cached in the pool."""
        if self.disk_changes is not None and block in self._hashes:
            self.disk_changes.invalidate(self._hashes[block])
        self._drop(block)
        self._pool.unmark_cached(block)

    def check(self) -> None:
        """Check that `_hashes`, `_blocks` and the pool contain the same cached blocks.

        Raises:
            AssertionError: if the hashes and the cached blocks do not match.
        """
        assert sum(map(len, self._blocks)) == len(self._hashes) == self._pool.num_cached
        for blocks in self._blocks:
            assert all(self._hashes[block] == block_hash for block_hash, block in blocks.items())

    def _find_with_windows(self, hashes: list[bytes]) -> list[list[int]]:
        """Find the longest cached prefix of a sequence if the model has attention windows.

        `hashes` contains the hashes of the leading blocks of the sequence. The result has one block
        table for each group of layers; see `WindowSearch.longest_prefix`.
        """
        # For each group, look up the id of each block. The null block is a placeholder for a block
        # that is not cached.
        null = self._pool.null_block
        tables = [
            [cached_blocks.get(block_hash, null) for block_hash in hashes]
            for cached_blocks in self._blocks
        ]

        def can_end_after(num_blocks: int) -> bool:
            # A recurrent model can continue only from a saved state (a snapshot). Other models can
            # continue after any block.
            return self.snapshots is None or hashes[num_blocks - 1] in self.snapshots

        return self._window_search.longest_prefix(tables, can_end_after)

    def _drop(self, block: int) -> None:
        """Remove a block from the cache. Do nothing if the cache does not contain the block.

        If a recurrent state was saved at the end of the block, delete this state, too.
        """
        block_hash = self._hashes.pop(block, None)
        if block_hash is None:
            return
        if self.disk_changes is not None:
            # The pool calls this method before the content of the block is overwritten. This is the
            # last chance to write the block to disk.
            self.disk_changes.save_before_reuse(block_hash, block)
        # `_blocks` has one dict for each group of layers. Find the dict that contains the block.
        for cached_blocks in self._blocks:
            if cached_blocks.get(block_hash) == block:
                del cached_blocks[block_hash]
                break
        if self.snapshots is not None:
            self.snapshots.delete(block_hash)

    def _block_hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """Return the hashes of the first `count` full blocks of a sequence.

        The hash of a block depends on the hash of the previous block. New hashes are appended to
        `sequence.block_hashes`. A stored hash never changes, because tokens are only appended to a
        sequence.
        """
        hashes = sequence.block_hashes
        for index in range(len(hashes), count):
            previous_hash = _first_hash(sequence) if index == 0 else hashes[index - 1]
            hashes.append(self._hash_block(previous_hash, sequence, index))
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


def _hashes_of_used_blocks(sequence: Sequence) -> list[bytes]:
    """Return the hashes of the cached blocks that at least one group of layers still uses.

    The first block comes first. Example: five blocks of the sequence are cached. If one group has
    freed the first two blocks, and another group has freed the first three, the result is the
    hashes of the last three blocks.
    """
    num_freed_in_all_groups = min(sequence.num_null_blocks)
    return sequence.block_hashes[num_freed_in_all_groups : sequence.num_blocks_in_cache]


def _first_hash(sequence: Sequence) -> bytes:
    """Return the initial value for computing the hashes of a sequence's blocks.

    The result depends on the salt and the adapter of the sequence. Because of the personalisation
    string, the result is never equal to the hash of a block.
    """
    text = sequence.params.cache_salt.encode("utf-8", "surrogatepass")
    key = b"" if sequence.adapter is None else sequence.adapter.digest
    return hashlib.blake2b(text, digest_size=_HASH_BYTES, key=key, person=b"salt").digest()
