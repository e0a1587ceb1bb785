# SPDX-License-Identifier: Apache-2.0
"""The scheduler. It manages the state of all requests from their arrival to their end.

    add -> waiting queue -> plan -> (the runner computes the step) -> commit -> update
                               ^                                         |
                               +------ until the sequence ends ----------+

`plan` returns the tokens of the next step (step_planner.py). `commit` appends the sampled tokens to
their sequences and returns the updates that the engine reports.

Sequences are ordered by rank (arrival_ranks.py).
"""

from collections import abc

from nereid_backend.core.active_requests import ActiveRequests
from nereid_backend.core.adapter import Adapter
from nereid_backend.core.async_plans import PendingPlans
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.block_tables import BlockTables
from nereid_backend.core.blocks.prefix_cache import PrefixCache
from nereid_backend.core.blocks.state_snapshots import StateSnapshots
from nereid_backend.core.blocks.window import AttentionWindow
from nereid_backend.core.draft_tokens.drafter import Drafter
from nereid_backend.core.grammar import Guide
from nereid_backend.core.invalid_blocks import InvalidBlocks
from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.queues.arrival_ranks import ArrivalRanks
from nereid_backend.core.queues.ranked_sequences import RunningSequences
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.sequence_endings import SequenceEndings
from nereid_backend.core.step import Chunk, Sampled, StepPlan, StepResult
from nereid_backend.core.step_planner import StepPlanner
from nereid_backend.core.updates import Ending, append_sampled, report_tokens, settle_drafts


