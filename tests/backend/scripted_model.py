"""A fake model with a fake KV cache, for tests of the scheduler and the block pool."""

import random
from collections import abc

from nereid_backend.core.blocks.window import AttentionWindow
from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, Sampled, StepPlan, StepResult

# The number of tokens in a block.
BLOCK = 4
EOS = 1
# The value of a slot whose keys and values are not finite numbers. hash() never returns -1.
NAN = -1


def next_token(token_ids: list[int], index: int) -> int:
    """Return the token after `token_ids`, which depends on all tokens and on the choice's index.

    Many tokens repeat a token five positions earlier, so that drafts from n-grams are often right.
    """
    rng = random.Random(f"{token_ids}{index}")
    if len(token_ids) > 6 and rng.random() < 0.7:
        return token_ids[-5]
    return rng.randrange(EOS, 40)


def expected_answer(prompt: list[int], max_tokens: int, index: int = 0) -> tuple[list[int], str]:
    """Return the tokens after `prompt` and the finish reason."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, index))
        if tokens[-1] == EOS:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class ScriptedModel:
    """A fake model that detects wrong contents of the KV cache.

    A slot of the cache contains the hash of a token and of all tokens before it. Before the model
    generates a token, it compares the slots of the sequence with the expected hashes. A wrong block
    table, a lost or wrongly shared block, and a missing chunk or copy cause an AssertionError. The
    blocks of every group of layers contain hashes. In a group with an attention window, the model
    reads only the slots inside the window.

    If the computation of a sequence fails, the slot of its last token contains NaN. An attention
    mask does not stop NaN. The model therefore raises an AssertionError if any slot in the block
    tables of a sequence contains NaN, even a slot that the sequence does not use.
    """

    def __init__(
        self,
        num_blocks: int,
        rng: random.Random | None = None,
        *,
        forced=0.0,
        broken=0.0,
        windows: abc.Sequence[AttentionWindow | None] = (None,),
        has_state: bool = False,
    ):
        """Create a model whose cache has `num_blocks` blocks.

        Args:
            num_blocks: the number of blocks in the cache.
            rng: the source of random numbers for `forced` and `broken`.
            forced: the probability that one more token follows a generated token in the same step,
                as the forced tokens of a grammar do.
            broken: the probability that the computation of one sequence fails. The computation of a
                whole step fails with a quarter of this probability.
            windows: the attention window of each group of layers.
            has_state: whether each row has a recurrent state, which must cover exactly the tokens
                before each chunk.
        """
        self._has_state = has_state
        # The hash of the tokens that each row's state covers, and the hash in each snapshot.
        self.states: dict[int, int] = {}
        self.snapshots: dict[int, int] = {}
        self._windows = windows
        self.slots: list[int | None] = [None] * (num_blocks * BLOCK)
        self.num_computed = 0
        self.num_copied = 0
        self._rng = rng or random.Random(0)
        self._forced = forced
        self._broken = broken
        self._failed_sequences: set[Sequence] = set()

    def run(self, plan: StepPlan) -> StepResult:
        self.compute(plan)
        result = self.answer(plan)
        self.clear_broken(plan, result)
        return result

    def compute(self, plan: StepPlan, sampled: abc.Sequence[int] = ()) -> None:
        """Compute the forward pass of a step.

        The argument `sampled` contains the tokens that the previous step sampled. A pending chunk
        starts with one of these tokens, and `plan.pending` contains the index of this token.
        """
        self._copy_blocks(plan)
        self._load_snapshots(plan)
        pending = {index: [sampled[source]] for index, source in plan.pending}
        for index, chunk in enumerate(plan.chunks):
            self._store(chunk, pending.get(index, []))
        if self._rng.random() < self._broken / 4:
            for chunk in plan.chunks:
                self.clear(chunk.sequence)
            raise RuntimeError("a fault made by the test")
        if plan.snapshots is not None:
            for index, snapshot in plan.snapshots.saves:
                self.snapshots[snapshot] = self.states[plan.chunks[index].sequence.row]

    def _copy_blocks(self, plan: StepPlan) -> None:
        # Read all source blocks before writing the first target block, as the GPU does.
        contents = [self._block(source) for source, _ in plan.copies]
        for (_, target), slots in zip(plan.copies, contents, strict=True):
            self.slots[target * BLOCK : (target + 1) * BLOCK] = slots
        self.num_copied += len(contents)

    def _block(self, block: int) -> list[int | None]:
        """Return the slots of a block."""
        return self.slots[block * BLOCK : (block + 1) * BLOCK]

    def _load_snapshots(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.is_first:
                self.states[chunk.sequence.row] = hash(chunk.sequence.params.cache_salt)
        if plan.snapshots is not None:
            for index, snapshot in plan.snapshots.loads:
                self.states[plan.chunks[index].sequence.row] = self.snapshots[snapshot]
            for snapshot in plan.snapshots.deleted:
                self.snapshots.pop(snapshot, None)

    def _advance_state(self, sequence: Sequence, known: list[int], start: int, end: int) -> None:
        """Check that the state covers exactly `known[:start]`, and add `known[start:end]` to it."""
        expected = hash(sequence.params.cache_salt)
        for token in known[:start]:
            expected = hash((expected, token))
        state = self.states[sequence.row]
        assert state == expected, f"{sequence}: its state does not cover the first {start} tokens"
        for token in known[start:end]:
            state = hash((state, token))
        self.states[sequence.row] = state

    def answer(self, plan: StepPlan) -> StepResult:
        """Return new tokens for the chunks that sample, and the requested prompt logprobs."""
        prompts = {
            index: [TokenLogprobs([token], [-1.0], 1) for token in self._followers(chunk)]
            for index, chunk in enumerate(plan.chunks)
            if chunk.sequence.params.prompt_logprobs is not None
        }
        sampled = [self._answer(chunk) for chunk in plan.chunks if chunk.samples]
        return StepResult(sampled, prompts)

    def clear_broken(self, plan: StepPlan, result: StepResult) -> None:
        """Clear the blocks of each sequence whose result contains an error."""
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        for sequence, outcome in zip(sampling, result.sampled, strict=True):
            if outcome.error is not None:
                self.clear(sequence)

    def clear(self, sequence: Sequence) -> None:
        for block in used_blocks(sequence):
            self.slots[block * BLOCK : (block + 1) * BLOCK] = [None] * BLOCK

    def _store(self, chunk: Chunk, pending: list[int]) -> None:
        """Store the hashes of a chunk in all groups of layers.

        `pending` contains the token that the previous step sampled, if the scheduler did not know
        this token when it planned the chunk.
        """
        sequence, start, num_tokens = chunk[:3]
        known = sequence.token_ids + sequence.draft_token_ids + pending
        assert start + num_tokens <= len(known)
        if sequence in self._failed_sequences:
            return  # The engine started this step before it knew that the previous step failed.
        assert len(sequence.block_tables) == len(self._windows)
        slots = {slot for block in used_blocks(sequence) for slot in self._block(block)}
        assert NAN not in slots, f"{sequence}: a block of the sequence contains NaN"
        if self._has_state:
            self._advance_state(sequence, known, start, start + num_tokens)
        for group, window in enumerate(self._windows):
            self._store_group(chunk, known, group, window)
        self.num_computed += num_tokens

    def _store_group(
        self, chunk: Chunk, known: list[int], group: int, window: AttentionWindow | None
    ) -> None:
        """Store the hashes of a chunk in one group. Each hash is computed from the previous hash.

        In a group without an attention window, the previous hash is read from the cache. In a group
        with a window, the hash before the chunk is computed from the known tokens, because the
        slots before the window may be freed.
        """
        sequence, start, num_tokens = chunk[:3]
        previous_hash = None
        if window is not None:
            first_visible = window.first_visible(start)
            previous_hash = self._check(sequence, known[:start], first_visible, group)
        for position in range(start, start + num_tokens):
            if window is None:
                previous_hash = self._read(sequence, position - 1, group)
            previous_hash = hash((previous_hash, known[position]))
            self.slots[self._slot(sequence, position, group)] = previous_hash

    def _followers(self, chunk: Chunk) -> list[int]:
        """Return the prompt tokens whose logprobs the chunk computes.

        Each of them follows a token for which the chunk computes logits.
        """
        first = chunk.start + chunk.num_tokens - chunk.num_logits + 1
        end = min(chunk.start + chunk.num_tokens + 1, chunk.sequence.num_prompt_tokens)
        return chunk.sequence.token_ids[first:end]

    def _answer(self, chunk: Chunk) -> Sampled:
        """Return the sampled tokens of a chunk. With the probability `broken`, return an error."""
        sequence = chunk.sequence
        if self._rng.random() < self._broken:
            return self._fail(chunk)
        tokens = list(sequence.token_ids)
        for group, window in enumerate(self._windows):
            first = window.first_visible(len(tokens) - 1) if window else 0
            self._check(sequence, tokens, first, group)
        assert chunk.num_logits in (len(sequence.draft_token_ids) + 1, chunk.num_tokens)
        new = [next_token(tokens, sequence.index)]
        for draft in sequence.draft_token_ids:
            if new[-1] != draft:
                break
            new.append(next_token(tokens + new, sequence.index))
        while self._rng.random() < self._forced:
            new.append(next_token(tokens + new, sequence.index))
        return Sampled(token_ids=new, logprobs=[-0.5] * len(new))

    def _fail(self, chunk: Chunk) -> Sampled:
        """Write NaN into the slot of the chunk's last token in each group, and return an error."""
        sequence = chunk.sequence
        self._failed_sequences.add(sequence)
        for group in range(len(self._windows)):
            last_slot = self._slot(sequence, chunk.start + chunk.num_tokens - 1, group)
            self.slots[last_slot] = NAN
        self.states[sequence.row] = NAN
        return Sampled(token_ids=[], logprobs=[], error="not finite")

    def _check(self, sequence: Sequence, tokens: list[int], first: int, group: int) -> int:
        """Return the hash of all tokens, and check the cache.

        For each token from index `first` on, the cache must contain the hash of the tokens so far.
        """
        expected = hash(sequence.params.cache_salt)
        for position, token in enumerate(tokens):
            expected = hash((expected, token))
            if position >= first:
                stored = self._read(sequence, position, group)
                assert stored == expected, f"{sequence}: the cache is wrong at position {position}"
        return expected

    def _read(self, sequence: Sequence, position: int, group: int) -> int | None:
        if position < 0:
            return hash(sequence.params.cache_salt)
        return self.slots[self._slot(sequence, position, group)]

    @staticmethod
    def _slot(sequence: Sequence, position: int, group: int) -> int:
        assert position // BLOCK >= sequence.num_null_blocks[group], "the block was released"
        return sequence.block_tables[group][position // BLOCK] * BLOCK + position % BLOCK


def used_blocks(sequence: Sequence) -> list[int]:
    """Return the blocks of a sequence in all groups, without the blocks that it has released."""
    tables = zip(sequence.block_tables, sequence.num_null_blocks, strict=True)
    return [block for table, num_released in tables for block in table[num_released:]]
