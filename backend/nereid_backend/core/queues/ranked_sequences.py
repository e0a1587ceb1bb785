# SPDX-License-Identifier: Apache-2.0
"""Lists of sequences, sorted by their scheduling rank."""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from nereid_backend.core.sequence import Sequence

_rank = attrgetter("rank")


class RankedSequences:
    """A list of sequences, sorted by `Sequence.rank`.

    The first sequence of the list is scheduled first. No two sequences have the same rank. `add`
    and `remove` shift the elements of a Python list. With ten thousand sequences, this takes a few
    microseconds.

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
    """The running sequences, each of which uses one row of the batch.

    Attributes:
        free_rows: the rows that belong to no sequence. `add` takes the last row of the list.
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
        """Check that every row of the batch is either free or used by exactly one sequence.

        Raises:
            AssertionError: if a row was lost or belongs to two sequences.
        """
        rows = [sequence.row for sequence in self if sequence.row is not None]
        assert len(rows) == len(self), "A running sequence has no row."
        assert sorted(rows + self.free_rows) == list(range(self._max_num_seqs)), (
            "A row is neither free nor used by exactly one sequence."
        )
