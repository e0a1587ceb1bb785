"""A limit on a resource that all clients share. A single client cannot use the whole resource."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext

# The amount that one client uses may be at most _TIMES_THE_REST times the amount that then remains
# free. Example: with a limit of 100, the first client can use 75, because 25 remain free and 75 is
# 3 times 25. A second client can then use 18 of the remaining 25.
_TIMES_THE_REST = 3


def is_within_share(amount: int, own: int, used: int, limit: int) -> bool:
    """Return whether a client may use `amount` more units of a resource.

    Args:
        amount: the additional amount.
        own: the amount that the client uses now. With 0, the client may use all that is left.
        used: the amount that all clients use now.
        limit: the largest amount that all clients may use.
    """
    left = limit - used - amount
    return left >= 0 and (not own or own + amount <= _TIMES_THE_REST * left)


def share_sentence(own: int) -> str:
    """Return the sentence of an error message that describes the share of an API key.

    Args:
        own: the amount that the key uses. With 0, the result is "", because the share is not the
            reason for the error.
    """
    if not own:
        return ""
    return (
        f"{own} of them belong to this API key, which may use at most three times as many as the "
        "limit leaves free. "
    )


class SharedBudget:
    """Counts how much of a limited resource is in use, in total and by each client.

    Args:
        limit: the largest amount that all clients together may use.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._by_client: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """The total amount of the resource that is currently in use."""
        return self._used

    def transaction(self) -> AbstractContextManager[None]:
        """Prevent other processes from changing the budget during the `with` block."""
        return nullcontext()

    def used_by(self, client: str) -> int:
        """Return the amount of the resource that a client currently uses."""
        return self._by_client[client]

    def fits(self, client: str, amount: int) -> bool:
        """Return whether a client may use `amount` more units of the resource.

        Only a client with a name is limited to a share. A client that uses nothing yet may use the
        whole remaining amount.
        """
        own = self.used_by(client) if client else 0
        return is_within_share(amount, own, self.used, self.limit)

    def add(self, client: str, amount: int) -> None:
        """Record that a client uses `amount` more units of the resource."""
        self._used += amount
        self._by_client[client] += amount

    def remove(self, client: str, amount: int) -> None:
        """Record that a client no longer uses `amount` units of the resource."""
        self._used -= amount
        self._by_client[client] -= amount
        if not self._by_client[client]:
            del self._by_client[client]
