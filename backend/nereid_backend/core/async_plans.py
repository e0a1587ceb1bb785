# SPDX-License-Identifier: Apache-2.0
"""The plans of async scheduling. Each step is planned while the previous step is still running.

    plan            plan_ahead(A)       commit(A)   settle(B)   plan_ahead(B)       commit(B)
    A: a b c        B: a b c d          b ended     B: a c d    C: a c d            ...

Plan B assumes that each sampling sequence of step A gets exactly one token. After step A is
committed, `settle(B)` removes the chunks of B whose sequences got more tokens or ended. `drop(B)`
discards B completely. A sequence that ends while an uncommitted plan contains the sequence keeps
its row and its blocks until that plan is committed.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import replace

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import StepPlan

# The id of a token that is still being sampled while the next step is planned.
_PENDING = -1


class PendingPlans:
    """The plans whose results are not applied yet, and the ended sequences in these plans.

    Attributes:
        is_planning: whether `plan_next` is making a plan at the moment.
        leaving: the sequences that have ended but are part of an uncommitted plan. These sequences
            keep their rows and blocks.
    """

    def __init__(self) -> None:
        self.is_planning = False
        self.leaving: dict[Sequence, None] = {}
        self._plans: list[StepPlan] = []

    def __bool__(self) -> bool:
        """Return whether there is at least one uncommitted plan."""
        return bool(self._plans)

    def __contains__(self, sequence: Sequence) -> bool:
        """Return whether an uncommitted plan contains a sequence."""
        return any(sequence is chunk.sequence for plan in self._plans for chunk in plan.chunks)

    def plan_next(self, before: StepPlan, plan_step: Callable[[], StepPlan]) -> StepPlan:
        """Plan the next step while the current step is still running.

        Example: `before` computes the last known token of a sequence with 20 tokens. The step will
        sample the token at index 20, so the next plan computes a chunk of one token that starts at
        20. The pair of this chunk and the sampled token is added to `StepPlan.pending`.

        While `plan_step` plans, each sequence for which the running step samples has a placeholder
        as its last token.

        Args:
            before: the plan of the running step, without draft tokens. If `before` was made ahead,
                `before` must be the result of `settle`.
            plan_step: a function that plans a step from the current state of the sequences.

        Returns:
            The plan of the next step. A plan without chunks needs no commit.
        """
        sampling: list[Sequence] = []
        # Unpacking the tuple `chunk` takes less time than reading its fields by name.
        for sequence, start, num_tokens, samples, _is_first, _num_logits in before.chunks:
            sequence.num_computed_tokens = start + num_tokens
            if samples:
                sequence.token_ids.append(_PENDING)
                sampling.append(sequence)
        self.is_planning = True
        try:
            plan = plan_step()
        finally:
            self.is_planning = False
            for sequence in sampling:
                sequence.token_ids.pop()
        if not plan.chunks:
            return plan
        # This dict maps each sequence that samples to the index of its token among the sampled
        # tokens of the running step.
        sources = {sequence: source for source, sequence in enumerate(sampling)}
        for index, chunk in enumerate(plan.chunks):
            if chunk.sequence in sources:
                plan.pending.append((index, sources[chunk.sequence]))
        self._plans = [before, plan]
        return plan

    def settle(self, plan: StepPlan, device_token_ids: abc.Sequence[int]) -> StepPlan:
        """Correct the chunks of an early plan after the previous step has ended.

        Example: the plan assumed that a sequence with 20 tokens gets one token, which the plan
        computes. If the grammar forced a second token, the sequence has 22 tokens. The chunk is
        still valid, but it no longer ends at the last token, so it does not sample.

        Args:
            plan: the plan that `plan_next` returned.
            device_token_ids: the input tokens that the step read from the device, because the host
                did not know these tokens yet (see `StepResult.device_token_ids`).

        Returns:
            The plan with two corrections. If a chunk was computed with a wrong input token, the
            chunk loses that token. If a chunk no longer ends at the last token of its sequence, the
            chunk does not sample.
        """
        chunks = plan.chunks
        for index, source in plan.pending:
            chunk = chunks[index]
            token_ids = chunk.sequence.token_ids
            has_right_input = token_ids[chunk.start] == device_token_ids[source]
            if has_right_input and len(token_ids) == chunk.start + 1:
                continue
            if chunks is plan.chunks:
                chunks = list(chunks)
            chunks[index] = chunk._replace(num_tokens=int(has_right_input), samples=False)
        if chunks is plan.chunks:
            return plan
        settled = replace(plan, chunks=chunks, num_tokens=sum(c.num_tokens for c in chunks))
        self._plans = [settled]
        return settled

    def remove(self, plan: StepPlan) -> None:
        """Remove a plan that was committed or dropped. Do nothing if the plan is unknown."""
        self._plans = [other for other in self._plans if other is not plan]

    def will_end(self, sequence: Sequence) -> bool:
        """Return whether a sequence has ended or reaches its length limit in this step."""
        return sequence in self.leaving or len(sequence.token_ids) >= sequence.max_total_tokens

    def take_free(self) -> list[Sequence]:
        """Remove and return the ended sequences that no uncommitted plan contains any more."""
        busy = {chunk.sequence for plan in self._plans for chunk in plan.chunks}
        free = [sequence for sequence in self.leaving if sequence not in busy]
        for sequence in free:
            del self.leaving[sequence]
        return free
