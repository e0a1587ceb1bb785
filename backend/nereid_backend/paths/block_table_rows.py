# SPDX-License-Identifier: Apache-2.0
"""The block tables of running sequences, stored as arrays. Attention reads these arrays."""

import math

import numpy as np

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import StepPlan
from nereid_backend.device_transfer import Integers


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
        self._null_block = null_block
        max_blocks = math.ceil(max_model_len / block_size)
        shape = (max_num_seqs, max_blocks)
        # For each group of layers, the block ids of all sequences, [max_num_seqs, max_blocks].
        self._arrays: list[Integers] = [
            np.full(shape, null_block, dtype=np.int64) for _ in range(num_groups)
        ]
        # For each group of layers and each row of the block tables, the number of block ids that
        # were copied into the row.
        self._num_filled = [[0] * max_num_seqs for _ in range(num_groups)]
        # For each group of layers and each row of the block tables, the number of block ids at the
        # start of the row that were replaced by the null block. The sequence no longer needs the
        # replaced blocks.
        self._num_replaced = [[0] * max_num_seqs for _ in range(num_groups)]
        # For each row of the block tables, the `Sequence.table_version` that was valid when the row
        # was last updated. If the version of the row's sequence has not changed, the row needs no
        # update.
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
        # This loop runs for every sequence of every step, so it must be fast. Unpacking a tuple is
        # faster than reading the fields by name. In most steps, a sequence gets no new block, so
        # its row in the block tables needs no update.
        for sequence, _start, _num_tokens, _samples, is_first, _num_logits in plan.chunks:
            row = sequence.row
            assert row is not None
            rows.append(row)
            # The row must be updated in two cases. If `is_first` is true, the sequence has just got
            # this row, which still contains the blocks of an earlier sequence. If `table_version`
            # has changed, a block table of the sequence has changed.
            if is_first or sequence.table_version != versions[row]:
                versions[row] = sequence.table_version
                for group in range(self.num_groups):
                    self._fill_row(group, row, sequence, is_first=is_first)
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

    def _fill_row(self, group: int, row: int, sequence: Sequence, *, is_first: bool) -> None:
        """Copy a sequence's new block ids into the array. Replace freed blocks by the null block.

        Args:
            group: the index of the group of layers.
            row: the row of the sequence.
            sequence: the sequence.
            is_first: whether this is the first chunk since the sequence got the row. The row then
                contains the blocks of an earlier sequence.

        Mutates: the row, and the numbers of its filled and replaced blocks.
        """
        block_table = sequence.block_tables[group]
        num_freed = sequence.num_null_blocks[group]  # freed blocks at the start of `block_table`
        table_row = self._arrays[group][row]
        num_filled = self._num_filled[group][row]  # the blocks that `table_row` contains
        num_replaced = self._num_replaced[group][row]  # the first blocks, already set to null
        if is_first:
            # Remove the blocks of the earlier sequence. The code below then copies the whole
            # `block_table` of the new sequence. `block_table` already contains the null block for
            # each freed block.
            table_row[:num_filled] = self._null_block
            num_filled = 0
            self._num_filled[group][row] = 0
            self._num_replaced[group][row] = 0
        elif num_freed > num_replaced:
            # A freed block may already contain tokens of another sequence. Therefore, the ids of
            # freed blocks are removed from the array.
            table_row[num_replaced:num_freed] = self._null_block
            self._num_replaced[group][row] = num_freed
        if len(block_table) > num_filled:
            table_row[num_filled : len(block_table)] = block_table[num_filled:]
            self._num_filled[group][row] = len(block_table)
