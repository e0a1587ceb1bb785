# SPDX-License-Identifier: Apache-2.0
"""Selects the running sequence that is preempted when the batch or the KV cache is full."""

from collections import Counter
from collections.abc import Container

from nereid_backend.core.queues.ranked_sequences import RunningSequences
from nereid_backend.core.sequence import Sequence


def cheapest_victim(index: int, running: RunningSequences, *, by_client: bool) -> Sequence:
    """Choose a sequence to preempt. Its blocks are needed for the sequence at `index`.

    If only one client has requests, the result is the cheapest sequence after `index`. If no
    sequence comes after `index`, the result is the sequence at `index`. `_preemption_cost` defines
    the cost.

    Args:
        index: the position of the sequence in the order of the running sequences.
        running: the running sequences.
        by_client: whether several clients have requests. If so, the result is the cheapest sequence
            of the client with the largest number of blocks divided by its weight. The sequence at
            `index` may be preempted, too.
    """
    sequence = running[index]
    later = running.after(index)
    if not by_client:
        return min(later or [sequence], key=_preemption_cost)
    num_blocks: Counter[str] = Counter()
    for other in running:
        num_blocks[other.params.client_id] += other.num_blocks

    def client_cost(other: Sequence) -> tuple[float, tuple[int, int, int]]:
        params = other.params
        return -num_blocks[params.client_id] / params.client_weight, _preemption_cost(other)

    # The first running sequence is never preempted for a later sequence, so it always finishes.
    may_preempt_itself = index > 0 or not later
    candidates = [*later, sequence] if may_preempt_itself else later
    return min(candidates, key=client_cost)


def fair_victim(
    sequence: Sequence,
    num_needed: int,
    running: RunningSequences,
    leaving: Container[Sequence],
    *,
    by_rows: bool,
) -> Sequence | None:
    """Choose a running sequence to preempt for a waiting sequence of another client.

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
        leaving: ended sequences. They must not be preempted.
        by_rows: True to count rows, False to count blocks.

    Returns:
        The sequence to preempt; None if no sequence may be preempted.
    """

    def size(other: Sequence) -> int:
        return 1 if by_rows else other.num_blocks

    used: Counter[str] = Counter()
    for other in running:
        used[other.params.client_id] += size(other)
    own = sequence.params
    own_share_after_gain = (used[own.client_id] + num_needed) / own.client_weight

    def share_after_loss(other: Sequence) -> float:
        params = other.params
        return (used[params.client_id] - size(other)) / params.client_weight

    candidates = [
        other
        for other in running.after(0)  # all sequences except the first in the order
        if other.params.client_id != own.client_id
        and other not in leaving
        and share_after_loss(other) >= own_share_after_gain
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
