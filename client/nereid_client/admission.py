"""How many requests may be in work at a time, and whether more are let in at all."""

from starlette.types import ASGIApp, Receive, Scope, Send

from nereid_client.errors import ApiError
from nereid_client.middleware import error_response

_RETRY_AFTER = {"Retry-After": "1"}


class Gate:
    """Counts requests in work.

    Attributes:
        num_requests: those that are in work.
        is_draining: whether the server is about to stop, and takes no more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_requests = 0
        self.is_draining = False

    def refusal(self) -> ApiError | None:
        """Why a request can't come in now; None when it can."""
        if self.is_draining:
            return ApiError(
                503,
                "the server is stopping: it finishes what it has begun and takes nothing new; "
                "try again at another one, or when it is back",
                code="unavailable",
                headers=_RETRY_AFTER,
            )
        if self.num_requests >= self._limit:
            return ApiError(
                429,
                f"{self.num_requests} requests are in work; the limit is {self._limit} "
                "(max_concurrent_requests); try again in a moment",
                code="rate_limit_exceeded",
                headers=_RETRY_AFTER,
            )
        return None


class Admission:
    """Lets requests with a body through a gate; pages that are only looked at are always let in."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or answer 429 or 503 at once."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        refusal = self._gate.refusal()
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        self._gate.num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.num_requests -= 1
