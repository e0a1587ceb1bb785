# SPDX-License-Identifier: Apache-2.0
"""Lists of sequences that are sorted by scheduling rank."""

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

    Attributes:
        sequences: the sequences in order. Only `add` and `remove` change the list.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self.sequences[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence at the position that its rank determines."""
        self.sequences.insert(self._position(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the list. The list must contain the sequence."""
        position = self._position(sequence)
        assert self.sequences[position] is sequence
        del self.sequences[position]

    def after(self, index: int) -> list[Sequence]:
        """Return the sequences that come after the sequence at `index`."""
        return self.sequences[index + 1 :]

    def _position(self, sequence: Sequence) -> int:
        return bisect_left(self.sequences, sequence.rank, key=_rank)


class RunningSequences(RankedSequences):
    """The running sequences, each of which has a row in the tables of the batch.

    Attributes:
        free_rows: the rows that no sequence has. The row at the end of the list is used first.
    """

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__()
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_seqs = max_num_seqs

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence and assign a row to the sequence. At least one row must be free."""
        sequence.row = self.free_rows.pop()
        super().add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the list and free the row of the sequence.

        The list must contain the sequence.
        """
        super().remove(sequence)
        assert sequence.row is not None
        self.free_rows.append(sequence.row)
        sequence.row = None

    def check(self) -> None:
        """Raise an AssertionError if a row of the batch was lost or belongs to two sequences.

        Raises:
            AssertionError: if a row was lost or has two owners.
        """
        rows = [sequence.row for sequence in self if sequence.row is not None]
        assert len(rows) == len(self), "A running sequence has no row."
        assert sorted(rows + self.free_rows) == list(range(self._max_num_seqs)), (
            "A row is neither free nor used by exactly one sequence."
        )
