# SPDX-License-Identifier: Apache-2.0
"""Runs the main loop of the engine: plan a step, run the step, and commit the new tokens.

With async scheduling, the device starts the next step before the host has read the tokens of the
current step:

    host     plan B, launch its pass | wait for A | commit A, launch B's sampling | report, plan C
    device   A ................................... | B's forward pass .......... | B's sampling | C

The plan of step B assumes that each sequence that is sampled in step A gets exactly one token. Step
A writes these tokens to device memory, and the forward pass of B reads them there. The sampling of
B is launched after A is committed. At this time, the host knows the tokens of A, so it can apply
grammars, penalties and bad words, and it knows which answers have ended. If the assumption was
wrong for a sequence, no token is sampled for the sequence in B, and a later step repeats the
computation with the correct tokens. If a sequence of A ends with an error, B is discarded
completely.
"""

import logging
import time
from dataclasses import dataclass

from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import StepPlan, StepResult
from nereid_backend.errors import EngineError, LostRankError, is_lost_device
from nereid_backend.step_runner import Runner, RunningStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _NextStep:
    """The next step, which was planned while the current step was running.

    Attributes:
        plan: the plan of the step.
        running: the started step; None if the step could not be started.
        error: the error if the step could not be started. `_start_next` does not raise the error,
            because the current step must be committed first.
    """

    plan: StepPlan
    running: RunningStep | None = None
    error: Exception | None = None


