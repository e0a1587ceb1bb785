# SPDX-License-Identifier: Apache-2.0
"""The plans of async scheduling. Each step is planned while the previous step is still running.

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
from nereid_backend.core.step import StepPlan

# The id of a token that is still being sampled while the next step is planned.
_PENDING = -1


class PendingPlans:
    """The uncommitted plans, and the ended sequences that these plans contain.

    Attributes:
        is_planning: whether `plan_next` is making a plan at the moment.
        leaving: the ended sequences that an uncommitted plan still contains. These sequences keep
            their rows and blocks.
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
        20. The indices of this chunk and of the sampled token are added to `StepPlan.pending`.

        Before `plan_step` is called, each sequence that samples in the running step gets a
        placeholder token. The placeholders are removed afterwards.

        Args:
            before: the plan of the running step. The plan must not contain draft tokens. If the
                running step was planned ahead, pass the plan that `settle` returned.
            plan_step: a function that plans a step from the current state of the sequences.

        Returns:
            The plan of the next step. A plan without chunks needs no commit.
        """
        sampling: list[Sequence] = []
        # Unpacking a tuple takes less time than reading its fields by name.
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
        # Maps each sampling sequence to the index of its token in the result of the running step.
        sources = {sequence: source for source, sequence in enumerate(sampling)}
        for index, chunk in enumerate(plan.chunks):
            if chunk.sequence in sources:
                plan.pending.append((index, sources[chunk.sequence]))
        self._plans = [before, plan]
        return plan

    def settle(self, plan: StepPlan, device_token_ids: abc.Sequence[int]) -> StepPlan:
        """Correct a plan that was made ahead. The previous step must have ended.

        Example: a sequence had 20 tokens. The plan assumed that the previous step adds one token,
        and the plan has a chunk for this token. If the grammar forced a second token, the sequence
        now has 22 tokens. The chunk must not sample, because it no longer contains the last token
        of the sequence.

        Args:
            plan: the plan that `plan_next` returned.
            device_token_ids: the tokens that the step of the plan used as its input; see
                `StepResult.device_token_ids`.

        Returns:
            The corrected plan. If the input token of a chunk was wrong, the chunk has no tokens and
            does not sample. If a chunk no longer contains the last token of its sequence, the chunk
            does not sample.
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
        """Return whether a sequence has ended or reaches its length limit in the running step."""
        return sequence in self.leaving or len(sequence.token_ids) >= sequence.max_total_tokens

    def take_free(self) -> list[Sequence]:
        """Remove the sequences without an uncommitted plan from `leaving`, and return them."""
        busy = {chunk.sequence for plan in self._plans for chunk in plan.chunks}
        free = [sequence for sequence in self.leaving if sequence not in busy]
        for sequence in free:
            del self.leaving[sequence]
        return free
