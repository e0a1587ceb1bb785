# SPDX-License-Identifier: Apache-2.0
"""Snapshots of recurrent states. A snapshot is a copy of the state after a prefix of the tokens.

The blocks of a sequence contain the keys and values of each token. A recurrent state, however, is
one summary of all tokens so far. A request can therefore continue a cached prefix only from a
position at which a snapshot was saved. Every snapshot is saved at the end of a full block, and the
hash of this block identifies the snapshot. Example with 16 tokens in a block, a prompt of 1000
tokens and an answer of 200 tokens:

    position  512        976      1000 ... 1184    1200
              snapshot   snapshot  |       snapshot |
              every      end of    end of  end of   end of
              32 blocks  prompt    prompt  answer   answer

Snapshots are saved at the positions from which later requests will probably continue:

- the end of the second-to-last full block of a prompt. The next turn of a chat repeats the prompt,
  but its last few tokens may be different. Example: the start of the reasoning is missing;
- the end of the last full block of an answer. The next turn of a chat repeats the answer. A new
  snapshot of an answer replaces the previous snapshot of this answer;
- the end of a cached prefix, if there is no snapshot at this position. Two requests have already
  had this prefix, so a third request will probably have the same prefix;
- the end of a chunk, if at least `_INTERVAL` blocks were computed since the last snapshot.

Snapshots and running sequences share the memory for states. If a sequence needs the memory, a
snapshot is deleted (eviction_order.py). If a block is removed from the prefix cache, its snapshot
is deleted, too.
"""

import time
from collections.abc import Callable, Iterable

from nereid_backend.core.blocks.eviction_order import EvictionOrder, SessionKey
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, SnapshotPlan

# The recurrent state of a sequence is saved again if at least `_INTERVAL` blocks were computed
# since the last save. A step can save the state only after the last token that the step computes.
_INTERVAL = 32
# A prompt may be divided into two chunks, so that the recurrent state can be saved at the end of
# the first chunk. This is done only if the division is at least `_MIN_DISTANCE` blocks after the
# last saved state. If the distance is smaller, the additional forward pass would take too much
# time.
_MIN_DISTANCE = 8
# Sessions can retain copies of recurrent states. While these copies use at most the fraction
# `_MAX_RETAINED_SHARE` of the memory for states, they are evicted only after all other copies. If
# they use more memory, the oldest copy is evicted first, whether a session retains the copy or not.
_MAX_RETAINED_SHARE = 0.75


