"""A limit that all clients share, so that no single client can use all of it."""

from collections import Counter

# After a request is admitted, its client may use at most this number of times the amount that is
# still free. If only one client sends requests, that client can use three quarters of the limit. A
# second client can then use three quarters of the remaining quarter.
_TIMES_THE_REST = 3


class SharedBudget:
    """The use of a limited resource, in total and for each named client.

    Args:
        limit: the largest total.

    Attributes:
        used: the current total.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._by_client: Counter[str] = Counter()

    def used_by(self, client: str) -> int:
        """Return the amount that a client uses now."""
        return self._by_client[client]

    def fits(self, client: str, amount: int) -> bool:
        """Return whether a client may use `amount` more.

        Only a client with a name is limited to a share. A client that uses nothing yet may use the
        whole remaining amount.
        """
        left = self.limit - self.used - amount
        own = self._by_client[client]
        has_share = bool(client) and own > 0
        return left >= 0 and (not has_share or own + amount <= _TIMES_THE_REST * left)

    def add(self, client: str, amount: int) -> None:
        """Record that a client uses `amount` more."""
        self.used += amount
        self._by_client[client] += amount

    def remove(self, client: str, amount: int) -> None:
        """Record that a client no longer uses `amount`."""
        self.used -= amount
        self._by_client[client] -= amount
        if not self._by_client[client]:
            del self._by_client[client]
