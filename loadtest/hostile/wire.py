"""Attacks with damaged HTTP, request smuggling, slow clients, and many connections."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from loadtest.hostile.attack import Attack, Outcome, Send, Statuses, Target, make_attacks
from loadtest.hostile.requests import CHATS, call, chat, connect, post, raw, read_raw, with_key

BODY = json.dumps(chat()).encode()
LENGTH = b"Content-Length: %d" % len(BODY)
CLOSES = (400, 401, 404, 405, 408, 411, 413, 414, 417, 426, 431, 501, 505, "closed")
_CHUNKED = b"Transfer-Encoding: chunked"
_SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n\r\n"


def attacks() -> Iterator[Attack]:
    """Yield all attacks of this module."""
    yield from _smuggling()
    yield from _damaged_requests()
    yield from _damaged_chunks()
    yield from _odd_requests()
    yield from _headers()
    yield from _slow()


def head(*lines: bytes) -> bytes:
    """Return the head of a chat completion with further header lines."""
    request_line = b"POST " + CHATS.encode() + b" HTTP/1.1"
    default = (b"Host: a", b"Authorization: Bearer {key}", b"Content-Type: application/json")
    return b"\r\n".join((request_line, *default, *lines, b"", b""))


def request(body: bytes = BODY) -> bytes:
    """Return a complete chat completion."""
    return head(b"Content-Length: %d" % len(body)) + body


def _smuggling() -> Iterator[Attack]:
    """Yield requests with an ambiguous length, each followed by a second request."""
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    chunked_heads = {
        "Content-Length and chunked": (LENGTH, _CHUNKED),
        "chunked and Content-Length": (_CHUNKED, LENGTH),
        "an unknown transfer encoding": (b"Transfer-Encoding: xchunked",),
        "chunked twice": (_CHUNKED, _CHUNKED),
        "chunked after identity": (b"Transfer-Encoding: identity, chunked",),
        "chunked with a tab": (b"Transfer-Encoding:\tchunked",),
        "chunked with a vertical tab": (b"Transfer-Encoding: \x0bchunked",),
    }
    heads = {
        "two lengths": (LENGTH, b"Content-Length: 5"),
        "a list of lengths": (b"Content-Length: 5, %d" % len(BODY),),
        "a length with a sign": (b"Content-Length: +%d" % len(BODY),),
        "a negative length": (b"Content-Length: -1",),
        "a length of 10**30": (b"Content-Length: " + b"9" * 30,),
        "a length in hexadecimal": (b"Content-Length: 0x50",),
        "a blank before the colon": (b"Transfer-Encoding : chunked", LENGTH),
        "a folded header": (b"X: a\r\n Transfer-Encoding: chunked", LENGTH),
    }
    requests = {
        **{name: head(*lines) + chunk for name, lines in chunked_heads.items()},
        **{name: head(*lines) + BODY for name, lines in heads.items()},
    }
    sends = {name: not_smuggled(data + _SMUGGLED) for name, data in requests.items()}
    yield from make_attacks("smuggling", sends, allowed=(200, *CLOSES), limit_s=10)
    # The chunk ends the first request, but its Content-Length includes the second request.
    body = b"0\r\n\r\n" + _SMUGGLED
    send = not_smuggled(head(b"Content-Length: %d" % len(body), _CHUNKED) + body)
    name = "an empty chunk before a second request"
    yield Attack("smuggling", name, send, allowed=CLOSES, limit_s=10)


def not_smuggled(data: bytes) -> Send:
    """Return a function that sends a request whose body may contain a second request.

    If the length of the first request is ambiguous, the server must not answer the second request,
    which asks for the list of models. The outcome has the status 599 if the server answers both.
    """
    is_ambiguous = b"Content-Length" in data and b"chunked" in data

    def send(target: Target, limit_s: float) -> Outcome:
        received = b""
        with connect(target.openai, limit_s) as connection:
            with suppress(OSError):
                connection.sendall(with_key(data, target))
            outcome = read_raw(connection)
            connection.settimeout(0.5)
            with suppress(OSError):
                while block := connection.recv(65536):
                    received += block
        lists_models = b'"object":"list"' in outcome.text.encode() + received
        if is_ambiguous and lists_models:
            return Outcome(599, "the second request was answered")
        return outcome

    return send


def _damaged_requests() -> Iterator[Attack]:
    """Yield requests whose first bytes are unusual."""
    requests = {
        "random bytes": bytes(range(256)) * 40,
        "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
        "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 9,
        "HTTP/0.9": b"GET /v1/models\r\n\r\n",
        "HTTP/9.9": b"GET /v1/models HTTP/9.9\r\nHost: a\r\n\r\n",
        "a method of 100,000 characters": b"A" * 100_000 + b" / HTTP/1.1\r\n\r\n",
        "a path of 1 MB": b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        "NUL in the path": b"GET /v1/\0models HTTP/1.1\r\nHost: a\r\n\r\n",
        "a path with ..": b"GET /v1/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
        "an absolute address": b"GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: a\r\n\r\n",
        "CONNECT": b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        "TRACE": b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n",
        "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
        "two hosts": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "only newlines": b"\n" * 50_000 + b"GARBAGE\r\n\r\n",
        "a WebSocket": b"GET /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        "an upgrade to h2c": b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    }
    sends = {name: raw(data) for name, data in requests.items()}
    yield from make_attacks("damaged HTTP", sends, allowed=(403, *CLOSES), limit_s=10)


def _damaged_chunks() -> Iterator[Attack]:
    """Yield requests with damaged or unusual chunks."""
    chunks = {
        "a chunk of 2**64 bytes": b"FFFFFFFFFFFFFFFF\r\nabc",
        "a chunk size with 1,000 digits": b"1" * 1000 + b"\r\nabc",
        "a chunk without a size": b"\r\nabc\r\n",
        "a chunk extension of 1 MB": b"1;" + b"x" * 2**20 + b"\r\n{\r\n0\r\n\r\n",
        "10,000 trailers": b"1\r\n{\r\n0\r\n" + b"A: b\r\n" * 10_000 + b"\r\n",
        "no end of a chunk": b"1\r\n{XX1\r\n}\r\n0\r\n\r\n",
        "a million chunks": b"1\r\n \r\n" * 10**6 + b"0\r\n\r\n",
    }
    sends = {name: raw(head(_CHUNKED) + data) for name, data in chunks.items()}
    yield from make_attacks("damaged HTTP", sends, allowed=CLOSES)


def _odd_requests() -> Iterator[Attack]:
    """Yield requests that the server may answer."""
    bomb = gzip.compress(b" " * 50_000_000)
    cases: dict[str, tuple[Send, Statuses]] = {
        "a body compressed with gzip": (
            post(CHATS, bomb, {"Content-Encoding": "gzip"}),
            (400, 413, 415),
        ),
        "the content type of an image": (
            post(CHATS, chat(), {"Content-Type": "image/png"}),
            (200, 400, 415),
        ),
        "DELETE with a body": (call("DELETE", CHATS, body=BODY), (405,)),
        "GET with a body": (call("GET", "/v1/models", body=BODY), (200,)),
    }
    for name, (send, allowed) in cases.items():
        yield Attack("damaged HTTP", name, send, allowed=allowed, limit_s=5)
    pipelined = raw(_SMUGGLED * 500)
    name = "500 requests at once on one connection"
    yield Attack("damaged HTTP", name, pipelined, allowed=(200, *CLOSES))


def _headers() -> Iterator[Attack]:
    """Yield requests with many, large or damaged header lines."""
    lines = {
        "10,000 headers": [b"X-%d: y" % i for i in range(10_000)],
        "the same header 10,000 times": [b"X: y"] * 10_000,
        "a header of 1 MB": [b"X: " + b"y" * 2**20],
        "a cookie of 60,000 bytes": [b"Cookie: " + b"c=1; " * 12_000],
        "a header name of 60,000 bytes": [b"X" * 60_000 + b": y"],
        "a header name with blanks": [b"X Y: z"],
        "NUL in a header": [b"X: a\0b"],
        "CR in a header": [b"X: a\rb: c"],
        "a request id with CRLF": [b"X-Request-Id: a\r\nSet-Cookie: b"],
        "a request id of 60,000 bytes": [b"X-Request-Id: " + b"r" * 60_000],
        "no colon": [b"XYZ"],
        "headers in Latin-1": [b"X: \xe9\xff"],
    }
    sends = {name: raw(head(LENGTH, *more) + BODY) for name, more in lines.items()}
    yield from make_attacks("headers", sends, allowed=(200, *CLOSES), limit_s=10)


def _slow() -> Iterator[Attack]:
    """Yield clients that send slowly, send nothing, or do not read."""
    chunked = head(_CHUNKED)
    one_chunk, one_header = b"1\r\n \r\n", b"A: b\r\n"
    drips = {
        "a body of one byte in a second": _dripping(head(LENGTH), BODY, pause_s=1.0),
        "a body that never comes": _dripping(head(LENGTH), b"", pause_s=1.0),
        "a body that stops in the middle": _dripping(head(LENGTH) + BODY[:20], b"", pause_s=1.0),
        "Expect: 100-continue without a body": _dripping(
            head(LENGTH, b"Expect: 100-continue"), b"", pause_s=1.0
        ),
        "endless chunks": _dripping(
            chunked, one_chunk * 100_000, pause_s=0.002, size=len(one_chunk)
        ),
        "a chunk that never ends": _dripping(
            chunked + b"FFFFFFF\r\n", b" " * 10**6, pause_s=0.5, size=6
        ),
        "headers of one byte in a second": _dripping(b"", head(LENGTH), pause_s=1.0),
        "headers that never end": _dripping(
            b"POST / HTTP/1.1\r\n", one_header * 10**6, pause_s=0.2, size=len(one_header)
        ),
        "a connection without a request": _dripping(b"", b"", pause_s=1.0),
    }
    yield from make_attacks("slow client", drips, allowed=CLOSES, limit_s=20)
    stream = chat(stream=True, max_tokens=500, ignore_eos=True, logprobs=True)
    unread = request(json.dumps(stream).encode())
    silent = {
        "700 connections without a request": _unread(700, b"", seconds=4),
        "50 streams that nobody reads": _unread(50, unread, seconds=6, receive_buffer=4096),
    }
    yield from make_attacks("slow client", silent, allowed=("left",), limit_s=20)


def _dripping(start: bytes, rest: bytes, pause_s: float, size: int = 1) -> Send:
    """Return a function that sends `start`, then `rest` in pieces until the server answers.

    Each piece has `size` bytes, and is sent `pause_s` seconds after the piece before. The server
    must end the connection within the time limit, with or without an answer.
    """

    def send(target: Target, limit_s: float) -> Outcome:
        deadline = time.monotonic() + limit_s
        data = with_key(rest, target)
        position = 0
        with connect(target.openai, limit_s) as connection:
            connection.sendall(with_key(start, target))
            connection.settimeout(pause_s)
            while time.monotonic() < deadline:
                outcome = read_raw(connection)  # the socket waits for `pause_s`
                if outcome.status != "hung":
                    return outcome
                with suppress(OSError):
                    connection.sendall(data[position : position + size])
                position += size
        return Outcome("hung")

    return send


def _unread(count: int, data: bytes, seconds: float, receive_buffer: int | None = None) -> Send:
    """Return a function that opens `count` connections, and closes them after some seconds.

    Each connection sends `data` and reads nothing. With a small `receive_buffer`, in bytes, the
    server cannot send its whole answer.
    """

    def send(target: Target, limit_s: float) -> Outcome:
        with ExitStack() as connections:
            for _ in range(count):
                connection = connections.enter_context(socket.socket())
                if receive_buffer is not None:  # takes effect only before `connect`
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
                connection.settimeout(limit_s)
                connection.connect(("127.0.0.1", target.openai))
                connection.sendall(with_key(data, target))
            time.sleep(seconds)
        return Outcome("left")

    return send
