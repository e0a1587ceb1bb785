# SPDX-License-Identifier: Apache-2.0
"""The scheduler, which decides which tokens the model computes in the next step.

There is no prefill phase and no decode phase. The known tokens of a sequence are its prompt and the
tokens that were sampled so far. The computed tokens of a sequence are those whose keys and values
are in the KV cache. A step computes some known tokens of every sequence, within a token budget for
all sequences together. When a step computes the last known token of a sequence, the step samples a
new token. Three features follow from that rule:

- chunked prefill: a long prompt is computed in several steps, together with sequences that add one
  token each;
- preemption: a preempted sequence has to compute all its tokens again;
- prefix caching: a sequence whose prefix is in the cache has fewer tokens to compute.

Sequences are ordered by rank. The rank is the number of the step in which the request arrived, plus
a fixed number of steps for each level of priority. A sequence that has waited for a long time
therefore comes before a sequence that arrives much later with a higher priority, so no sequence
starves.

Running sequences are planned first, and each of them gets at least one token. Waiting sequences
follow. If there are not enough free blocks, a running sequence that comes later in the order is
preempted. The scheduler selects the sequence with the lowest priority. If several sequences have
that priority, the scheduler selects the one with the fewest tokens to compute again. The first
sequence in the order is never preempted for another sequence, so it always finishes.

With async scheduling, a step is planned ahead while the previous step is running (async_plans.py).
A plan that is made ahead never preempts a sequence and never copies a block, because the running
step may still use the blocks. If a plan would have needed a preemption or a copy, `is_held_up` is
True.
"""

from collections import abc
from dataclasses import replace

from nereid_backend.core.active_requests import ActiveRequests
from nereid_backend.core.async_plans import PendingPlans
from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.block_tables import BlockTables
from nereid_backend.core.grammar import Guide
from nereid_backend.core.outputs import FinishReason, RequestUpdate
from nereid_backend.core.prefix_cache import PrefixCache
from nereid_backend.core.prompt_lookup import PromptLookup
from nereid_backend.core.ranked_sequences import RankedSequences
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, Sampled, StepPlan, StepResult
from nereid_backend.core.updates import append_sampled, make_update, num_equal
from nereid_backend.core.window import AttentionWindow

# A request whose priority is higher by one level may arrive up to this many steps later (some
# seconds with a large model) and is still scheduled first. Levels are limited to the range from
# -_MAX_LEVEL to _MAX_LEVEL, so that every request is scheduled eventually.
AGEING_STEPS = 256
_MAX_LEVEL = 100


