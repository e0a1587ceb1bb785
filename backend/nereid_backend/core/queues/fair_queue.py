# SPDX-License-Identifier: Apache-2.0
"""The waiting queue, in which the requests of several clients take turns.

The weighted token count of a client is the number of tokens that were planned for the client,
divided by the client's weight. The next sequence belongs to the client with the smallest weighted
token count. Among the sequences of one client, the sequence with the lowest rank comes first.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

from nereid_backend.core.queues.ranked_sequences import RankedSequences
from nereid_backend.core.sequence import Sequence


class FairQueue:
    """The waiting sequences of all clients. The queue lets the clients share the engine fairly.

    The weighted token count of a client is the number of tokens that were planned for the client,
    divided by the client's weight.

    A client is active while it has a waiting or running sequence. When a client becomes active, its
    weighted token count is set to the smallest count of the active clients. Otherwise, a client
    that sent no requests for some time would afterwards come before all other clients.
    """

    def __init__(self) -> None:
        """Create an empty queue without active clients."""
        # Maps a client to its waiting sequences. Clients without waiting sequences are absent.
        self._queues: dict[str, RankedSequences] = {}
        # The number of waiting sequences of all clients.
        self._num_waiting = 0
        # Maps each active client to the number of its waiting and running sequences.
        self._num_sequences: Counter[str] = Counter()
        # Maps each active client to its weighted token count. Example: the count of a client with
        # the weight 2.0 increases by 0.5 for each planned token.
        self._weighted_counts: dict[str, float] = {}

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    @property
    def has_several_clients(self) -> bool:
        """Whether more than one client is active."""
        return len(self._weighted_counts) > 1

    def register(self, sequence: Sequence, num_sequences: int) -> None:
        """Record that the client of `sequence` has sent a request with `num_sequences` sequences.

        If the client was not active, its weighted token count is set to the smallest count of the
        active clients.
        """
        client = sequence.params.client_id
        self._num_sequences[client] += num_sequences
        if client not in self._weighted_counts:
            self._weighted_counts[client] = min(self._weighted_counts.values(), default=0.0)

    def unregister(self, sequence: Sequence) -> None:
        """Record that a sequence has ended. A client without sequences becomes inactive."""
        client = sequence.params.client_id
        self._num_sequences[client] -= 1
        if not self._num_sequences[client]:
            del self._num_sequences[client], self._weighted_counts[client]

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Increase the weighted token count of a sequence's client.

        The count increases by `num_tokens` divided by the weight of the client.
        """
        params = sequence.params
        self._weighted_counts[params.client_id] += num_tokens / params.client_weight

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue of its client."""
        queue = self._queues.setdefault(sequence.params.client_id, RankedSequences())
        queue.add(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue. The queue must contain the sequence."""
        client = sequence.params.client_id
        self._queues[client].remove(sequence)
        if not self._queues[client]:
            del self._queues[client]
        self._num_waiting -= 1

    def first(self) -> Sequence:
        """Return the waiting sequence that is started next. The queue must not be empty.

        If two clients have equal weighted token counts, the client with fewer sequences comes
        first.
        """
        client = min(self._queues, key=self._turn)
        return self._queues[client][0]

    def first_of_each_client(self) -> list[Sequence]:
        """Return the first waiting sequence of every client."""
        return [queue[0] for queue in self._queues.values()]

    def _turn(self, client: str) -> tuple[float, int]:
        """Return the sort key of a client. The client with the smallest key is served next."""
        return self._weighted_counts[client], self._num_sequences[client]


def fair_shares(
    demands: Mapping[str, int], weights: Mapping[str, float], budget: int
) -> dict[str, int]:
    """Divide a budget among clients in proportion to their weights.

    No client gets more than its demand. If a client demands less than its share, the rest of the
    share is divided among the other clients. Every client gets at least 1.

    Example: with equal weights and a budget of 512, the demands {"a": 4000, "b": 100} give the
    shares {"a": 412, "b": 100}.

    Args:
        demands: maps each client to its demand, which is at least 1.
        weights: maps each client in `demands` to its weight, which is greater than 0.
        budget: the number that is divided.
    """
    shares: dict[str, int] = {}
    remaining_budget = budget
    # The clients are sorted by demand divided by weight, the smallest quotient first. If a client
    # needs fewer tokens than its fair part of the budget, the remaining tokens go to the clients
    # after it.
    smallest_demand_first = sorted(demands, key=lambda client: demands[client] / weights[client])
    # For each client, the sum of its weight and the weights of all clients after it. Subtracting
    # one weight after the other from the total could leave 0 for a client with a small weight.
    weights_last_first = (weights[client] for client in reversed(smallest_demand_first))
    remaining_weights = reversed(list(accumulate(weights_last_first)))
    for client, remaining_weight in zip(smallest_demand_first, remaining_weights, strict=True):
        fair_share = int(remaining_budget * weights[client] / remaining_weight)
        shares[client] = max(1, min(demands[client], fair_share))
        remaining_budget -= shares[client]
    return shares
