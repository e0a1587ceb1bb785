"""Stands for a model and its KV cache in tests of the core."""

import random
from collections import abc

from nereid_backend.core.blocks.window import AttentionWindow
from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, Sampled, StepPlan, StepResult

BLOCK = 4
EOS = 1
# Stands in a slot for what is not a finite number; hash() never gives it.
NAN = -1


def next_token(token_ids: list[int], index: int) -> int:
    """A function of the whole sequence that often repeats what it wrote some tokens ago."""
    rng = random.Random(f"{token_ids}{index}")
    if len(token_ids) > 6 and rng.random() < 0.7:
        return token_ids[-5]
    return rng.randrange(EOS, 40)


def expected_answer(prompt: list[int], max_tokens: int, index: int = 0) -> tuple[list[int], str]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, index))
        if tokens[-1] == EOS:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class ScriptedModel:
    """Remembers in each slot of the cache a token and all that came before it, as hashes do.

    Every token it gives depends on the whole sequence as read from the cache, and that must be the
    request's own: a wrong block table, a block lost or shared wrongly, a chunk that was skipped or
    a copy not made raises. Each group of layers has its own block table, and what it remembers is
    in the blocks of every group. With an attention window, it reads only what the window covers.

    A request that goes wrong leaves NaN in the slot of its last token. Masking does not stop NaN,
    so it harms whoever has that slot in his table, whether he looks at it or not.
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
        """Answer with several tokens in a share of the steps, and fail in a share of them.

        With `has_state`, each row has a recurrent state, which must cover exactly the tokens before
        each chunk.
        """
        self._has_state = has_state
        # The hash of the tokens that the state of each row covers, and the snapshots by id.
        self.states: dict[int, int] = {}
        self.snapshots: dict[int, int] = {}
        self._windows = windows
        self.slots: list[int | None] = [None] * (num_blocks * BLOCK)
        self.num_computed = 0
        self.num_copied = 0
        self._rng = rng or random.Random(0)
        self._forced = forced
        self._broken = broken
        self._went_wrong: set[Sequence] = set()

    def run(self, plan: StepPlan) -> StepResult:
        self.compute(plan)
        result = self.answer(plan)
        self.clear_broken(plan, result)
        return result

    def compute(self, plan: StepPlan, sampled: abc.Sequence[int] = ()) -> None:
        """The forward pass; pending chunks get their tokens from what was sampled before."""
        blocks = [self.slots[a * BLOCK : (a + 1) * BLOCK] for a, _ in plan.copies]
        for (_, target), block in zip(plan.copies, blocks, strict=True):
            self.slots[target * BLOCK : (target + 1) * BLOCK] = block
        self.num_copied += len(blocks)
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
        expected = hash(sequence.params.cache_salt)
        for token in known[:start]:
            expected = hash((expected, token))
        state = self.states[sequence.row]
        assert state == expected, f"{sequence}: its state does not cover the first {start} tokens"
        for token in known[start:end]:
            state = hash((state, token))
        self.states[sequence.row] = state

    def answer(self, plan: StepPlan) -> StepResult:
        """Tokens for the chunks that sample, and what was asked about prompts."""
        prompts = {
            index: [TokenLogprobs([token], [-1.0], 1) for token in self._followers(chunk)]
            for index, chunk in enumerate(plan.chunks)
            if chunk.sequence.params.prompt_logprobs is not None
        }
        sampled = [self._answer(chunk) for chunk in plan.chunks if chunk.samples]
        return StepResult(sampled, prompts)

    def clear_broken(self, plan: StepPlan, result: StepResult) -> None:
        """What is done about sequences that went wrong, once that is known."""
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        for sequence, outcome in zip(sampling, result.sampled, strict=True):
            if outcome.error is not None:
                self.clear(sequence)

    def clear(self, sequence: Sequence) -> None:
        for block in used_blocks(sequence):
            self.slots[block * BLOCK : (block + 1) * BLOCK] = [None] * BLOCK

    def _store(self, chunk: Chunk, pending: list[int]) -> None:
        sequence, start, num_tokens = chunk[:3]
        known = sequence.token_ids + sequence.draft_token_ids + pending
        assert start + num_tokens <= len(known)
        if sequence in self._went_wrong:
            return  # Its step was begun before that was known.
        assert len(sequence.block_tables) == len(self._windows)
        found = {
            slot for b in used_blocks(sequence) for slot in self.slots[b * BLOCK : (b + 1) * BLOCK]
        }
        assert NAN not in found, f"{sequence}: NaN has come to it"
        if self._has_state:
            self._advance_state(sequence, known, start, start + num_tokens)
        for group, window in enumerate(self._windows):
            self._store_group(chunk, known, group, window)
        self.num_computed += num_tokens

    def _store_group(
        self, chunk: Chunk, known: list[int], group: int, window: AttentionWindow | None
    ) -> None:
        sequence, start, num_tokens = chunk[:3]
        before = None
        if window is not None:
            before = self._check(sequence, known[:start], window.first_visible(start), group)
        for position in range(start, start + num_tokens):
            if window is None:
                before = self._read(sequence, position - 1, group)
            before = hash((before, known[position]))
            self.slots[self._slot(sequence, position, group)] = before

    def _followers(self, chunk: Chunk) -> list[int]:
        first = chunk.start + chunk.num_tokens - chunk.num_logits + 1
        end = min(chunk.start + chunk.num_tokens + 1, chunk.sequence.num_prompt_tokens)
        return chunk.sequence.token_ids[first:end]

    def _answer(self, chunk: Chunk) -> Sampled:
        sequence = chunk.sequence
        if self._rng.random() < self._broken:
            self._went_wrong.add(sequence)
            for group in range(len(self._windows)):
                slot = self._slot(sequence, chunk.start + chunk.num_tokens - 1, group)
                self.slots[slot] = NAN
            self.states[sequence.row] = NAN
            return Sampled([], [], "not finite")
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
        return Sampled(new, [-0.5] * len(new))

    def _check(self, sequence: Sequence, tokens: list[int], first: int, group: int) -> int:
        """What these tokens should have left behind; the cache has it from the first one on."""
        expected = hash(sequence.params.cache_salt)
        for position, token in enumerate(tokens):
            expected = hash((expected, token))
            if position >= first:
                found = self._read(sequence, position, group)
                assert found == expected, (
                    f"{sequence}: the cache holds something else at {position}"
                )
        return expected

    def _read(self, sequence: Sequence, position: int, group: int) -> int | None:
        if position < 0:
            return hash(sequence.params.cache_salt)
        return self.slots[self._slot(sequence, position, group)]

    @staticmethod
    def _slot(sequence: Sequence, position: int, group: int) -> int:
        assert position // BLOCK >= sequence.num_null_blocks[group], "given back already"
        return sequence.block_tables[group][position // BLOCK] * BLOCK + position % BLOCK


def used_blocks(sequence: Sequence) -> list[int]:
    tables = zip(sequence.block_tables, sequence.num_null_blocks, strict=True)
    return [block for table, num_dropped in tables for block in table[num_dropped:]]
