"""Admission control: limit the requests that run, and reject requests to an overloaded server.

A Triton server with a full queue rejects requests itself (503), but each rejection costs a gRPC
call and the tokenization of the prompt. During a large overload, the rejected requests alone would
use all of the server's CPU time. The frontend therefore counts the rejections. While the server
rejects many requests, the frontend rejects most of the new requests without sending them.
"""

import collections
import json
import time
from contextlib import AbstractContextManager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid_client.error_responses import error_response
from nereid_client.errors import ApiError
from nereid_client.middleware.client_keys import ANONYMOUS, Client, current_client, limit_error
from nereid_client.middleware.request_metrics import RequestMetrics, is_from_supervisor
from nereid_client.middleware.shared_budget import SharedBudget

_RETRY_AFTER = {"Retry-After": "1"}
# A throttle counts the requests that were admitted or rejected in the last _WINDOW_S seconds. This
# time must be shorter than the time that the server needs to process a full queue. Otherwise, the
# queue could become empty while the throttle still rejects requests.
_WINDOW_S = 0.5
# Within _WINDOW_S seconds, the server may reject up to this share of the admitted requests, plus
# _TOLERATED_REJECTIONS requests. If the server rejects more, the throttle itself rejects most new
# requests. The throttle still admits some requests, because only these requests show whether the
# server is overloaded.
_TOLERATED_SHARE = 0.2
_TOLERATED_REJECTIONS = 4
_LONGEST_PAUSE_S = 1.0
# When the number of throttles has reached this value, all throttles without a rejection in the last
# _WINDOW_S seconds are deleted.
_MAX_THROTTLES = 1024
# Up to this many health checks of `nereid serve` can run at the same time without being counted as
# requests. Two health checks run at the same time after a start: one of the language model, and one
# of an embedding model or a reranker.
_MAX_CHECKS = 2
# If a request has waited too long in the server's queue, the error message begins with these words.
_EXPIRED_IN_QUEUE = "the request waited"


_ABORT_PATHS = ("/abort_request", "/abort_requests")
_OVERLOADED = (503, 529)
"""The HTTP statuses with which an overloaded server rejects a request. Anthropic's API has 529."""


class Gate:
    """Counts the running requests. Rejects new requests if too many run or a shutdown has begun.

    Args:
        running: counts the requests that run. Its limit is the setting max_concurrent_requests.

    Attributes:
        is_draining: whether the server is about to stop and accepts no new requests.
    """

    def __init__(self, running: SharedBudget) -> None:
        self._running = running
        self.is_draining = False

    def transaction(self) -> AbstractContextManager[None]:
        """Prevent other processes from admitting requests during the `with` block."""
        return self._running.transaction()

    @property
    def num_requests(self) -> int:
        """The number of requests that run now."""
        return self._running.used

    def enter(self, client: Client = ANONYMOUS) -> None:
        """Record that a request starts."""
        self._running.add(client.share, 1)

    def leave(self, client: Client = ANONYMOUS) -> None:
        """Record that a request has ended."""
        self._running.remove(client.share, 1)

    def rejection(self, client: Client = ANONYMOUS) -> ApiError | None:
        """Return an error if a new request is forbidden, or None if the request may run.

        A request is forbidden if the server is about to stop, if too many requests of all clients
        run, or if too many requests of this client run.
        """
        if self.is_draining:
            return _draining_error()
        # `fits` checks the limit on the running requests of all clients. In addition, one named
        # client may use at most 3/4 of the capacity that other clients do not use.
        if not self._running.fits(client.share, 1):
            return self._too_many_error(client)
        if not client.max_concurrent:
            return None
        num_own = self._running.used_by(client.share)
        if num_own < client.max_concurrent:
            return None
        return limit_error(
            f"{num_own} requests with this API key are running, but the limit is "
            f"{client.max_concurrent} (max_concurrent_requests of the key)",
            wait_s=1,
        )

    def _too_many_error(self, client: Client) -> ApiError:
        num_own = self._running.used_by(client.share)
        own = f", {num_own} of them from this client" if client.share else ""
        return ApiError(
            429,
            f"{self.num_requests} requests are running{own}, but the limit is "
            f"{self._running.limit} (max_concurrent_requests). Try again in a moment.",
            code="rate_limit_exceeded",
            headers=_RETRY_AFTER,
            limit="max_concurrent_requests",
        )


