# SPDX-License-Identifier: Apache-2.0
"""From a step plan to the tensors of one packed forward pass."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch, Decodes, Prefill
from nereid_backend.core.request import Request
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.device_transfer import Integers, upload_all

# Decodes of at most so many blocks are one group: splitting them costs more than padding them.
_SHORT_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One packed step.

    Attributes:
        input_ids: [1, num_tokens] int64.
        position_ids: [1, num_tokens] int64; every request counts from 0.
        attention: where keys and values are.
        logits_index: [max(1, num_logits)] int64, tokens whose logits are wanted, chunk by chunk;
            when there are none it names the first token, because models do not take an empty index.
        num_logits: how many are wanted.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention: AttentionBatch
    logits_index: Tensor
    num_logits: int


def tokens_of(chunk: Chunk) -> list[int]:
    """A chunk's tokens: what is known, then what is guessed to follow."""
    request = chunk.request
    token_ids = request.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return token_ids + request.draft_token_ids[: chunk.num_tokens - len(token_ids)]


class BatchBuilder:
    """Builds batches and keeps the running requests' block tables as rows of one array.

    A row is filled from the request's own list as that grows, so that a step costs a few operations
    on arrays instead of a copy of every list.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, null_block: int
    ) -> None:
        """Make empty tables.

        Args:
            max_num_seqs: number of rows.
            max_model_len: longest request in tokens.
            block_size: tokens in one block.
            null_block: a block that is never written; pads the tables. What a table is padded with
                is read, and then masked; another request's block could hold NaN, which masking
                does not stop.
        """
        self._block_size = block_size
        self._null_block = null_block
        width = -(-max_model_len // block_size)
        self._tables: Integers = np.full((max_num_seqs, width), null_block, dtype=np.int64)
        self._num_filled = [0] * max_num_seqs
        self._num_dropped = [0] * max_num_seqs

    def build(
        self, plan: StepPlan, device: torch.device, sampled: Tensor | None = None
    ) -> StepBatch:
        """Tensors of a plan that has at least one chunk.

        Nothing is read from the device, and nothing of what was asked of it before is waited for.

        Args:
            plan: the step.
            device: where the tensors go.
            sampled: [n] int64 on the device, what the step before samples; the plan's pending
                chunks get their tokens from there.

        Mutates: the block tables of the requests that take part.
        """
        token_ids, rows, wanted = self._take_in(plan)
        starts = [chunk.start for chunk in plan.chunks]
        counts = [chunk.num_tokens for chunk in plan.chunks]
        num_decodes = counts.count(1)
        row_array, start_array = np.array(rows), np.array(starts)
        count_array = np.array(counts)
        ends = count_array.cumsum()
        # A token's position: its request's start plus its distance from the chunk's first token.
        positions = np.arange(plan.num_tokens) + (start_array - ends + count_array).repeat(
            count_array
        )
        tables = self._tables[row_array.repeat(count_array), positions // self._block_size]
        slots = tables * self._block_size + positions % self._block_size
        groups = self._group(start_array[:num_decodes] + 1)
        prefills = range(num_decodes, len(counts))
        arrays = [np.array(token_ids), positions, slots, np.array(wanted or [0])]
        for tokens, lens in groups:
            arrays += (self._blocks(row_array[tokens], lens.max()), lens)
            if not isinstance(tokens, slice):
                arrays.append(tokens)
        arrays += [self._blocks(row_array[i : i + 1], starts[i] + counts[i]) for i in prefills]
        arrays.append(np.array(plan.pending, dtype=np.int64).reshape(-1, 2).T)
        parts = iter(upload_all(arrays, device))
        input_ids, position_ids, slot_ids, logits_index = itertools.islice(parts, 4)
        attention = AttentionBatch(
            slots=slot_ids,
            num_decodes=num_decodes,
            decodes=[
                Decodes(
                    blocks=next(parts),
                    lens=next(parts),
                    tokens=None if isinstance(tokens, slice) else next(parts),
                    block_size=self._block_size,
                )
                for tokens, _ in groups
            ],
            prefills=[
                Prefill(
                    start=int(ends[i]) - counts[i],
                    end=int(ends[i]),
                    num_cached=starts[i],
                    blocks=next(parts),
                )
                for i in prefills
            ],
            block_size=self._block_size,
        )
        if plan.pending:
            assert sampled is not None, "a step that was planned ahead needs what comes before it"
            # Chunks of one token come first, so that the chunk's number is its token's.
            chunks, sources = next(parts)
            input_ids.index_copy_(0, chunks, sampled.index_select(0, sources))
        return StepBatch(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            attention=attention,
            logits_index=logits_index,
            num_logits=len(wanted),
        )

    def _take_in(self, plan: StepPlan) -> tuple[list[int], list[int], list[int]]:
        """Bring the tables up to date; returns tokens, the chunks' rows, and wanted logits."""
        token_ids: list[int] = []
        rows: list[int] = []
        wanted: list[int] = []
        for chunk in plan.chunks:
            request, start, num_tokens, _, is_first, num_logits = chunk
            row = request.row
            assert row is not None
            self._fill_row(row, request, is_first)
            if num_tokens > 1:
                token_ids += tokens_of(chunk)
            elif start < len(request.token_ids):
                token_ids.append(request.token_ids[start])
            else:
                token_ids.append(0)  # It is pending.
            rows.append(row)
            end = len(token_ids)
            wanted.extend(range(end - num_logits, end))
        return token_ids, rows, wanted

    def _fill_row(self, row: int, request: Request, is_first: bool) -> None:
        block_table = request.block_table
        filled = self._num_filled[row]
        if is_first:
            self._tables[row, :filled] = self._null_block
            filled = self._num_dropped[row] = 0
        elif request.num_dropped_blocks > self._num_dropped[row]:
            # They are another request's by now.
            self._tables[row, self._num_dropped[row] : request.num_dropped_blocks] = (
                self._null_block
            )
            self._num_dropped[row] = request.num_dropped_blocks
        if len(block_table) > filled:
            self._tables[row, filled : len(block_table)] = block_table[filled:]
            self._num_filled[row] = len(block_table)
        elif is_first:
            self._num_filled[row] = 0

    def _group(self, lens: Integers) -> list[tuple[Integers | slice, Integers]]:
        """Split decodes by length, so that padding is at most as much as there is to pad.

        Returns:
            Pairs of indices into lens and the lengths there; one pair if all go together.
        """
        num_blocks = -(-lens // self._block_size)
        most = num_blocks.max(initial=0)
        if most <= _SHORT_BLOCKS or len(lens) * most <= 2 * num_blocks.sum():
            return [(slice(len(lens)), lens)] if len(lens) else []
        kinds = np.ceil(np.log2(num_blocks.clip(min=_SHORT_BLOCKS))).astype(np.int64)
        groups = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
        return [(group, lens[group]) for group in groups]

    def _blocks(self, rows: Integers, num_tokens: int) -> Integers:
        """The rows' tables as far as num_tokens tokens reach; a copy."""
        return self._tables[rows, : -(-int(num_tokens) // self._block_size)]
