# SPDX-License-Identifier: Apache-2.0
"""Assigns a rank to each sequence. The sequence with the lowest rank is scheduled first.

A request with a smaller `priority` number is more urgent. The first number of a rank is the step in
which the request arrived, plus 256 times its `priority`. No sequence waits forever, because urgent
requests that arrive much later have a higher rank. Example: a request with priority 1 arrives in
step 100, so its rank begins with 356. A request with priority 0 arrives in step 400, so its rank
begins with 400. The first request is scheduled before the second request.
"""

from collections import abc

from nereid_backend.core.sequence import Sequence

# A request with `priority` 1 is scheduled like a request that has `priority` 0 and arrives
# AGEING_STEPS steps later. With a large model, these steps take some seconds. Every request is
# scheduled eventually, because priorities are limited to the range from -_MAX_LEVEL to _MAX_LEVEL.
AGEING_STEPS = 256
_MAX_LEVEL = 100


class ArrivalRanks:
    """Assigns ranks to the sequences of new requests."""

    def __init__(self) -> None:
        """Set the number of requests and the number of steps to 0."""
        self._num_requests = 0
        self._num_steps = 0

    def note_step(self) -> None:
        """Add 1 to the number of steps. The ranks of new requests depend on the number of steps."""
        self._num_steps += 1

    def assign(self, sequences: abc.Sequence[Sequence]) -> None:
        """Set the ranks of all sequences of a new request."""
        priority = sequences[0].params.priority
        level = max(-_MAX_LEVEL, min(_MAX_LEVEL, priority))
        arrival = self._num_steps + level * AGEING_STEPS
        for sequence in sequences:
            # Python compares tuples element by element. The last two elements make each rank
            # unique.
            sequence.rank = (arrival, priority, self._num_requests, sequence.index)
        self._num_requests += 1
