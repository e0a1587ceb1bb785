# SPDX-License-Identifier: Apache-2.0
"""The prefix cache on disk, whose blocks remain usable after a restart of the process.

    a block was computed  -> its bytes are copied  -> a thread writes the file
    a request arrives     -> a thread reads files  -> the blocks join the prefix cache in memory

A request waits until its files are read, but at most `_MAX_WAIT_S` seconds. Then the blocks that
have been read are added to the prefix cache in memory, and the engine computes the other tokens.
The scheduler does not distinguish these blocks from other cached blocks.
"""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from nereid_backend.core.blocks.disk_store import DiskStore
from nereid_backend.core.blocks.prefix_cache import PrefixCache
from nereid_backend.core.sequence import Sequence
from nereid_backend.paths.stored_prefixes import StoredPrefixes

_MAX_WAIT_S = 5.0
_NUM_READERS = 2
# The time limit in seconds for writing the remaining files when the engine is closed.
_CLOSE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _PrefixRead:
    """The blocks and the recurrent state that a thread reads from disk for one request.

    Attributes:
        hashes: the hashes of the blocks in the available prefix of the request. These blocks are in
            memory or on disk.
        missing_hashes: the hashes of the blocks that must be read from disk, in the order of the
            tokens.
        needs_snapshot: whether the snapshot of the last block must be read, too.
        deadline: the request waits until this time at the latest (time.monotonic()).
        contents: the bytes of the blocks that have been read, in the order of `missing_hashes`. The
            thread appends to this list.
        state: the bytes of the snapshot; None if the snapshot was not read.
        is_cancelled: whether the thread should stop.
        future: a future that is done when the thread has finished.
    """

    hashes: list[bytes]
    missing_hashes: list[bytes]
    needs_snapshot: bool
    deadline: float
    contents: list[bytes] = field(default_factory=list)
    state: bytes | None = None
    is_cancelled: bool = False
    future: "Future[None] | None" = None

    def is_ready(self, now: float) -> bool:
        """Return whether the read has finished or its deadline has passed at the time `now`."""
        return now >= self.deadline or (self.future is not None and self.future.done())

    @property
    def has_all_files(self) -> bool:
        """Whether the thread has read every missing block, and the snapshot if one is needed."""
        has_snapshot = not self.needs_snapshot or self.state is not None
        return has_snapshot and len(self.contents) == len(self.missing_hashes)

    def contents_by_hash(self) -> dict[bytes, bytes]:
        """Return the blocks that have been read, as a dict that maps block hashes to bytes."""
        # Copy the list, because the thread may still append to the list.
        contents = list(self.contents)
        return dict(zip(self.missing_hashes, contents, strict=False))


