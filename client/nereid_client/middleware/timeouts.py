"""Ends a request if it takes too long, or if the client stops reading the response."""

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid_client.error_responses import error_event, error_response
from nereid_client.errors import ApiError
from nereid_client.middleware.client_keys import current_client
from nereid_client.middleware.request_metrics import RequestMetrics
from nereid_client.middleware.running_requests import RunningRequests, abort_error
from nereid_client.streaming import sse

TIMEOUT_HEADER = "x-request-timeout"
_SEND_ERROR_TIMEOUT_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _TimeLimit:
    """The time limit of one request.

    Attributes:
        seconds: the number of seconds. None means no limit.
        is_requested: whether the limit comes from the request, and not from the server's setting.
    """

    seconds: float | None
    is_requested: bool


class Timeouts:
    """Middleware that ends requests after a time limit, and cancels their generation.

    A client may set a shorter limit with the header `X-Request-Timeout: SECONDS`. If the response
    has not started, the client receives the status 504. If a stream has started, the error is the
    last event of the stream.
    """

    def __init__(
        self,
        app: ASGIApp,
        limit_s: float,
        unread_s: float,
        metrics: RequestMetrics,
        running: RunningRequests,
    ) -> None:
        """Create the middleware.

        Args:
            app: the application that this middleware calls.
            limit_s: the setting request_timeout_s, in seconds from the arrival of the request to
                the end of its response. 0 means no limit.
            unread_s: the setting unread_timeout_s. If a client reads nothing of the response for
                this many seconds, the connection is closed. 0 means no limit.
            metrics: counts the requests that this middleware has ended.
            running: the requests that run now. `running` aborts a request by changing its timeout.
        """
        self._app = app
        self._running = running
        self._limit_s = limit_s
        self._unread_s = unread_s
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, and cancel the call when a time limit is reached.

        If the header X-Request-Timeout contains a wrong value, the client gets an error, and the
        application is not called. If the frontend stops during the call, the response ends with an
        error.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            limit = self._time_limit(scope)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        response = _ObservedResponse(send)
        try:
            await self._call_with_limit(limit, response, scope, receive)
        except asyncio.CancelledError:
            # When the frontend has to stop, uvicorn cancels the requests that are still running.
            await response.end_with(_stopped_error(), scope, receive)
            raise

    async def _call_with_limit(
        self, limit: "_TimeLimit", response: "_ObservedResponse", scope: Scope, receive: Receive
    ) -> None:
        """Call the application. If the timeout of the request expires, end the request.

        The timeout expires for one of three reasons:

        - The client does not read the response, so `watch` has made the timeout expire. uvicorn
          then closes the connection, and no error is sent.
        - Another request has aborted this request. The abort makes the timeout expire.
        - The time limit is reached.
        """
        timeout = asyncio.timeout(limit.seconds)
        watch = _UnreadWatch(response, timeout, self._unread_s)
        state = scope.setdefault("state", {})
        request_id = state.get("request_id", "")
        tracked = self._running.track(request_id, current_client.get().name, timeout)
        with tracked as running_request:
            state["running_request"] = running_request  # the routes add ids to this object
            try:
                async with timeout:
                    with watch:
                        await self._app(scope, receive, response.send)
                return
            except TimeoutError:
                if not timeout.expired():
                    raise  # the application itself has raised this error
        if watch.is_unread:
            self._count_and_log_unread_response(scope)
        elif running_request.is_aborted:
            await response.end_with(abort_error(), scope, receive)
        else:
            error = _timeout_error(limit)
            self._metrics.count_refusal(error)
            await response.end_with(error, scope, receive)

    def _time_limit(self, scope: Scope) -> "_TimeLimit":
        """Return the smaller of two time limits: the server's setting and the request's header.

        Raises: ApiError 400 if the header is wrong.
        """
        requested_s = _requested_limit(scope)
        # If a limit is 0 or None, the time is not limited.
        if requested_s and (not self._limit_s or requested_s <= self._limit_s):
            return _TimeLimit(requested_s, is_requested=True)
        return _TimeLimit(self._limit_s or None, is_requested=False)

    def _count_and_log_unread_response(self, scope: Scope) -> None:
        """Count and log a request that ended because the client stopped reading the response."""
        error = ApiError(499, "The client did not read the response", limit="unread_timeout_s")
        self._metrics.count_refusal(error)
        _log.warning(
            "The frontend closed the connection of request %s, because its client read nothing of "
            "the response for %g s (unread_timeout_s)",
            scope.get("state", {}).get("request_id"),
            self._unread_s,
        )


