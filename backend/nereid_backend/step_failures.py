# SPDX-License-Identifier: Apache-2.0
"""The counter of failed steps, which decides when the engine must end."""

import logging

from nereid_backend.core.step import StepPlan
from nereid_backend.errors import EngineError, is_lost_device

logger = logging.getLogger(__name__)


class StepFailures:
    """Counts consecutive failed steps."""

    def __init__(self, limit: int) -> None:
        """Store the number of consecutive failures after which the engine ends."""
        self._limit = limit
        self._count = 0

    def reset(self) -> None:
        """Set the count to 0 after a successful step."""
        self._count = 0

    def record(self, plan: StepPlan, error: Exception) -> str:
        """Count a failed step, and return the error message for the requests of the step.

        Args:
            plan: the plan of the failed step.
            error: the exception that the step raised.

        Raises:
            EngineError: if the GPU is lost, or if too many consecutive steps have failed. The
                engine must end.
        """
        logger.error("a step with %d sequences failed", len(plan.chunks), exc_info=error)
        message = f"the engine failed: {type(error).__name__}: {error}"
        self._count += 1
        if is_lost_device(message):
            raise EngineError(f"the device is lost, because {message}") from error
        if self._count >= self._limit:
            raise EngineError(
                f"{self._limit} consecutive steps have failed (max_step_failures): {message}"
            ) from error
        return message
