# SPDX-License-Identifier: Apache-2.0
"""Removes the blocks of failed sequences from the prefix cache."""

from nereid_backend.core.async_plans import PendingPlans
from nereid_backend.core.blocks.block_tables import BlockTables
from nereid_backend.core.queues.ranked_sequences import RunningSequences
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step_planner import StepPlanner


class InvalidBlocks:
    """The KV cache blocks of the sequences that failed in the last step.

    The blocks of a failed sequence may contain NaN or overwritten values. Other sequences can share
    these blocks.
    """

    def __init__(
        self,
        tables: BlockTables,
        running: RunningSequences,
        pending_plans: PendingPlans,
        planner: StepPlanner,
    ) -> None:
        """Create an empty collection of invalid blocks. An invalid block may have wrong content.

        Args:
            tables: the block tables, from which invalid blocks are removed.
            running: the running sequences, which may share invalid blocks.
            pending_plans: contains the sequences that have ended but still have blocks.
            planner: preempts the sequences that share invalid blocks.
        """
        self._tables = tables
        self._running = running
        self._pending_plans = pending_plans
        self._planner = planner
        # The ids of the blocks that `add_blocks_of` has marked since the last call of `purge`.
        self._blocks: set[int] = set()

    def add_blocks_of(self, sequence: Sequence) -> None:
        """Mark the blocks of a failed sequence as invalid. Delete the sequence's saved states."""
        self._blocks |= self._tables.blocks_of(sequence)
        cache = self._tables.cache
        if cache is None or cache.snapshots is None:
            return
        for block_hash in sequence.block_hashes:
            cache.snapshots.delete(block_hash)
        if cache.disk_changes is not None:
            cache.disk_changes.invalid.extend(sequence.block_hashes)

    def purge(self) -> None:
        """Remove the blocks of failed sequences from the prefix cache and from all block tables.

        If a running sequence shares one of these blocks, preempt the sequence, so that it computes
        all its tokens again. Afterwards, this object contains no blocks.
        """
        if not self._blocks:
            return
        invalid_blocks = self._blocks
        self._blocks = set()
        # A request with several sequences keeps the blocks of its prompt for the sequences that
        # have not started yet. Release these blocks if one of them is invalid.
        self._tables.kept_prompts.drop_with(invalid_blocks)
        for sequence in list(self._running):
            attends_to_invalid = not invalid_blocks.isdisjoint(sequence.all_blocks())
            # An ended sequence computes no more tokens, so it need not be preempted.
            has_ended = sequence in self._pending_plans.ended_sequences
            if attends_to_invalid and not has_ended:
                # The blocks that this sequence computed may be wrong, too. `blocks_of` also returns
                # freed blocks of the sequence that are still cached.
                self._tables.forget(self._tables.blocks_of(sequence))
                self._planner.preempt(sequence)
        self._tables.forget(invalid_blocks)