class StateSnapshots:
    """Maps the hash of a block to the saved copy of the recurrent state after the block.

    This class contains only the ids of the snapshots. The forward path stores the states under
    these ids.
    """

    def __init__(
        self, num_states: int, block_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create an empty collection of snapshots. A snapshot is a copy of a recurrent state.

        Args:
            num_states: the number of states that fit into the memory, including the states of
                running sequences.
            block_size: the number of tokens in one block.
            clock: returns the time in seconds. A session, which consists of the requests of one
                client with the same cache key, retains its snapshots for a limited time.
        """
        self._block_size = block_size
        # While a prompt is computed, a snapshot is saved when a chunk ends at the end of a block
        # and at least `_interval_tokens` tokens were computed since the last snapshot.
        self._interval_tokens = _INTERVAL * block_size
        # Snapshots are especially useful at two positions in a prompt
        # (`_snapshot_positions_in_prompt`). The prompt is divided into chunks at these positions. A
        # snapshot is saved there if at least `_min_distance_tokens` tokens were computed since the
        # last snapshot.
        self._min_distance_tokens = _MIN_DISTANCE * block_size

        self._num_states = num_states
        # The largest number of snapshots: the number of states that fit into the memory, minus the
        # number of running sequences. `prepare_step` updates this number.
        self._max_snapshots = num_states

        # Maps the hash of a block to the id of the snapshot at the end of the block.
        self._ids: dict[bytes, int] = {}
        # The hashes of all snapshots, in eviction order: if the memory is full, the first snapshot
        # is deleted. A snapshot moves to the end when it is used. Sessions can retain up to
        # `max_retained` snapshots, which come after all other snapshots.
        max_retained = int(num_states * _MAX_RETAINED_SHARE)
        self._order: EvictionOrder[bytes] = EvictionOrder(max_retained, clock)
        # The number of snapshots that were saved so far. The next snapshot gets this number as its
        # id.
        self._num_saved = 0
        # The ids of deleted snapshots. The plan of the next step contains these ids, so that the
        # memory of the snapshots is freed.
        self._deleted: list[int] = []

        # The hashes of the snapshots that must still be written to disk; None if there is no cache
        # on disk. The dict is used as an ordered set, so all its values are None. A snapshot of a
        # prompt is added as soon as it has been saved. A snapshot of an answer is replaced by the
        # next snapshot of the answer, so only the last one is added, when the sequence releases its
        # blocks.
        self.unsaved: dict[bytes, None] | None = None

    def __contains__(self, block_hash: bytes) -> bool:
        """Return whether a recurrent state is saved under the hash `block_hash`."""
        return block_hash in self._ids

    def __len__(self) -> int:
        """Return the number of snapshots."""
        return len(self._ids)

    def start_recording(self) -> None:
        """Start to add the hashes of new snapshots to `unsaved`.

        The caller writes the snapshots to disk.
        """
        self.unsaved = {}

    def start_from(self, sequence: Sequence, num_reused: int) -> None:
        """Let a sequence continue from the state that was saved after `num_reused` tokens.

        A snapshot is a saved copy of a recurrent state. If `num_reused` is 0, the sequence starts
        without a snapshot.

        Mutates: `sequence.snapshot_id` and `sequence.num_snapshot_tokens`.
        """
        sequence.snapshot_id = None
        sequence.num_snapshot_tokens = num_reused
        if num_reused > 0:
            block_hash = self._hash_before(sequence, num_reused)
            sequence.snapshot_id = self._ids[block_hash]
            self._note_use(block_hash)

    def chunk_length(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the length of a sequence's next chunk of tokens, at most `num_tokens`.

        A snapshot of the recurrent state can be saved only after the last token of a chunk, and
        only at the end of a block. Therefore, the chunk ends at the first position in the prompt at
        which a snapshot should be saved. If the chunk contains no such position, the chunk ends at
        the last end of a block, unless it reaches the last known token of the sequence.

        Examples: block_size is 16, the prompt has 1000 tokens, the first 512 of them are computed,
        and a snapshot should be saved after 976 tokens. For num_tokens=488, the chunk ends at 976,
        so the length is 976 - 512 = 464. For num_tokens=100, the last end of a block is at 608, so
        the length is 608 - 512 = 96.
        """
        start = sequence.num_computed_tokens
        end = start + num_tokens
        snapshot_positions = self._snapshot_positions_in_prompt(sequence)
        positions_in_chunk = [position for position in snapshot_positions if start < position < end]
        if positions_in_chunk:
            return min(positions_in_chunk) - start
        has_last_known_token = end >= len(sequence.token_ids)
        last_block_end = end // self._block_size * self._block_size
        contains_block_end = last_block_end > start
        if has_last_known_token or not contains_block_end:
            return num_tokens
        return last_block_end - start

    def prepare_step(self, chunks: list[Chunk], num_running: int) -> SnapshotPlan:
        """Choose the snapshots that the next step loads, saves and deletes.

        A snapshot is a copy of a sequence's recurrent state. Old snapshots are deleted if the
        memory is not sufficient for the new snapshots and the states of the running sequences.

        Args:
            chunks: the chunks of the step. Each chunk contains the tokens of one sequence.
            num_running: the number of running sequences. Each of them has a state.

        Mutates: the sequences of the chunks. If the state of a sequence is saved,
            `unsaved_snapshot_id` is set to the id of the new snapshot.
        """
        # Each running sequence needs one state. The rest of the memory is used for snapshots.
        self._max_snapshots = self._num_states - num_running
        # Each pair contains the index of a chunk and the id of a snapshot.
        loads: list[tuple[int, int]] = []
        saves: list[tuple[int, int]] = []
        for chunk_index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if chunk.is_first and sequence.snapshot_id is not None:
                # The sequence has just started to run, and continues from a snapshot.
                loads.append((chunk_index, sequence.snapshot_id))
            if len(saves) < self._max_snapshots and self._is_worth_saving(chunk):
                sequence.unsaved_snapshot_id = self._new_id()
                saves.append((chunk_index, sequence.unsaved_snapshot_id))
        # Delete old snapshots until there is enough memory for the new snapshots. Even a snapshot
        # in `loads` may be deleted, because the step loads snapshots before it deletes any.
        self._evict_to(self._max_snapshots - len(saves))
        return SnapshotPlan(loads, saves, self._take_deleted())

    def _evict_to(self, max_count: int) -> None:
        """Delete the oldest saved states until at most `max_count` saved states are left."""
        while self._ids and len(self._ids) > max_count:
            self._deleted.append(self._ids.pop(self._order.pop()))

    def _take_deleted(self) -> list[int]:
        """Return the ids of the snapshots that were deleted since the last call of this method."""
        deleted = self._deleted
        self._deleted = []
        return deleted

    def add(self, sequence: Sequence) -> None:
        """Let new requests use the recurrent state that the last step saved for a sequence.

        The saved copy of the state is a snapshot. The snapshot is stored under the hash of the last
        block whose tokens the state covers. If another sequence has already stored a snapshot under
        this hash, the new snapshot is deleted. A snapshot of the prompt is also marked for writing
        to disk. If the sequence has already saved a snapshot of its answer, the previous snapshot
        is deleted.

        Mutates: `sequence.unsaved_snapshot_id` and `sequence.num_snapshot_tokens`.
        """
        snapshot_id = sequence.unsaved_snapshot_id
        if snapshot_id is None:
            return  # The last step has not saved the state of this sequence.
        sequence.unsaved_snapshot_id = None
        position = sequence.num_computed_tokens
        block_hash = self._hash_before(sequence, position)
        self._store_or_delete(block_hash, snapshot_id)
        is_in_prompt = position <= sequence.num_prompt_tokens
        if is_in_prompt:
            # Snapshots of the answer are not marked for writing here, because newer snapshots will
            # probably replace them soon. `close` marks the last snapshot of the answer.
            self._write_to_disk_later(block_hash)
        self._delete_previous_answer_snapshot(sequence)
        sequence.num_snapshot_tokens = position

    def _store_or_delete(self, block_hash: bytes, snapshot_id: int) -> None:
        """Store a new snapshot under a hash. If the hash has an older one, delete the new one."""
        if block_hash in self._ids:
            self._deleted.append(snapshot_id)
            self._note_use(block_hash)
        else:
            self._ids[block_hash] = snapshot_id
            self._order.add(block_hash)

    def _delete_previous_answer_snapshot(self, sequence: Sequence) -> None:
        """Delete a sequence's previous snapshot if this snapshot was saved during the answer.

        The next turn of the chat continues after the whole answer, so only the last snapshot of the
        answer is useful. A snapshot of the prompt, or a snapshot from which the sequence started,
        may be useful to other requests.
        """
        previous_position = sequence.num_snapshot_tokens
        is_in_answer = previous_position > sequence.num_prompt_tokens
        was_saved_by_sequence = previous_position > sequence.num_reused_tokens
        if is_in_answer and was_saved_by_sequence:
            self.delete(self._hash_before(sequence, previous_position))

    def close(self, sequence: Sequence) -> None:
        """Delete a sequence's unsaved snapshot, and let the last saved snapshot be written to disk.

        This method is called when the blocks of the sequence are released. A snapshot is a copy of
        the recurrent state. A snapshot is unsaved while the step that saves the state is running.

        Example: a prompt has 1000 tokens, the last snapshot was saved after 1184 tokens, and the
        running step saves a snapshot after 1200 tokens. The snapshot after 1200 tokens is deleted,
        and the snapshot after 1184 tokens is written to disk.
        """
        self._delete_unsaved(sequence)
        last_saved_position = sequence.num_snapshot_tokens
        is_in_answer = last_saved_position > sequence.num_prompt_tokens
        if is_in_answer:  # `add` has already marked the snapshots of the prompt.
            self._write_to_disk_later(self._hash_before(sequence, last_saved_position))

    def _delete_unsaved(self, sequence: Sequence) -> None:
        """Delete the snapshot that the running step saves for a sequence, if there is one."""
        if sequence.unsaved_snapshot_id is not None:
            self._deleted.append(sequence.unsaved_snapshot_id)
            sequence.unsaved_snapshot_id = None

    def id_of(self, block_hash: bytes) -> int | None:
        """Return the id of a block's saved recurrent state; None if no such state was saved."""
        return self._ids.get(block_hash)

    def reserve_id(self, block_hash: bytes) -> int | None:
        """Reserve memory for a recurrent state that was read from disk, and return its id.

        The caller must store the state under the returned id before the next step. If the memory is
        full, the oldest saved states are deleted.

        Args:
            block_hash: the hash of the last block before the state. No state may be saved under
                this hash.

        Returns:
            The id; None if running sequences use the whole memory for states.
        """
        assert block_hash not in self._ids, "the id of the earlier state would be lost"
        if self._max_snapshots < 1:
            # The running sequences use all memory that is reserved for recurrent states.
            return None
        self._evict_to(self._max_snapshots - 1)
        snapshot_id = self._new_id()
        self._ids[block_hash] = snapshot_id
        self._order.add(block_hash)
        return snapshot_id

    def delete(self, block_hash: bytes) -> None:
        """Delete the recurrent state that is saved under this hash, if there is one."""
        snapshot_id = self._ids.pop(block_hash, None)
        if snapshot_id is not None:
            self._order.forget(block_hash)
            self._deleted.append(snapshot_id)

    def retain(self, hashes: Iterable[bytes], key: SessionKey, seconds: float) -> None:
        """Let a session retain the snapshots of some blocks for at least `seconds` seconds.

        Retained snapshots are evicted after other snapshots. If several snapshots are retained, the
        snapshot of the first hash is evicted first. Hashes without a snapshot are ignored.
        """
        with_snapshot = (block_hash for block_hash in hashes if block_hash in self._ids)
        self._order.retain(with_snapshot, key, seconds)

    def extend(self, key: SessionKey, seconds: float) -> None:
        """Retain the snapshots of a session for at least the next `seconds` seconds."""
        self._order.extend(key, seconds)

    def _hash_before(self, sequence: Sequence, position: int) -> bytes:
        """Return the hash of the block that ends at `position`. The hash is the key of a snapshot.

        Example with 16 tokens in a block: the position 32 is the end of the second block.
        """
        return sequence.block_hashes[position // self._block_size - 1]

    def _new_id(self) -> int:
        """Return an id that no other saved recurrent state has had."""
        snapshot_id = self._num_saved
        self._num_saved += 1
        return snapshot_id

    def _note_use(self, block_hash: bytes) -> None:
        """Mark a saved recurrent state as the most recently used saved state."""
        self._order.remove(block_hash)
        self._order.add(block_hash)

    def _write_to_disk_later(self, block_hash: bytes) -> None:
        """Add the hash of a saved state to `unsaved`. Do nothing if there is no cache on disk."""
        if self.unsaved is not None:
            self.unsaved[block_hash] = None

    def _snapshot_positions_in_prompt(self, sequence: Sequence) -> list[int]:
        """Return the positions in the prompt after which the recurrent state should be saved.

        The first position is the end of the cached blocks. The sequence that computed these blocks
        and this sequence have the same prefix, so a third sequence will probably have it, too. The
        second position is the end of the second-to-last full block: the next turn of a chat repeats
        the prompt, but its last few tokens may be different. A position is left out if fewer than
        `_MIN_DISTANCE` blocks are between the last snapshot and the position.
        """
        # Sequences with images are computed by other code, which cannot copy recurrent states.
        if sequence.images is not None:
            return []
        num_full_blocks = len(sequence.token_ids) // self._block_size
        end_of_second_to_last_block = (num_full_blocks - 1) * self._block_size
        positions = (sequence.end_of_cached_blocks, end_of_second_to_last_block)
        min_position = sequence.num_snapshot_tokens + self._min_distance_tokens
        return [position for position in positions if position >= min_position]

    def _is_worth_saving(self, chunk: Chunk) -> bool:
        """Return whether the recurrent state after the tokens of `chunk` must be saved.

        A state can be saved only at the end of a block. The state is saved at the end of every
        block of an answer, if many blocks were computed since the last saved state, and at the
        positions that `_snapshot_positions_in_prompt` returns.
        """
        sequence = chunk.sequence
        chunk_end = chunk.start + chunk.num_tokens
        is_end_of_block = chunk_end % self._block_size == 0
        # Sequences with images are computed by other code, which cannot copy recurrent states.
        if not is_end_of_block or sequence.images is not None:
            return False
        is_in_answer = chunk_end > sequence.num_prompt_tokens
        is_far_from_last = chunk_end - sequence.num_snapshot_tokens >= self._interval_tokens
        return (
            is_in_answer
            or is_far_from_last
            or chunk_end in self._snapshot_positions_in_prompt(sequence)
        )
