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
    # Whether the headers of the current request are complete and valid.
    _has_headers = False
    # The number of bytes that have arrived since the parser last reported one of these events: the
    # end of the headers, a part of the body, or the end of the request. These bytes belong to
    # headers, to trailers, or to the extension of a chunk's size.
    _num_header_bytes = 0
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
        """
        is_start_of_headers = self._timer is None and not self._has_headers
        if is_start_of_headers:
            self._start_timer()
        self._num_header_bytes += len(data)
        # If `data` completes headers or a part of a body, the parser calls a method `on_...`, which
        # sets `_num_header_bytes` to 0.
        self._parse(data)
        is_too_large = self._num_header_bytes > _MAX_HEADER_BYTES
        if is_too_large and not self.transport.is_closing():
            self._refuse_large_headers()

    def _refuse_large_headers(self) -> None:
        """Close the connection. Send the status 431 first, unless a response may have started."""
        may_have_started_response = self._has_headers or self._running is not None
        if not may_have_started_response:
            self.transport.write(_TOO_LARGE)
        self.transport.close()

    def _parse(self, data: bytes) -> None:
        """Pass received bytes to the parser, which calls the methods `on_...` for each part.

        Unlike uvicorn's `data_received`, this method ignores the header Upgrade. If the bytes are
        not a valid request, the client receives the status 400.
        """
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            # The parser has stopped after the headers of a request with the header Upgrade.
            num_parsed_bytes = error.args[0]
            self._parse_without_upgrade(data[num_parsed_bytes:])
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Ignore a trailer, which is a header after the body of a request.

        The parser calls this method for both headers and trailers. A proxy can remove or replace a
        header, such as X-Client-Id, but proxies do not check trailers. If trailers were stored, a
        client could send X-Client-Id as a trailer, and the proxy would not remove it.

        Raises: ValueError if there are too many headers. `_parse` then calls `send_400_response`.
        """
        is_trailer = self._has_headers
        if is_trailer:
            return
        if len(self.headers) >= _MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request whose headers have arrived, and stop the timer for its headers.

        A request with the header Upgrade is not started. The parser stops after such headers, and
        `_parse` then passes the same headers without Upgrade to a new parser, which calls this
        method again.

        Raises: an exception if the URL is invalid, if the client asks for a tunnel (the method
            CONNECT), or if too many requests wait. `_parse` then calls `send_400_response`.
        """
        self._num_header_bytes = 0
        self._stop_timer()
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("the frontend is no proxy")
        if not self.parser.should_upgrade():
            self._start_request()

    def _start_request(self) -> None:
        """Start the request whose headers have arrived.

        If an earlier request of the connection is running, uvicorn appends the new request to
        `pipeline`, where it waits. Otherwise, the new request becomes the running request.
        """
        if len(self.pipeline) >= _MAX_WAITING_REQUESTS:
            raise ValueError("too many requests of the connection wait")
        super().on_headers_complete()
        self._has_headers = True
        if self.scope["http_version"] == "1.0":
            _disable_chunked_encoding(self.cycle)
        is_waiting = bool(self.pipeline)
        if not is_waiting:
            self._running = self.cycle

    def send_400_response(self, msg: str) -> None:
        """Send the status 400 for an invalid request, and close the connection.

        The connection is closed without the status 400 in two cases:

        - An earlier request is running. The client would consider the status 400 to be the response
          to the earlier request.
        - The body of the running request is invalid, and the response to this request has started.
          The client would consider the status 400 to be a part of this response.
        """
        running = self._running
        if running is not None:
            is_running_invalid = self._has_headers and running is self.cycle
            if not is_running_invalid or running.response_started:
                self.transport.close()
                return
        super().send_400_response(msg)

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record the end of a request. The next bytes are the headers of a new request."""
        self._has_headers = False
        self._num_header_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Remove the header Upgrade from a request, and parse the request again.

        The parser ends such a request after its headers, and would parse the body as a new request.
        Java's HttpClient and `curl --http2` ask for HTTP/2 in each request, and continue with
        HTTP/1.1 if the server ignores this.

        `rest` contains the received bytes after the headers of the request.
        """
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"".join([*head, b"\r\n", rest]))

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
        """Close the connection if the client has read nothing since the timer started.

        Restart the timer instead if the client has read a part of the response, or if the
        middleware Timeouts checks whether the client reads.

        Example: 5000 bytes were unsent when the timer started. If 5000 bytes are still unsent,
        close the connection. If 3000 bytes are unsent, restart the timer.

        Args:
            num_unsent_before: the number of unsent bytes when the timer started.
        """
        self._unread_timer = None
        has_read = self.transport.get_write_buffer_size() < num_unsent_before
        if has_read or self._is_generating_response():
            self._start_unread_timer()
            return
        _log.warning(
            "The frontend closed a connection, because its client read nothing of the response "
            "for %g s (unread_timeout_s)",
            self.unread_s,
        )
        self.transport.abort()  # the method `close` would wait until the client has read the rest

    def _is_generating_response(self) -> bool:
        """Return whether the application still adds parts to a response that has started.

        The new parts are added to the unsent bytes, so the number of these bytes does not show
        whether the client reads. The middleware Timeouts checks this instead.
        """
        # A response can end before it is complete, for example at a time limit. The request then
        # stays in `_running`, although uvicorn has closed the transport.
        has_started = self._running is not None and self._running.response_started
        return has_started and not self.transport.is_closing()

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


def _disable_chunked_encoding(cycle: RequestResponseCycle) -> None:
    """Keep uvicorn from using chunked encoding, which HTTP/1.0 lacks, in the answer to a request.

    uvicorn 0.54 has no setting for this. It uses chunked encoding for each response without
    Content-Length, for example a stream. Without chunked encoding, the response ends when uvicorn
    closes the connection. uvicorn closes each connection with HTTP/1.0 after the response.

    Mutates: the attributes `chunked_encoding` and `send` of `cycle`, which sends the response.
    """
    send = cycle.send
    cycle.chunked_encoding = False  # None lets uvicorn choose

    async def send_of_unknown_length(message: Any) -> None:  # noqa: ANN401 - uvicorn's signature
        # uvicorn subtracts the length of each message from the expected length of the response.
        # The result must not be negative, and must be 0 after the last message. The length of the
        # response is unknown, so each message sets the expected length to its own length.
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_of_unknown_length  # type: ignore[method-assign]


def protocol_class(timeout_s: float, unread_s: float) -> type[asyncio.Protocol]:
    """Return the protocol class for uvicorn's setting `http`.

    Args:
        timeout_s: the setting receive_timeout_s.
        unread_s: the setting unread_timeout_s.
    """
    return type("Protocol", (LimitedProtocol,), {"timeout_s": timeout_s, "unread_s": unread_s})
