# SPDX-License-Identifier: Apache-2.0
"""The step planner. It selects the tokens that the model computes in the next step.

There is no prefill phase and no decode phase. The known tokens of a sequence are its prompt and the
tokens that were sampled so far. A token is computed if its keys and values are in the KV cache. A
step computes some known tokens of every sequence. The token budget limits the number of tokens of
all sequences together. When a step computes the last known token of a sequence, the step samples a
new token. This rule also covers three features:

- chunked prefill: a long prompt is computed in several steps, together with sequences that add one
  token each;
- preemption: all tokens of a preempted sequence are computed again;
- prefix caching: if the prefix of a sequence is in the cache, fewer tokens are computed.

Running sequences are planned first, and each of them gets at least one token. Waiting sequences are
planned after the running sequences. Example with a budget of 16 tokens: sequences A and B run, and
each of them needs one token. Sequence C waits with a prompt of 40 tokens. The step computes one
token of A, one token of B, and the first 14 tokens of C.

If a running sequence needs more blocks than are free, a sequence that comes later in the order is
preempted. The planner selects the sequence with the lowest priority. If several sequences have that
priority, the planner selects the one with the fewest tokens to compute again. The first sequence in
the order is never preempted for another sequence, so it always finishes.

If several clients have requests, each client may use a fair share of the rows, the blocks and the
token budget. If a client has less than its share, sequences of other clients are preempted
(`_preempt_other_clients`) or get fewer tokens (prefill_shares.py). The short request of one client
therefore does not wait for the long requests of another client.

With async scheduling, a step is planned ahead while the previous step is running (async_plans.py).
A plan that is made ahead never preempts a sequence and never copies a block, because the running
step may still use the blocks. If such a plan would need a preemption or a copy,
`must_wait_for_step` is set to True.
"""

from dataclasses import dataclass, field

