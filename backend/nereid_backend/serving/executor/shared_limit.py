# SPDX-License-Identifier: Apache-2.0
"""Divides a limited resource among the clients, so that every client gets some of the resource."""

from collections import Counter

# If a client already uses some of the resource, it may get more only if its new total is at most
# three times the amount that remains free. Example: if the limit is 16, the first client may use up
# to 12, because 4 remain free. A second client may then use up to 3 of these 4.
_TIMES_THE_REST = 3


class SharedLimit:
    """Counts how much of a limited resource is used, in total and by each client.

    Attributes:
        limit: the largest total.
        used: the current total.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._by_client: Counter[str] = Counter()

    @property
    def num_clients(self) -> int:
        """The number of clients that currently use some of the limited resource."""
        return len(self._by_client)

    def used_by(self, client: str) -> int:
        """Return how much of the limited resource a client currently uses."""
        return self._by_client[client]

    def allows(self, client: str, amount: int) -> bool:
        """Return whether a client may use an additional amount of the limited resource.

        A client that uses nothing yet may use everything that is free. A client without a name
        (`client` is "") may also use everything that is free.
        """
        left = self.limit - self.used - amount
        own = self._by_client[client]
        has_share = bool(client) and own > 0
        return left >= 0 and (not has_share or own + amount <= _TIMES_THE_REST * left)

    def add(self, client: str, amount: int) -> None:
        """Record that a client uses an additional amount of the limited resource."""
        self.used += amount
        self._by_client[client] += amount

    def remove(self, client: str, amount: int) -> None:
        """Record that a client has released an amount of the limited resource."""
        self.used -= amount
        self._by_client[client] -= amount
        if not self._by_client[client]:
            del self._by_client[client]
