"""Records how many requests and tokens each client uses in a minute, for the client's limits."""

import math
from contextlib import AbstractContextManager, nullcontext


class Usages:
    """Stores how much of each limit has been used. The stored amounts decrease with time.

    Each limit has a key, such as "requests of team-a". All times are seconds of time.monotonic().
    """

    def __init__(self) -> None:
        self._stored: dict[str, tuple[float, float]] = {}

    def used(self, key: str, per_minute: int, now: float) -> float:
        """Return how much of a limit is used at the time `now`.

        Example: an amount of 100 was stored, and `per_minute` is 60. After 10 s, the used amount is
        90.

        Args:
            key: the key of the limit.
            per_minute: the amount that becomes available again in each minute.
            now: the current time.
        """
        amount, then = self._read(key)
        passed_s = max(now - then, 0.0)
        return max(amount - passed_s * per_minute / 60, 0.0) if amount else 0.0

    def add(self, key: str, amount: float, per_minute: int, now: float) -> None:
        """Add `amount` to the used amount of a limit.

        The other parameters are those of `used`.
        """
        with self._transaction():
            self._write(key, self.used(key, per_minute, now) + amount, now)

    def _transaction(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps other processes from changing the used amounts.

        In this class, the context manager does nothing, because no other process can access the
        used amounts. A subclass that shares the amounts between processes overrides this method.
        """
        return nullcontext()

    def _read(self, key: str) -> tuple[float, float]:
        """Return the last stored used amount, and the time when this amount was stored."""
        return self._stored.get(key, (0.0, -math.inf))

    def _write(self, key: str, amount: float, now: float) -> None:
        self._stored[key] = (amount, now)
