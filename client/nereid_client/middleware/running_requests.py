"""Records the ids of running requests, so that clients can abort requests by id."""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nereid_client.errors import ApiError


@dataclass(eq=False)
class RunningRequest:
    """A request that is running.

    Attributes:
        ids: the ids by which the request can be aborted.
        client: the name of the client in the key file, or "".
        timeout: ends the request when it expires.
        is_aborted: whether the request was aborted.
    """

    ids: set[str]
    client: str
    timeout: asyncio.Timeout
    is_aborted: bool = False


class RunningRequests:
    """The requests that are running."""

    def __init__(self) -> None:
        self._requests: set[RunningRequest] = set()

    @contextmanager
    def track(
        self, request_id: str, client: str, timeout: asyncio.Timeout
    ) -> Iterator[RunningRequest]:
        """Add a request, and remove the request when the `with` block ends."""
        request = RunningRequest({request_id}, client, timeout)
        self._requests.add(request)
        try:
            yield request
        finally:
            self._requests.discard(request)

    def abort(self, caller: RunningRequest, ids: Collection[str] | None) -> int:
        """Abort requests, and return the number of aborted requests.

        A client of the key file can abort only its own requests. A client without a name can abort
        the requests of all clients.

        Args:
            caller: the request that aborts other requests. This request itself is not aborted.
            ids: the ids of the requests. None aborts all requests.

        Mutates: the attributes `is_aborted` and `timeout` of the aborted requests.
        """
        now = asyncio.get_running_loop().time()
        num_aborted = 0
        for request in self._requests - {caller}:
            is_named = ids is None or not request.ids.isdisjoint(ids)
            may_abort = not caller.client or caller.client == request.client
            if is_named and may_abort and not request.timeout.expired():
                request.is_aborted = True
                request.timeout.reschedule(now)  # the middleware Timeouts then ends the request
                num_aborted += 1
        return num_aborted


def abort_error() -> ApiError:
    """Return the error that ends an aborted request."""
    return ApiError(
        499, "The request was aborted, because its id was sent to /abort_request", code="cancelled"
    )
