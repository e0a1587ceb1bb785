"""uvicorn's HTTP protocol, with limits on headers, on unread responses and on waiting requests.

The headers must not be too large, and must arrive in time. The trailers, which are headers after a
body, must not be too large either. uvicorn itself has no such limits. A client could open many
connections and send nothing, or send headers without an end. Such connections would use up the file
descriptors and the memory.

A client could also request a large response that is not streamed, and read nothing. uvicorn would
keep the unread rest of the response in memory until the client disconnects.

With pipelining, a client sends further requests on a connection before it has received the response
to the first one. These requests wait. uvicorn does not limit their number, and each of them needs
about 2 KB of memory.
"""

import asyncio
import logging
import sys
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_MAX_HEADER_BYTES = 64 * 1024
_MAX_HEADERS = 256
_MAX_WAITING_REQUESTS = 100
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)

_log = logging.getLogger(__name__)


class LimitedProtocol(HttpToolsProtocol):
    """An HTTP protocol that closes a connection if the headers are too large or arrive too late.

    It also closes a connection if the client stops reading a response that has ended, or if too
    many requests of the connection wait. The middleware Timeouts ends a response that the client
    stops reading before its end.

    Attributes:
        timeout_s: the longest time for receiving the headers of a request. 0 means no limit.
        unread_s: the longest time in which the client reads nothing of a response. 0 means no
            limit.
    """

    timeout_s: float = 0.0
    unread_s: float = 0.0

    # The timer closes the connection if the headers of a request do not arrive in time.
    _timer: asyncio.TimerHandle | None = None
    # Whether the headers of the current request are complete.
    _has_headers = False
    # The bytes that the parser is parsing.
    _data = b""
    # The number of received bytes that belong to headers, to trailers or to the extension of a
    # chunk's size. The count restarts at 0 if the headers end, a part of the body arrives or the
    # request ends.
    _num_header_bytes = 0
    # Whether the last call of `data_received` received only bytes of headers, trailers or
    # extensions.
    _contains_only_headers = False
    # The request that the application handles now. uvicorn's attribute `cycle` is the newest
    # request instead, which may still wait in `pipeline`.
    _running: RequestResponseCycle | None = None
    # The timer closes the connection if the client reads nothing. It runs while a part of a
    # response is unsent.
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - uvicorn's signature
        """Start the timer of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and report to the running request that the client has disconnected.

        uvicorn reports this only to the newest request of the connection.
        """
        self._stop_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and close the connection if the headers are too large.

        The first bytes of a request start the timer that limits the time for its headers.

        Mutates: `_num_header_bytes`, if `data` contains only a part of headers or trailers.
        """
        is_start_of_headers = self._timer is None and not self._has_headers
        if is_start_of_headers:
            self._start_timer()
        self._contains_only_headers = True
        # During this call, the parser may call the methods below. Each of them except `on_header`
        # sets `_contains_only_headers` to False.
        # - `on_headers_complete`, at the end of the headers. It sets `_has_headers` and stops the
        #   timer.
        # - `on_body`, for each part of the body.
        # - `on_message_complete`, at the end of the body. It resets `_has_headers` to False.
        self._data = data
        super().data_received(data)
        self._data = b""
        if not self._contains_only_headers:
            self._num_header_bytes = 0
            return
        self._num_header_bytes += len(data)
        if self._num_header_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
            if not (self._has_headers or self._running):  # otherwise, a response may have started
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header.

        Raises: ValueError if the request has too many headers. uvicorn then sends the status 400.
        """
        if len(self.headers) >= _MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the timer, because the headers of the request have arrived.

        Raises: ValueError if too many requests of the connection wait. uvicorn then calls
            `send_400_response`.
        """
        self._has_headers = True
        self._contains_only_headers = False
        self._stop_timer()
        if self._asks_for_upgrade():
            return  # `_unsupported_upgrade_warning` parses the request again
        if len(self.pipeline) >= _MAX_WAITING_REQUESTS:
            raise ValueError("too many requests of the connection wait")
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)
        if not self.pipeline:
            self._running = self.cycle

    def send_400_response(self, msg: str) -> None:
        """Send the status 400 and close the connection.

        If an earlier request is running, close the connection without a response. The client would
        consider the status 400 to be the response to the earlier request.
        """
        running = self._running
        is_damaged_body = self._has_headers and running is self.cycle
        if running is None or (is_damaged_body and not running.response_started):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._contains_only_headers = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record the end of a request. The next bytes are the headers of a new request."""
        self._has_headers = self._contains_only_headers = False
        if not self._asks_for_upgrade():
            super().on_message_complete()

    def _asks_for_upgrade(self) -> bool:
        """Return whether the request asks for another protocol, such as a WebSocket or HTTP/2.

        A request with the method CONNECT asks for no other protocol. It is answered with an error.
        """
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _should_upgrade(self) -> bool:
        """Return False, because the frontend supports no other protocol."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Remove the header Upgrade from a request, and parse the request again.

        The parser ends such a request after its headers, and would parse the body as a new request.
        Java's HttpClient and `curl --http2` ask for HTTP/2 in each request, and continue with
        HTTP/1.1 if the server ignores this.

        uvicorn calls this method while it handles the parser's HttpParserUpgrade, whose argument is
        the number of parsed bytes.
        """
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        error = sys.exception()
        assert isinstance(error, httptools.HttpParserUpgrade)
        rest = self._data[error.args[0] :]
        self.parser = httptools.HttpRequestParser(self)
        self._data = b"".join([*head, b"\r\n", rest])
        super().data_received(self._data)

    def pause_writing(self) -> None:
        """Start the timer for unread responses, because the client reads slowly or not at all."""
        super().pause_writing()
        self._start_unread_timer()

    def on_response_complete(self) -> None:
        """Restart the timer for unread responses if a part of the response is still unsent.

        uvicorn then starts the next waiting request.
        """
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._stop_unread_timer()
        self._start_unread_timer()

    def _start_unread_timer(self) -> None:
        """Start the timer for unread responses, if it is needed and does not run yet."""
        num_unsent = self.transport.get_write_buffer_size()
        if self.unread_s and num_unsent and self._unread_timer is None:
            self._unread_timer = self.loop.call_later(
                self.unread_s, self._close_if_unread, num_unsent
            )

    def _close_if_unread(self, num_unsent_before: int) -> None:
        """Close the connection if the client has read nothing. Otherwise, restart the timer.

        While a response is being generated, its next parts are added to the unsent bytes. The
        middleware Timeouts then decides whether the client still reads.

        Args:
            num_unsent_before: the number of unsent bytes when the timer was started.
        """
        self._unread_timer = None
        is_generating = self._running is not None and self._running.response_started
        may_grow = is_generating and not self.transport.is_closing()
        if may_grow or self.transport.get_write_buffer_size() < num_unsent_before:
            self._start_unread_timer()
            return
        _log.warning(
            "The frontend closed a connection, because its client read nothing of the response "
            "for %g s (unread_timeout_s)",
            self.unread_s,
        )
        self.transport.abort()  # the method `close` would wait until the client has read the rest

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _start_timer(self) -> None:
        if self.timeout_s:
            self._timer = self.loop.call_later(self.timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        self.transport.close()


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Send a response without Content-Length as plain bytes instead of chunks.

    HTTP/1.0 has no chunks. The client recognises the end of the response by the end of the
    connection, because uvicorn closes a connection with HTTP/1.0 after the response.

    Mutates: cycle, before it has sent anything.
    """
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_without_chunks(message: Any) -> None:  # noqa: ANN401 - uvicorn's signature
        # uvicorn checks that no message exceeds the expected length.
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_without_chunks  # type: ignore[method-assign]


def protocol_class(timeout_s: float, unread_s: float) -> type[asyncio.Protocol]:
    """Return the protocol class for uvicorn's setting `http`.

    Args:
        timeout_s: the setting receive_timeout_s.
        unread_s: the setting unread_timeout_s.
    """
    return type("Protocol", (LimitedProtocol,), {"timeout_s": timeout_s, "unread_s": unread_s})
