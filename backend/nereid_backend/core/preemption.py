# SPDX-License-Identifier: Apache-2.0
"""Selects the running sequence that is preempted when the batch or the KV cache is full."""

from collections import Counter
from collections.abc import Container, Iterable

from nereid_backend.core.queues.ranked_sequences import RunningSequences
from nereid_backend.core.sequence import Sequence


def cheapest_victim(index: int, running: RunningSequences) -> Sequence:
    """Choose the sequence after `index` that is cheapest to preempt; see `_preemption_cost`.

    The sequence at `index` needs blocks. If no sequence comes after it, the result is the sequence
    at `index` itself.
    """
    later_sequences = running.after(index)
    return min(later_sequences, key=_preemption_cost) if later_sequences else running[index]


def cheapest_victim_of_largest_client(index: int, running: RunningSequences) -> Sequence:
    """Return the sequence to preempt: the cheapest sequence of the largest client.

    The planner calls this function if several clients have requests.

    The sequence at `index` needs blocks. If no running sequence comes after this sequence, the
    result is this sequence. Otherwise, the candidates are this sequence and all later sequences.
    However, the first running sequence is never a candidate, so it always finishes.

    Each client's number of blocks is divided by the client's weight. The result belongs to the
    client for which this quotient is largest, and is the candidate of this client that is cheapest
    to preempt.
    """
    sequence = running[index]
    later_sequences = running.after(index)
    if not later_sequences:
        return sequence
    is_first = index == 0
    candidates = later_sequences if is_first else [*later_sequences, sequence]
    return _victim_of_largest_client(candidates, running)


def _victim_of_largest_client(
    candidates: Iterable[Sequence], running: RunningSequences
) -> Sequence:
    """Find the client with the most blocks. Return its candidate that is cheapest to preempt.

    The number of blocks of each client is divided by the client's weight.

    Example: the clients A and B have the weight 1. The running sequences of A have 30 blocks, and
    those of B have 20 blocks. The result is the cheapest candidate of A.
    """
    num_blocks_of_client: Counter[str] = Counter()
    for sequence in running:
        num_blocks_of_client[sequence.params.client_id] += sequence.num_blocks

    def sort_key(sequence: Sequence) -> tuple[float, tuple[int, int, int]]:
        params = sequence.params
        weighted_blocks = num_blocks_of_client[params.client_id] / params.client_weight
        # The client with the most blocks for each unit of its weight comes first. Among the
        # sequences of this client, the sequence that is cheapest to preempt comes first.
        return -weighted_blocks, _preemption_cost(sequence)

    return min(candidates, key=sort_key)


def fair_victim(
    sequence: Sequence,
    num_needed: int,
    running: RunningSequences,
    ended_sequences: Container[Sequence],
    *,
    by_rows: bool,
) -> Sequence | None:
    """Choose a running sequence to preempt for the benefit of a waiting sequence of another client.

    The share of a client is its number of rows or blocks, divided by its weight. A client may lose
    a sequence only if its share would still be at least the new share of the waiting sequence's
    client. The first running sequence is never preempted.

    Example: rows are counted, and all clients have the weight 1. Client A has 3 running sequences,
    client B has 1 running sequence, and a sequence of B waits for a row. A may lose a sequence,
    because both clients then have 2 rows. If A has only 2 running sequences, the preemption would
    leave A with 1 row and B with 2 rows, so the result is None.

    Args:
        sequence: the waiting sequence.
        num_needed: the number of rows or blocks that the waiting sequence needs.
        running: the running sequences.
        ended_sequences: sequences that have ended but still have blocks. They must not be
            preempted.
        by_rows: True to count rows, False to count blocks.

    Returns:
        The sequence to preempt; None if no sequence may be preempted.
    """

    def size(other: Sequence) -> int:
        return 1 if by_rows else other.num_blocks

    used_by_client: Counter[str] = Counter()
    for other in running:
        used_by_client[other.params.client_id] += size(other)
    own = sequence.params
    own_share_after_gain = (used_by_client[own.client_id] + num_needed) / own.client_weight

    def can_be_preempted(other: Sequence) -> bool:
        client = other.params
        share_after_loss = (used_by_client[client.client_id] - size(other)) / client.client_weight
        is_other_client = client.client_id != own.client_id
        return is_other_client and share_after_loss >= own_share_after_gain

    candidates = [
        other
        for other in running.after(0)  # all running sequences except the first one
        if other not in ended_sequences and can_be_preempted(other)
    ]
    return min(candidates, key=_preemption_cost, default=None)


def _preemption_cost(sequence: Sequence) -> tuple[int, int, int]:
    """Return the sort key of a sequence. The sequence with the smallest key is preempted first.

    The sequence with the largest `priority` number is preempted first. If these numbers are equal,
    the sequence with the fewest tokens to compute again is preempted first. If the numbers of these
    tokens are equal, too, the sequence that arrived last is preempted first.
    """
    num_lost = sequence.num_computed_tokens - sequence.num_reused_tokens
    return -sequence.params.priority, num_lost, -sequence.rank[2]
