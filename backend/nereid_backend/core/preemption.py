# SPDX-License-Identifier: Apache-2.0
"""Selects the running sequence that is preempted when the batch or the KV cache is full."""

from collections import Counter
from collections.abc import Container

from nereid_backend.core.queues.ranked_sequences import RunningSequences
from nereid_backend.core.sequence import Sequence


def cheapest_victim(index: int, running: RunningSequences, *, by_client: bool) -> Sequence:
    """Return the sequence that must be preempted to free blocks for the sequence at `index`.

    With one client, this is the cheapest sequence after `index`, or the sequence at `index` if no
    sequence comes after it. See `_preemption_cost` for the cost.

    Args:
        index: the position of the sequence in the order of the running sequences.
        running: the running sequences.
        by_client: whether several clients have requests. A sequence of the client with the most
            blocks for its weight is then preempted, which may be the sequence at `index` itself.
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
    """Choose a sequence of another client, which will be preempted for `sequence`.

    A client may lose a sequence only if it is still not worse off than the client of `sequence`.
    The two clients are compared by their rows or blocks per weight after the preemption. The first
    running sequence is never preempted.

    Example: rows are counted, and all clients have the weight 1. Client A has 3 running sequences,
    client B has 1 running sequence, and a sequence of B needs a row. A may lose a sequence, because
    both clients then have 2 rows. If A has only 2 running sequences, A would have fewer rows than
    B, so the result is None.

    Args:
        sequence: the waiting sequence.
        num_needed: the number of rows or blocks that the waiting sequence needs.
        running: the running sequences.
        leaving: sequences that have ended and must not be preempted.
        by_rows: whether rows are counted. Otherwise, blocks are counted.

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

    The order is: lower priority, fewer tokens to compute again, later arrival.
    """
    num_lost = sequence.num_computed_tokens - sequence.num_reused_tokens
    return -sequence.params.priority, num_lost, -sequence.rank[2]
