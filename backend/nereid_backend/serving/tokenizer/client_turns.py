# SPDX-License-Identifier: Apache-2.0
"""A queue in which clients take turns."""

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class ClientTurns(Generic[Item]):
    """A queue that returns one item of each client in turn.

    Items of the same client keep their order. Example: the client "a" adds the items a1, a2 and a3.
    Then the client "b" adds the item b1. The queue returns a1, b1, a2, a3.
    """

    def __init__(self) -> None:
        # Maps each client to a queue with the items of the client. The first key of the dict is the
        # client whose item is returned next. Clients without items are absent.
        self._items: dict[str, deque[Item]] = {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[Item]:
        for items in self._items.values():
            yield from items

    def add(self, client: str, item: Item) -> None:
        """Add an item of a client."""
        self._items.setdefault(client, deque()).append(item)

    def take(self) -> Item:
        """Remove and return the next item. The queue must not be empty."""
        client = next(iter(self._items))
        items = self._items.pop(client)
        item = items.popleft()
        if items:
            self._items[client] = items  # The client takes its next turn after all other clients.
        return item

    def remove(self, client: str, item: Item) -> None:
        """Remove an item of `client`. The item must still be in the queue."""
        self._items[client].remove(item)
        if not self._items[client]:
            del self._items[client]
