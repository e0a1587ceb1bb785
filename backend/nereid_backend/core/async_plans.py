# SPDX-License-Identifier: Apache-2.0
"""Plans that are made ahead for async scheduling, while the previous step is still running.

    plan            plan_ahead(A)       commit(A)   settle(B)   plan_ahead(B)       commit(B)
    A: a b c        B: a b c d          b ended     B: a c d    C: a c d            ...

Plan B assumes that each sampling sequence of step A gets exactly one token. When A is committed,
`settle(B)` removes the parts of B for which that was wrong, or `drop(B)` discards B. A sequence
that ends while an uncommitted plan contains it keeps its row and its blocks until that plan is
committed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from nereid_backend.core.request import Request
from nereid_backend.core.step import StepPlan

# Replaces a token that is still being sampled while the next step is planned.
_PENDING = -1


class PendingPlans:
    """The plans that are not committed yet, and the ended sequences that these plans contain.

    Attributes:
        is_planning: whether a plan is being made ahead at the moment.
        leaving: the sequences that have ended but are in one of the plans. They keep their rows
            and blocks.
    """

    def __init__(self) -> None:
        self.is_planning = False
        self.leaving: dict[Request, None] = {}
        self._plans: list[StepPlan] = []

    def __bool__(self) -> bool:
        """Return whether any plan is not committed."""
        return bool(self._plans)

    def __contains__(self, request: Request) -> bool:
        """Return whether one of the plans contains a sequence."""
        return any(request is chunk.request for plan in self._plans for chunk in plan.chunks)

    def plan_next(self, before: StepPlan, plan_step: Callable[[], StepPlan]) -> StepPlan:
        """Plan the step that follows a running step.

        Args:
            before: the plan of the running step, without draft tokens. If that plan was made ahead
                itself, it must be settled.
            plan_step: plans a step from the current state of the sequences.

        Returns:
            A plan. A plan without chunks needs no commit.
        """
        sampling = [chunk.request for chunk in before.chunks if chunk.samples]
        for chunk in before.chunks:
            chunk.request.num_computed_tokens = chunk.start + chunk.num_tokens
        for request in sampling:
            request.token_ids.append(_PENDING)
        self.is_planning = True
        try:
            plan = plan_step()
        finally:
            self.is_planning = False
            for request in sampling:
                request.token_ids.pop()
        if not plan.chunks:
            return plan
        sources = {request: source for source, request in enumerate(sampling)}
        plan.pending.extend(
            (index, sources[chunk.request])
            for index, chunk in enumerate(plan.chunks)
            if chunk.request in sources
        )
        self._plans = [before, plan]
        return plan

    def settle(self, plan: StepPlan, device_token_ids: Sequence[int]) -> StepPlan:
        """Return the valid part of a plan that was made ahead, after the previous plan's commit.

        Args:
            plan: the plan that plan_next returned.
            device_token_ids: the tokens that the step used as input in place of the tokens that
                were not known (StepResult.device_token_ids).

        Returns:
            The plan with two corrections. A chunk that was computed with a wrong input token loses
            its token. A chunk that is no longer at the end of its sequence does not sample.
        """
        chunks = plan.chunks
        for index, source in plan.pending:
            chunk = chunks[index]
            token_ids = chunk.request.token_ids
            is_right = token_ids[chunk.start] == device_token_ids[source]
            if is_right and len(token_ids) == chunk.start + 1:
                continue
            if chunks is plan.chunks:
                chunks = list(chunks)
            chunks[index] = chunk._replace(num_tokens=int(is_right), samples=False)
        if chunks is plan.chunks:
            return plan
        settled = replace(plan, chunks=chunks, num_tokens=sum(c.num_tokens for c in chunks))
        self._plans = [settled]
        return settled

    def remove(self, plan: StepPlan) -> None:
        """Remove a plan that was committed or dropped. Do nothing if it is unknown."""
        self._plans = [other for other in self._plans if other is not plan]

    def will_end(self, request: Request) -> bool:
        """Return whether the running step is known to be the last step of a sequence."""
        return request in self.leaving or len(request.token_ids) >= request.max_total_tokens

    def take_free(self) -> list[Request]:
        """Remove and return the sequences in `leaving` that no plan contains any more."""
        busy = {chunk.request for plan in self._plans for chunk in plan.chunks}
        free = [request for request in self.leaving if request not in busy]
        for request in free:
            del self.leaving[request]
        return free
