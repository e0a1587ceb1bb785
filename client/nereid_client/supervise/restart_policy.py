"""The rules by which `nereid serve` restarts a program that has ended."""

import time
from collections.abc import Callable
from dataclasses import dataclass

_MAX_WAIT_S = 60.0
_RESET_AFTER_S = 600.0
_MAX_DOUBLINGS = 64


@dataclass(frozen=True)
class RestartPolicy:
    """The limits on restarts.

    Attributes:
        max_restarts: the largest number of consecutive restarts. 0 means that nothing is restarted.
        backoff_s: the waiting time before the second consecutive restart, in seconds. The time
            doubles with each further restart. The first restart is immediate.
    """

    max_restarts: int
    backoff_s: float


class Restarts:
    """Counts the consecutive restarts of a program.

    The count returns to zero after the program has run for 10 minutes.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._last_failure = float("-inf")
        self.number = 0

    def record_failure(self) -> float | None:
        """Record a failure, and return the seconds to wait before the restart.

        Return None if the program must not be restarted again.

        Mutates: `number`, the number of restarts in a row, and the time of the last failure.
        """
        now = self._clock()
        if now - self._last_failure >= _RESET_AFTER_S:
            self.number = 0
        self._last_failure = now
        if self.number >= self._policy.max_restarts:
            return None
        self.number += 1
        if self.number == 1:
            return 0.0
        # The second restart waits for `backoff_s`. The exponent is limited, because Python cannot
        # multiply a float by an integer such as 2**1024.
        num_doublings = min(self.number - 2, _MAX_DOUBLINGS)
        return float(min(self._policy.backoff_s * 2**num_doublings, _MAX_WAIT_S))

    def describe(self) -> str:
        """Describe this restart, for example as "restart 2 of 5"."""
        return f"restart {self.number} of {self._policy.max_restarts}"
