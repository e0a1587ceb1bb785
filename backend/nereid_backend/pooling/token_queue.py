# SPDX-License-Identifier: Apache-2.0
"""Which items go through the model next: by tokens, and every request in turn."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from nereid_backend.pooling.prepare_items import Prepared


@dataclass(frozen=True, slots=True)
class Ticket:
    """One item of one request, waiting."""

    request_id: str
    index: int
    prepared: Prepared


class TokenQueue:
    """Items that wait, request by request.

    A step takes one item of each request in turn until its tokens are used up, and the next step
    goes on where it stopped. So a request of a thousand texts keeps the model busy while it is
    alone, and does not keep a request of one waiting. Within a request short texts come first:
    texts of one length are computed as one batch.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self.num_items = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._waiting)

    def add(self, request_id: str, items: Sequence[Prepared]) -> None:
        """Let a request's items wait. Mutates: this queue."""
        tickets = [Ticket(request_id, i, one) for i, one in enumerate(items)]
        tickets.sort(key=lambda ticket: ticket.prepared.num_tokens)
        self._waiting[request_id] = deque(tickets)
        self.num_items += len(tickets)

    def remove(self, request_id: str) -> None:
        """Forget what waits of a request. Mutates: this queue."""
        self.num_items -= len(self._waiting.pop(request_id, ()))

    def take(self, budget: int) -> list[Ticket]:
        """The next step's items; at least one if any wait. Mutates: this queue.

        Args:
            budget: tokens; only a single item may have more.
        """
        taken: list[Ticket] = []
        left = budget
        while self._waiting:
            request_id, tickets = next(iter(self._waiting.items()))
            if taken and tickets[0].prepared.num_tokens > left:
                break
            ticket = tickets.popleft()
            taken.append(ticket)
            left -= ticket.prepared.num_tokens
            if tickets:
                self._waiting.move_to_end(request_id)
            else:
                del self._waiting[request_id]
        self.num_items -= len(taken)
        return taken
