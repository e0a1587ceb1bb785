"""Records how many requests and tokens each client uses, to enforce limits per minute."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple


class StoredUsage(NamedTuple):
    """The used amount of a limit, and the time at which this amount was stored."""

    amount: float
    time: float


NOTHING_USED = StoredUsage(0.0, -math.inf)


class Usages:
    """Stores how much of each limit is used. The used amounts decrease as time passes.

    Each limit has a key, such as "requests of team-a". All times are seconds of time.monotonic().
    """

    def __init__(self) -> None:
        self._stored: dict[str, StoredUsage] = {}

    def used(self, key: str, per_minute: int, now: float) -> float:
        """Return how much of a limit is used at the time `now`.

        Example: an amount of 100 was stored, and `per_minute` is 60. After 10 s, the used amount is
        90.

        Args:
            key: the key of the limit.
            per_minute: the amount that becomes available again in each minute.
            now: the current time.
        """
        stored = self._read(key)
        if not stored.amount:
            return 0.0
        passed_s = max(now - stored.time, 0.0)
        return max(stored.amount - passed_s * per_minute / 60, 0.0)

    def add(self, key: str, amount: float, per_minute: int, now: float) -> None:
        """Increase the used amount of a limit by `amount`.

        See `used` for the other arguments.
        """
        with self._transaction():
            self._write(key, self.used(key, per_minute, now) + amount, now)

    def _transaction(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps other processes from changing the used amounts.

        In this class, the context manager does nothing, because no other process can access the
        used amounts. A subclass that shares the amounts between processes overrides this method.
        """
        return nullcontext()

    def _read(self, key: str) -> StoredUsage:
        """Return the last stored usage of the limit `key`."""
        return self._stored.get(key, NOTHING_USED)

    def _write(self, key: str, amount: float, now: float) -> None:
        self._stored[key] = StoredUsage(amount, now)
