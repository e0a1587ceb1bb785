# SPDX-License-Identifier: Apache-2.0
"""Which tokens go through the model next.

There is no prefill phase and no decode phase. A request has tokens that are known (its prompt, then
what was sampled) and tokens that are computed (their keys and values are in the cache). Each step
gives every request some of the tokens that it still has to compute, under one budget; when none is
left to compute after the last known token, a new one is sampled. A long prompt is thereby cut into
chunks that share steps with requests that add one token each, a preempted request is one that has
everything to compute again, and one whose prompt was found in the cache has less to compute.

Order: by rank, which is the step of arrival plus a fixed number of steps for each level of
priority. A request that waits long thus comes before any that arrives much later, whatever their
priorities: nobody starves. Running requests go first, each with at least one token, then waiting
ones. When blocks run out, one of those behind gives its blocks back: of the lowest priority, the
one with the least to compute again. The first in order is never preempted for another, so it ends;
then the next is the first.

A step can be planned ahead, while the one before it is computed (ahead.py). What takes from others
what a step under way may use, to preempt, and to copy a block that it writes to, is never planned
ahead; is_held_up then says that a plan fell short.
"""

from collections.abc import Sequence
from dataclasses import replace

from nereid_backend.core.async_plans import StepsUnderWay
from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.block_tables import BlockTables
from nereid_backend.core.grammar import Guide
from nereid_backend.core.groups import Groups
from nereid_backend.core.outputs import FinishReason, RequestUpdate
from nereid_backend.core.prefix_cache import PrefixCache
from nereid_backend.core.prompt_lookup import PromptLookup
from nereid_backend.core.ranked_requests import RankedRequests
from nereid_backend.core.request import Request
from nereid_backend.core.step import Chunk, Sampled, StepPlan, StepResult
from nereid_backend.core.updates import append_sampled, make_update, num_equal
from nereid_backend.core.window import Sight

# A level of priority is worth so many steps of waiting, some seconds with a model worth scheduling
# for; levels beyond the limit count as the limit, so that everybody's turn comes.
AGEING_STEPS = 256
_MAX_LEVEL = 100


