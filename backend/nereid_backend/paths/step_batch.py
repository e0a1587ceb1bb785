# SPDX-License-Identifier: Apache-2.0
"""Conversion of a step plan into the tensors of one packed forward pass.

Example: a plan with two decodes and a prefill of three tokens becomes one row of five tokens.
Attention computes the two decodes together and the prefill separately.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch, DecodeGroup, Prefill
from nereid_backend.attention.gpu.gpu_batch import PackedRows, PrefillShape, StepLayout
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.device_transfer import Integers, upload_all

# Decodes with at most this number of blocks always form one group. Computing their padding takes
# less time than computing a second group.
_SHORT_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tensors of one packed step.

    Attributes:
        input_ids: [1, num_tokens] int64.
        position_ids: [1, num_tokens] int64. The first token of each sequence has position 0.
        attention: where the keys and values of the tokens are stored.
        logits_index: [max(1, num_logits)] int64, the indices of the tokens whose logits are needed,
            in the order of the chunks. If no logits are needed, the index contains the first token,
            because models do not accept an empty index.
        num_logits: the number of tokens whose logits are needed.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention: AttentionBatch
    logits_index: Tensor
    num_logits: int


def tokens_of(chunk: Chunk) -> list[int]:
    """Return the token ids of a chunk: known tokens, followed by draft tokens.

    Example: the known tokens are [5, 6, 7], and the draft tokens are [8, 9]. A chunk of 3 tokens
    that starts at 2 has the token ids [7, 8, 9].
    """
    sequence = chunk.sequence
    token_ids = sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return token_ids + sequence.draft_token_ids[: chunk.num_tokens - len(token_ids)]


class BatchBuilder:
    """Builds the tensors of steps, and stores the block tables of running sequences in arrays.

    Each group of layers has an array, and each sequence has a row in the arrays. Blocks that were
    added to the sequence's own lists since the last step are copied into the row, so that a step
    does not copy all block tables.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        null_block: int,
        layout: StepLayout | None = None,
        num_groups: int = 1,
    ) -> None:
        """Create empty block tables.

        Args:
            max_num_seqs: the number of rows.
            max_model_len: the largest number of tokens in a sequence.
            block_size: tokens in one block.
            null_block: the number of a block that is never written. The unused elements of the
                tables contain this number. Attention reads the keys of this block and then masks
                them. Another sequence's block could contain NaN, which masking does not remove.
            layout: adds the arrays that only GPU kernels read; None if no GPU kernel is used.
            num_groups: the number of groups of layers. GPU kernels support only one group.
        """
        assert layout is None or num_groups == 1, "GPU kernels read one block table."
        self._layout = layout
        self._block_size = block_size
        self._null_block = null_block
        width = -(-max_model_len // block_size)
        self._tables: list[Integers] = [
            np.full((max_num_seqs, width), null_block, dtype=np.int64) for _ in range(num_groups)
        ]
        # For each group and row: how many blocks were copied into the row, and how many of these
        # blocks were freed later. The null block replaces freed blocks.
        self._num_filled = [[0] * max_num_seqs for _ in range(num_groups)]
        self._num_dropped = [[0] * max_num_seqs for _ in range(num_groups)]
        # For each row, the version of the block tables that were copied into the row.
        self._versions = [0] * max_num_seqs

    def build(
        self, plan: StepPlan, device: torch.device, sampled: Tensor | None = None
    ) -> StepBatch:
        """Return the tensors of a plan.

        The call does not read from the device and does not wait for work on the device.

        Example with 16 tokens in a block: a decode computes position 20 of a sequence with the
        block table [7, 2], and a prefill computes the first 3 tokens of a sequence with the block
        table [5]. The positions are [20, 0, 1, 2], and the slots are [36, 80, 81, 82]. There is one
        group of decodes, with the length 21, and one prefill, with the tokens 1 to 3 of the step.

        Args:
            plan: the step, with at least one chunk.
            device: the device on which the tensors are created.
            sampled: [n] int64 on the device, the tokens that the previous step samples. They are
                needed if the plan was made ahead: its pending chunks compute these tokens.

        Mutates: the block tables of the plan's sequences.
        """
        rows = self._update_tables(plan)
        starts = np.array([chunk.start for chunk in plan.chunks])
        counts = np.array([chunk.num_tokens for chunk in plan.chunks])
        num_logits = np.array([chunk.num_logits for chunk in plan.chunks])
        # Chunks of one token (decodes) come before all longer chunks (prefills).
        num_decodes = int(np.count_nonzero(counts == 1))
        prefill_chunks = plan.chunks[num_decodes:]
        positions = _consecutive(starts, counts)
        # The logits of the last num_logits tokens of each chunk are needed.
        logits_index = _consecutive(counts.cumsum() - num_logits, num_logits)
        groups = self._group(positions[:num_decodes] + 1)
        step_arrays = [
            _input_ids(plan.chunks, num_decodes),
            positions,
            self._slots(positions, rows.repeat(counts)),
            logits_index if len(logits_index) else np.zeros(1, np.int64),
            _pending_tokens(plan),
        ]
        group_arrays = self._group_arrays(groups, rows)
        prefill_arrays = [
            self._blocks(rows[index : index + 1], chunk.start + chunk.num_tokens)
            for index, chunk in enumerate(prefill_chunks, num_decodes)
        ]
        kernel_arrays = self._kernel_arrays(plan.chunks, groups)
        table_arrays = []
        for index in range(1, len(self._tables)):
            table_arrays += self._table_arrays(index, plan.chunks, groups, rows)
        # One operation copies all arrays to the device. Below, the tensors are taken from the
        # iterator in the order of the arrays.
        arrays = [*step_arrays, *group_arrays, *prefill_arrays, *table_arrays, *kernel_arrays]
        tensors = iter(upload_all(arrays, device))
        input_ids, position_ids, slots, logits_ids, pending = itertools.islice(tensors, 5)
        attention = AttentionBatch(
            slots=slots,
            num_decodes=num_decodes,
            decodes=self._decode_groups(groups, tensors),
            prefills=_prefills(prefill_chunks, num_decodes, tensors),
            block_size=self._block_size,
        )
        attention.other_groups = tuple(_with_blocks(attention, tensors) for _ in self._tables[1:])
        if self._layout is not None:
            attention.device_rows = PackedRows(self._layout, list(tensors))
        if plan.pending:
            assert sampled is not None, "a plan with pending tokens needs the sampled tokens"
            indices, sources = pending
            input_ids.index_copy_(0, indices, sampled.index_select(0, sources))
        return StepBatch(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            attention=attention,
            logits_index=logits_ids,
            num_logits=len(logits_index),
        )

    def _group_arrays(
        self, groups: list[tuple[Integers | slice, Integers]], rows: Integers
    ) -> list[Integers]:
        """Return the arrays of the groups of decodes, in the order in which they are read.

        Each group has its blocks, its lengths, and its token indices if these are not a slice; see
        `_decode_groups`. `groups` are the groups that `_group` returned, and `rows` are the rows of
        the step's chunks.
        """
        arrays = []
        for tokens, lens in groups:
            arrays += [self._blocks(rows[tokens], lens.max()), lens]
            if not isinstance(tokens, slice):
                arrays.append(tokens)
        return arrays

    def _table_arrays(
        self,
        index: int,
        chunks: list[Chunk],
        groups: list[tuple[Integers | slice, Integers]],
        rows: Integers,
    ) -> list[Integers]:
        """Return the arrays of the group of layers `index` that depend on its block tables.

        The arrays are the slots of the tokens, the blocks of each group of decodes, and the blocks
        of each prefill. `groups` are the groups of decodes that `_group` returned, and `rows` are
        the rows of the chunks.
        """
        starts = np.array([chunk.start for chunk in chunks])
        counts = np.array([chunk.num_tokens for chunk in chunks])
        positions = _consecutive(starts, counts)
        num_decodes = int(np.count_nonzero(counts == 1))
        return [
            self._slots(positions, rows.repeat(counts), index),
            *(self._blocks(rows[tokens], lens.max(), index) for tokens, lens in groups),
            *(
                self._blocks(rows[number : number + 1], chunk.start + chunk.num_tokens, index)
                for number, chunk in enumerate(chunks[num_decodes:], num_decodes)
            ),
        ]

    def _kernel_arrays(
        self, chunks: list[Chunk], groups: list[tuple[Integers | slice, Integers]]
    ) -> list[Integers]:
        """Return the additional arrays that GPU kernels read; see `StepLayout.arrays`.

        The list is empty if no GPU kernel is used. `groups` are the groups of decodes that `_group`
        returned.
        """
        if self._layout is None:
            return []
        size = self._block_size
        decode_shapes = [(len(lens), -(-int(lens.max()) // size)) for _, lens in groups]
        # Each decode is one chunk and one token, so this is the index of the first prefill's chunk
        # and also of its first token.
        start = sum(count for count, _ in decode_shapes)
        prefills = []
        for chunk in chunks[start:]:
            num_blocks = -(-(chunk.start + chunk.num_tokens) // size)
            prefills.append(PrefillShape(start, chunk.num_tokens, chunk.start, num_blocks))
            start += chunk.num_tokens
        return self._layout.arrays(decode_shapes, prefills)

    def _decode_groups(
        self, groups: list[tuple[Integers | slice, Integers]], tensors: Iterator[Tensor]
    ) -> list[DecodeGroup]:
        """Return the groups of decodes as tensors.

        `groups` are the groups that `_group` returned. `tensors` yields the blocks and the lengths
        of each group, and the token indices of each group that is not a slice of the decodes.
        """
        decode_groups = []
        for tokens, _ in groups:
            blocks = next(tensors)
            lens = next(tensors)
            token_index = None if isinstance(tokens, slice) else next(tensors)
            decode_groups.append(DecodeGroup(token_index, blocks, lens, self._block_size))
        return decode_groups

    def _slots(self, positions: Integers, rows: Integers, index: int = 0) -> Integers:
        """Return the slot (the index in the KV cache) of each token, [num_tokens] int64.

        Example: block_size is 16, and the block table of a sequence is [7, 2]. The token at
        position 20 is token 4 of block 2, so its slot is 2 * 16 + 4 = 36.

        Args:
            positions: [num_tokens] int64, the position of each token in its sequence.
            rows: [num_tokens] int64, the row of the sequence of each token.
            index: the group of layers.
        """
        blocks = self._tables[index][rows, positions // self._block_size]
        slots: Integers = blocks * self._block_size + positions % self._block_size
        return slots

    def _update_tables(self, plan: StepPlan) -> Integers:
        """Copy the new blocks of a plan's sequences into the arrays of block tables.

        Returns:
            [num_chunks] int64, the row of each chunk.
        """
        versions = self._versions
        rows: list[int] = []
        # This loop runs for every chunk of every step, so it must be fast. In most steps, a
        # sequence gets no new block, and its row stays unchanged. Unpacking a chunk is faster than
        # reading its fields by name.
        for sequence, _start, _num_tokens, _samples, is_first, _num_logits in plan.chunks:
            row = sequence.row
            assert row is not None
            rows.append(row)
            if is_first or sequence.table_version != versions[row]:
                versions[row] = sequence.table_version
                for index in range(len(self._tables)):
                    self._fill_row(index, row, sequence, is_first=is_first)
        return np.array(rows)

    def _fill_row(self, index: int, row: int, sequence: Sequence, *, is_first: bool) -> None:
        """Copy a sequence's new blocks into its row, and replace freed blocks by the null block.

        Args:
            index: the group of layers.
            row: the row of the sequence.
            sequence: the sequence.
            is_first: whether the sequence starts now. The row then still contains the blocks of an
                earlier sequence.
        """
        block_table = sequence.block_tables[index]
        end_dropped = sequence.num_dropped_blocks[index]
        array = self._tables[index][row]
        num_filled = self._num_filled[index][row]
        num_dropped = self._num_dropped[index][row]
        if is_first:
            array[:num_filled] = self._null_block
            num_filled = 0
            self._num_filled[index][row] = 0
            self._num_dropped[index][row] = 0
        elif end_dropped > num_dropped:
            # Another sequence may use the freed blocks by now.
            array[num_dropped:end_dropped] = self._null_block
            self._num_dropped[index][row] = end_dropped
        if len(block_table) > num_filled:
            array[num_filled : len(block_table)] = block_table[num_filled:]
            self._num_filled[index][row] = len(block_table)

    def _group(self, lens: Integers) -> list[tuple[Integers | slice, Integers]]:
        """Divide the sequences that decode in this step into groups of similar length.

        The groups limit padding: padding at most doubles the number of blocks that a group of long
        sequences reads.

        Example: with 16 tokens in a block, the lengths [20, 30, 9000] give the groups [0, 1] and
        [2], because 9000 tokens need many more blocks than 30.

        Args:
            lens: [num_decodes] int64, the number of tokens that each sequence attends to.

        Returns:
            One pair (indices, lengths) for each group: the indices of the group's sequences in
            `lens`, and the elements of `lens` at these indices. If all sequences form one group,
            the indices are a slice.
        """
        num_blocks = -(-lens // self._block_size)
        longest = num_blocks.max(initial=0)
        if longest <= _SHORT_BLOCKS or len(lens) * longest <= 2 * num_blocks.sum():
            return [(slice(len(lens)), lens)] if len(lens) else []
        # Lengths with the same rounded logarithm differ by a factor of two at most.
        levels = np.ceil(np.log2(num_blocks.clip(min=_SHORT_BLOCKS))).astype(np.int64)
        groups = [np.flatnonzero(levels == level) for level in np.unique(levels)]
        return [(group, lens[group]) for group in groups]

    def _blocks(self, rows: Integers, num_tokens: int, index: int = 0) -> Integers:
        """Return a copy of the block tables of `rows`, cut to the blocks of `num_tokens` tokens.

        `index` is the group of layers. Example: with 16 tokens in a block, num_tokens=35 gives the
        first 3 blocks of each table.
        """
        return self._tables[index][rows, : -(-int(num_tokens) // self._block_size)]


def _consecutive(starts: Integers, counts: Integers) -> Integers:
    """Return an array with `counts[i]` consecutive numbers that begin at `starts[i]`, for each i.

    Example: the starts [20, 0] and the counts [1, 3] give [20, 0, 1, 2].
    """
    ends = counts.cumsum()
    first_indices = ends - counts
    numbers: Integers = np.arange(ends[-1]) + (starts - first_indices).repeat(counts)
    return numbers


def _pending_tokens(plan: StepPlan) -> Integers:
    """Return the pending tokens of a plan, [2, num_pending] int64.

    The first row contains the index of each pending token in the step, and the second row the index
    of its source in the tokens that the previous step samples. A pending token belongs to a decode.
    Decodes come first in a step, so the index of the decode is also the index of its token.
    """
    numbers = itertools.chain.from_iterable(plan.pending)
    return np.fromiter(numbers, np.int64, 2 * len(plan.pending)).reshape(-1, 2).T


def _input_ids(chunks: list[Chunk], num_decodes: int) -> Integers:
    """Return the token ids of a step, [num_tokens] int64.

    If a decode's token is not known yet, because the previous step is still sampling the token, its
    id is 0. The caller then copies the token on the device. `num_decodes` is the number of leading
    chunks with one token.
    """
    token_ids = [
        chunk.sequence.token_ids[chunk.start] if chunk.start < len(chunk.sequence.token_ids) else 0
        for chunk in chunks[:num_decodes]
    ]
    for chunk in chunks[num_decodes:]:
        token_ids += tokens_of(chunk)
    return np.array(token_ids, dtype=np.int64)


def _with_blocks(attention: AttentionBatch, tensors: Iterator[Tensor]) -> AttentionBatch:
    """Return the metadata of another group of layers.

    `attention` is the metadata of the first group. `tensors` yields the tensors of the arrays that
    `BatchBuilder._table_arrays` returned.
    """
    return AttentionBatch(
        slots=next(tensors),
        num_decodes=attention.num_decodes,
        decodes=[
            DecodeGroup(group.tokens, next(tensors), group.lens, group.block_size)
            for group in attention.decodes
        ],
        prefills=[replace(prefill, blocks=next(tensors)) for prefill in attention.prefills],
        block_size=attention.block_size,
    )


def _prefills(chunks: list[Chunk], start: int, blocks: Iterator[Tensor]) -> list[Prefill]:
    """Return the prefills of a step.

    `chunks` are the chunks of several tokens. The first token of the first chunk has the index
    `start` in the packed row. `blocks` yields the block table of each chunk.
    """
    prefills: list[Prefill] = []
    for chunk in chunks:
        end = start + chunk.num_tokens
        prefills.append(Prefill(start, end, chunk.start, next(blocks)))
        start = end
    return prefills