class Scheduler:
    """Plans the steps of all requests that have not ended, and allocates their blocks.

    The class is not thread-safe: one thread must call all its methods.

    Attributes:
        pool: the blocks of the KV cache.
        cache: the prefix cache; None if prefix caching is off.
        lookup: the object that proposes draft tokens; None if speculative decoding is off.
        attention_window: the model's attention window; None if tokens attend to all earlier tokens.
        num_preemptions: the number of preemptions since the start.
        is_held_up: whether the last plan was made ahead and needed a preemption or a block copy.
    """

    def __init__(  # noqa: PLR0913 - settings, each given by name
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        shares_blocks: bool = True,
        whole_prefill: bool = False,
        num_speculative_tokens: int = 0,
        attention_window: AttentionWindow | None = None,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            pool: the blocks of the KV cache.
            block_size: tokens in one block.
            max_num_seqs: the largest number of sequences that run at the same time.
            max_num_batched_tokens: the largest number of tokens in one step.
            enable_prefix_caching: whether a request may reuse blocks that other requests have
                computed.
            shares_blocks: whether the blocks of a sequence contain its whole state. If False (as in
                recurrent models), sequences never share blocks.
            whole_prefill: if True, a prompt is never divided into chunks and never reuses cached
                blocks. A prompt that exceeds the token budget is computed in a step of its own.
            num_speculative_tokens: the largest number of draft tokens for one sequence in one step.
            attention_window: the model's attention window, before which blocks are freed. None if
                tokens attend to all earlier tokens.
        """
        self.pool = pool
        self.attention_window = attention_window
        self.num_preemptions = 0
        self._shares = shares_blocks and not whole_prefill
        self._whole_prefill = whole_prefill
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        caches = enable_prefix_caching and self._shares
        self.cache = PrefixCache(pool, block_size, attention_window) if caches else None
        self.lookup = None
        if num_speculative_tokens > 0 and self._shares:
            self.lookup = PromptLookup(num_speculative_tokens)
        self._tables = BlockTables(
            pool,
            block_size,
            self.cache,
            attention_window=attention_window,
            max_step_tokens=None if whole_prefill else max_num_batched_tokens,
        )
        self._requests = ActiveRequests(self._tables, shares_prompts=self._shares)
        self._num_added = 0
        self._num_steps = 0
        self._running = RankedSequences()
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._ended: list[RequestUpdate] = []
        # Whether the last plan had no budget left for a waiting prompt that cannot be divided into
        # chunks. The next plan then starts with that prompt.
        self._is_overdue = False
        self._pending_plans = PendingPlans()
        self.is_held_up = False

    @property
    def num_running(self) -> int:
        """The number of sequences that have a row and blocks and have not ended."""
        return len(self._running) - len(self._pending_plans.leaving)

    @property
    def num_waiting(self) -> int:
        """The number of sequences that have no row and no blocks and have not ended."""
        return self._requests.num_sequences - self.num_running

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request has not ended, or has ended but its end was not reported yet."""
        return request_id in self._requests or any(
            update.request_id == request_id for update in self._ended
        )

    def is_preparing(self, request_id: str) -> bool:
        """Return whether a request waits until `start` or `refuse` is called."""
        return self._requests.is_preparing(request_id)

    def has_work(self) -> bool:
        """Return whether the next step would compute tokens or return updates."""
        return bool(self._requests or self._ended or self._pending_plans.leaving)

    def add(self, sequence: Sequence, *, is_prepared: bool = True) -> None:
        """Add a request and set the ranks of its sequences.

        The id must be new. The pool must have enough blocks for each sequence if it runs alone.

        Args:
            sequence: sequence 0 of the request. The method creates the other sequences as copies.
            is_prepared: if False, the request waits until `start` or `refuse` is called.
        """
        sequences = sequence.all_sequences()
        priority = sequence.params.priority
        level = max(-_MAX_LEVEL, min(_MAX_LEVEL, priority))
        due = self._num_steps + level * AGEING_STEPS
        for each in sequences:
            each.rank = (due, priority, self._num_added, each.index)
        self._num_added += 1
        self._requests.add(sequences, is_prepared=is_prepared)

    def start(self, request_id: str, guide: Guide) -> None:
        """Attach a guide to a request and put the request into the waiting queue.

        Do nothing if the request has ended.
        """
        self._requests.start(request_id, guide)

    def refuse(self, request_id: str, error: str, *, is_refused: bool = True) -> None:
        """End a request whose guide could not be created.

        Args:
            request_id: a request that was added with is_prepared=False.
            error: a sentence that describes the error, for the updates of the request.
            is_refused: whether the request itself caused the error.
        """
        self._ended += [
            self._end(sequence, "error", error=error, is_refused=is_refused)
            for sequence in self._requests.sequences_of(request_id)
        ]

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or only its sequence `index`. The next commit reports the end.

        Do nothing if the request is unknown.
        """
        sequences = self._requests.sequences_of(request_id)
        # End the last sequence first. Otherwise a follower would become the leader for a moment.
        matching = [s for s in reversed(sequences) if index in (None, s.index)]
        ended = [self._end(sequence, "abort") for sequence in matching]
        self._ended += reversed(ended)

    def plan(self) -> StepPlan:
        """Return the plan of the next step. Every sequence in the plan has a row and blocks."""
        assert not self._pending_plans, "A step is still running. Call plan_ahead instead of plan."
        self.is_held_up = False
        return self._plan()

    def plan_ahead(self, before: StepPlan) -> StepPlan:
        """Plan the next step while the current step is still running.

        Args:
            before: the plan of the running step, without draft tokens. If `before` was made ahead,
                `before` must be the result of `settle`.

        Returns:
            The plan of the next step. A plan without chunks needs no commit.
        """
        assert self.lookup is None, (
            "A step cannot be planned ahead with speculative decoding, because draft tokens depend "
            "on the last sampled token."
        )
        return self._pending_plans.plan_next(before, self._plan)

    def settle(self, plan: StepPlan, device_token_ids: abc.Sequence[int]) -> StepPlan:
        """Return the valid part of a plan that was made ahead; see `PendingPlans.settle`."""
        return self._pending_plans.settle(plan, device_token_ids)

    def drop(self, plan: StepPlan) -> None:
        """Discard a plan that was made ahead.

        The sequences keep the blocks that were allocated for the plan.
        """
        self._pending_plans.remove(plan)
        self._release_ended()

    def _plan(self) -> StepPlan:
        self._num_steps += 1
        chunks: list[Chunk] = []
        budget = self._max_num_batched_tokens
        if not self._is_overdue:
            budget = self._plan_running(chunks, budget)
        self._plan_waiting(chunks, budget)
        if not chunks and self._running:
            # The overdue prompt did not get enough blocks, so the running sequences continue.
            self._plan_running(chunks, budget)
        chunks.sort(key=_has_many_tokens)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return StepPlan(chunks, num_tokens, self._tables.take_copies())

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply the result of a step and return the updates of its sequences.

        The result also contains the last updates of sequences that were aborted or refused since
        the previous commit.
        """
        updates, self._ended = self._ended, []
        self._pending_plans.remove(plan)
        leaving = self._pending_plans.leaving
        sampled = iter(result.sampled)
        invalid_blocks: set[int] = set()
        for index, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            if sequence in leaving:
                # The sequence has ended, but other sequences may share its blocks. If the step
                # wrote invalid numbers into the blocks, they must not be reused.
                if chunk.samples and next(sampled).error is not None:
                    invalid_blocks |= self._tables.blocks_of(sequence)
                continue
            num_known = len(sequence.token_ids)
            sequence.num_computed_tokens = min(chunk.start + chunk.num_tokens, num_known)
            if index in result.prompt_logprobs:
                sequence.prompt_logprobs += result.prompt_logprobs[index]
            if not chunk.samples:
                self._tables.cache_blocks(sequence)
                self._tables.free_invisible(sequence)
                continue
            outcome = next(sampled)
            if outcome.error is not None:
                invalid_blocks |= self._tables.blocks_of(sequence)
            updates.append(self._append(sequence, outcome))
            self._tables.free_invisible(sequence)
        self._purge(invalid_blocks)
        self._release_ended()
        return updates

    def fail(self, plan: StepPlan, error: str) -> list[RequestUpdate]:
        """End every sequence of a plan whose step failed, and return the last updates."""
        updates, self._ended = self._ended, []
        self._pending_plans.remove(plan)
        invalid_blocks = {
            b for chunk in plan.chunks for b in self._tables.blocks_of(chunk.sequence)
        }
        updates += [
            self._end(chunk.sequence, "error", error=error)
            for chunk in plan.chunks
            if chunk.sequence not in self._pending_plans.leaving
        ]
        self._purge(invalid_blocks)
        self._release_ended()
        return updates

    def check(self) -> None:
        """Verify that the block tables, the reference counts and the rows agree.

        Raises:
            AssertionError: if a block, a row or a sequence was lost.
        """
        tables = [sequence.block_table for sequence in self._running]
        self.pool.check([*tables, *self._tables.held_tables()])
        if self.cache is not None:
            self.cache.check()
        rows = [sequence.row for sequence in self._running if sequence.row is not None]
        assert len(rows) == len(self._running), "A running sequence has no row."
        assert sorted(rows + self._free_rows) == list(range(self._max_num_seqs)), (
            "A row is neither free nor used by exactly one sequence."
        )
        self._requests.check(self.num_running)

    def _plan_running(self, chunks: list[Chunk], budget: int) -> int:
        index = 0
        is_ahead = self._pending_plans.is_planning
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            if is_ahead and self._pending_plans.will_end(sequence):
                index += 1
                continue
            # Keep one token of the budget for each running sequence that is planned after this
            # sequence. Otherwise, a long chunk could leave no budget for those sequences.
            limit = max(1, budget - (len(self._running) - index - 1))
            num_known = len(sequence.token_ids) - sequence.num_computed_tokens
            num_tokens = min(num_known, 1 if self._whole_prefill else limit)
            missing = self._tables.missing(sequence, sequence.num_computed_tokens + num_tokens)
            if missing > 0 and not self._make_room(index, missing):
                break
            self._tables.grow(sequence, missing)
            if self.lookup is not None and num_tokens == num_known:
                self._propose_drafts(sequence, limit - num_tokens)
            chunks.append(_chunk(sequence, num_tokens, is_first=False))
            budget -= chunks[-1].num_tokens
            index += 1
        return budget

    def _plan_waiting(self, chunks: list[Chunk], budget: int) -> None:
        # A sequence gets blocks for all its known tokens at once. Otherwise, two prompts could each
        # have half of their blocks and wait for the other prompt's blocks forever.
        if self.is_held_up:
            return
        is_overdue, self._is_overdue = self._is_overdue, False
        waiting = self._requests.waiting
        while waiting and self._free_rows and budget > 0:
            sequence = waiting[0]
            if self._whole_prefill and chunks and len(sequence.token_ids) > budget:
                self._is_overdue = not is_overdue
                break
            if not self._try_admit(sequence):
                break
            num_known = len(sequence.token_ids) - sequence.num_computed_tokens
            num_tokens = num_known if self._whole_prefill else min(num_known, budget)
            chunks.append(_chunk(sequence, num_tokens, is_first=True))
            budget -= num_tokens
            if is_overdue:
                break

    def _try_admit(self, sequence: Sequence) -> bool:
        request = self._requests.of(sequence)
        if self._pending_plans.is_planning and sequence in request.followers:
            self.is_held_up = True
            return False
        while not self._tables.try_admit(sequence, request):
            # If no sequence is running, all used blocks belong to prompts that groups keep for
            # followers. Such prompts can be computed again, so they are dropped.
            if self._running or not self._tables.drop_oldest_prompt():
                return False
        self._requests.admit(sequence)
        sequence.row = self._free_rows.pop()
        self._running.add(sequence)
        return True

    def _make_room(self, index: int, num_blocks: int) -> bool:
        """Preempt sequences until `num_blocks` blocks are free for the running sequence at `index`.

        Every preempted sequence comes after `index` in the order, so it has no chunk in the current
        plan yet.

        Returns:
            False if the sequence at `index` itself was preempted, or if the plan is made ahead and
            therefore must not preempt a sequence.
        """
        sequence = self._running[index]
        while self.pool.num_free < num_blocks:
            if self._tables.drop_oldest_prompt():
                continue
            if self._pending_plans.is_planning:
                self.is_held_up = True
                return False
            victim = min(self._running.after(index), key=_preemption_cost, default=sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.prompt_logprobs = []
        self._requests.waiting.add(sequence)
        self.num_preemptions += 1

    def _propose_drafts(self, sequence: Sequence, limit: int) -> None:
        """Set the draft tokens of a sequence if enough blocks are free for the draft tokens."""
        assert self.lookup is not None
        room = sequence.max_total_tokens - len(sequence.token_ids) - 1
        drafts = self.lookup.propose(sequence, min(limit, room))
        missing = self._tables.missing(sequence, len(sequence.token_ids) + len(drafts))
        if missing > self.pool.num_free:
            return
        self._tables.grow(sequence, missing)
        sequence.draft_token_ids = drafts

    def _append(self, sequence: Sequence, sampled: Sampled) -> RequestUpdate:
        """Append sampled tokens to a sequence and return its update.

        End the sequence if one of the tokens ends it.
        """
        drafts, sequence.draft_token_ids = sequence.draft_token_ids, []
        if sampled.error is not None:
            return self._end(sequence, "error", error=sampled.error)
        num_known = len(sequence.token_ids)
        reason, stop_reason = append_sampled(sequence, sampled)
        new_token_ids = sequence.token_ids[num_known:]
        if drafts:
            # The step has already computed the keys and values of the accepted draft tokens.
            num_accepted = num_equal(drafts, new_token_ids)
            sequence.num_computed_tokens += num_accepted
            assert self.lookup is not None
            self.lookup.learn(sequence, len(drafts), num_accepted)
        self._tables.cache_blocks(sequence)
        self._requests.share_prompt(sequence)
        top = sampled.top[: len(new_token_ids)] if sampled.top is not None else None
        update = make_update(sequence, new_token_ids, top)
        if reason is None:
            return update
        return self._end(sequence, reason, update=update, stop_reason=stop_reason)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        update: RequestUpdate | None = None,
        stop_reason: int | None = None,
        error: str | None = None,
        is_refused: bool = False,
    ) -> RequestUpdate:
        """Remove a sequence and return its last update."""
        if self.lookup is not None:
            self.lookup.forget(sequence)
        self._requests.remove(sequence)
        if sequence.row is not None:
            if sequence in self._pending_plans:
                self._pending_plans.leaving[sequence] = None
            else:
                self._release(sequence)
        update = update or make_update(sequence, [], None)
        return replace(
            update,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            is_refused=is_refused,
        )

    def _release_ended(self) -> None:
        """Release the rows and blocks of ended sequences that no uncommitted plan contains."""
        if self._pending_plans.leaving:
            for sequence in self._pending_plans.take_free():
                self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Release the row and the blocks of a running sequence."""
        assert sequence.row is not None
        self._running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = None
        sequence.draft_token_ids = []
        self._tables.release(sequence)

    def _purge(self, blocks: set[int]) -> None:
        """Remove blocks with invalid content from the prefix cache and from all block tables.

        The blocks of a failed sequence may contain NaN, or they may have been overwritten to remove
        NaN. Running sequences that share these blocks are preempted and compute their tokens again.
        """
        if not blocks:
            return
        self._tables.drop_prompts_with(blocks)
        for sequence in list(self._running):
            if sequence not in self._pending_plans.leaving and not blocks.isdisjoint(
                sequence.block_table
            ):
                self._tables.forget(self._tables.blocks_of(sequence))
                self._preempt(sequence)
        self._tables.forget(blocks)


def _chunk(sequence: Sequence, num_tokens: int, *, is_first: bool) -> Chunk:
    start = sequence.num_computed_tokens
    samples = start + num_tokens == len(sequence.token_ids)
    num_logits = int(samples) + len(sequence.draft_token_ids)
    num_tokens += len(sequence.draft_token_ids)
    if sequence.wants_prompt_logprobs:
        num_logits = num_tokens
    return Chunk(sequence, start, num_tokens, samples, is_first, num_logits)


def _preemption_cost(sequence: Sequence) -> tuple[int, int, int]:
    """Return a sort key. The sequence with the smallest key should be preempted first.

    The order is: lower priority, fewer tokens to compute again, later arrival.
    """
    num_lost = sequence.num_computed_tokens - sequence.num_reused_tokens
    return -sequence.params.priority, num_lost, -sequence.rank[2]


def _has_many_tokens(chunk: Chunk) -> bool:
    return chunk.num_tokens > 1
