"""How long a request may take, and how long its answer may lie unread."""

import asyncio
import logging
import math
from typing import Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid_client.errors import ApiError
from nereid_client.middleware.body_limit import error_response
from nereid_client.streaming import sse

TIMEOUT_HEADER = "x-request-timeout"
_LAST_WORD_S = 1.0

_log = logging.getLogger(__name__)


class Deadlines:
    """Ends requests that take too long; what they were generating is cancelled.

    The caller may ask for less than the server allows: `X-Request-Timeout: SECONDS`. An answer that
    has not begun becomes a 504; a stream gets an error as its last event.
    """

    def __init__(self, app: ASGIApp, limit_s: float, unread_s: float) -> None:
        """Nothing is limited by a limit of 0.

        Args:
            app: what answers.
            limit_s: from the request's arrival to the end of its answer.
            unread_s: a client that takes nothing of its answer for so long has gone.
        """
        self._app = app
        self._limit_s = limit_s
        self._unread_s = unread_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application for as long as it may take."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            limit_s = self._limit_of(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            async with asyncio.timeout(limit_s) as running:
                with _Watch(answer, running, self._unread_s) as watch:
                    await self._app(scope, receive, answer.send)
        except TimeoutError:
            if not running.expired():
                raise
            if not watch.found_unread:
                await answer.end_late(scope, receive, limit_s or 0)
                return
            _log.warning(
                "request %s: its client read nothing for %g s (unread_timeout_s); it was ended",
                scope.get("state", {}).get("request_id"),
                self._unread_s,
            )

    def _limit_of(self, scope: Scope) -> float | None:
        """Seconds that this request has, None for no limit.

        Raises: ApiError 400.
        """
        limits = [self._limit_s] if self._limit_s else []
        given = Headers(scope=scope).get(TIMEOUT_HEADER)
        if given is not None:
            try:
                wanted = float(given)
            except ValueError:
                wanted = math.nan
            if not 0 < wanted < math.inf:
                raise ApiError(
                    400, f"X-Request-Timeout: must be a number of seconds over 0, got {given[:80]}"
                )
            limits.append(wanted)
        return min(limits, default=None)


class _Answer:
    """Passes an answer on, and knows how far it has come.

    Attributes:
        waits_since: since when, by the loop's clock, a message waits to be taken; None while none.
    """

    def __init__(self, send: Send) -> None:
        self.waits_since: float | None = None
        self._send = send
        self._clock = asyncio.get_running_loop().time
        self._has_begun = self._is_stream = self._has_ended = False

    async def send(self, message: Message) -> None:
        self.waits_since = self._clock()
        try:
            await self._send(message)
        finally:
            self.waits_since = None
        if message["type"] == "http.response.start":
            self._has_begun = True
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._is_stream = kind.startswith(sse.EventStream.media_type)
        elif not message.get("more_body"):
            self._has_ended = True

    async def end_late(self, scope: Scope, receive: Receive, limit_s: float) -> None:
        """Say that time is up, in the way that is still open."""
        error = ApiError(
            504,
            f"the request was not finished within {limit_s:g} s, the limit of the server's "
            "request_timeout_s or of the header X-Request-Timeout",
            code="timeout",
        )
        if not self._has_begun:
            await error_response(error)(scope, receive, self._send)
        elif self._is_stream and not self._has_ended:
            last = {"type": "http.response.body", "body": sse.event(error.body())}
            try:
                async with asyncio.timeout(_LAST_WORD_S):
                    await self._send({**last, "more_body": False})
            except TimeoutError:
                return


class _Watch:
    """Ends a request whose client does not take its answer: one timer for all of its messages.

    Args:
        answer: what the client should take.
        running: expires when it does not.
        unread_s: how long it may leave a message; 0 for ever.
    """

    def __init__(self, answer: _Answer, running: asyncio.Timeout, unread_s: float) -> None:
        self.found_unread = False
        self._answer = answer
        self._running = running
        self._unread_s = unread_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._unread_s:
            self._timer = self._loop.call_later(self._unread_s, self._look)
        return self

    def __exit__(self, *args: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now, since = self._loop.time(), self._answer.waits_since
        due = (now if since is None else since) + self._unread_s
        if due > now:
            self._timer = self._loop.call_at(due, self._look)
        elif not self._running.expired():
            self.found_unread = True
            self._running.reschedule(now)
