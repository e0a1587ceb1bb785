# SPDX-License-Identifier: Apache-2.0
"""Async scheduling: each step is planned while the previous step is still running.

In this example, A, B and C are the plans of three steps, and a, b, c and d are sequences:

    plan            plan_ahead(A)       commit(A)   settle(B)   plan_ahead(B)       commit(B)
    A: a b c        B: a b c d          b ended     B: a c d    C: a c d            ...

Plan B assumes that each sampling sequence of step A gets exactly one token. After step A is
committed, `settle(B)` corrects the chunks of B for which this assumption was wrong. `drop(B)`
discards B completely. If a sequence ends while an uncommitted plan contains it, the sequence keeps
its row and its blocks until that plan is committed.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import replace

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan

# The id of a token that is still being sampled while the next step is planned.
_PENDING = -1


class PendingPlans:
    """Stores the plan of each unfinished step. A plan lists the tokens that the step computes.

    `plan_next` plans a step while the previous step is running. The plan assumes that the previous
    step adds exactly one token to each sequence that samples. After the previous step is committed,
    its plan is removed, and `settle` corrects the chunks for which the assumption was wrong.

    Attributes:
        is_planning: whether `plan_next` is making a plan at the moment.
        ended_sequences: the ended sequences that an uncommitted plan still contains. These
            sequences keep their rows and blocks. The dict is used as an ordered set.
    """

    def __init__(self) -> None:
        self.is_planning = False
        self.ended_sequences: dict[Sequence, None] = {}
        # If the next step is planned while the current step is running, the plans of both steps are
        # added to this list. A plan is removed when its step is finished or discarded.
        self._unfinished: list[StepPlan] = []

    def __bool__(self) -> bool:
        """Return whether at least one planned step is unfinished."""
        return bool(self._unfinished)

    def __contains__(self, sequence: Sequence) -> bool:
        """Return whether the plan of an unfinished step contains `sequence`."""
        return any(sequence is chunk.sequence for plan in self._unfinished for chunk in plan.chunks)

    def keep_until_commit(self, sequence: Sequence) -> None:
        """Keep the batch row and the KV cache blocks of an ended sequence until no plan uses them.

        The row and the blocks are kept until every plan that contains the sequence is committed.
        """
        self.ended_sequences[sequence] = None

    def plan_next(self, before: StepPlan, plan_step: Callable[[], StepPlan]) -> StepPlan:
        """Plan the next step while the current step is still running.

        The plan assumes that the running step adds exactly one token to each sequence that samples.
        Example: the running step computes the last known token of a sequence with 20 tokens, and
        samples the token at index 20:

        1. The placeholder `_PENDING` is appended to the sequence, which then has 21 tokens. 20 of
           them count as computed.
        2. `plan_step` plans a chunk with only the token at index 20.
        3. The placeholder is removed.
        4. A pair in `StepPlan.pending` states which sampled token is the input of the chunk.

        If the assumption was wrong, `settle` corrects the plan after the running step has ended.

        Args:
            before: the plan of the running step. The plan must not contain draft tokens. If the
                running step was planned ahead, pass the plan that `settle` returned.
            plan_step: a function that plans a step from the current state of the sequences.

        Returns:
            The plan of the next step. A plan without chunks needs no commit.

        Mutates: `num_computed_tokens` of the sequences in `before`, as if the step had ended.
        """
        sampling_sequences = _append_placeholders(before)
        self.is_planning = True
        try:
            plan = plan_step()
        finally:
            self.is_planning = False
            _remove_placeholders(sampling_sequences)
        if plan.chunks:
            # The engine does not run a plan without chunks, so such a plan is not stored as
            # unfinished.
            _add_pending_tokens(plan, sampling_sequences)
            self._unfinished = [before, plan]
        return plan

    def settle(self, plan: StepPlan, device_token_ids: abc.Sequence[int]) -> StepPlan:
        """Correct a plan that was made before the result of the previous step was known.

        The plan assumed that the previous step adds exactly one token to each sequence that
        samples. A chunk whose input is this token is corrected in two cases:

            The device sampled another token.       The chunk gets no tokens, and does not sample.
            The sequence got more than one token.   The chunk does not sample.

        Example of the second case: a sequence had 20 tokens. The previous step sampled the token at
        index 20, and then the grammar forced the token at index 21. The chunk computes the token at
        index 20, but must not sample, because the next token is already known.

        The previous step must have been committed, and none of its sequences may have failed.

        Args:
            plan: the plan that `plan_next` returned.
            device_token_ids: the tokens that the previous step sampled on the device. The step of
                `plan` uses these tokens as its input, even if a token was replaced afterwards.

        Returns:
            The corrected plan, or `plan` if no chunk was wrong.
        """
        corrected: dict[int, Chunk] = {}
        # `plan.pending` lists the chunks whose input token was not known when the plan was made.
        for chunk_index, sampled_index in plan.pending:
            chunk = plan.chunks[chunk_index]
            input_token = device_token_ids[sampled_index]
            token_ids = chunk.sequence.token_ids
            if token_ids[chunk.start] != input_token:  # Another token was sampled.
                corrected[chunk_index] = chunk._replace(num_tokens=0, samples=False)
            elif len(token_ids) > chunk.start + 1:  # The sequence got more than one token.
                corrected[chunk_index] = chunk._replace(samples=False)
        if not corrected:
            return plan
        settled = _with_chunks(plan, corrected)
        self._unfinished = [settled if other is plan else other for other in self._unfinished]
        return settled

    def remove(self, plan: StepPlan) -> None:
        """Remove the plan of a finished or discarded step. Do nothing if the plan is unknown."""
        self._unfinished = [other for other in self._unfinished if other is not plan]

    def will_end(self, sequence: Sequence) -> bool:
        """Return whether a sequence has ended or reaches its length limit in the running step."""
        reaches_limit = len(sequence.token_ids) >= sequence.max_total_tokens
        return reaches_limit or sequence in self.ended_sequences

    def take_releasable(self) -> list[Sequence]:
        """Remove and return the ended sequences that no unfinished step uses."""
        planned = {chunk.sequence for plan in self._unfinished for chunk in plan.chunks}
        releasable = [sequence for sequence in self.ended_sequences if sequence not in planned]
        for sequence in releasable:
            del self.ended_sequences[sequence]
        return releasable


def _with_chunks(plan: StepPlan, replacements: dict[int, Chunk]) -> StepPlan:
    """Return a copy of `plan` in which some chunks are replaced by the chunks in `replacements`."""
    chunks = [replacements.get(index, chunk) for index, chunk in enumerate(plan.chunks)]
    return replace(plan, chunks=chunks, num_tokens=sum(chunk.num_tokens for chunk in chunks))


def _append_placeholders(plan: StepPlan) -> list[Sequence]:
    """Update the sequences of a running step as if the step had already ended.

    The chunks count as computed, and each sampling sequence gets the placeholder `_PENDING` in
    place of the token that is still being sampled. The result contains the sampling sequences in
    the order of their chunks. `_remove_placeholders` removes the placeholders.
    """
    sampling_sequences = []
    for chunk in plan.chunks:
        sequence = chunk.sequence
        sequence.num_computed_tokens = chunk.start + chunk.num_tokens
        if chunk.samples:
            sequence.token_ids.append(_PENDING)
            sampling_sequences.append(sequence)
    return sampling_sequences


def _remove_placeholders(sampling_sequences: list[Sequence]) -> None:
    """Remove the placeholders that `_append_placeholders` has appended.

    `num_computed_tokens` is not reset, because the running step will compute all its tokens.
    """
    for sequence in sampling_sequences:
        sequence.token_ids.pop()


def _add_pending_tokens(plan: StepPlan, sampling_sequences: list[Sequence]) -> None:
    """Add a pair to `plan.pending` for each sequence whose input token is still being sampled.

    The pair contains the index of the chunk and the index of the token, which is the position of
    the sequence in `sampling_sequences`.
    """
    sampled_indices = {sequence: index for index, sequence in enumerate(sampling_sequences)}
    for chunk_index, chunk in enumerate(plan.chunks):
        if chunk.sequence in sampled_indices:
            plan.pending.append((chunk_index, sampled_indices[chunk.sequence]))