class DiskTier:
    """Copies blocks and snapshots between the prefix cache in memory and the files on disk.

    Only the engine's thread may call the public methods.
    """

    def __init__(self, store: DiskStore, cache: PrefixCache, prefixes: StoredPrefixes) -> None:
        """Create an object that copies blocks between the memory (`cache`) and the disk (`store`).

        Args:
            store: the files on disk.
            cache: the prefix cache in memory.
            prefixes: reads and writes the blocks and snapshots of the forward path.
        """
        self._store = store
        self._cache = cache
        self._prefixes = prefixes
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="prefix-disk")
        # The unfinished reads, by request id.
        self._reads: dict[str, _PrefixRead] = {}
        # The cache calls `_save_block` before the content of an unsaved block is overwritten.
        cache.start_recording_new_blocks(before_reuse=self._save_block)

    def start_reading(self, sequence: Sequence) -> bool:
        """Start to read the prefix of a request from disk, in the background.

        `sequence` is the first sequence of the request. `finish_reading` adds the blocks that were
        read to the prefix cache in memory.

        Returns:
            Whether a read was started. False if there is nothing to read, for example because all
            blocks are in memory.
        """
        if sequence.params.prompt_logprobs is not None:
            # Log-probabilities of the prompt are computed from the prompt's logits. The cache
            # contains no logits, so the whole prompt must be computed.
            return False
        read = self._plan_read(sequence)
        if read is None:
            return False
        read.future = self._readers.submit(self._read_files, read)
        self._reads[sequence.request_id] = read
        return True

    def _plan_read(self, sequence: Sequence) -> _PrefixRead | None:
        """Decide what to read from disk for a sequence. Return None if no read is needed.

        The available prefix consists of the leading blocks that are in memory or on disk. No read
        is needed if this prefix is empty, or if the prefix (and its snapshot, for a recurrent
        model) is completely in memory.
        """
        hashes = self._available_prefix(sequence)
        if not hashes:
            return None
        missing_hashes = [block_hash for block_hash in hashes if not self._is_in_memory(block_hash)]
        # A snapshot is a copy of a recurrent state. A recurrent model can continue a prefix only
        # from the snapshot that was saved after the last block of the prefix. Other models have no
        # snapshots.
        snapshots = self._cache.snapshots
        needs_snapshot = snapshots is not None and hashes[-1] not in snapshots
        if not missing_hashes and not needs_snapshot:
            return None
        # The request waits at most until this deadline. It then starts with the blocks that were
        # read before the deadline.
        deadline = time.monotonic() + _MAX_WAIT_S
        return _PrefixRead(hashes, missing_hashes, needs_snapshot, deadline)

    def _available_prefix(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of a sequence's blocks before the first unavailable block.

        A block is available if it is in memory or on disk. If the model has a recurrent state, the
        result ends at the last block whose snapshot is in memory or on disk.
        """
        hashes = list(itertools.takewhile(self._has_block, self._cache.prefix_hashes(sequence)))
        if self._cache.snapshots is not None:
            while hashes and not self._has_snapshot(hashes[-1]):
                hashes.pop()
        return hashes

    def take_ready(self) -> list[str]:
        """Finish the reads that are complete or whose deadline has passed.

        Return the ids of the requests.
        """
        now = time.monotonic()
        ready = [request_id for request_id, read in self._reads.items() if read.is_ready(now)]
        for request_id in ready:
            self.finish_reading(request_id)
        return ready

    def finish_reading(self, request_id: str) -> None:
        """Finish the disk read of a request. Add the blocks to the prefix cache in memory.

        The thread may not have read all files yet, because a request also starts when its grammar
        has been compiled or the deadline of the read has passed. Only the blocks that were read so
        far are then added. Do nothing if no files were being read for the request.
        """
        read = self._reads.pop(request_id, None)
        if read is None:
            return
        read.is_cancelled = True  # stops the thread if it is still reading files
        # A recurrent model can continue only if it has the snapshot (the recurrent state after the
        # last block) and all blocks.
        if read.needs_snapshot and not read.has_all_files:
            return
        self._insert_blocks(read.hashes, read.contents_by_hash())
        if read.state is not None:
            self._insert_snapshot(read.hashes, read.state)

    def _insert_blocks(self, hashes: list[bytes], contents: dict[bytes, bytes]) -> None:
        """Add blocks to the prefix cache in memory. The blocks were read from disk.

        Example: the block "a" is in memory, and "b" and "d" were read from disk. For the hashes
        [a, b, c, d], only "b" is added, because the block "c" before "d" is not available.

        Args:
            hashes: the hashes of the blocks of a prefix, in the order of the tokens.
            contents: the bytes of the blocks that were read, by the hash of the block.
        """

        def is_available(block_hash: bytes) -> bool:
            return block_hash in contents or self._is_in_memory(block_hash)

        # The cache can use a block only if all earlier blocks are in the cache, too. Therefore,
        # only the blocks before the first missing block are added.
        usable_hashes = list(itertools.takewhile(is_available, hashes))
        # `insert` returns the hash and the id of each block that was not in memory.
        new_blocks = self._cache.insert(usable_hashes)
        self._prefixes.write_blocks(
            [block for _, block in new_blocks],
            [contents[block_hash] for block_hash, _ in new_blocks],
        )

    def _insert_snapshot(self, hashes: list[bytes], state: bytes) -> None:
        """Add a snapshot to the prefix cache in memory. The snapshot was read from disk.

        Do nothing if the cache already contains the snapshot, or lacks a block before it.

        Args:
            hashes: the hashes of the blocks before the snapshot.
            state: the bytes of the snapshot, which is the recurrent state after the last block.
        """
        snapshots = self._cache.snapshots
        assert snapshots is not None, "a snapshot is read only if the model has snapshots"
        # A block is missing if the memory had too few free blocks.
        if hashes[-1] in snapshots or not all(map(self._is_in_memory, hashes)):
            return
        snapshot_id = snapshots.reserve_id(hashes[-1])
        if snapshot_id is not None:
            self._prefixes.write_snapshot(snapshot_id, state)

    def cancel(self, request_id: str) -> None:
        """Stop reading the prefix of a request. Do nothing if its prefix is not being read."""
        read = self._reads.pop(request_id, None)
        if read is not None:
            read.is_cancelled = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until one read is complete or `timeout_s` seconds have passed.

        Return False at once if nothing is being read.
        """
        futures = [read.future for read in self._reads.values() if read.future is not None]
        if futures:
            wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED)
        return bool(futures)

    def save(self) -> None:
        """Pass new blocks and recurrent states to the writer thread, and delete invalid blocks."""
        changes = self._cache.disk_changes
        assert changes is not None
        for block_hash in changes.invalid:
            self._store.delete(_block_key(block_hash))
            self._store.delete(_snapshot_key(block_hash))
        changes.invalid.clear()
        has_saved_blocks = _save_oldest_first(changes.unsaved, self._save_cached_block)
        snapshots = self._cache.snapshots
        if has_saved_blocks and snapshots is not None and snapshots.unsaved is not None:
            _save_oldest_first(snapshots.unsaved, self._save_snapshot)

    def close(self) -> None:
        """Stop reading files, and wait until the writer thread has written all waiting data.

        The wait ends after `_CLOSE_TIMEOUT_S` seconds at the latest.
        """
        self._readers.shutdown(wait=False, cancel_futures=True)
        for read in self._reads.values():
            read.is_cancelled = True
        self.save()
        self._store.flush(_CLOSE_TIMEOUT_S)

    def _has_block(self, block_hash: bytes) -> bool:
        """Return whether a block is in memory or on disk.

        The result is always True for a model without a KV cache, because the blocks of such a model
        contain no data.
        """
        return (
            not self._prefixes.has_blocks
            or self._is_in_memory(block_hash)
            or _block_key(block_hash) in self._store
        )

    def _is_in_memory(self, block_hash: bytes) -> bool:
        """Return whether a block is in the prefix cache in memory."""
        return self._cache.block_of(block_hash) is not None

    def _has_snapshot(self, block_hash: bytes) -> bool:
        """Return whether a block's saved recurrent state is in memory or on disk."""
        snapshots = self._cache.snapshots
        assert snapshots is not None
        return block_hash in snapshots or _snapshot_key(block_hash) in self._store

    def _save_cached_block(self, block_hash: bytes) -> bool:
        """Pass a block to the writer thread, unless the block was evicted; see `_save_block`."""
        block = self._cache.block_of(block_hash)
        return block is None or self._save_block(block_hash, block)

    def _save_snapshot(self, block_hash: bytes) -> bool:
        """Pass the snapshot of a block to the writer thread, and return whether this succeeded.

        The snapshot is a copy of the recurrent state after the last token of the block. If the
        queue of the thread is full, return False, so that the caller tries again later.
        """
        assert self._cache.snapshots is not None, "the caller saves only existing snapshots"
        snapshot_id = self._cache.snapshots.id_of(block_hash)
        key = _snapshot_key(block_hash)
        if snapshot_id is None or key in self._store:
            return True  # The snapshot was evicted, or is already on disk.
        return self._store.write(key, self._prefixes.read_snapshot(snapshot_id))

    def _save_block(self, block_hash: bytes, block: int) -> bool:
        """Pass a block to the writer thread. Return False if the queue is full, else True."""
        if not self._prefixes.has_blocks or _block_key(block_hash) in self._store:
            return True
        return self._store.write(_block_key(block_hash), self._prefixes.read_block(block))

    def _read_files(self, read: _PrefixRead) -> None:
        """Read the files of a request into `read.state` and `read.contents`.

        This method runs in a reader thread. If the snapshot is damaged, the blocks are not read,
        because they cannot be used without the snapshot.
        """
        if read.needs_snapshot:
            read.state = self._store.read(_snapshot_key(read.hashes[-1]))
            if read.state is None:
                return
        if self._prefixes.has_blocks:
            self._read_blocks(read)
        else:  # The blocks of a model without a KV cache contain no data.
            read.contents.extend(b"" for _ in read.missing_hashes)

    def _read_blocks(self, read: _PrefixRead) -> None:
        """Read the missing blocks of a request into `read.contents`.

        The blocks after a damaged block cannot be used, so they are not added. Their files are read
        nevertheless, because `DiskStore.read` deletes damaged files, and the engine can then write
        these files again.
        """
        has_damaged_block = False
        for block_hash in read.missing_hashes:
            if read.is_cancelled:
                return
            content = self._store.read(_block_key(block_hash))
            if content is None:
                has_damaged_block = True
            elif not has_damaged_block:
                read.contents.append(content)


def _save_oldest_first(unsaved: dict[bytes, None], save: Callable[[bytes], bool]) -> bool:
    """Call `save` for the hashes in `unsaved`, in order, until `save` returns False.

    Return whether all hashes were saved.

    Mutates: `unsaved`. Each hash for which `save` returned True is removed.
    """
    while unsaved:
        block_hash = next(iter(unsaved))
        if not save(block_hash):
            return False
        del unsaved[block_hash]
    return True


def _block_key(block_hash: bytes) -> bytes:
    """Return the key under which a block is stored on disk."""
    return b"block" + block_hash


def _snapshot_key(block_hash: bytes) -> bytes:
    """Return the key under which the recurrent state after a block is stored on disk."""
    return b"state" + block_hash
