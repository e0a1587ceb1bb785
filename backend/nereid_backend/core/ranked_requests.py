# SPDX-License-Identifier: Apache-2.0
"""Requests in the order in which they are served."""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from nereid_backend.core.request import Request

_rank = attrgetter("rank")


class RankedRequests:
    """Requests sorted by their ranks, which differ; the best comes first.

    A sorted list: adding and removing move memory, which for ten thousand requests costs a few
    microseconds, and nothing else depends on how many there are.
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
        """Put a request into its place."""
        self._requests.insert(self._place(request), request)

    def remove(self, request: Request) -> None:
        """Take a request out; it is there."""
        place = self._place(request)
        assert self._requests[place] is request
        del self._requests[place]

    def after(self, index: int) -> list[Request]:
        """All that come after a place."""
        return self._requests[index + 1 :]

    def _place(self, request: Request) -> int:
        return bisect_left(self._requests, request.rank, key=_rank)