def _draining_error() -> ApiError:
    """Return the error for a new request to a server that is stopping."""
    return ApiError(
        503,
        "The server is stopping. It finishes the requests that run and accepts no new ones. Send "
        "the request to another server, or wait until this one has restarted.",
        code="unavailable",
        headers=_RETRY_AFTER,
        limit="draining",  # the label of this rejection in the metrics
    )


class Throttle:
    """Limits the number of requests that the frontend sends to an overloaded server.

    Each throttle limits the requests of one client to one path. A throttle needs no setting,
    because it admits about as many requests per second as the server accepts. All times are seconds
    of time.monotonic().
    """

    def __init__(self) -> None:
        self._admission_times: collections.deque[float] = collections.deque()
        self._rejection_times: collections.deque[float] = collections.deque()
        self._paused_until = 0.0
        self._last_message = ""
        self._retry_after = "1"

    def record_admission(self, now: float) -> None:
        """Record that the frontend sends a request to the server."""
        self._admission_times.append(now)

    def record_rejection(self, message: str, retry_after: str, started: float, now: float) -> None:
        """Record that the server rejected a request.

        Args:
            message: the server's error message.
            retry_after: the value of the response's header Retry-After.
            started: the time at which the request was sent to the server.
            now: the time at which the rejection arrived.
        """
        self._rejection_times.append(now)
        self._last_message = message
        self._retry_after = retry_after
        has_expired_in_queue = message.lower().startswith(_EXPIRED_IN_QUEUE)
        if has_expired_in_queue:
            return  # the time until the rejection was the waiting time, not work of the server
        duration_s = now - started
        num_sent_later = sum(sent > started for sent in self._admission_times)
        # The server will probably also reject the requests that were sent after this request. These
        # rejections take about `duration_s` seconds. If there are many such requests, the frontend
        # pauses for this time. Otherwise, the frontend would send requests faster than a slow
        # server can reject them.
        if num_sent_later >= _TOLERATED_REJECTIONS:
            self._paused_until = now + min(duration_s, _LONGEST_PAUSE_S)

    def rejection(self, now: float) -> ApiError | None:
        """Return an error if the throttle rejects a new request, or None if the request may run.

        A request is rejected during a pause, or if the server rejected too many of the requests of
        the last `_WINDOW_S` seconds. Older requests are forgotten.
        """
        self._forget_old(now)
        num_rejected = len(self._rejection_times)
        num_tolerated = _TOLERATED_REJECTIONS + _TOLERATED_SHARE * len(self._admission_times)
        is_paused = now < self._paused_until
        if num_rejected < num_tolerated and not is_paused:
            return None
        return ApiError(
            503,
            "The server is overloaded, so the frontend did not send this request to it. In the "
            f"last {_WINDOW_S:g} seconds, the server rejected {num_rejected} requests, the last "
            f"one with this message: {self._last_message}",
            code="unavailable",
            headers={"Retry-After": self._retry_after},
            limit="overload",  # the label of this rejection in the metrics
        )

    def is_active(self, now: float) -> bool:
        """Return whether the server has rejected a request in the last `_WINDOW_S` seconds."""
        self._forget_old(now)
        return bool(self._rejection_times)

    def _forget_old(self, now: float) -> None:
        """Remove all stored times that are more than `_WINDOW_S` seconds in the past."""
        for times in (self._admission_times, self._rejection_times):
            while times and times[0] < now - _WINDOW_S:
                times.popleft()