from nereid_backend.core.active_requests import ActiveRequests
from nereid_backend.core.async_plans import PendingPlans
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.block_tables import BlockTables
from nereid_backend.core.draft_tokens.drafter import Drafter
from nereid_backend.core.preemption import (
    cheapest_victim,
    cheapest_victim_of_largest_client,
    fair_victim,
)
from nereid_backend.core.prefill_shares import PrefillShares
from nereid_backend.core.queues.ranked_sequences import RunningSequences
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan, make_chunk, make_one_token_chunk


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
        whole_prefill: whether every prompt must be computed in one step. If so, a prompt that
            exceeds `max_num_batched_tokens` is computed in a step of its own.
        num_preemptions: the number of preemptions since the start.
        must_wait_for_step: whether the last plan was made ahead and needed a preemption or a block
            copy. The next plan must then be made after the running step has ended.
        has_overdue_prompt: whether the next plan must start with the first waiting prompt. This is
            true if the prompt did not fit into the last plan and must be computed in one step.
        prefill_shares: limits the prompt tokens of each client in the current step.
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
    must_wait_for_step: bool = False
    has_overdue_prompt: bool = False
    prefill_shares: PrefillShares = field(default_factory=PrefillShares)

    def plan(self) -> StepPlan:
        """Return the plan of the next step: the tokens that are computed for each sequence.

        A row is a place in the batch. If several clients have requests, each client may use a fair
        share of the rows, of the blocks, and of the tokens that one step may compute.

        Mutates: running sequences can be preempted, and waiting sequences can start to run.
        """
        if self.drafter is not None:
            # Draft tokens are proposed for all running sequences together.
            self.drafter.prepare(self.running.sequences)
        if self.requests.waiting.has_several_clients:
            chunks = self._plan_fair_chunks()
        else:
            # The only client may use the whole token budget for its prompts. Remove the limits of
            # an earlier step, in which there were several clients.
            self.prefill_shares.clear()
            chunks = self._plan_chunks()
        return self._make_plan(chunks)

    def _plan_fair_chunks(self) -> list[Chunk]:
        """Select the tokens of the next step if several clients have requests.

        First, sequences are preempted if the client that comes next in the waiting queue has less
        than its fair share of the rows or blocks. Then, the prompt tokens of each client are
        limited (`_limit_prefill`), and the tokens are selected within these limits. Finally, the
        waiting queue records the tokens of each client, because the client with the fewest tokens,
        divided by its weight, comes next.
        """
        waiting = self.requests.waiting
        if waiting:
            self._preempt_other_clients(waiting.first())
        self._limit_prefill()
        chunks = self._plan_chunks()
        for chunk in chunks:
            waiting.charge(chunk.sequence, chunk.num_tokens)
        return chunks

    def _limit_prefill(self) -> None:
        """Limit how many prompt tokens this step may compute for each client.

        The token budget of the step is divided among the clients whose prompts must still be
        computed. If every prompt must be computed in one step (`whole_prefill`), there are no
        limits.

        Mutates: `prefill_shares`, which contains the limits of this step.
        """
        if self.whole_prefill:
            self.prefill_shares.clear()  # removes all limits
            return
        # `divide` ignores sequences without uncomputed prompt tokens.
        sequences = list(self.running)
        if self.running.free_rows:
            # The step can also start waiting sequences.
            sequences += self.requests.waiting.first_of_each_client()
        # Each running sequence gets at least one token, whether its client has a share or not.
        num_reserved = len(self.running)
        self.prefill_shares.divide(self.max_num_batched_tokens - num_reserved, sequences)

    def _make_plan(self, chunks: list[Chunk]) -> StepPlan:
        """Return the plan of a step that computes `chunks`. The method may reorder `chunks`.

        The plan contains all block copies that are necessary before the step, and the snapshots of
        recurrent states that the step loads and saves.
        """
        num_tokens = sum([chunk.num_tokens for chunk in chunks])
        has_long_chunk = num_tokens > len(chunks)  # Each chunk has at least one token.
        if has_long_chunk:
            # Move the chunks with one token to the front. The attention kernels process all chunks
            # with one token together.
            chunks.sort(key=_has_several_tokens)
        snapshots = None
        if self.tables.snapshots is not None and chunks:
            # Each running sequence needs memory for one state. The rest of the memory is used for
            # snapshots.
            snapshots = self.tables.snapshots.prepare_step(chunks, num_running=len(self.running))
        return StepPlan(chunks, num_tokens, self.tables.take_copies(), snapshots=snapshots)

    def _plan_chunks(self) -> list[Chunk]:
        """Select the tokens of the next step, first from running and then from waiting sequences.

        Each chunk of the result contains the tokens of one sequence.

        A prompt is overdue if it must be computed in one step, but did not fit into the previous
        step. The step then computes only this prompt. If the prompt cannot be started, the step
        computes only the running sequences, which free rows and blocks when they end.
        """
        if not self.has_overdue_prompt:
            chunks, remaining_budget = self._plan_running(self.max_num_batched_tokens)
            self._plan_waiting(chunks, remaining_budget)
            return chunks
        overdue_chunk = self._start_overdue_prompt()
        if overdue_chunk is not None:
            return [overdue_chunk]
        chunks, _remaining_budget = self._plan_running(self.max_num_batched_tokens)
        return chunks

    def _start_overdue_prompt(self) -> Chunk | None:
        """Start the first waiting sequence, and return its first chunk.

        Return None if there are not enough rows or blocks. The running sequences are then computed
        first, because they free rows and blocks when they end.

        Mutates: `has_overdue_prompt`. It becomes False, whether the sequence was started or not,
            except if the prompt cannot be started before the previous step has ended.
        """
        if self.must_wait_for_step:
            # The plan needs a preemption, which must wait for the end of the previous step. The
            # prompt stays overdue until then.
            return None
        self.has_overdue_prompt = False
        if not self.requests.waiting or not self.running.free_rows:
            return None
        sequence = self.requests.waiting.first()
        if not self._try_admit(sequence):
            return None
        return self._first_chunk(sequence, self.max_num_batched_tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Release a running sequence's row and blocks. Put the sequence into the waiting queue."""
        self.release(sequence)
        sequence.prompt_logprobs = []
        self.requests.waiting.add(sequence)
        self.num_preemptions += 1

    def release(self, sequence: Sequence) -> None:
        """Release the batch row and the KV cache blocks of a running sequence."""
        self.running.remove(sequence)
        sequence.draft_token_ids = []
        self.tables.release(sequence)

    def _plan_running(self, budget: int) -> tuple[list[Chunk], int]:
        """Select the next tokens of each running sequence, until the budget is used up.

        The method also stops if there are not enough free blocks for a sequence.

        Args:
            budget: the number of tokens that the step may compute.

        Returns:
            The chunks and the rest of the budget. A chunk contains the tokens of one sequence.
        """
        chunks: list[Chunk] = []
        is_planning_ahead = self.pending_plans.is_planning
        # `_plan_next_tokens` can preempt sequences, which removes them from the list while the loop
        # runs. It preempts only sequences at `index` or later, so the loop skips no sequence. If it
        # preempts the sequence at `index`, it returns None, and the loop ends.
        for index, sequence in enumerate(self.running.sequences):
            if budget <= 0:
                break
            if is_planning_ahead and self.pending_plans.will_end(sequence):
                continue  # The step that is still running computes the last token of the sequence.
            chunk = self._plan_next_tokens(index, sequence, budget)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return chunks, budget

    def _plan_next_tokens(self, index: int, sequence: Sequence, budget: int) -> Chunk | None:
        """Select the tokens to compute next for a running sequence, and allocate their blocks.

        If speculative decoding is on and the chunk contains the last known token (a token of the
        prompt or a sampled token), the sequence also gets draft tokens, which are guesses for the
        next tokens.

        Example: the last running sequence has 100 known tokens, 64 of them are computed, and
        `budget` is 16. The chunk consists of the 16 tokens from index 64 on.

        Args:
            index: the position of the sequence in the order of the running sequences.
            sequence: the sequence.
            budget: the number of tokens that the step may still compute.

        Returns:
            The chunk; None if `_allocate` could not allocate the blocks.
        """
        start = sequence.num_computed_tokens
        num_uncomputed = len(sequence.token_ids) - start
        if num_uncomputed == 1 and self.drafter is None and sequence.num_tokens_with_blocks > start:
            # This is the usual case: the sequence already has a block for its last known token.
            return make_one_token_chunk(sequence, start)
        # Reserve one token of the budget for each running sequence after the position `index`.
        # Otherwise, the sequence at `index` could use the whole budget.
        num_later = len(self.running) - index - 1
        own_budget = max(1, budget - num_later)
        # If `whole_prefill` is True, the first chunk has computed the whole prompt, so each later
        # chunk needs only the last sampled token. The rest of `own_budget` is for draft tokens.
        max_known_tokens = 1 if self.whole_prefill else own_budget
        # The client's share of the budget or a snapshot of a recurrent state can shorten the chunk.
        num_tokens = self._chunk_length(sequence, min(num_uncomputed, max_known_tokens))
        if not self._allocate(index, num_tokens):
            return None
        if self.drafter is not None and num_tokens == num_uncomputed:
            self._propose_drafts(self.drafter, sequence, own_budget - num_tokens)
        return make_chunk(sequence, num_tokens, is_first=False)

    def _allocate(self, index: int, num_tokens: int) -> bool:
        """Allocate blocks for the next `num_tokens` tokens of the running sequence at `index`.

        If there are not enough free blocks, release the blocks that a request keeps for its waiting
        sequences. If no request keeps blocks, preempt the sequence at `index` or a later sequence.
        These sequences have no chunk in the current plan.

        Returns:
            Whether the blocks were allocated. False if the sequence itself was preempted. Also
            False if a preemption is needed, but the previous step is still running.

        Mutates: `must_wait_for_step`. It becomes True in the last case.
        """
        sequence = self.running[index]
        while not self.tables.try_extend(sequence, sequence.num_computed_tokens + num_tokens):
            if self.tables.kept_prompts.drop_oldest():
                continue
            if self.pending_plans.is_planning:
                # The running step may still use the blocks of the sequences.
                self.must_wait_for_step = True
                return False
            victim = self._select_victim(index)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _select_victim(self, index: int) -> Sequence:
        """Return the sequence to preempt next: the sequence at `index` or a later sequence."""
        if self.requests.waiting.has_several_clients:
            return cheapest_victim_of_largest_client(index, self.running)
        return cheapest_victim(index, self.running)

    def _chunk_length(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the length of a sequence's next chunk of tokens, at most `num_tokens`.

        Two things can shorten the chunk: the share of the sequence's client in the token budget,
        and a snapshot, because a snapshot is saved only at the end of a chunk.
        """
        num_tokens = self.prefill_shares.take(sequence, num_tokens)
        if self.tables.snapshots is None:
            return num_tokens
        return self.tables.snapshots.chunk_length(sequence, num_tokens)

    def _plan_waiting(self, chunks: list[Chunk], budget: int) -> None:
        """Start waiting sequences. For each sequence, append its first tokens to `chunks`.

        A started sequence gets a row of the batch, and blocks for all its known tokens at once.
        Otherwise, two sequences could each get half of the blocks that they need, and wait for each
        other forever.

        Stop at the first sequence for which there are not enough rows, blocks or tokens. `budget`
        is the number of tokens that the step may still compute. With `whole_prefill`, a prompt must
        be computed in one step. If such a prompt exceeds the rest of the budget, it gets a step of
        its own: it is started now if `chunks` is empty, and otherwise becomes overdue.

        Mutates: `has_overdue_prompt`. It becomes True if a prompt becomes overdue.
        """
        if self.must_wait_for_step:
            # A running sequence needs the blocks of another sequence, which can be preempted only
            # when the previous step has ended. Admit no sequence until then, because a newly
            # admitted sequence would take the blocks that are still free.
            return
        waiting = self.requests.waiting
        while waiting and self.running.free_rows and budget > 0:
            sequence = waiting.first()
            exceeds_budget = self.whole_prefill and len(sequence.token_ids) > budget
            if exceeds_budget and chunks:
                self.has_overdue_prompt = True
                return
            if not self._try_admit(sequence):
                return
            chunk = self._first_chunk(sequence, budget)  # with `whole_prefill`, the whole prompt
            chunks.append(chunk)
            budget -= chunk.num_tokens

    def _first_chunk(self, sequence: Sequence, budget: int) -> Chunk:
        """Return the first chunk (the first tokens to compute) of a sequence that has just started.

        The chunk contains at most `budget` tokens, but with `whole_prefill`, it contains all
        uncomputed tokens.
        """
        max_tokens = len(sequence.token_ids) - sequence.num_computed_tokens
        if not self.whole_prefill:
            max_tokens = min(max_tokens, budget)
        num_tokens = self._chunk_length(sequence, max_tokens)
        return make_chunk(sequence, num_tokens, is_first=True)

    def _try_admit(self, sequence: Sequence) -> bool:
        """Start a waiting sequence: give it a row of the batch and blocks of the KV cache.

        The sequence then runs and is no longer in the waiting queue.

        Returns:
            Whether the sequence was started. False if there are not enough free blocks. Also False
            if the plan is made before the previous step ends, and the sequence might need a copy of
            a block.
        """
        request = self.requests.of(sequence)
        # A follower uses the prompt blocks of another sequence of the same request. If the prompt
        # ends within a block, the follower needs a copy of this block.
        may_need_copy = sequence in request.followers
        if may_need_copy and self.pending_plans.is_planning:
            self.must_wait_for_step = True
            return False
        while not self.tables.try_admit(sequence, request):
            has_freed_blocks = self._free_kept_prompt()
            if not has_freed_blocks:
                return False
        self.requests.admit(sequence)
        self.running.add(sequence)
        return True

    def _free_kept_prompt(self) -> bool:
        """If no sequence is running, free the prompt blocks that one request keeps.

        A request with several sequences keeps the blocks of its prompt for its waiting sequences.
        The blocks that were kept for the longest time are freed. The waiting sequences of this
        request must then compute the prompt again. This is done only if no sequence is running,
        because a running sequence will free its blocks when it ends.

        Returns:
            Whether blocks were freed.
        """
        return not self.running and self.tables.kept_prompts.drop_oldest()

    def _preempt_other_clients(self, sequence: Sequence) -> None:
        """Preempt sequences of other clients if a waiting sequence needs their rows or blocks.

        A preempted sequence returns to the waiting queue and computes its tokens again later. The
        loop ends when enough rows and blocks are free, or when `fair_victim` finds no sequence that
        a client may lose.
        """
        num_blocks = self.tables.num_blocks_to_start(sequence)
        while (victim := self._next_victim(sequence, num_blocks)) is not None:
            if self.pending_plans.is_planning:
                # The previous step is still running, so this plan must not preempt a running
                # sequence.
                self.must_wait_for_step = True
                return
            self.preempt(victim)

    def _next_victim(self, sequence: Sequence, num_blocks: int) -> Sequence | None:
        """Return the running sequence that must be preempted next for a waiting sequence.

        The waiting sequence needs one row and `num_blocks` blocks. Return None if enough rows and
        blocks are free, or if no sequence can be preempted fairly.
        """
        ended_sequences = self.pending_plans.ended_sequences
        if not self.running.free_rows:
            return fair_victim(sequence, 1, self.running, ended_sequences, by_rows=True)
        if self.pool.num_free < num_blocks:
            return fair_victim(sequence, num_blocks, self.running, ended_sequences, by_rows=False)
        return None

    def _propose_drafts(self, drafter: Drafter, sequence: Sequence, limit: int) -> None:
        """Set the draft tokens of a sequence. Do nothing if there are not enough free blocks."""
        # Subtract 1, because the step adds one sampled token after the accepted draft tokens.
        num_allowed = sequence.max_total_tokens - len(sequence.token_ids) - 1
        drafts = drafter.propose(sequence, min(limit, num_allowed))
        if self.tables.try_extend(sequence, len(sequence.token_ids) + len(drafts)):
            sequence.draft_token_ids = drafts


def _has_several_tokens(chunk: Chunk) -> bool:
    """Return whether a chunk has several tokens. This function is a sort key: False comes first."""
    return chunk.num_tokens > 1
