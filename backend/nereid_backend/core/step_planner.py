# SPDX-License-Identifier: Apache-2.0
"""The step planner, which selects the tokens that the model computes in the next step.

There is no prefill phase and no decode phase. The known tokens of a sequence are its prompt and the
tokens that were sampled so far. The computed tokens of a sequence are those whose keys and values
are in the KV cache. A step computes some known tokens of every sequence, within a token budget for
all sequences together. When a step computes the last known token of a sequence, the step samples a
new token. Three features follow from that rule:

- chunked prefill: a long prompt is computed in several steps, together with sequences that add one
  token each;
- preemption: a preempted sequence has to compute all its tokens again;
- prefix caching: a sequence whose prefix is in the cache has fewer tokens to compute.

Running sequences are planned first, and each of them gets at least one token. Waiting sequences
follow. Example with a budget of 16 tokens: sequences A and B run and need one token each, and C
waits with a prompt of 40 tokens. The step computes one token of A, one token of B, and the first 14
tokens of C.

If there are not enough free blocks, a running sequence that comes later in the order is
preempted. The planner selects the sequence with the lowest priority. If several sequences have that
priority, the planner selects the one with the fewest tokens to compute again. The first sequence in
the order is never preempted for another sequence, so it always finishes.

If several clients have requests, a client that has less than its fair share of the rows, the blocks
or the token budget gets a part of the share of another client (_make_room and _prefill_shares). The
short request of one client therefore does not wait for the long requests of another client.

With async scheduling, a step is planned ahead while the previous step is running (async_plans.py).
A plan that is made ahead never preempts a sequence and never copies a block, because the running
step may still use the blocks. If a plan would have needed a preemption or a copy, `is_held_up` is
True.
"""

from collections import Counter
from dataclasses import dataclass, field

from nereid_backend.core.active_requests import ActiveRequests
from nereid_backend.core.async_plans import PendingPlans
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.block_tables import BlockTables
from nereid_backend.core.draft_tokens.drafter import Drafter
from nereid_backend.core.preemption import cheapest_victim, fair_victim
from nereid_backend.core.queues.fair_queue import fair_shares
from nereid_backend.core.queues.ranked_sequences import RunningSequences
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan


