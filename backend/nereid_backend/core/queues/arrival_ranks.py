# SPDX-License-Identifier: Apache-2.0
"""Assigns each sequence a rank by arrival and priority. The lowest rank is scheduled first.

A rank begins with the number of the step in which the request arrived, plus a fixed number of steps
for each level of priority. A sequence that has waited for a long time therefore comes before a
sequence that arrives much later with a higher priority, so no sequence starves. Example: a request
with priority 1 that arrives in step 100 has the rank 100 + 256. It comes before a request with
priority 0 that arrives in step 400.
"""

from collections import abc

from nereid_backend.core.sequence import Sequence

# A request with `priority` 1 is scheduled as if it had `priority` 0 and had arrived this number of
# steps later, which takes some seconds with a large model. Every request is scheduled eventually,
# because priorities are limited to the range from -_MAX_LEVEL to _MAX_LEVEL.
AGEING_STEPS = 256
_MAX_LEVEL = 100


class ArrivalRanks:
    """Assigns ranks to the sequences of new requests."""

    def __init__(self) -> None:
        """Start to count requests and steps at 0."""
        self._num_requests = 0
        self._num_steps = 0

    def note_step(self) -> None:
        """Count one more planned step. The ranks of new requests depend on the number of steps."""
        self._num_steps += 1

    def assign(self, sequences: abc.Sequence[Sequence]) -> None:
        """Set the ranks of all sequences of a new request."""
        priority = sequences[0].params.priority
        level = max(-_MAX_LEVEL, min(_MAX_LEVEL, priority))
        arrival = self._num_steps + level * AGEING_STEPS
        for sequence in sequences:
            # Ranks are tuples, which Python compares element by element. The last two elements make
            # each rank unique.
            sequence.rank = (arrival, priority, self._num_requests, sequence.index)
        self._num_requests += 1
