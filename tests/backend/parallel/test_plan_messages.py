"""Tests that the forward passes of all ranks read the same tensors."""

import random

import torch
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.parallel.plan_messages import PlanDecoder, PlanEncoder
from nereid_backend.paths.step_batch import BatchBuilder

NUM_STEPS = 300
NUM_ROWS = 5
BLOCK_SIZE = 4
MAX_LEN = 60
NULL_BLOCK = 1000


class RandomPlans:
    """Plans of random sequences. The plans have the properties of the scheduler's plans.

    Attributes:
        num_null_blocks: the number of blocks that left an attention window.
        num_rejected_drafts: the number of rejected draft tokens.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sequences: dict[int, Sequence] = {}
        self.num_null_blocks = 0
        self.num_rejected_drafts = 0

    def next(self) -> StepPlan:
        rows = self._random.sample(range(NUM_ROWS), self._random.randint(1, NUM_ROWS))
        chunks = sorted((self._chunk(row) for row in rows), key=lambda one: one.num_tokens > 1)
        copies = [(self._block(), self._block())] if self._random.random() < 0.2 else []
        return StepPlan(chunks, sum(chunk.num_tokens for chunk in chunks), copies)

    def _chunk(self, row: int) -> Chunk:
        sequence = self._sequences.get(row)
        is_first = sequence is None or len(sequence.token_ids) > MAX_LEN - 12
        if is_first:
            sequence = self._sequences[row] = self._new_sequence(row)
        else:
            self._extend(sequence)
        start = sequence.num_computed_tokens
        known = len(sequence.token_ids) - start
        count = self._random.randint(1, known)
        samples = count == known
        num_drafts = self._random.randint(0, 3) if samples else 0
        sequence.draft_token_ids = [self._token() for _ in range(num_drafts)]
        count += num_drafts
        num_blocks = -(-(start + count) // BLOCK_SIZE)
        while len(sequence.block_table) < num_blocks:
            sequence.block_table += [self._block()]
        sequence.num_computed_tokens = start + count - num_drafts
        return Chunk(sequence, start, count, samples, is_first, (num_drafts + 1) * samples)

    def _new_sequence(self, row: int) -> Sequence:
        """Return a sequence whose first blocks may be in the prefix cache."""
        tokens = [self._token() for _ in range(self._random.randint(2, 30))]
        sequence = Sequence("", tokens, SamplingParams(), max_total_tokens=MAX_LEN)
        sequence.row = row
        num_cached = self._random.randint(0, (len(tokens) - 1) // BLOCK_SIZE)
        sequence.block_table = [self._block() for _ in range(num_cached)]
        sequence.num_computed_tokens = num_cached * BLOCK_SIZE
        return sequence

    def _extend(self, sequence: Sequence) -> None:
        """Commit the previous step of a sequence, and drop blocks that left the window."""
        if sequence.num_computed_tokens == len(sequence.token_ids):
            drafts = sequence.draft_token_ids
            num_accepted = self._random.randint(0, len(drafts))
            self.num_rejected_drafts += len(drafts) - num_accepted
            sequence.token_ids += [*drafts[:num_accepted], self._token()]
            sequence.num_computed_tokens += num_accepted
        num_full = sequence.num_computed_tokens // BLOCK_SIZE
        (num_dropped,) = sequence.num_null_blocks
        if num_full > num_dropped and self._random.random() < 0.3:
            sequence.num_null_blocks = [num_dropped + 1]
            sequence.block_table[num_dropped] = NULL_BLOCK
            sequence.table_version += 1
            self.num_null_blocks += 1

    def _token(self) -> int:
        return self._random.randrange(300)

    def _block(self) -> int:
        return self._random.randrange(NULL_BLOCK)


def make_builder():
    return BatchBuilder(
        max_num_seqs=NUM_ROWS, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, null_block=NULL_BLOCK
    )


def tensors(batch):
    attention = batch.attention
    yield from (batch.input_ids, batch.position_ids, batch.logits_index, attention.slots)
    for group in attention.decodes:
        yield from (group.blocks, group.lens)
    for prefill in attention.prefills:
        yield torch.tensor([prefill.start, prefill.end, prefill.num_cached])
        yield prefill.blocks


def test_a_decoded_plan_gives_the_tensors_of_the_original_plan():
    encoder, decoder = PlanEncoder(), PlanDecoder()
    original, decoded = make_builder(), make_builder()
    plans = RandomPlans(1)
    for _ in range(NUM_STEPS):
        plan = plans.next()
        expected = original.build(plan, torch.device("cpu"))
        plan_of_rank = decoder.decode(encoder.encode(plan))
        batch = decoded.build(plan_of_rank, torch.device("cpu"))
        assert plan_of_rank.copies == plan.copies
        assert batch.num_logits == expected.num_logits
        pairs = list(zip(tensors(batch), tensors(expected), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs)
    assert plans.num_null_blocks
    assert plans.num_rejected_drafts


def test_a_message_contains_each_block_only_once():
    plans, encoder = RandomPlans(2), PlanEncoder()
    num_sent = {}
    for _ in range(NUM_STEPS):
        plan = plans.next()
        message = encoder.encode(plan)
        for chunk, sent in zip(plan.chunks, message.chunks, strict=True):
            row = chunk.sequence.row
            num_sent[row] = len(sent.new_blocks) + (0 if chunk.is_first else num_sent[row])
            assert num_sent[row] == len(chunk.sequence.block_table)
            assert len(sent.token_ids) == chunk.num_tokens
