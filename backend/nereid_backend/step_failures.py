# SPDX-License-Identifier: Apache-2.0
"""Steps that fail: what their requests are told, and when an engine gives up."""

import logging

from nereid_backend.core.step import StepPlan
from nereid_backend.errors import EngineError, is_lost_device

logger = logging.getLogger(__name__)


class StepFailures:
    """Counts steps that failed one after the other."""

    def __init__(self, limit: int) -> None:
        """Give up after so many in a row (max_step_failures)."""
        self._limit = limit
        self._count = 0

    def forget(self) -> None:
        """A step has gone well."""
        self._count = 0

    def tell(self, plan: StepPlan, error: Exception) -> str:
        """Count a step that failed; returns what its requests are told.

        Raises:
            EngineError: the device is lost, or too many steps in a row have failed.
        """
        logger.error("a step of %d sequences failed", len(plan.chunks), exc_info=error)
        message = f"the engine failed: {type(error).__name__}: {error}"
        self._count += 1
        if is_lost_device(message):
            raise EngineError(f"{message}; the device is lost") from error
        if self._count >= self._limit:
            raise EngineError(
                f"{message}; {self._limit} steps in a row have failed (max_step_failures)"
            ) from error
        return message
