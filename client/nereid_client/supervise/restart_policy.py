"""How often a part of `nereid serve` may be started again, and when."""

import time
from collections.abc import Callable
from dataclasses import dataclass

_LONGEST_WAIT_S = 60.0
_FORGIVEN_AFTER_S = 600.0


@dataclass(frozen=True)
class RestartPolicy:
    """Limits on starting a part again.

    Attributes:
        max_restarts: so often in a row; 0 never.
        backoff_s: the wait before the second restart in a row, doubled for each further one.
    """

    max_restarts: int
    backoff_s: float


class Restarts:
    """Counts the restarts of one part. Ten minutes without a failure wipe the slate clean."""

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._last_failure = float("-inf")
        self.number = 0

    def next_wait_s(self) -> float | None:
        """Note a failure; seconds until the part may start again, None: not any more."""
        now = self._clock()
        if now - self._last_failure >= _FORGIVEN_AFTER_S:
            self.number = 0
        self._last_failure = now
        if self.number >= self._policy.max_restarts:
            return None
        self.number += 1
        if self.number == 1:
            return 0.0
        return float(min(self._policy.backoff_s * 2 ** (self.number - 2), _LONGEST_WAIT_S))

    def describe(self) -> str:
        """Which restart this is."""
        return f"restart {self.number} of {self._policy.max_restarts}"