class StepLoop:
    """Runs steps: the scheduler plans each step, and the runner computes the step.

    Attributes:
        started: one pair for each request whose first tokens were planned in the last call of
            `step`: the request id, and the start time of the step by time.monotonic(). If a request
            is preempted before its first output token, the request appears in a later step again.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, max_step_failures: int, is_async: bool
    ) -> None:
        """Create a loop without a running step.

        Args:
            scheduler: plans the steps.
            runner: executes the plans.
            max_step_failures: the loop raises an EngineError after this number of consecutive
                failed steps.
            is_async: whether the next step starts before the tokens of the current step are read.
                If True, the scheduler must not propose draft tokens, and the runner's forward path
                must support pending chunks (see `StepPlan.pending`).
        """
        # Each pair consists of a request id and the start time of a step. Each call of `step`
        # creates a new list, because callers may still use the previous list.
        self.started: list[tuple[str, float]] = []
        self._scheduler = scheduler
        self._runner = runner
        self._max_step_failures = max_step_failures
        self._is_async = is_async
        self._num_failures = 0
        # The step that is still running when the method `step` returns. Only async scheduling has
        # such a step. If the attribute is None, the next call of `step` plans a step.
        self._running_step: RunningStep | None = None

    def step(self) -> list[RequestUpdate]:
        """Finish the running step. If no step is running, plan, run and finish a new step.

        With async scheduling, the method also starts the next step before it finishes the current
        step. The next step is still running when the method returns, and the next call finishes it.

        If a step fails, its sequences end with an error, and the loop can continue.

        Returns:
            The updates of the sequences that got tokens or ended.

        Raises:
            EngineError: the device is lost, or too many consecutive steps have failed.
        """
        self.started = []
        step = self._running_step
        self._running_step = None
        if step is not None:
            return self._commit_and_start_next(step)
        plan = self._scheduler.plan()
        if not plan.chunks:
            # This step has no tokens to compute. Some sequences may have ended since the last step,
            # for example because they were aborted. `commit` returns the last updates of these
            # sequences.
            return self._scheduler.commit(plan, StepResult())
        return self._run(plan)

    def pause(self) -> None:
        """Tell the runner that no sequence is running, so the next step may be much later."""
        self._runner.pause()

    def _run(self, plan: StepPlan) -> list[RequestUpdate]:
        """Compute the step that `plan` describes, apply the result, and return the updates.

        If the step fails, its sequences end with an error.
        """
        self._record_start(plan)
        start_time = time.perf_counter()
        try:
            # On a GPU, `start` launches the forward pass and `sample` launches the sampling. Both
            # calls return before the GPU has finished.
            step = self._runner.start(plan)
            self._runner.sample(step, plan)
        except Exception as error:  # noqa: BLE001 - every error ends the requests of the step
            return self._fail(plan, error)
        return self._commit_and_start_next(step, start_time)

    def _commit_and_start_next(
        self, step: RunningStep, start_time: float | None = None
    ) -> list[RequestUpdate]:
        """Wait for a step and commit its result. With async scheduling, start the next step first.

        The next step is discarded if this step fails. `start_time` is the time at which this step
        was started, by time.perf_counter(). If it is given, the duration of the step is recorded,
        from which the scheduler computes the cost of draft tokens.
        """
        next_step = self._start_next(step) if self._is_async else None
        try:
            result = self._runner.finish(step)
        except Exception as error:  # noqa: BLE001 - every error ends the requests of the step
            updates = self._fail(step.plan, error)
            if next_step is not None:
                updates += self._discard(next_step)
            return updates
        self._num_failures = 0
        if start_time is not None:
            self._scheduler.add_time(step.plan, time.perf_counter() - start_time)
        updates = self._scheduler.commit(step.plan, result)
        if next_step is not None:
            updates += self._sample_next(next_step, result)
        return updates

    def _start_next(self, step: RunningStep) -> _NextStep | None:
        """Plan and start the next step while the step `step` is still running.

        Only the forward pass is started. `_sample_next` samples the tokens later. Return None if
        the next step cannot be planned yet.
        """
        if self._scheduler.must_wait_for_step:
            # The last plan needed a preemption or a block copy. Neither is possible while a step is
            # running.
            return None
        plan = self._scheduler.plan_ahead(step.plan)
        if not plan.chunks:
            return None  # No sequence has a token to compute.
        self._record_start(plan)
        try:
            return _NextStep(plan, running=self._runner.start(plan, step))
        except Exception as error:  # noqa: BLE001 - `_sample_next` ends the requests of the step
            # The error is handled later, because the running step must be committed first.
            return _NextStep(plan, error=error)

    def _sample_next(self, step: _NextStep, previous_result: StepResult) -> list[RequestUpdate]:
        """Launch the sampling of the next step, if its forward pass has been started.

        The next step is discarded instead in two cases: its forward pass could not be started, or a
        sequence of the previous step has failed.

        Returns:
            The updates of the sequences that end because the next step has failed; empty if the
            step has not failed.

        Mutates: `_running_step`, which becomes the next step if its sampling was launched.
        """
        has_failed_sequence = any(sampled.error is not None for sampled in previous_result.sampled)
        if step.running is None or has_failed_sequence:
            return self._discard(step)
        plan = self._scheduler.settle(step.plan, previous_result.device_token_ids)
        try:
            self._runner.sample(step.running, plan)
        except Exception as error:  # noqa: BLE001 - every error ends the requests of the step
            return self._fail(plan, error)
        self._running_step = step.running
        return []

    def _discard(self, step: _NextStep) -> list[RequestUpdate]:
        """Discard the next step. If it could not be started, end its sequences with its error.

        A started step has read tokens that were not sampled correctly. Its sequences continue: the
        loop plans the step again, so there are no updates.
        """
        if step.error is not None:
            return self._fail(step.plan, step.error)
        self._scheduler.drop(step.plan)
        return []

    def _fail(self, plan: StepPlan, error: Exception) -> list[RequestUpdate]:
        """End the sequences of a failed step with an error, and return their last updates.

        The loop can continue after most errors. The errors below end the loop.

        Mutates: `_num_failures`.

        Raises:
            LostRankError: a process of tensor parallelism has ended.
            EngineError: the GPU is lost, or too many consecutive steps have failed.
        """
        if isinstance(error, LostRankError):
            raise error
        logger.error("A step with %d sequences failed.", len(plan.chunks), exc_info=error)
        message = f"the engine failed: {type(error).__name__}: {error}"
        self._num_failures += 1
        if is_lost_device(message):
            raise EngineError(f"the device is lost, because {message}") from error
        if self._num_failures >= self._max_step_failures:
            raise EngineError(
                f"{self._num_failures} consecutive steps have failed (max_step_failures): {message}"
            ) from error
        return self._scheduler.fail_step(plan, message)

    def _record_start(self, plan: StepPlan) -> None:
        """Add to `started` each request whose first tokens this step computes."""
        now = time.monotonic()
        self.started += [
            (chunk.sequence.request_id, now)
            for chunk in plan.chunks
            if chunk.is_first and not chunk.sequence.was_reported
        ]
