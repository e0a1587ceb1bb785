# SPDX-License-Identifier: Apache-2.0
"""Async scheduling: the device starts the next step before the host has read this step's tokens.

    host     plan B, launch its pass | wait for A | commit A, launch B's sampling | report, plan C
    device   A ................................... | B's forward pass .......... | B's sampling | C

The plan of step B assumes that each sampling sequence of step A gets exactly one token. The forward
pass of B reads these tokens from device memory, where A wrote them. The sampling of B is launched
after A is committed. By then, the host knows everything that depends on the earlier tokens:
grammars, penalties, bad words, and which answers have ended. If the assumption was wrong for a
sequence, B does not sample a token for the sequence, and a later step computes wrong tokens again.
If a sequence of A ends with an error, B is dropped completely.
"""

from collections.abc import Callable

from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import StepPlan, StepResult
from nereid_backend.runner import Runner, RunningStep
from nereid_backend.step_failures import StepFailures


class AsyncSteps:
    """Runs the steps of a scheduler on a runner. Two steps may be running at the same time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        failures: StepFailures,
        record_start: Callable[[StepPlan], None],
    ) -> None:
        """Create an object without running steps.

        Args:
            scheduler: a scheduler without speculative decoding.
            runner: a runner whose path supports steps that were planned ahead.
            failures: the counter of failed steps.
            record_start: a function that is called with each plan whose step is about to start.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._failures = failures
        self._record_start = record_start
        self._running_step: RunningStep | None = None

    def step(self) -> list[RequestUpdate] | None:
        """Start the next step if possible, then finish the running step.

        Returns:
            The updates of the finished step; None if there was nothing to compute or report.

        Raises:
            EngineError: if the device is lost, or if too many steps in a row have failed.
        """
        step, self._running_step = self._running_step, None
        if step is not None:
            return self._finish(step)
        plan = self._scheduler.plan()
        if not plan.chunks:
            return self._scheduler.commit(plan, StepResult()) or None
        self._record_start(plan)
        try:
            step = self._runner.start(plan)
            self._runner.sample(step, plan)
        except Exception as error:  # noqa: BLE001 - ends the step's requests with an error
            return self._fail(plan, error)
        return self._finish(step)

    def _finish(self, step: RunningStep) -> list[RequestUpdate]:
        """Start the step after `step` if possible, then wait for `step` and return its updates."""
        plan = self._plan_next(step)
        next_step: RunningStep | None = None
        start_error: Exception | None = None
        if plan is not None:
            try:
                next_step = self._runner.start(plan, step)
            except Exception as error:  # noqa: BLE001 - reported below
                # The running step must be finished and reported first.
                start_error = error
        try:
            result = self._runner.finish(step)
        except Exception as error:  # noqa: BLE001 - ends the step's requests with an error
            updates = self._fail(step.plan, error)
            has_errors = True
        else:
            self._failures.forget()
            updates = self._scheduler.commit(step.plan, result)
            has_errors = any(sampled.error is not None for sampled in result.sampled)
        if plan is None:
            return updates
        if start_error is not None:
            return updates + self._fail(plan, start_error)
        if has_errors:
            self._scheduler.drop(plan)
            return updates
        assert next_step is not None
        return updates + self._sample_next(next_step, result)

    def _plan_next(self, step: RunningStep) -> StepPlan | None:
        """Plan the next step before `step` is finished. Return None if that is not possible."""
        if self._scheduler.is_held_up:
            return None
        plan = self._scheduler.plan_ahead(step.plan)
        if not plan.chunks:
            return None
        self._record_start(plan)
        return plan

    def _sample_next(self, next_step: RunningStep, before: StepResult) -> list[RequestUpdate]:
        """Launch the sampling of a step that was started before the previous step was committed."""
        plan = self._scheduler.settle(next_step.plan, before.device_token_ids)
        try:
            self._runner.sample(next_step, plan)
        except Exception as error:  # noqa: BLE001 - ends the step's requests with an error
            return self._fail(plan, error)
        self._running_step = next_step
        return []

    def _fail(self, plan: StepPlan, error: Exception) -> list[RequestUpdate]:
        return self._scheduler.fail(plan, self._failures.tell(plan, error))
