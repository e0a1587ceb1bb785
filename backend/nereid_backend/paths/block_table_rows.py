# SPDX-License-Identifier: Apache-2.0
"""The block tables of running sequences, stored as arrays. Attention reads these arrays."""

import math

import numpy as np

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import StepPlan
from nereid_backend.device_transfer import Integers


class _TableRow:
    """The block ids of one sequence for one group of layers, stored in one row of an array."""

    __slots__ = ("_block_ids", "_null_block", "_num_filled", "_num_removed")

    def __init__(self, block_ids: Integers, null_block: int) -> None:
        """Create an empty row. `block_ids` is a view of the array, and contains `null_block`."""
        self._block_ids = block_ids
        self._null_block = null_block
        self._num_filled = 0  # the number of block ids that were copied into the row
        self._num_removed = 0  # the number of freed blocks at the start of the row, now null

    def clear(self) -> None:
        """Remove the blocks of an earlier sequence."""
        self._block_ids[: self._num_filled] = self._null_block
        self._num_filled = 0
        self._num_removed = 0

    def remove_freed(self, num_freed: int) -> None:
        """Replace the first `num_freed` blocks by the null block, because they have been freed.

        A freed block may already contain tokens of another sequence.
        """
        if num_freed > self._num_removed:
            self._block_ids[self._num_removed : num_freed] = self._null_block
            self._num_removed = num_freed

    def append_new(self, block_table: list[int]) -> None:
        """Copy the blocks of `block_table` that the row does not contain yet."""
        num_blocks = len(block_table)
        if num_blocks > self._num_filled:
            self._block_ids[self._num_filled : num_blocks] = block_table[self._num_filled :]
            self._num_filled = num_blocks


class BlockTableRows:
    """The block tables of running sequences, one row for each sequence.

    Each group of layers has its own array. A step copies only the new blocks of a sequence into the
    row of the sequence, because copying all block tables would take longer.

    Attributes:
        num_groups: the number of groups of layers.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        null_block: int,
        num_groups: int,
    ) -> None:
        """Create empty block tables. The block table of a sequence lists its KV cache blocks.

        Args:
            max_num_seqs: the number of rows, which is the largest number of running sequences.
            max_model_len: the largest number of tokens in a sequence.
            block_size: the number of tokens in one block.
            null_block: the id of a block that contains only zeros. It fills the unused places of a
                row.
            num_groups: the number of groups of layers. A sequence has one block table for each
                group.
        """
        self.num_groups = num_groups
        self._block_size = block_size
        max_blocks = math.ceil(max_model_len / block_size)
        shape = (max_num_seqs, max_blocks)
        # For each group of layers, the block ids of all sequences, [max_num_seqs, max_blocks].
        self._arrays: list[Integers] = [
            np.full(shape, null_block, dtype=np.int64) for _ in range(num_groups)
        ]
        # For each sequence, its row in the array of each group.
        self._rows = [
            [_TableRow(array[row], null_block) for array in self._arrays]
            for row in range(max_num_seqs)
        ]
        # For each sequence, the `Sequence.table_version` of the last update. Each change of the
        # sequence's block tables changes the version.
        self._versions = [0] * max_num_seqs

    def update(self, plan: StepPlan) -> Integers:
        """Add the new blocks of each sequence in `plan` to the block tables.

        A plan consists of chunks: the tokens that a step computes for each sequence. The block
        table of a sequence is stored in one row of an array.

        Returns:
            [num_chunks] int64, the row of each chunk.
        """
        versions = self._versions
        rows: list[int] = []
        # This loop runs for every sequence of every step. Unpacking a tuple is faster than reading
        # the fields by name. In most steps, a sequence gets no new block and needs no update.
        for sequence, _start, _num_tokens, _samples, is_first, _num_logits in plan.chunks:
            row = sequence.row
            assert row is not None
            rows.append(row)
            if is_first or sequence.table_version != versions[row]:
                versions[row] = sequence.table_version
                self._update_rows(sequence, row, is_first=is_first)
        return np.array(rows)

    def slots(self, positions: Integers, rows: Integers, group: int = 0) -> Integers:
        """Return the slot (the index in the KV cache) of each token, [num_tokens] int64.

        Example: block_size is 16, and the block table of a sequence is [7, 2]. The token at
        position 20 is token 4 of block 2, so its slot is 2 * 16 + 4 = 36.

        Args:
            positions: [num_tokens] int64, the position of each token in its sequence.
            rows: [num_tokens] int64, the row of each token's sequence.
            group: the index of the group of layers.
        """
        blocks = self._arrays[group][rows, positions // self._block_size]
        slots: Integers = blocks * self._block_size + positions % self._block_size
        return slots

    def blocks(self, rows: Integers, num_tokens: int, group: int = 0) -> Integers:
        """Return the blocks that contain the first `num_tokens` tokens of each sequence.

        `rows` are the rows of the sequences, and `group` is the index of the group of layers.
        Example: a block has 16 tokens, and num_tokens is 35. The result is the first 3 blocks of
        each sequence.
        """
        num_blocks = (int(num_tokens) + self._block_size - 1) // self._block_size
        return self._arrays[group][rows, :num_blocks]

    def _update_rows(self, sequence: Sequence, row: int, *, is_first: bool) -> None:
        """Copy a sequence's new block ids into the arrays, and remove its freed blocks.

        Args:
            sequence: the sequence.
            row: the row of the sequence.
            is_first: whether this is the first chunk since the sequence got the row. The row then
                contains the blocks of an earlier sequence.
        """
        for group, table_row in enumerate(self._rows[row]):
            if is_first:
                table_row.clear()
            else:
                table_row.remove_freed(sequence.num_null_blocks[group])
            table_row.append_new(sequence.block_tables[group])
