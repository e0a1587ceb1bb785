# SPDX-License-Identifier: Apache-2.0
"""A list of sequences that is sorted by scheduling rank."""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from nereid_backend.core.sequence import Sequence

_rank = attrgetter("rank")


class RankedSequences:
    """A list of sequences, sorted by `Sequence.rank`.

    The sequence that is scheduled first comes first. No two sequences have the same rank. `add` and
    `remove` shift the elements of a Python list, which takes a few microseconds for ten thousand
    sequences.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence at the position that its rank determines."""
        self._sequences.insert(self._position(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is in the list."""
        position = self._position(sequence)
        assert self._sequences[position] is sequence
        del self._sequences[position]

    def after(self, index: int) -> list[Sequence]:
        """Return the sequences that come after the sequence at `index`."""
        return self._sequences[index + 1 :]

    def _position(self, sequence: Sequence) -> int:
        return bisect_left(self._sequences, sequence.rank, key=_rank)