@dataclass(slots=True)
class StepPlanner:
    """Plans each step, and allocates the blocks of the KV cache that the step needs.

    Attributes:
        pool: the blocks of the KV cache.
        tables: the block tables of all sequences.
        requests: the requests that have not ended, and the waiting queue. Mutated.
        running: the running sequences. Mutated.
        pending_plans: the plans whose steps are not committed.
        drafter: proposes draft tokens; None if speculative decoding is off.
        max_num_batched_tokens: the largest number of tokens in one step.
        whole_prefill: whether every prompt must be computed in one step. A prompt that exceeds
            `max_num_batched_tokens` is then computed in a step of its own.
        num_preemptions: the number of preemptions since the start.
        is_held_up: whether the last plan was made ahead and needed a preemption or a block copy.
        has_overdue_prompt: whether the last plan had no budget left for a waiting prompt that
            cannot be divided into chunks. The next plan then starts with that prompt.
        shares: the largest number of prompt tokens that the current step may compute for each
            client. Empty if only one client has requests, or if prompts cannot be divided into
            chunks.
    """

    pool: BlockPool
    tables: BlockTables
    requests: ActiveRequests
    running: RunningSequences
    pending_plans: PendingPlans
    drafter: Drafter | None
    max_num_batched_tokens: int
    whole_prefill: bool
    num_preemptions: int = 0
    is_held_up: bool = False
    has_overdue_prompt: bool = False
    shares: dict[str, int] = field(default_factory=dict)

    def plan(self) -> StepPlan:
        """Return the plan of the next step. Every sequence in the plan has a row and blocks.

        If several clients have requests, each client gets its share of the rows, of the blocks and
        of the token budget, and is charged for the tokens that the step computes.
        """
        if self.drafter is not None:
            self.drafter.prepare(self.running.sequences)
        waiting = self.requests.waiting
        has_several_clients = waiting.has_several_clients
        if has_several_clients and waiting:
            self._make_room(waiting.first())
        self.shares = self._prefill_shares() if has_several_clients else {}
        chunks = self._plan_chunks()
        if has_several_clients:
            for chunk in chunks:
                waiting.charge(chunk.sequence, chunk.num_tokens)
        num_tokens = sum([chunk.num_tokens for chunk in chunks])
        if num_tokens > len(chunks):
            # The attention kernels process all chunks of a single token together, so these chunks
            # come first.
            chunks.sort(key=_has_many_tokens)
        snapshots = None
        if self.tables.snapshots is not None and chunks:
            snapshots = self.tables.snapshots.plan(chunks, len(self.running))
        return StepPlan(chunks, num_tokens, self.tables.take_copies(), snapshots=snapshots)

    def _plan_chunks(self) -> list[Chunk]:
        """Return the chunks of the running sequences, and then the chunks of waiting sequences.

        If `has_overdue_prompt` is true, the last step had no budget for the first waiting prompt,
        which cannot be divided. In this case, only that prompt is planned.
        """
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        if not self.has_overdue_prompt:
            budget = self._plan_running(chunks, budget)
        self._plan_waiting(chunks, budget)
        if not chunks and self.running:
            # There are not enough free blocks for the overdue prompt. Plan the running sequences
            # instead, which would otherwise have waited for this prompt.
            self._plan_running(chunks, budget)
        return chunks

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a running sequence: release its row and blocks, and queue it again."""
        self.release(sequence)
        sequence.prompt_logprobs = []
        self.requests.waiting.add(sequence)
        self.num_preemptions += 1

    def release(self, sequence: Sequence) -> None:
        """Release the row and the blocks of a running sequence."""
        self.running.remove(sequence)
        sequence.draft_token_ids = []
        self.tables.release(sequence)

    def _plan_running(self, chunks: list[Chunk], budget: int) -> int:
        """Append the chunks of the running sequences to `chunks`.

        Returns:
            The number of tokens of the budget that are left.
        """
        index = 0
        running = self.running.sequences
        is_ahead = self.pending_plans.is_planning
        # Preempting a sequence removes it from the list of running sequences during the loop.
        while index < len(running) and budget > 0:
            sequence = running[index]
            if is_ahead and self.pending_plans.will_end(sequence):
                index += 1
                continue
            start = sequence.num_computed_tokens
            chunk: Chunk | None
            if (
                start + 1 == len(sequence.token_ids)
                and self.tables.has_block(sequence, start)
                and self.drafter is None
            ):
                # Nearly all chunks are decodes that need no new block, so this branch creates them
                # directly. The result is the same as that of `_plan_next_tokens`, but takes less
                # time. The arguments are positional, because keyword arguments take more time.
                num_tokens, samples, is_first, num_logits = 1, True, False, 1
                chunk = Chunk(sequence, start, num_tokens, samples, is_first, num_logits)
            else:
                # Keep one token of the budget for each running sequence that is planned after this
                # sequence. Otherwise, a long chunk could leave no budget for those sequences.
                num_later = len(running) - index - 1
                chunk = self._plan_next_tokens(index, max(1, budget - num_later))
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.num_tokens
            index += 1
        return budget

    def _plan_next_tokens(self, index: int, limit: int) -> Chunk | None:
        """Return the chunk with the next tokens of the running sequence at `index`.

        Example: the sequence has 100 known tokens, 64 of them are computed, and `limit` is 16. The
        chunk consists of the 16 tokens from index 64 on.

        Args:
            index: the position of the sequence in the order of the running sequences.
            limit: the largest number of tokens in the chunk.

        Returns:
            The chunk; None if there are not enough free blocks for the tokens.
        """
        sequence = self.running[index]
        num_remaining = len(sequence.token_ids) - sequence.num_computed_tokens
        # If `whole_prefill` is true, the first step of a sequence has computed its whole prompt, so
        # only the last sampled token remains.
        num_tokens = min(num_remaining, 1 if self.whole_prefill else limit)
        # A client with long prompts gets only its share of the budget.
        num_tokens = self._take_share(sequence, num_tokens)
        if self.tables.snapshots is not None:
            num_tokens = self.tables.snapshots.chunk_length(sequence, num_tokens)
        while not self.tables.try_extend(sequence, sequence.num_computed_tokens + num_tokens):
            if not self._free_some_blocks(index):
                return None
        if self.drafter is not None and num_tokens == num_remaining:
            self._propose_drafts(self.drafter, sequence, limit - num_tokens)
        return _make_chunk(sequence, num_tokens, is_first=False)

    def _plan_waiting(self, chunks: list[Chunk], budget: int) -> None:
        """Move waiting sequences to the running sequences, and append their chunks to `chunks`.

        Stop at the first sequence for which the budget, the rows or the blocks do not suffice. With
        `whole_prefill`, a prompt that exceeds the rest of the budget becomes the overdue prompt,
        with which the next step starts.

        A sequence gets blocks for all its known tokens at once. Otherwise, two prompts could each
        have half of their blocks and wait for the other prompt's blocks forever.
        """
        if self.is_held_up:
            # A running sequence needs a preemption, but a plan that is made before the previous
            # step ends must not preempt. Admit no waiting sequence, so that the free blocks remain
            # for that sequence.
            return
        starts_with_overdue_prompt = self.has_overdue_prompt
        self.has_overdue_prompt = False
        waiting = self.requests.waiting
        while waiting and self.running.free_rows and budget > 0:
            sequence = waiting.first()
            if self.whole_prefill and chunks and len(sequence.token_ids) > budget:
                self.has_overdue_prompt = True
                break
            if not self._try_admit(sequence):
                break
            num_remaining = len(sequence.token_ids) - sequence.num_computed_tokens
            num_tokens = num_remaining if self.whole_prefill else min(num_remaining, budget)
            num_tokens = self._take_share(sequence, num_tokens)
            if self.tables.snapshots is not None:
                num_tokens = self.tables.snapshots.chunk_length(sequence, num_tokens)
            chunks.append(_make_chunk(sequence, num_tokens, is_first=True))
            budget -= num_tokens
            if starts_with_overdue_prompt:
                # The running sequences have no chunks in this step, because they wait for the
                # overdue prompt. They must not wait for a second prompt as well.
                break

    def _try_admit(self, sequence: Sequence) -> bool:
        """Give a row and blocks to a waiting sequence, if possible.

        Returns:
            Whether the sequence got a row and blocks. False if there are not enough free blocks, or
            if the sequence might need a block copy, which a plan that is made before the previous
            step ends must not contain.
        """
        request = self.requests.of(sequence)
        if self.pending_plans.is_planning and sequence in request.followers:
            # The sequence shares the prompt blocks of its request and may need a copy of the last
            # block. A plan that is made before the previous step ends must not copy blocks, so the
            # sequence must wait.
            self.is_held_up = True
            return False
        while not self.tables.try_admit(sequence, request):
            # No sequence is running, so all used blocks contain prompts that requests keep for
            # their waiting sequences. Free the oldest of these prompts. The waiting sequences of
            # that request then compute the prompt again.
            if self.running or not self.tables.drop_oldest_prompt():
                return False
        self.requests.admit(sequence)
        self.running.add(sequence)
        return True

    def _make_room(self, sequence: Sequence) -> None:
        """Preempt sequences of other clients if `sequence` has a right to their rows or blocks.

        See `preemption.fair_victim` for the sequences that may be preempted.
        """
        num_blocks = self.tables.num_first_blocks(sequence)
        leaving = self.pending_plans.leaving
        while True:
            if not self.running.free_rows:
                victim = fair_victim(sequence, 1, self.running, leaving, by_rows=True)
            elif self.pool.num_free < num_blocks:
                victim = fair_victim(sequence, num_blocks, self.running, leaving, by_rows=False)
            else:
                return
            if victim is None:
                return
            if self.pending_plans.is_planning:
                # A plan that is made before the previous step ends must not preempt a sequence.
                self.is_held_up = True
                return
            self.preempt(victim)

    def _prefill_shares(self) -> dict[str, int]:
        """Return the largest number of prompt tokens that this step may compute for each client.

        Return an empty dictionary if at most one client has a prompt to compute.
        """
        if self.whole_prefill:
            return {}
        demands: Counter[str] = Counter()
        weights: dict[str, float] = {}
        sequences = list(self.running)
        if self.running.free_rows:
            sequences += self.requests.waiting.firsts()
        for sequence in sequences:
            num_remaining = len(sequence.token_ids) - sequence.num_computed_tokens
            # A sequence with one remaining token is a decode, and decodes are always computed.
            if num_remaining > 1:
                demands[sequence.params.client_id] += num_remaining
                weights[sequence.params.client_id] = sequence.params.client_weight
        if len(demands) < 2:
            return {}
        # Every running sequence gets at least one token of the budget.
        return fair_shares(demands, weights, self.max_num_batched_tokens - len(self.running))

    def _take_share(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens the client's share of the budget allows.

        The limit is the rest of the client's share of the token budget. The returned number is
        subtracted from this rest. One token is always allowed.
        """
        if num_tokens <= 1 or not self.shares:
            return num_tokens
        client = sequence.params.client_id
        share = self.shares.get(client, num_tokens)
        num_allowed = max(1, min(num_tokens, share))
        self.shares[client] = share - num_allowed
        return num_allowed

    def _free_some_blocks(self, index: int) -> bool:
        """Free blocks of the KV cache for the running sequence at `index`.

        The call drops the prompt blocks of one request. If no request keeps prompt blocks, the call
        preempts one sequence. The preempted sequence comes after `index` in the order, so it has no
        chunk in the current plan yet.

        Returns:
            False if the sequence at `index` itself was preempted, or if the plan is made ahead and
            therefore must not preempt a sequence.
        """
        if self.tables.drop_oldest_prompt():
            return True
        if self.pending_plans.is_planning:
            self.is_held_up = True
            return False
        sequence = self.running[index]
        victim = cheapest_victim(
            index, self.running, by_client=self.requests.waiting.has_several_clients
        )
        self.preempt(victim)
        return victim is not sequence

    def _propose_drafts(self, drafter: Drafter, sequence: Sequence, limit: int) -> None:
        """Set the draft tokens of a sequence if enough blocks are free to compute them."""
        num_allowed = sequence.max_total_tokens - len(sequence.token_ids) - 1
        drafts = drafter.propose(sequence, min(limit, num_allowed))
        if self.tables.try_extend(sequence, len(sequence.token_ids) + len(drafts)):
            sequence.draft_token_ids = drafts


def _make_chunk(sequence: Sequence, num_tokens: int, *, is_first: bool) -> Chunk:
    """Return the chunk with the next `num_tokens` known tokens and the draft tokens.

    Example: a sequence has 20 known tokens, of which 19 are computed, and 3 draft tokens. The chunk
    starts at 19 and has 4 tokens. All 4 logits are needed to verify the draft tokens.
    """
    start = sequence.num_computed_tokens
    has_last_known_token = start + num_tokens == len(sequence.token_ids)
    num_drafts = len(sequence.draft_token_ids)
    # The log-probability of each prompt token is computed from the logits of the token before it.
    num_known_with_logits = (
        num_tokens if sequence.wants_prompt_logprobs else int(has_last_known_token)
    )
    return Chunk(
        sequence=sequence,
        start=start,
        num_tokens=num_tokens + num_drafts,
        samples=has_last_known_token,
        is_first=is_first,
        num_logits=num_known_with_logits + num_drafts,
    )


def _has_many_tokens(chunk: Chunk) -> bool:
    return chunk.num_tokens > 1
