# SPDX-License-Identifier: Apache-2.0
"""Converts the plan of each forward pass into a message from rank 0 to the other ranks.

A message contains only the data that a forward pass needs. Data that was in an earlier message is
omitted. Example: a sequence has the block table [7, 2]. After 32 tokens, the sequence gets block 9.
The message of the next step contains the row of the sequence, the new token, and block 9.
"""

from typing import NamedTuple

from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.step_batch import tokens_of


class ChunkMessage(NamedTuple):
    """A chunk of a step.

    Attributes:
        row: the row of the chunk's sequence.
        start: the index of the first token of the chunk in the sequence.
        token_ids: the tokens of the chunk, followed by its draft tokens.
        is_first: whether this is the first chunk since the sequence got its row.
        num_logits: the number of tokens, counted from the end of the chunk, for which the model
            computes logits.
        new_blocks: the blocks that were appended to the block table after the previous message.
        num_null_blocks: the number of leading blocks that were freed.
    """

    row: int
    start: int
    token_ids: list[int]
    is_first: bool
    num_logits: int
    new_blocks: list[int]
    num_null_blocks: int


class StepMessage(NamedTuple):
    """A message about a forward pass: the tokens to compute, and the cache blocks to copy first.

    A pair (7, 2) in `copies` means that block 7 is copied to block 2.
    """

    chunks: list[ChunkMessage]
    copies: list[tuple[int, int]]


class PlanEncoder:
    """Converts the step plans of rank 0 into messages for the other ranks."""

    def __init__(self) -> None:
        """Create an encoder that remembers which blocks the earlier messages contained."""
        # Maps each batch row to the number of blocks that earlier messages contained for the row's
        # sequence.
        self._num_sent: dict[int, int] = {}

    def encode(self, plan: StepPlan) -> StepMessage:
        """Convert a step plan into a message.

        A message omits the blocks that earlier messages contained. The receiver must therefore
        decode the messages in the order in which they were encoded.
        """
        assert not plan.pending, "asynchronous plans cannot be sent to other ranks"
        return StepMessage([self._encode_chunk(chunk) for chunk in plan.chunks], plan.copies)

    def _encode_chunk(self, chunk: Chunk) -> ChunkMessage:
        """Convert a chunk (the tokens of one sequence in a forward pass) into a message.

        The message contains only the blocks of the sequence that no earlier message contained.
        Example: an earlier message contained the block table [7, 2]. The block table is now
        [7, 2, 9], so the new message contains only the block 9.

        Mutates: `_num_sent`, because the message contains the blocks up to the end of the table.
        """
        sequence = chunk.sequence
        row = sequence.row
        assert row is not None
        num_sent_blocks = 0 if chunk.is_first else self._num_sent[row]
        self._num_sent[row] = len(sequence.block_table)
        # Tensor parallelism supports only one group of layers, and so only one block table.
        (num_null_blocks,) = sequence.num_null_blocks
        return ChunkMessage(
            row=row,
            start=chunk.start,
            token_ids=tokens_of(chunk),
            is_first=chunk.is_first,
            num_logits=chunk.num_logits,
            # A block table never becomes shorter: new blocks are appended, and freed blocks at its
            # start are replaced by the null block.
            new_blocks=sequence.block_table[num_sent_blocks:],
            num_null_blocks=num_null_blocks,
        )


class PlanDecoder:
    """Converts the messages of rank 0 into step plans for another rank.

    A decoded plan contains only the data that a forward pass needs. The forward pass of the decoded
    plan computes the same tokens as the forward pass of the original plan.
    """

    def __init__(self) -> None:
        """Create a decoder without sequences."""
        self._sequences: dict[int, Sequence] = {}

    def decode(self, message: StepMessage) -> StepPlan:
        """Convert a message into a step plan.

        In the sequences of the plan, only the attributes that a forward pass reads are set.
        """
        chunks = [self._decode_chunk(chunk) for chunk in message.chunks]
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return StepPlan(chunks, num_tokens, message.copies)

    def _decode_chunk(self, message: ChunkMessage) -> Chunk:
        """Convert a message into a `Chunk`, and add the new tokens and blocks to its sequence.

        A message identifies the sequence by its row in the batch. If this is the first chunk since
        the sequence got the row, a new sequence replaces the earlier sequence of the row.
        """
        if message.is_first:
            self._sequences[message.row] = empty_sequence()
        sequence = self._sequences[message.row]
        sequence.row = message.row
        sequence.block_table += message.new_blocks
        sequence.num_null_blocks = [message.num_null_blocks]
        # The messages do not contain tokens that were found in the prefix cache. The forward pass
        # reads only new tokens, so zeros can replace the missing tokens in `token_ids`.
        num_missing = max(0, message.start - len(sequence.token_ids))
        sequence.token_ids += [0] * num_missing
        # Some draft tokens of the previous message may have been rejected. Therefore, the tokens of
        # the new message replace all tokens from `message.start` on.
        sequence.token_ids[message.start :] = message.token_ids
        return Chunk(
            sequence=sequence,
            start=message.start,
            num_tokens=len(message.token_ids),
            samples=message.num_logits > 0,
            is_first=message.is_first,
            num_logits=message.num_logits,
        )


def empty_sequence() -> Sequence:
    """Return a sequence without tokens and blocks."""
    return Sequence("", [], SamplingParams(), max_total_tokens=0)