def _requested_limit(scope: Scope) -> float | None:
    """Return the seconds in the header X-Request-Timeout, or None if there is no such header.

    Raises: ApiError 400 if the value is not a number over 0.
    """
    text = Headers(scope=scope).get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan  # every comparison with this value is false
    if not 0 < seconds < math.inf:
        raise ApiError(
            400,
            "The header X-Request-Timeout must be a number of seconds greater than 0, but the "
            f"request has {text[:80]!r}",
        )
    return seconds


def _stopped_error() -> ApiError:
    """Return an error with the status 503 for a request that ends because the server stops."""
    return ApiError(
        503,
        "The server is stopping, and this request did not finish in time. Send the request again.",
        code="unavailable",
        headers={"Retry-After": "1"},
    )


def _timeout_error(limit: _TimeLimit) -> ApiError:
    """Return an error with the status 504 for a request that took longer than its limit."""
    source = "the server's setting request_timeout_s"
    if limit.is_requested:
        source = "the request's header X-Request-Timeout"
    return ApiError(
        504,
        f"The request did not finish within {limit.seconds or 0:g} s, which is the limit of "
        f"{source}",
        code="timeout",
        limit="x_request_timeout" if limit.is_requested else "request_timeout_s",
    )


class _ObservedResponse:
    """Sends a response to the client. Records when the response starts and ends.

    Attributes:
        unsent_since: the time at which the response started to send the current message, on the
            clock of the event loop. None if no message is being sent.
    """

    def __init__(self, send: Send) -> None:
        self.unsent_since: float | None = None
        self._send = send
        self._clock = asyncio.get_running_loop().time
        self._has_started = False
        self._is_stream = False
        self._has_ended = False
        self._last_events = b""  # the body of the last message, if the response is a stream

    async def send(self, message: Message) -> None:
        """Send a message. While it is being sent, `unsent_since` contains the time of this call."""
        self.unsent_since = self._clock()
        try:
            await self._send(message)
        finally:
            self.unsent_since = None
        self._record(message)

    def _record(self, message: Message) -> None:
        """Update the state of the response after `message` has been sent."""
        if message["type"] == "http.response.start":
            self._has_started = True
            media_type = Headers(raw=message["headers"]).get("content-type", "")
            self._is_stream = media_type.startswith(sse.EventStream.media_type)
            return
        if self._is_stream:
            self._last_events = message.get("body", b"")
        if not message.get("more_body"):
            self._has_ended = True

    async def end_with(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Send an error as the response, or as the last event of a stream that has started."""
        if not self._has_started:
            await error_response(error, scope)(scope, receive, self._send)
        elif self._is_stream and not self._has_ended:
            event = error_event(error, scope, self._last_events)
            message = {"type": "http.response.body", "body": event, "more_body": False}
            try:
                async with asyncio.timeout(_SEND_ERROR_TIMEOUT_S):
                    await self._send(message)
            except TimeoutError:
                return


class _UnreadWatch:
    """Ends a request if the client stops reading the response.

    One timer serves all messages of a response, because a timer for each message would be costly.

    Args:
        response: the response that the client should read.
        timeout: the timeout of the request. It expires at once if the client does not read.
        unread_s: the number of seconds that a message may wait. 0 means no limit.

    Attributes:
        is_unread: whether this watch has ended the request.
    """

    def __init__(
        self, response: _ObservedResponse, timeout: asyncio.Timeout, unread_s: float
    ) -> None:
        self.is_unread = False
        self._response = response
        self._timeout = timeout
        self._unread_s = unread_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._unread_s:
            self._timer = self._loop.call_later(self._unread_s, self._check)
        return self

    def __exit__(self, *args: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """End the request if sending a message takes too long. Otherwise, set the timer again.

        Do nothing if the timeout has already expired for another reason.
        """
        now = self._loop.time()
        unsent_since = self._response.unsent_since
        waiting_s = 0.0 if unsent_since is None else now - unsent_since  # None: nothing is unsent
        if waiting_s < self._unread_s:
            self._timer = self._loop.call_later(self._unread_s - waiting_s, self._check)
        elif not self._timeout.expired():
            self.is_unread = True
            self._timeout.reschedule(now)  # the timeout expires at once, which ends the request
