# SPDX-License-Identifier: Apache-2.0
"""A list of sequences that is sorted by scheduling rank."""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from nereid_backend.core.request import Request

_rank = attrgetter("rank")


class RankedRequests:
    """A list of sequences, sorted by `Request.rank`.

    The sequence that is scheduled first comes first. No two sequences have the same rank. `add` and
    `remove` shift the elements of a Python list, which takes a few microseconds for ten thousand
    sequences.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Insert a sequence at the position that its rank determines."""
        self._requests.insert(self._position(request), request)

    def remove(self, request: Request) -> None:
        """Remove a sequence that is in the list."""
        position = self._position(request)
        assert self._requests[position] is request
        del self._requests[position]

    def after(self, index: int) -> list[Request]:
        """Return the sequences that come after the sequence at `index`."""
        return self._requests[index + 1 :]

    def _position(self, request: Request) -> int:
        return bisect_left(self._requests, request.rank, key=_rank)