class Scheduler:
    """Plans each step, and applies the result of each step to the requests.

    The class is not thread-safe. All methods must be called by the same thread.

    Attributes:
        pool: the blocks of the KV cache.
        cache: the prefix cache; None if prefix caching is off.
        drafter: proposes draft tokens; None if speculative decoding is off.
        windows: the attention window of each group of layers (window.py); None for a group with
            full attention.
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
        drafter: Drafter | None = None,
        windows: abc.Sequence[AttentionWindow | None] = (None,),
        num_states: int = 0,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            pool: the blocks of the KV cache.
            block_size: the number of tokens in one block.
            max_num_seqs: the largest number of sequences that run at the same time.
            max_num_batched_tokens: the largest number of tokens in one step.
            enable_prefix_caching: whether a request may reuse blocks that other requests have
                computed.
            shares_blocks: whether sequences may share blocks. False for recurrent models, because
                their blocks do not contain the whole state of a sequence.
            whole_prefill: if True, a prompt is never divided into chunks and never reuses cached
                blocks. A prompt that exceeds the token budget is computed in a step of its own.
            drafter: proposes draft tokens; None turns speculative decoding off. A drafter requires
                shares_blocks=True and whole_prefill=False.
            windows: the attention window of each group of layers; None for a group with full
                attention. Blocks before the window are freed.
            num_states: the number of recurrent states that fit into the memory, including
                snapshots; 0 if the model has no snapshots. If there are snapshots, sequences share
                blocks through the prefix cache even if `shares_blocks` is False.
        """
        self.pool = pool
        self.windows = tuple(windows)
        self._has_windows = any(window is not None for window in windows)
        shares_blocks = shares_blocks and not whole_prefill
        self.cache: PrefixCache | None = None
        if enable_prefix_caching and not whole_prefill:
            snapshots = StateSnapshots(num_states, block_size) if num_states > 0 else None
            if shares_blocks or snapshots is not None:
                self.cache = PrefixCache(pool, block_size, self.windows, snapshots)
        has_snapshots = self.cache is not None and self.cache.snapshots is not None
        assert drafter is None or shares_blocks, "rejected draft tokens could not be removed"
        self.drafter = drafter
        self._tables = BlockTables(
            pool,
            block_size,
            self.cache,
            windows=self.windows,
            max_step_tokens=None if whole_prefill else max_num_batched_tokens,
        )
        self._requests = ActiveRequests(self._tables, shares_prompts=shares_blocks or has_snapshots)
        self._running = RunningSequences(max_num_seqs)
        self._pending_plans = PendingPlans()
        self._planner = StepPlanner(
            pool=pool,
            tables=self._tables,
            requests=self._requests,
            running=self._running,
            pending_plans=self._pending_plans,
            drafter=drafter,
            max_num_batched_tokens=max_num_batched_tokens,
            whole_prefill=whole_prefill,
        )
        self._ranks = ArrivalRanks()
        self._invalid_blocks = InvalidBlocks(
            self._tables, self._running, self._pending_plans, self._planner
        )
        self._endings = SequenceEndings(self._requests, self._pending_plans, self._planner, drafter)
        # The last updates of sequences that ended between two steps, for example because they were
        # aborted. The next call of `commit` or `fail_step` returns these updates.
        self._unreported_updates: list[RequestUpdate] = []

    @property
    def num_preemptions(self) -> int:
        """The number of preemptions since the start."""
        return self._planner.num_preemptions

    @property
    def must_wait_for_step(self) -> bool:
        """Whether the last plan is incomplete because it was made before the previous step ended.

        The plan is incomplete if it needed a preemption or a block copy. A plan that is made before
        the previous step ends must not contain either of them.
        """
        return self._planner.must_wait_for_step

    @property
    def num_running(self) -> int:
        """The number of sequences that have a batch row and blocks and have not ended."""
        return len(self._running) - len(self._pending_plans.ended_sequences)

    @property
    def num_waiting(self) -> int:
        """The number of waiting sequences. They have neither a batch row nor blocks."""
        return self._requests.num_sequences - self.num_running

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request is active or its last update has not been returned yet."""
        return request_id in self._requests or any(
            update.request_id == request_id for update in self._unreported_updates
        )

    def adapters(self) -> set[Adapter]:
        """Return the LoRA adapters of all requests that have not ended."""
        return self._requests.adapters()

    def is_preparing(self, request_id: str) -> bool:
        """Return whether `start` or `end_with_error` must still be called for a request."""
        return self._requests.is_preparing(request_id)

    def has_work(self) -> bool:
        """Return whether another step has work to do: tokens to compute, or updates to return."""
        return bool(
            self._requests or self._unreported_updates or self._pending_plans.ended_sequences
        )

    def add(self, sequence: Sequence, *, is_prepared: bool = True) -> None:
        """Add a request to the waiting queue: its first sequence, and n - 1 copies of it.

        The id of the request must be new. The pool must have enough blocks to run each sequence
        alone. The call sets the rank of each sequence, which determines the order in which
        sequences run.

        Args:
            sequence: the first sequence of the request. `sequence.params.n` is the number of
                sequences.
            is_prepared: False while the grammar of the request is being compiled. The request then
                enters the queue when `start` is called, or ends when `end_with_error` is called.
        """
        sequences = sequence.all_sequences()
        self._ranks.assign(sequences)
        self._requests.add(sequences, is_prepared=is_prepared)

    def start(self, request_id: str, guide: Guide | None) -> None:
        """Put a prepared request into the waiting queue. `guide` limits the tokens of its answer.

        Do nothing if the request has ended. `guide` is None if the request has no grammar and no
        thinking budget.
        """
        self._requests.start(request_id, guide)

    def end_with_error(self, request_id: str, error: str, *, is_refused: bool = True) -> None:
        """End a request whose grammar failed to compile. The next call of `commit` reports the end.

        Do nothing if the request has ended.

        Args:
            request_id: a request that was added with is_prepared=False.
            error: a sentence that describes the error. The client gets this sentence.
            is_refused: True if the client caused the error with an invalid grammar, which is the
                usual case. False if the server has failed.
        """
        # `sequences_of` returns a new list, so the loop can call `end`, which removes a sequence
        # from the request.
        for sequence in self._requests.sequences_of(request_id):
            update = self._endings.end(sequence, "error", error=error, is_refused=is_refused)
            self._unreported_updates.append(update)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or only its sequence `index`. The next call of `commit` reports the end.

        Do nothing if the request is unknown.
        """
        sequences = self._requests.sequences_of(request_id)
        aborted = [sequence for sequence in sequences if index in (None, sequence.index)]
        # End the sequences in reverse order. Otherwise, the end of the first sequence would put the
        # next sequence into the waiting queue to compute the prompt, although the next sequence is
        # aborted by the same call.
        updates = [self._endings.end(sequence, "abort") for sequence in reversed(aborted)]
        self._unreported_updates += reversed(updates)

    def plan(self) -> StepPlan:
        """Return the plan of the next step: the tokens that are computed for each sequence."""
        assert not self._pending_plans, "A step is still running. Call plan_ahead instead of plan."
        self._planner.must_wait_for_step = False
        return self._plan_step()

    def plan_ahead(self, before: StepPlan) -> StepPlan:
        """Plan the next step before the current step has ended.

        The GPU can then start the next step without waiting for its plan.

        Args:
            before: the plan of the running step. The plan must not contain draft tokens. If the
                running step was planned ahead, pass the plan that `settle` returned.

        Returns:
            The plan of the next step. A plan without chunks needs no commit.
        """
        assert self.drafter is None, (
            "A step cannot be planned ahead with speculative decoding, because draft tokens depend "
            "on the last sampled token."
        )
        return self._pending_plans.plan_next(before, self._plan_step)

    def settle(self, plan: StepPlan, device_token_ids: abc.Sequence[int]) -> StepPlan:
        """Correct a plan that was made during the previous step; see `PendingPlans.settle`."""
        return self._pending_plans.settle(plan, device_token_ids)

    def drop(self, plan: StepPlan) -> None:
        """Discard a plan that was made ahead.

        The sequences keep the blocks that were allocated for the plan.
        """
        self._pending_plans.remove(plan)
        self._endings.release_unused()

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Append the sampled tokens of a step to the sequences, and report them in updates.

        An update reports the new tokens or the end of one sequence. The result also contains the
        last update of each sequence that was aborted or refused after the previous commit. If a
        sequence ended while the step was running, its tokens are ignored.

        Args:
            plan: the plan of the step. Each chunk of the plan contains tokens of one sequence.
            result: the tokens that the step has sampled.
        """
        updates, self._unreported_updates = self._unreported_updates, []
        self._pending_plans.remove(plan)
        for chunk_index, logprobs in result.prompt_logprobs.items():
            plan.chunks[chunk_index].sequence.prompt_logprobs += logprobs
        # `result.sampled` has one entry for each chunk that samples, in the order of the chunks.
        remaining_sampled = iter(result.sampled)
        for chunk in plan.chunks:
            sampled = next(remaining_sampled) if chunk.samples else None
            update = self._commit_chunk(chunk, sampled)
            if update is not None:
                updates.append(update)
        # Preempt the running sequences that share blocks with a failed sequence.
        self._invalid_blocks.purge()
        # Release the rows and blocks of the sequences that ended while this step was running. If
        # another unfinished step uses a sequence, its row and blocks are released after that step.
        self._endings.release_unused()
        return updates

    def fail_step(self, plan: StepPlan, error: str) -> list[RequestUpdate]:
        """End all sequences in the plan of a failed step. Return the last update of each sequence.

        The blocks of these sequences may contain wrong values, so the blocks are removed from the
        prefix cache, and running sequences that share the blocks are preempted. The list also
        contains the last update of each sequence that was aborted or refused after the previous
        commit.
        """
        updates, self._unreported_updates = self._unreported_updates, []
        self._pending_plans.remove(plan)
        for chunk in plan.chunks:
            update = self._end_failed(chunk.sequence, error)
            if update is not None:
                updates.append(update)
        # Preempt the running sequences that share blocks with the failed sequences.
        self._invalid_blocks.purge()
        # Release the rows and blocks of the sequences that ended while this step was running. If
        # another unfinished step uses a sequence, its row and blocks are released after that step.
        self._endings.release_unused()
        return updates

    def add_time(self, plan: StepPlan, seconds: float) -> None:
        """Record how many seconds the forward pass and the sampling of a step took together.

        The cost of draft tokens is computed from these times. A step is ignored if it computes
        several known tokens of a sequence, because its time then depends mainly on these tokens.
        Examples of known tokens: a part of a prompt, and the tokens of a preempted sequence.
        """
        if self.drafter is None:
            return
        if all(map(_has_one_known_token, plan.chunks)):
            num_sequences = len(plan.chunks)
            num_drafts = plan.num_tokens - num_sequences
            self.drafter.lengths.costs.add_step(num_sequences, num_drafts, seconds)

    def check(self) -> None:
        """Check that the block tables, the reference counts and the rows are consistent.

        Raises:
            AssertionError: if a block, a row or a sequence was lost.
        """
        tables = [table for sequence in self._running for table in sequence.block_tables]
        # A request with several sequences also keeps the blocks of its prompt for the sequences
        # that do not run yet.
        tables += self._tables.kept_prompts.block_tables()
        self.pool.check(tables)
        self._tables.check(self._running)
        if self.cache is not None:
            self.cache.check()
        self._running.check()
        self._requests.check(self.num_running)

    def _plan_step(self) -> StepPlan:
        """Return the plan of the next step, and add 1 to the number of steps.

        The ranks of new requests depend on the number of steps.
        """
        self._ranks.note_step()
        return self._planner.plan()

    def _commit_chunk(self, chunk: Chunk, sampled: Sampled | None) -> RequestUpdate | None:
        """Apply the step's result to the sequence of `chunk`, and return an update for the client.

        The sampled tokens are appended to the sequence. If no token could be sampled, the sequence
        ends with an error instead. The result is None if the sequence ended while the step was
        running, or if the step samples no token for the chunk (`sampled` is None).

        Mutates: the sequence and the prefix cache. The tokens of the chunk count as computed, full
            blocks are added to the cache, and blocks before an attention window are freed.
        """
        sequence = chunk.sequence
        if sampled is not None and sampled.error is not None:
            return self._end_failed(sequence, sampled.error, is_refused=sampled.is_refused)
        if sequence in self._pending_plans.ended_sequences:
            return None
        num_known = len(sequence.token_ids)  # the number of tokens without the sampled tokens
        chunk_end = chunk.start + chunk.num_tokens
        # The tokens of the chunk after the known tokens are draft tokens. They count as computed
        # only after `settle_drafts` has verified them.
        has_drafts = chunk_end > num_known
        sequence.num_computed_tokens = num_known if has_drafts else chunk_end
        ending = None
        if sampled is not None:
            ending = append_sampled(sequence, sampled)
            if sequence.draft_token_ids and self.drafter is not None:
                settle_drafts(sequence, sequence.token_ids[num_known:], self.drafter)
        # Add the full blocks before the sequence can end, because an ended sequence has no blocks.
        if self.cache is not None:
            self.cache.add(sequence)
        update = None
        if sampled is not None:
            update = self._finish_sampling(sequence, sampled, num_known, ending)
        if self._has_windows:
            # This call does nothing if the sequence has ended and has released its blocks.
            self._tables.free_blocks_before_window(sequence)
        return update

    def _end_failed(
        self, sequence: Sequence, error: str, *, is_refused: bool = False
    ) -> RequestUpdate | None:
        """End a sequence with an error. Return its last update.

        Return None if the sequence was aborted while the step was running, because its last update
        has already been created.

        Args:
            sequence: the sequence.
            error: a sentence that describes the error.
            is_refused: True if the parameters of the request forbid every token. False if the step
                has failed, so that the blocks of the sequence may contain wrong values.
        """
        if not is_refused:
            # Other sequences may use the same blocks, so mark the blocks as invalid even if the
            # sequence has ended. Mark them first, because a sequence loses its blocks when it ends.
            self._invalid_blocks.add_blocks_of(sequence)
        if sequence in self._pending_plans.ended_sequences:
            return None
        return self._endings.end(sequence, "error", error=error, is_refused=is_refused)

    def _finish_sampling(
        self, sequence: Sequence, sampled: Sampled, num_known: int, ending: Ending | None
    ) -> RequestUpdate:
        """Report the new tokens of a sequence in an update. If `ending` is set, end the sequence.

        Example: the sampled tokens are [5, 2, 9], and 2 is a stop token, so 5 and 2 were appended.
        The update reports the tokens [5, 2] and their log-probabilities, and its finish_reason is
        "stop".

        Mutates: the waiting queue. If other sequences of the request have waited until the prompt
            was computed, these sequences are put into the queue.

        Args:
            sequence: the sequence, to which the new tokens have already been appended.
            sampled: the tokens that the step has sampled, and their log-probabilities.
            num_known: the number of tokens of the sequence before the new tokens.
            ending: the reason why the sequence ends; None if the sequence continues.
        """
        new_token_ids = sequence.token_ids[num_known:]
        if sequence.params.n > 1:
            # The step has sampled a token, which shows that the whole prompt is computed.
            # Therefore, put the other sequences of the request into the queue. If they are already
            # in the queue, this call does nothing.
            self._requests.share_prompt(sequence)
        # The sampled tokens after a stop token are not reported.
        top_logprobs = None if sampled.top is None else sampled.top[: len(new_token_ids)]
        update = report_tokens(sequence, new_token_ids, top_logprobs)
        if ending is None:
            return update
        return self._endings.end(
            sequence, ending.reason, update=update, stop_reason=ending.stop_token_id
        )


def _has_one_known_token(chunk: Chunk) -> bool:
    """Return whether a chunk consists of one known token and any number of draft tokens.

    Known tokens are prompt tokens and sampled tokens.
    """
    # A step computes logits for the last known token and for each draft token. If all tokens of a
    # chunk have logits, the chunk therefore has only one known token. There is one exception: if
    # log-probabilities of the prompt were requested, all prompt tokens have logits.
    starts_after_prompt = chunk.start >= chunk.sequence.num_prompt_tokens - 1
    return starts_after_prompt and chunk.num_tokens == chunk.num_logits
