# SPDX-License-Identifier: Apache-2.0
"""Converts the plan of an engine step into the input tensors of a forward pass.

Example: a plan with two decodes and a prefill of three tokens becomes one row of five tokens.
Attention computes the two decodes together and the prefill separately.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch, DecodeGroup, Prefill
from nereid_backend.attention.gpu.gpu_batch import PrefillShape, StepLayout
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.device_transfer import Integers, upload_all
from nereid_backend.paths.block_table_rows import BlockTableRows
from nereid_backend.paths.length_groups import LengthGroup, group_by_length


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tensors of one packed step.

    Attributes:
        input_ids: [1, num_tokens] int64.
        position_ids: [1, num_tokens] int64. The first token of each sequence has position 0.
        attention: the attention metadata of the step, such as the cache slots of the tokens.
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
    """Return the ids of the tokens in a chunk: known tokens, followed by draft tokens.

    Example: the known tokens are [5, 6, 7], and the draft tokens are [8, 9]. A chunk of 3 tokens
    that starts at 2 has the token ids [7, 8, 9].
    """
    sequence = chunk.sequence
    token_ids = sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return token_ids + sequence.draft_token_ids[: chunk.num_tokens - len(token_ids)]


@dataclass(slots=True)  # not frozen, because frozen objects are slower to create
class _PackedChunks:
    """The tokens that a step computes, packed into one row. Each chunk belongs to one sequence.

    Attributes:
        chunks: the chunks. Chunks of one token (decodes) come before longer chunks (prefills).
        num_decodes: the number of decodes.
        rows: [num_chunks] int64, the row of each chunk's sequence in the block tables.
        positions: [num_tokens] int64, the position of each token in its sequence.
        token_rows: [num_tokens] int64, the row of each token's sequence in the block tables.
        logits_index: [num_logits] int64, the indices of the tokens whose logits are needed.
    """

    chunks: list[Chunk]
    num_decodes: int
    rows: Integers
    positions: Integers
    token_rows: Integers
    logits_index: Integers

    @classmethod
    def from_chunks(cls, chunks: list[Chunk], rows: Integers) -> "_PackedChunks":
        """Pack the tokens of all chunks into one row. A chunk is the tokens of one sequence.

        Example: the chunks start at 20 and 0, and have 1 and 3 tokens. The positions are
        [20, 0, 1, 2]. If each chunk needs the logits of its last token, `logits_index` is [0, 3].

        `rows` contains the row of each chunk's sequence in the block tables. `StepPlan` lists all
        chunks of one token first. They are called decodes here, even if a chunk is a part of a
        prompt, because attention computes all chunks of one token in the same way.
        """
        starts = np.array([chunk.start for chunk in chunks])
        counts = np.array([chunk.num_tokens for chunk in chunks])
        num_logits = np.array([chunk.num_logits for chunk in chunks])
        return cls(
            chunks=chunks,
            num_decodes=int(np.count_nonzero(counts == 1)),
            rows=rows,
            positions=_joined_ranges(starts, counts),  # starts[i], starts[i] + 1, ... of each chunk
            token_rows=rows.repeat(counts),
            # The logits of the last `chunk.num_logits` tokens of each chunk are needed.
            logits_index=_joined_ranges(counts.cumsum() - num_logits, num_logits),
        )

    @property
    def prefills(self) -> list[Chunk]:
        """The chunks of several tokens."""
        return self.chunks[self.num_decodes :]


class _Decodes(NamedTuple):
    """The decodes of one length group; see the attributes `lens` and `tokens` of `DecodeGroup`."""

    lens: Tensor
    tokens: Tensor | None


class _LayerGroupArrays(NamedTuple):
    """The cache slots and the block tables of a step, for one group of attention layers.

    Attributes:
        slots: [num_tokens] int64, the slot of each token.
        decode_blocks: for each length group of decodes, the block tables of its sequences.
        prefill_blocks: for each prefill, the block table of its sequence.
    """

    slots: Integers
    decode_blocks: list[Integers]
    prefill_blocks: list[Integers]


class BatchBuilder:
    """Converts the plans of steps into tensors, and stores the block tables of sequences."""

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
        """Create empty block tables. The block table of a sequence lists its KV cache blocks.

        Args:
            max_num_seqs: the number of rows, one for each running sequence.
            max_model_len: the largest number of tokens in a sequence.
            block_size: the number of tokens in one block.
            null_block: the id of a block that is never written. The unused elements of the tables
                contain this id. Attention reads the keys of this block and then masks them. The
                block of another sequence could contain NaN, which masking does not remove.
            layout: computes further arrays that GPU kernels read, such as the division of the
                prefills into tiles. None if no GPU kernel is used.
            num_groups: the number of groups of attention layers. A sequence has separate blocks in
                each group, because layers with a sliding window need fewer blocks than layers with
                full attention. GPU kernels support only one group.
        """
        assert layout is None or num_groups == 1, "GPU kernels read one block table."
        self._layout = layout
        self._block_size = block_size
        self._tables = BlockTableRows(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            null_block=null_block,
            num_groups=num_groups,
        )

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
            sampled: [n] int64 on the device, the tokens that the previous step samples. The pending
                chunks of the plan compute these tokens. None if the plan has no pending chunks.

        Mutates: the block tables of the plan's sequences.
        """
        step = _PackedChunks.from_chunks(plan.chunks, self._tables.update(plan))
        length_groups = group_by_length(step.positions[: step.num_decodes] + 1, self._block_size)
        layer_groups = range(self._tables.num_groups)
        arrays = [
            _input_ids(plan.chunks, step.num_decodes),
            step.positions,
            step.logits_index if len(step.logits_index) else np.zeros(1, np.int64),
            _pending_tokens(plan),
            *itertools.chain.from_iterable(map(_arrays_of_group, length_groups)),
        ]
        for layer_group in layer_groups:
            slots, decode_blocks, prefill_blocks = self._layer_group_arrays(
                step, length_groups, layer_group
            )
            arrays += [slots, *decode_blocks, *prefill_blocks]
        arrays += self._kernel_arrays(step, length_groups)
        # One operation copies all arrays to the device. Below, the tensors are taken from the
        # iterator in the order of the arrays.
        tensors = iter(upload_all(arrays, device))
        input_ids, position_ids, logits_index, pending = itertools.islice(tensors, 4)
        decodes = [_read_group(group, tensors) for group in length_groups]
        attention, *other_groups = [
            self._attention_of_layer_group(step, decodes, tensors) for _ in layer_groups
        ]
        attention.other_groups = tuple(other_groups)
        if self._layout is not None:
            attention.kernel_metadata = self._layout.packed_rows(tensors)
        if plan.pending:
            assert sampled is not None, "a plan with pending tokens needs the sampled tokens"
            indices, sources = pending
            input_ids.index_copy_(0, indices, sampled.index_select(0, sources))
        return StepBatch(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            attention=attention,
            logits_index=logits_index,
            num_logits=len(step.logits_index),
        )

    def _layer_group_arrays(
        self, step: _PackedChunks, length_groups: list[LengthGroup], layer_group: int
    ) -> _LayerGroupArrays:
        """Return the cache slots and the block tables of a step for one group of attention layers.

        A slot is needed for each token, and a block table for each sequence. `step.token_rows` has
        one element for each token, and `step.rows` has one for each sequence. In `step.rows`, the
        decodes come before the prefills. Each length group lists the indices of its decodes.

        Args:
            step: the tokens of the step.
            length_groups: the decodes of the step, divided into groups of similar lengths.
            layer_group: the number of the group of attention layers.
        """
        tables = self._tables
        slots = tables.slots(step.positions, step.token_rows, layer_group)
        decode_blocks = [
            tables.blocks(step.rows[decodes.indices], decodes.lens.max(), layer_group)
            for decodes in length_groups
        ]
        prefill_blocks = [
            tables.blocks(step.rows[i : i + 1], chunk.start + chunk.num_tokens, layer_group)
            for i, chunk in enumerate(step.prefills, start=step.num_decodes)
        ]
        return _LayerGroupArrays(slots, decode_blocks, prefill_blocks)

    def _attention_of_layer_group(
        self, step: _PackedChunks, decodes: list[_Decodes], tensors: Iterator[Tensor]
    ) -> AttentionBatch:
        """Build the attention metadata of a step for one group of attention layers.

        Args:
            step: the tokens of the step.
            decodes: the decodes of each length group. They are equal in all groups of layers.
            tensors: yields first the cache slots of all tokens, then the block tables of each
                length group, and then the block table of each prefill. This function reads the
                first two, and passes the iterator to `_prefills`, which reads the last.
        """
        slots = next(tensors)
        decode_groups: list[DecodeGroup] = []
        for lens, tokens in decodes:
            blocks = next(tensors)
            decode_groups.append(DecodeGroup(tokens, blocks, lens, self._block_size))
        prefills = _prefills(step.prefills, step.num_decodes, tensors)
        return AttentionBatch(slots, step.num_decodes, decode_groups, prefills, self._block_size)

    def _kernel_arrays(
        self, step: _PackedChunks, length_groups: list[LengthGroup]
    ) -> list[Integers]:
        """Return the arrays that only GPU kernels read; [] if no GPU kernel is used.

        `StepLayout.arrays` computes the arrays from the sizes of the decodes and the prefills.

        Args:
            step: the tokens of the step.
            length_groups: the decodes of the step, divided into groups of similar lengths.
        """
        if self._layout is None:
            return []
        # The shape of the block tables of each group: the number of decodes, and the number of
        # blocks of the longest decode.
        decode_shapes = [
            (len(decodes.lens), self._num_blocks(int(decodes.lens.max())))
            for decodes in length_groups
        ]
        return self._layout.arrays(decode_shapes, self._prefill_shapes(step))

    def _prefill_shapes(self, step: _PackedChunks) -> list[PrefillShape]:
        """Return the PrefillShape of each prefill of a step."""
        shapes: list[PrefillShape] = []
        first_token = step.num_decodes  # Each decode has one token. Decodes precede prefills.
        for chunk in step.prefills:
            num_blocks = self._num_blocks(chunk.start + chunk.num_tokens)
            shapes.append(PrefillShape(first_token, chunk.num_tokens, chunk.start, num_blocks))
            first_token += chunk.num_tokens
        return shapes

    def _num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that contain `num_tokens` tokens of a sequence."""
        return (num_tokens + self._block_size - 1) // self._block_size


def _joined_ranges(starts: Integers, counts: Integers) -> Integers:
    """Concatenate ranges of numbers. Range i has `counts[i]` numbers and begins at `starts[i]`.

    Example: the starts [20, 0] and the counts [1, 3] give [20, 0, 1, 2].
    """
    ends = counts.cumsum()
    first_indices = ends - counts
    numbers: Integers = np.arange(ends[-1]) + (starts - first_indices).repeat(counts)
    return numbers


def _pending_tokens(plan: StepPlan) -> Integers:
    """Return the indices of pending tokens: the tokens that the previous step is still sampling.

    The result is [2, num_pending] int64, with one column for each pending token. The first row
    contains the index of the token in this step. The second row contains the index of the token
    among the tokens that the previous step samples. A pending token belongs to a decode. Decodes
    come first in a step, so the index of the decode is also the index of its token.
    """
    indices = itertools.chain.from_iterable(plan.pending)
    pairs = np.fromiter(indices, np.int64, 2 * len(plan.pending)).reshape(-1, 2)
    return pairs.T


def _input_ids(chunks: list[Chunk], num_decodes: int) -> Integers:
    """Return the ids of all tokens that a step computes, [num_tokens] int64.

    The first `num_decodes` chunks are decodes (chunks of one token). If the previous step is still
    sampling the token of a decode, its id in the result is 0.
    """
    # A list comprehension is faster than a loop, and most steps consist only of decodes.
    token_ids = [
        chunk.sequence.token_ids[chunk.start] if chunk.start < len(chunk.sequence.token_ids) else 0
        for chunk in chunks[:num_decodes]
    ]
    for chunk in chunks[num_decodes:]:
        token_ids += tokens_of(chunk)
    return np.array(token_ids, dtype=np.int64)


def _arrays_of_group(group: LengthGroup) -> list[Integers]:
    """Return the lengths of the decodes in a group, and the indices of their tokens in the step.

    If the group contains all decodes of the step, only the lengths are returned. Attention does not
    need the indices in this case.
    """
    if isinstance(group.indices, slice):
        return [group.lens]
    # Each decode has one token, and decodes come before all other tokens of a step. The index of a
    # decode is therefore also the index of its token.
    return [group.lens, group.indices]


def _read_group(group: LengthGroup, tensors: Iterator[Tensor]) -> _Decodes:
    """Return the decodes of a group.

    `tensors` yields the arrays that `_arrays_of_group` returned for this group, on the device.
    """
    lens = next(tensors)
    tokens = None if isinstance(group.indices, slice) else next(tensors)
    return _Decodes(lens, tokens)


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
