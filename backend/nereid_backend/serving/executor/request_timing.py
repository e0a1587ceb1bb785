# SPDX-License-Identifier: Apache-2.0
"""When a request came, began, and must have ended; all by time.monotonic()."""

import math
from dataclasses import dataclass

from nereid_backend.errors import CapacityError, DeadlineError, NereidError


@dataclass(slots=True)
class Timing:
    """The times of one request in the executor.

    Attributes:
        arrived: it came.
        num_prompt_tokens: what it brought.
        queue_timeout_s: it may wait so long before it is computed; infinite for no limit.
        timeout_s: it may take so long in all.
        begun: the engine began to compute it; None while it waits.
        first_token: the first token came from the engine.
    """

    arrived: float = 0.0
    num_prompt_tokens: int = 0
    queue_timeout_s: float = math.inf
    timeout_s: float = math.inf
    begun: float | None = None
    first_token: float | None = None

    @property
    def next_deadline(self) -> float:
        """When `overdue` has to be looked at next."""
        is_waiting = self.begun is None
        limit = min(self.queue_timeout_s, self.timeout_s) if is_waiting else self.timeout_s
        return self.arrived + limit

    def overdue(self, now: float) -> NereidError | None:
        """What to answer when one of the request's times is over."""
        if now < self.next_deadline:
            return None
        waited_s = now - self.arrived
        if self.begun is None and waited_s >= self.queue_timeout_s:
            return CapacityError(
                f"the request waited {waited_s:.1f} s for its turn; the limit is "
                f"{self.queue_timeout_s:g} s (queue_timeout); try again later"
            )
        return DeadlineError(
            f"the request was not finished after {waited_s:.1f} s; the limit is "
            f"{self.timeout_s:g} s (timeout); ask for fewer tokens or allow more time"
        )


def limit_of(asked_s: float | None, default_s: float) -> float:
    """A limit from what the request asks for (None: nothing) and the default; 0 is no limit."""
    limit_s = default_s if asked_s is None else asked_s
    return limit_s if limit_s > 0 else math.inf