class Scheduler:
    """Owns every request that was accepted and has not ended, and the pool of blocks.

    Not thread-safe: one thread plans and commits.
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
        sight: Sight | None = None,
    ) -> None:
        """Begin with no requests.

        Args:
            pool: the blocks of the KV cache.
            block_size: tokens in one block.
            max_num_seqs: at most so many sequences run at once.
            max_num_batched_tokens: a step has at most so many tokens.
            enable_prefix_caching: whether requests find what others have computed.
            shares_blocks: whether blocks say all that the model remembers of a sequence; if not,
                nothing is ever shared.
            whole_prefill: a prompt is never cut, nor continued from what another has computed; one
                larger than a step's budget goes in a step of its own, and after that a request
                computes one token a step.
            num_speculative_tokens: guess so many next tokens a step and request.
            sight: how far back the model looks; blocks before that are given back. None: to the
                beginning.
        """
        self.pool = pool
        self.sight = sight
        self.num_preemptions = 0
        self._shares = shares_blocks and not whole_prefill
        self._whole_prefill = whole_prefill
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        caches = enable_prefix_caching and self._shares
        self.cache = PrefixCache(pool, block_size, sight) if caches else None
        self.lookup = None
        if num_speculative_tokens > 0 and self._shares:
            self.lookup = PromptLookup(num_speculative_tokens)
        self._tables = BlockTables(
            pool,
            block_size,
            self.cache,
            sight=sight,
            most_step_tokens=None if whole_prefill else max_num_batched_tokens,
        )
        self._groups = Groups(self._tables, shares_prompts=self._shares)
        self._num_added = 0
        self._num_steps = 0
        self._running = RankedRequests()
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._ended: list[RequestUpdate] = []
        # Whether a prompt that must go whole did not fit beside the running requests.
        self._is_overdue = False
        self._under_way = StepsUnderWay()
        self.is_held_up = False

    @property
    def num_running(self) -> int:
        """Sequences with blocks."""
        return len(self._running) - len(self._under_way.leaving)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return self._groups.num_sequences - self.num_running

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this name is in work, or its end is still to be reported."""
        return request_id in self._groups or any(
            update.request_id == request_id for update in self._ended
        )

    def is_preparing(self, request_id: str) -> bool:
        """Whether a request waits for start() or refuse()."""
        return self._groups.is_preparing(request_id)

    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._groups or self._ended or self._under_way.leaving)

    def add(self, request: Request, *, is_prepared: bool = True) -> None:
        """Accept a request. Its id is new and each of its sequences fits the pool when alone.

        Args:
            request: its sequence 0; the others are made of it.
            is_prepared: if not, it waits until start() or refuse() is called for it.
        """
        sequences = request.sequences()
        level = max(-_MAX_LEVEL, min(_MAX_LEVEL, request.params.priority))
        due = self._num_steps + level * AGEING_STEPS
        for sequence in sequences:
            sequence.rank = (due, request.params.priority, self._num_added, sequence.index)
        self._num_added += 1
        self._groups.add(sequences, is_prepared=is_prepared)

    def start(self, request_id: str, guide: Guide) -> None:
        """Let a request that was added unprepared run. Unknown ones are ignored."""
        self._groups.start(request_id, guide)

    def refuse(self, request_id: str, error: str, *, is_refused: bool = True) -> None:
        """End a request that was added unprepared: its guide cannot be made."""
        self._ended += [
            self._end(sequence, "error", error=error, is_refused=is_refused)
            for sequence in self._groups.sequences_of(request_id)
        ]

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one of its sequences at once; the next commit reports it.

        Unknown ones are ignored.
        """
        sequences = self._groups.sequences_of(request_id)
        # The last first: none becomes the one that computes the prompt only to be ended next.
        chosen = [s for s in reversed(sequences) if index in (None, s.index)]
        ended = [self._end(sequence, "abort") for sequence in chosen]
        self._ended += reversed(ended)

    def plan(self) -> StepPlan:
        """Choose the next step's tokens and give their requests rows and blocks."""
        assert not self._under_way, "a step is under way; plan ahead of it"
        self.is_held_up = False
        return self._plan()

    def plan_ahead(self, before: StepPlan) -> StepPlan:
        """Plan the step after one that is computed now and is committed before it.

        Args:
            before: the last plan, settled if it was made ahead itself; without guesses.

        Returns:
            A plan; one without chunks needs no commit.
        """
        assert self.lookup is None, "guesses are made from the last token"
        return self._under_way.plan_next(before, self._plan)

    def settle(self, plan: StepPlan, drawn: Sequence[int]) -> StepPlan:
        """What counts of a plan that was made ahead; see `StepsUnderWay.settle`."""
        return self._under_way.settle(plan, drawn)

    def drop(self, plan: StepPlan) -> None:
        """Take a plan back that was made ahead; its requests keep what they got for it."""
        self._under_way.land(plan)
        self._let_leave()

    def _plan(self) -> StepPlan:
        self._num_steps += 1
        chunks: list[Chunk] = []
        budget = self._max_num_batched_tokens
        if not self._is_overdue:
            budget = self._plan_running(chunks, budget)
        self._plan_waiting(chunks, budget)
        if not chunks and self._running:
            # The overdue prompt found no room.
            self._plan_running(chunks, budget)
        chunks.sort(key=_has_many_tokens)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return StepPlan(chunks, num_tokens, self._tables.take_copies())

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in what a plan's step brought and report what is new, ended requests included."""
        updates, self._ended = self._ended, []
        self._under_way.land(plan)
        leaving = self._under_way.leaving
        sampled = iter(result.sampled)
        tainted: set[int] = set()
        for index, chunk in enumerate(plan.chunks):
            request = chunk.request
            if request in leaving:
                # What was wrong with it may still harm others.
                if chunk.samples and next(sampled).error is not None:
                    tainted |= self._tables.blocks_of(request)
                continue
            num_known = len(request.token_ids)
            request.num_computed_tokens = min(chunk.start + chunk.num_tokens, num_known)
            if index in result.prompt_logprobs:
                request.prompt_logprobs += result.prompt_logprobs[index]
            if not chunk.samples:
                self._tables.remember(request)
                self._tables.drop_unseen(request)
                continue
            outcome = next(sampled)
            if outcome.error is not None:
                tainted |= self._tables.blocks_of(request)
            updates.append(self._take(request, outcome))
            self._tables.drop_unseen(request)
        self._purge(tainted)
        self._let_leave()
        return updates

    def fail(self, plan: StepPlan, error: str) -> list[RequestUpdate]:
        """End every sequence of a plan whose step failed, and report that."""
        updates, self._ended = self._ended, []
        self._under_way.land(plan)
        tainted = {b for chunk in plan.chunks for b in self._tables.blocks_of(chunk.request)}
        updates += [
            self._end(chunk.request, "error", error=error)
            for chunk in plan.chunks
            if chunk.request not in self._under_way.leaving
        ]
        self._purge(tainted)
        self._let_leave()
        return updates

    def check(self) -> None:
        """Verify the pool against the block tables, and the rows.

        Raises:
            AssertionError: something leaked.
        """
        tables = [request.block_table for request in self._running]
        self.pool.check([*tables, *self._tables.held_tables()])
        if self.cache is not None:
            self.cache.check()
        rows = [request.row for request in self._running if request.row is not None]
        assert len(rows) == len(self._running), "a running request has no row"
        assert sorted(rows + self._free_rows) == list(range(self._max_num_seqs)), "rows leaked"
        self._groups.check(self.num_running)

    def _plan_running(self, chunks: list[Chunk], budget: int) -> int:
        index = 0
        is_ahead = self._under_way.is_planning
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            if is_ahead and self._under_way.will_end(request):
                index += 1
                continue
            # One token stays for each of those that come after.
            limit = max(1, budget - (len(self._running) - index - 1))
            num_known = len(request.token_ids) - request.num_computed_tokens
            num_tokens = min(num_known, 1 if self._whole_prefill else limit)
            missing = self._tables.missing(request, request.num_computed_tokens + num_tokens)
            if missing > 0 and not self._make_room(index, missing):
                break
            self._tables.grow(request, missing)
            if self.lookup is not None and num_tokens == num_known:
                self._guess(request, limit - num_tokens)
            chunks.append(_chunk(request, num_tokens, is_first=False))
            budget -= chunks[-1].num_tokens
            index += 1
        return budget

    def _plan_waiting(self, chunks: list[Chunk], budget: int) -> None:
        # A request gets blocks for all its known tokens at once: two half-admitted prompts could
        # otherwise wait for each other's blocks.
        if self.is_held_up:
            return
        is_overdue, self._is_overdue = self._is_overdue, False
        waiting = self._groups.waiting
        while waiting and self._free_rows and budget > 0:
            request = waiting[0]
            if self._whole_prefill and chunks and len(request.token_ids) > budget:
                self._is_overdue = not is_overdue
                break
            if not self._try_admit(request):
                break
            num_known = len(request.token_ids) - request.num_computed_tokens
            num_tokens = num_known if self._whole_prefill else min(num_known, budget)
            chunks.append(_chunk(request, num_tokens, is_first=True))
            budget -= num_tokens
            if is_overdue:
                break

    def _try_admit(self, request: Request) -> bool:
        group = self._groups.of(request)
        if self._under_way.is_planning and request in group.followers:
            self.is_held_up = True
            return False
        while not self._tables.try_admit(request, group):
            # With nobody running, only prompts that groups hold can be in the way.
            if self._running or not self._tables.drop_oldest_prompt():
                return False
        self._groups.admit(request)
        request.row = self._free_rows.pop()
        self._running.add(request)
        return True

    def _make_room(self, index: int, num_blocks: int) -> bool:
        """Preempt until there is room for the running request at a place in the order.

        All who give way come after it, so none of them has a chunk in the plan being made. False if
        it had to give way itself.
        """
        request = self._running[index]
        while self.pool.num_free < num_blocks:
            if self._tables.drop_oldest_prompt():
                continue
            if self._under_way.is_planning:
                self.is_held_up = True
                return False
            victim = min(self._running.after(index), key=_loss, default=request)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.prompt_logprobs = []
        self._groups.waiting.add(request)
        self.num_preemptions += 1

    def _guess(self, request: Request, limit: int) -> None:
        """Let a request guess what comes next, where that costs nobody else anything."""
        assert self.lookup is not None
        room = request.max_total_tokens - len(request.token_ids) - 1
        drafts = self.lookup.propose(request, min(limit, room))
        missing = self._tables.missing(request, len(request.token_ids) + len(drafts))
        if missing > self.pool.num_free:
            return
        self._tables.grow(request, missing)
        request.draft_token_ids = drafts

    def _take(self, request: Request, sampled: Sampled) -> RequestUpdate:
        """Append sampled tokens up to the first that ends the request."""
        drafts, request.draft_token_ids = request.draft_token_ids, []
        if sampled.error is not None:
            return self._end(request, "error", error=sampled.error)
        num_known = len(request.token_ids)
        reason, stop_reason = append_sampled(request, sampled)
        new_token_ids = request.token_ids[num_known:]
        if drafts:
            # A guess that was right is computed, too.
            num_right = num_equal(drafts, new_token_ids)
            request.num_computed_tokens += num_right
            assert self.lookup is not None
            self.lookup.learn(request, len(drafts), num_right)
        self._tables.remember(request)
        self._groups.share_prompt(request)
        top = sampled.top[: len(new_token_ids)] if sampled.top is not None else None
        update = make_update(request, new_token_ids, top)
        if reason is None:
            return update
        return self._end(request, reason, update=update, stop_reason=stop_reason)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        update: RequestUpdate | None = None,
        stop_reason: int | None = None,
        error: str | None = None,
        is_refused: bool = False,
    ) -> RequestUpdate:
        """Forget a sequence; returns its last update."""
        if self.lookup is not None:
            self.lookup.forget(request)
        self._groups.remove(request)
        if request.row is not None:
            if request in self._under_way:
                self._under_way.leaving[request] = None
            else:
                self._leave(request)
        update = update or make_update(request, [], None)
        return replace(
            update,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            is_refused=is_refused,
        )

    def _let_leave(self) -> None:
        """Take the rows and blocks of those who have ended and are in no step under way."""
        if self._under_way.leaving:
            for request in self._under_way.take_free():
                self._leave(request)

    def _leave(self, request: Request) -> None:
        """Take a running request's row and blocks away."""
        assert request.row is not None
        self._running.remove(request)
        self._free_rows.append(request.row)
        request.row = None
        request.draft_token_ids = []
        self._tables.release(request)

    def _purge(self, blocks: set[int]) -> None:
        """Make sure that nobody relies on blocks of a request that went wrong.

        They may hold numbers that are not finite, or have been overwritten for that reason. Those
        who share them compute everything again.
        """
        if not blocks:
            return
        self._tables.drop_prompts_with(blocks)
        for request in list(self._running):
            if request not in self._under_way.leaving and not blocks.isdisjoint(
                request.block_table
            ):
                self._tables.forget(self._tables.blocks_of(request))
                self._preempt(request)
        self._tables.forget(blocks)


def _chunk(request: Request, num_tokens: int, *, is_first: bool) -> Chunk:
    start = request.num_computed_tokens
    samples = start + num_tokens == len(request.token_ids)
    num_logits = int(samples) + len(request.draft_token_ids)
    num_tokens += len(request.draft_token_ids)
    if request.wants_prompt_logprobs:
        num_logits = num_tokens
    return Chunk(request, start, num_tokens, samples, is_first, num_logits)


def _loss(request: Request) -> tuple[int, int, int]:
    """Sorts first what is best preempted: low priority, little to compute again, arrived late."""
    num_lost = request.num_computed_tokens - request.num_reused_tokens
    return -request.params.priority, num_lost, -request.rank[2]


def _has_many_tokens(chunk: Chunk) -> bool:
    return chunk.num_tokens > 1
