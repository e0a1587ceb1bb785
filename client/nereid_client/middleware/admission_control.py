"""How many requests may be in work at a time, and whether more are let in at all.

A server whose queue is full says so (503), but to be told costs a way through gRPC and the
tokenizer, and far beyond capacity those become a queue of their own. So the frontend learns from
the refusals: while many of the requests that it lets through are refused, it refuses most of the
rest itself, at once.
"""

import collections
import contextlib
import json
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid_client.errors import ApiError
from nereid_client.middleware.body_limit import error_response

_RETRY_AFTER = {"Retry-After": "1"}
# Short against the time for which a server's queue lasts, so that it does not run empty.
_WINDOW_S = 0.5
# So much of what is let through in a window may be refused, and so many requests besides: enough
# for the queue to be kept full, and for the end of an overload to be seen.
_SHARE = 0.2
_FREE_REFUSALS = 4
_LONGEST_WAY_S = 1.0
_WAITED = "the request waited"  # how the refusal begins of one that was let into the queue


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


class Throttle:
    """What the server's refusals on one path have taught.

    No setting: the rate at which requests are let through follows the one at which the server
    takes them.
    """

    def __init__(self) -> None:
        self._let_in: collections.deque[float] = collections.deque()
        self._refused: collections.deque[float] = collections.deque()
        self._closed_until = 0.0
        self._last_words = ""
        self._retry_after = "1"

    def let_in(self, now: float) -> None:
        """Note a request that goes to the server."""
        self._let_in.append(now)

    def learn(self, message: str, retry_after: str, started: float, now: float) -> None:
        """Note that the server refused one that was sent to it at `started`."""
        self._refused.append(now)
        self._last_words, self._retry_after = message, retry_after
        num_behind = sum(then > started for then in self._let_in)
        if num_behind >= _FREE_REFUSALS and not message.startswith(_WAITED):
            # It took the way there and back alone. What was let in meanwhile is still on that way:
            # until it has arrived nothing follows it, or a server that is slow to refuse would
            # have ever more to refuse.
            self._closed_until = now + min(now - started, _LONGEST_WAY_S)

    def refusal(self, now: float) -> ApiError | None:
        """Why a request need not be sent to the server; None when it should be."""
        self._forget(now)
        num_refused, num_let_in = len(self._refused), len(self._let_in)
        is_open = now >= self._closed_until
        if is_open and num_refused < _FREE_REFUSALS + _SHARE * num_let_in:
            return None
        return ApiError(
            503,
            f"{self._last_words} (said of {num_refused} of the last {num_let_in} requests, and of "
            "this one without asking)",
            code="unavailable",
            headers={"Retry-After": self._retry_after},
        )

    def _forget(self, now: float) -> None:
        for times in (self._let_in, self._refused):
            while times and times[0] < now - _WINDOW_S:
                times.popleft()


class Admission:
    """Lets requests with a body through a gate.

    What is only looked at is always let in, and so is what ends work: a server at its limit, or one
    that stops, is where that matters most.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate
        self._throttles: collections.defaultdict[str, Throttle] = collections.defaultdict(Throttle)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or answer 429 or 503 at once."""
        if scope["type"] != "http" or _is_always_let_in(scope):
            await self._app(scope, receive, send)
            return
        now = time.monotonic()
        throttle = self._throttles.get(scope["path"])
        refusal = self._gate.refusal() or (throttle.refusal(now) if throttle else None)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        if throttle:
            throttle.let_in(now)
        self._gate.num_requests += 1
        try:
            await self._app(scope, receive, self._listening(scope["path"], send, now))
        finally:
            self._gate.num_requests -= 1

    def _listening(self, path: str, send: Send, started: float) -> Send:
        """`send`, with an ear for refusals, which only routes to a model give."""
        retry_after: str | None = None

        async def listen(message: Message) -> None:
            nonlocal retry_after
            if message["type"] == "http.response.start" and message["status"] == 503:
                retry_after = Headers(raw=message["headers"]).get("retry-after")
            elif message["type"] == "http.response.body" and retry_after is not None:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    told = json.loads(message["body"])["error"]["message"]
                    now = time.monotonic()
                    self._throttles[path].learn(told, retry_after, started, now)
                retry_after = None
            await send(message)

        return listen


def _is_always_let_in(scope: Scope) -> bool:
    if scope["method"] in ("GET", "HEAD", "OPTIONS", "DELETE"):
        return True
    return str(scope["path"]).endswith("/cancel")