class AdmissionControl:
    """Middleware that rejects requests if too many run, or if the server is overloaded or stops.

    If a limit is exceeded, the response has the status 429. In the other cases, the status is 503.

    GET, HEAD, OPTIONS and DELETE requests are always admitted. Requests that abort other requests
    are always admitted, too. Clients need such requests most when the server is overloaded or about
    to stop.

    Args:
        app: the application that this middleware calls.
        gate: limits the requests that run.
        metrics: counts the rejected requests.
    """

    def __init__(self, app: ASGIApp, gate: Gate, metrics: RequestMetrics) -> None:
        self._app = app
        self._gate = gate
        self._metrics = metrics
        self._num_checks = 0
        # Each client has its own throttle for each path, so that requests are rejected only if they
        # come from the client that overloads the server.
        self._throttles: dict[tuple[str, str], Throttle] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, unless the request is rejected with the status 429 or 503.

        The gate limits the number of running requests. A throttle limits the requests of one client
        to one path after the server has rejected many of these requests.
        """
        if scope["type"] != "http" or _is_always_admitted(scope):
            await self._app(scope, receive, send)
            return
        client = current_client.get()
        if self._is_admitted_check(scope, client):
            await self._answer_health_check(scope, receive, send)
            return
        now = time.monotonic()
        key = (client.share, scope["path"])  # the key of the client's throttle for this path
        rejection = self._enter_gate_or_reject(client, self._throttles.get(key), now)
        if rejection is not None:
            self._metrics.count_refusal(rejection)
            await error_response(rejection, scope)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, self._observe_rejections(key, send, now))
        finally:
            self._gate.leave(client)

    def _is_admitted_check(self, scope: Scope, client: Client) -> bool:
        """Return whether a request is a health check of `nereid serve` that is always admitted.

        `nereid serve` restarts a server that does not answer. Any client can send the user agent of
        `nereid serve`, so at most _MAX_CHECKS such requests are admitted at the same time.
        Further requests are treated as any other request.
        """
        # A client has a name only if the request contains a key of the key file. `nereid serve`
        # never uses a key of the key file, so a request of a named client is not its health check.
        may_be_check = is_from_supervisor(scope) and not client.name
        return may_be_check and self._num_checks < _MAX_CHECKS

    def _enter_gate_or_reject(
        self, client: Client, throttle: Throttle | None, now: float
    ) -> ApiError | None:
        """Admit a new request and return None, or return an error if a limit rejects the request.

        If None is returned, the caller must call `self._gate.leave` at the end of the request.
        """
        # Several frontend processes can share the counters of running requests. During the
        # transaction, no other process can admit a request between the check of the limit and the
        # update of the counter.
        with self._gate.transaction():
            rejection = self._gate.rejection(client) or client.rejection(now)
            if rejection is None and throttle is not None:
                rejection = throttle.rejection(now)
            if rejection is not None:
                return rejection
            client.count_request(now)
            self._gate.enter(client)
        if throttle is not None:  # each process has throttles of its own
            throttle.record_admission(now)
        return None

    async def _answer_health_check(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a health check from `nereid serve`. Health checks are not counted as requests."""
        self._num_checks += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_checks -= 1

    def _observe_rejections(self, key: tuple[str, str], send: Send, started: float) -> Send:
        """Wrap `send` in a function that also records rejections by the server.

        `key` selects the throttle that records them, and `started` is the start of the request.

        A rejection is a response with a status in `_OVERLOADED` and the header Retry-After. Only
        routes that call a model send such a response. Its first message contains the status and the
        headers, and its second message contains the body.
        """
        # After the first message of a rejection, this is the value of the header Retry-After. After
        # the second message, it is None again.
        retry_after: str | None = None

        async def send_observed(message: Message) -> None:
            nonlocal retry_after
            if message["type"] == "http.response.start" and message["status"] in _OVERLOADED:
                retry_after = Headers(raw=message["headers"]).get("retry-after")
            elif message["type"] == "http.response.body" and retry_after is not None:
                self._record_rejection(key, message.get("body", b""), retry_after, started)
                retry_after = None
            await send(message)

        return send_observed

    def _record_rejection(
        self, key: tuple[str, str], body: bytes, retry_after: str, started: float
    ) -> None:
        """Record a rejection in the throttle `key`, if the body is an error object."""
        try:
            text = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return
        now = time.monotonic()
        self._throttle(key, now).record_rejection(text, retry_after, started, now)

    def _throttle(self, key: tuple[str, str], now: float) -> Throttle:
        """Return the throttle of a client for a path. Create the throttle if there is none yet."""
        if key not in self._throttles and len(self._throttles) >= _MAX_THROTTLES:
            # A client can send a new client id with each request, and each id creates a throttle.
            # Throttles without recent rejections must therefore be deleted.
            self._throttles = {
                name: throttle
                for name, throttle in self._throttles.items()
                if throttle.is_active(now)
            }
        return self._throttles.setdefault(key, Throttle())


def _is_always_admitted(scope: Scope) -> bool:
    """Return whether a request only reads, deletes or aborts something. Such a request is cheap."""
    if scope["method"] in ("GET", "HEAD", "OPTIONS", "DELETE"):
        return True
    path: str = scope["path"]
    return path.endswith("/cancel") or path in _ABORT_PATHS
