# SPDX-License-Identifier: Apache-2.0
"""Stores waiting items, and chooses the items that are computed next."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from nereid_backend.pooling.inputs.prepare_items import Prepared


@dataclass(frozen=True, slots=True)
class QueuedItem:
    """A waiting item of a request.

    Attributes:
        request_id: the id of the request.
        index: the index of the item in its request.
        prepared: the tokenised item.
    """

    request_id: str
    index: int
    prepared: Prepared


class TokenQueue:
    """The waiting items of all requests.

    A step takes one item of each request in turn until the token budget is used up. The next step
    continues with the next request. A request with a thousand texts uses whole steps only while no
    other request waits. Therefore it does not delay a request with one text. A request's short
    texts are computed first, because texts of similar lengths are computed as one batch.

    Example: request a has items of 5, 6 and 7 tokens, and request b has one item of 9 tokens.
    `take(22)` returns the items a5, b9 and a6, and the next call returns a7.

    Attributes:
        num_items: the number of waiting items.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[QueuedItem]] = OrderedDict()
        self.num_items = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __len__(self) -> int:
        """Return the number of requests that have waiting items."""
        return len(self._waiting)

    def add(self, request_id: str, items: Sequence[Prepared]) -> None:
        """Add the items of a request."""
        queued_items = [
            QueuedItem(request_id, index, prepared) for index, prepared in enumerate(items)
        ]
        queued_items.sort(key=lambda queued: queued.prepared.num_tokens)
        self._waiting[request_id] = deque(queued_items)
        self.num_items += len(queued_items)

    def remove(self, request_id: str) -> None:
        """Remove the waiting items of a request. Do nothing if the request has no waiting items."""
        self.num_items -= len(self._waiting.pop(request_id, ()))

    def take(self, budget: int) -> list[QueuedItem]:
        """Choose the items that are computed next. Remove them from the queue, and return them.

        The requests take turns: each request gives one item, and is then the last request. Example:
        request a has items of 5, 6 and 7 tokens, and request b has one item of 9 tokens. `take(22)`
        returns the items of 5, 9 and 6 tokens. The next call returns the item of 7 tokens.

        Args:
            budget: the largest total number of tokens of the returned items. If the first item has
                more tokens than `budget`, only the first item is returned.
        """
        taken: list[QueuedItem] = []
        num_left = budget  # the number of tokens that further items may have
        while self._waiting:
            # The requests take turns. The first request in the dict has the next turn.
            request_id, waiting_items = next(iter(self._waiting.items()))
            if taken and waiting_items[0].prepared.num_tokens > num_left:
                break  # The item does not fit. It will be the first item of the next call.
            item = waiting_items.popleft()
            taken.append(item)
            num_left -= item.prepared.num_tokens
            if waiting_items:
                self._waiting.move_to_end(request_id)  # the next turn belongs to another request
            else:
                del self._waiting[request_id]
        self.num_items -= len(taken)
        return taken
