# SPDX-License-Identifier: Apache-2.0
"""Steps planned ahead: while the one before is computed, before its tokens are known.

    plan            plan_ahead(A)       commit(A)   settle(B)   plan_ahead(B)       commit(B)
    A: a b c        B: a b c d          b ended     B: a c d    C: a c d            ...

It is taken for granted then that each request of A that samples gets one token there. What turns
out otherwise is put right when A is committed: settle(B) says what of B still counts, drop(B) that
nothing does. A sequence that ends while a step has it under way keeps its row and blocks until that
step is committed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from nereid_backend.core.request import Request
from nereid_backend.core.step import StepPlan

# Stands for a token that is being sampled while the step after it is planned.
_PENDING = -1


class StepsUnderWay:
    """Plans that are not committed, of which one was made ahead, and who may not leave for them.

    Attributes:
        is_planning: whether a plan is being made ahead.
        leaving: sequences that have ended but are in one of the plans; they have rows and blocks.
    """

    def __init__(self) -> None:
        self.is_planning = False
        self.leaving: dict[Request, None] = {}
        self._plans: list[StepPlan] = []

    def __bool__(self) -> bool:
        """Whether a plan that was made ahead, or the one before it, is not committed."""
        return bool(self._plans)

    def __contains__(self, request: Request) -> bool:
        """Whether a sequence takes part in one of the plans."""
        return any(request is chunk.request for plan in self._plans for chunk in plan.chunks)

    def plan_next(self, before: StepPlan, plan_step: Callable[[], StepPlan]) -> StepPlan:
        """Plan the step after one that is computed now.

        Args:
            before: the last plan, settled if it was made ahead itself; without guesses.
            plan_step: plans a step of what the requests know.

        Returns:
            A plan; one without chunks needs no commit.
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

    def settle(self, plan: StepPlan, drawn: Sequence[int]) -> StepPlan:
        """What counts of a plan that was made ahead, now that the one before it is committed.

        Args:
            plan: as plan_next returned it.
            drawn: what stood for the tokens that were not known (StepResult.drawn).

        Returns:
            The plan to go on with. A chunk that was computed with another token than the right one
            has none any more; one behind which more is known by now does not sample.
        """
        chunks = plan.chunks
        for index, source in plan.pending:
            chunk = chunks[index]
            token_ids = chunk.request.token_ids
            is_right = token_ids[chunk.start] == drawn[source]
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

    def land(self, plan: StepPlan) -> None:
        """A plan is not under way any more."""
        self._plans = [other for other in self._plans if other is not plan]

    def will_end(self, request: Request) -> bool:
        """Whether the step under way is a sequence's last, as far as that is known."""
        return request in self.leaving or len(request.token_ids) >= request.max_total_tokens

    def take_free(self) -> list[Request]:
        """Those of `leaving` that are in no plan any more; they leave it."""
        busy = {chunk.request for plan in self._plans for chunk in plan.chunks}
        free = [request for request in self.leaving if request not in busy]
        for request in free:
            del self.leaving[request]
        return free
