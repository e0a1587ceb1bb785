# SPDX-License-Identifier: Apache-2.0
"""Steps that overlap: the device begins the next one before the host has read this one's tokens.

    host     plan B, queue its pass | wait for A | commit A, queue B's sampling | answer, plan C ...
    device   A .................................. | B's forward pass .......... | B's sampling | C

B is planned on the assumption that each request of A that samples gets one token there; its pass
takes these tokens from where A left them, on the device. B's sampling is queued when A is
committed, so that whatever depends on the tokens so far (grammars, penalties, bad words, where an
answer ends) is known then, as it is without overlap. What has turned out otherwise until then is
not sampled, or is computed again; all of B, if a sequence of A ends with an error.
"""

from collections.abc import Callable

from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import StepPlan, StepResult
from nereid_backend.runner import Flight, Runner
from nereid_backend.step_failures import StepFailures


class LookAhead:
    """Runs a scheduler's steps on a runner; two may be under way."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        failures: StepFailures,
        note_begun: Callable[[StepPlan], None],
    ) -> None:
        """Begin with nothing under way.

        Args:
            scheduler: without guesses, of a path that takes steps that were planned ahead.
            runner: of that path.
            failures: counts steps that fail.
            note_begun: is told of each plan that is begun.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._failures = failures
        self._note_begun = note_begun
        self._flight: Flight | None = None

    def step(self) -> list[RequestUpdate] | None:
        """Finish a step, with the next one begun before that if possible.

        Returns:
            What is new; None if there was nothing to do.

        Raises:
            EngineError: see `StepFailures.tell`.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            return self._finish(flight)
        plan = self._scheduler.plan()
        if not plan.chunks:
            return self._scheduler.commit(plan, StepResult()) or None
        self._note_begun(plan)
        try:
            flight = self._runner.start(plan)
            self._runner.sample(flight, plan)
        except Exception as error:  # noqa: BLE001 - the step's requests end here, and are told
            return self._fail(plan, error)
        return self._finish(flight)

    def _finish(self, flight: Flight) -> list[RequestUpdate]:
        """Begin the next step, and then see what this one brought."""
        plan = self._plan_next(flight)
        ahead: Flight | None = None
        fault: Exception | None = None
        if plan is not None:
            try:
                ahead = self._runner.start(plan, flight)
            except Exception as error:  # noqa: BLE001 - its turn comes below
                fault = error
        try:
            result = self._runner.finish(flight)
        except Exception as error:  # noqa: BLE001 - as above
            updates = self._fail(flight.plan, error)
            has_errors = True
        else:
            self._failures.forget()
            updates = self._scheduler.commit(flight.plan, result)
            has_errors = any(sampled.error is not None for sampled in result.sampled)
        if plan is None:
            return updates
        if fault is not None:
            return updates + self._fail(plan, fault)
        if has_errors:
            self._scheduler.drop(plan)
            return updates
        assert ahead is not None
        return updates + self._go_on(ahead, result)

    def _plan_next(self, flight: Flight) -> StepPlan | None:
        """What can be begun before a step is finished."""
        if self._scheduler.is_held_up:
            return None
        plan = self._scheduler.plan_ahead(flight.plan)
        if not plan.chunks:
            return None
        self._note_begun(plan)
        return plan

    def _go_on(self, ahead: Flight, before: StepResult) -> list[RequestUpdate]:
        """Sample from a step that was begun ahead, now that the one before it is committed."""
        plan = self._scheduler.settle(ahead.plan, before.drawn)
        try:
            self._runner.sample(ahead, plan)
        except Exception as error:  # noqa: BLE001 - as above
            return self._fail(plan, error)
        self._flight = ahead
        return []

    def _fail(self, plan: StepPlan, error: Exception) -> list[RequestUpdate]:
        return self._scheduler.fail(plan, self._failures.tell(plan, error))
