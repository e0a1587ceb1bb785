"""Attacks below JSON: damaged HTTP, request smuggling, slow clients, and many connections."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from loadtest.hostile.attack import Attack, Outcome, Send, Target, call, chat, post, raw, read_raw

_CHAT = "/v1/chat/completions"
_BODY = json.dumps(chat()).encode()
CLOSES = (400, 401, 404, 405, 408, 411, 413, 414, 417, 426, 431, 501, 505, "closed")
_SLOW_S = 20.0
_SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n\r\n"


def attacks() -> Iterator[Attack]:
    """Yield all attacks below JSON."""
    yield from _smuggling()
    yield from _damaged_http()
    yield from _headers()
    yield from _slow()


def head(*lines: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    """Return the head of a POST request with further header lines."""
    usual = (b"Host: a", b"Authorization: Bearer {key}", b"Content-Type: application/json")
    request_line = b"POST " + path + b" HTTP/1.1"
    return b"\r\n".join((request_line, *usual, *lines, b"", b""))


def _smuggling() -> Iterator[Attack]:
    length = b"Content-Length: %d" % len(_BODY)
    chunked = b"Transfer-Encoding: chunked"
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_BODY), _BODY)
    heads = {
        "Content-Length and chunked": (length, chunked),
        "chunked and Content-Length": (chunked, length),
        "two lengths": (length, b"Content-Length: 5"),
        "a list of lengths": (b"Content-Length: 5, %d" % len(_BODY),),
        "a length with a sign": (b"Content-Length: +%d" % len(_BODY),),
        "a negative length": (b"Content-Length: -1",),
        "a length of 10**30": (b"Content-Length: " + b"9" * 30,),
        "a length in hexadecimal": (b"Content-Length: 0x50",),
        "an unknown transfer encoding": (b"Transfer-Encoding: xchunked",),
        "chunked twice": (chunked, chunked),
        "chunked after identity": (b"Transfer-Encoding: identity, chunked",),
        "chunked with a tab": (b"Transfer-Encoding:\tchunked",),
        "chunked with a vertical tab": (b"Transfer-Encoding: \x0bchunked",),
        "a blank before the colon": (b"Transfer-Encoding : chunked", length),
        "a folded header": (b"X: a\r\n Transfer-Encoding: chunked", length),
    }
    for name, lines in heads.items():
        body = chunk if "chunked" in name or "transfer" in name else _BODY
        send = not_smuggled(head(*lines) + body + _SMUGGLED)
        yield Attack("smuggling", name, send, (200, *CLOSES), 10)
    early = b"0\r\n\r\n" + _SMUGGLED
    lines = (b"Content-Length: %d" % len(early), chunked)
    yield Attack(
        "smuggling",
        "an empty chunk before a second request",
        not_smuggled(head(*lines) + early),
        CLOSES,
        10,
    )


def not_smuggled(sent: bytes) -> Send:
    """Return a function that sends bytes with a second request inside the body of the first one.

    A second response is allowed only if the first request was complete before the second request.
    The outcome has the status 599 if the list of models arrives although the length of the body was
    ambiguous.
    """
    is_ambiguous = b"Content-Length" in sent and b"chunked" in sent

    def send(target: Target, limit_s: float) -> Outcome:
        with socket.create_connection(("127.0.0.1", target.openai), timeout=limit_s) as connection:
            with suppress(OSError):
                connection.sendall(sent.replace(b"{key}", target.key.encode()))
            first = read_raw(connection)
            connection.settimeout(0.5)
            rest = b""
            with suppress(OSError):
                while block := connection.recv(65536):
                    rest += block
        if is_ambiguous and b'"object":"list"' in first.text.encode() + rest:
            return Outcome(599, "the second request was answered")
        return first

    return send


def _damaged_http() -> Iterator[Attack]:
    heads = {
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
    for name, sent in heads.items():
        yield Attack("damaged HTTP", name, raw(sent), (403, *CLOSES), 10)
    chunked = head(b"Transfer-Encoding: chunked")
    bodies = {
        "a chunk of 2**64 bytes": b"FFFFFFFFFFFFFFFF\r\nabc",
        "a chunk size with 1,000 digits": b"1" * 1000 + b"\r\nabc",
        "a chunk without a size": b"\r\nabc\r\n",
        "a chunk extension of 1 MB": b"1;" + b"x" * 2**20 + b"\r\n{\r\n0\r\n\r\n",
        "10,000 trailers": b"1\r\n{\r\n0\r\n" + b"A: b\r\n" * 10_000 + b"\r\n",
        "no end of a chunk": b"1\r\n{XX1\r\n}\r\n0\r\n\r\n",
        "a million chunks": b"1\r\n \r\n" * 10**6 + b"0\r\n\r\n",
    }
    for name, sent in bodies.items():
        yield Attack("damaged HTTP", name, raw(chunked + sent), CLOSES, 15)
    yield Attack(
        "damaged HTTP",
        "500 requests at once on one connection",
        raw(_SMUGGLED * 500),
        (200, *CLOSES),
        15,
    )
    compressed = gzip.compress(b" " * 50_000_000)
    yield Attack(
        "damaged HTTP",
        "a body compressed with gzip",
        post(_CHAT, compressed, {"Content-Encoding": "gzip"}),
        (400, 413, 415),
        5,
    )
    yield Attack(
        "damaged HTTP",
        "the content type of an image",
        post(_CHAT, chat(), {"Content-Type": "image/png"}),
        (200, 400, 415),
        5,
    )
    yield Attack("damaged HTTP", "DELETE with a body", call("DELETE", _CHAT, body=_BODY), (405,), 5)
    yield Attack(
        "damaged HTTP", "GET with a body", call("GET", "/v1/models", body=_BODY), (200,), 5
    )


def _headers() -> Iterator[Attack]:
    length = b"Content-Length: %d" % len(_BODY)
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
    for name, more in lines.items():
        yield Attack("headers", name, raw(head(length, *more) + _BODY), (200, *CLOSES), 10)


def _slow() -> Iterator[Attack]:
    length = b"Content-Length: %d" % len(_BODY)
    chunked = head(b"Transfer-Encoding: chunked")
    sends = {
        "a body of one byte in a second": _dripping(head(length), _BODY, 1.0),
        "a body that never comes": _dripping(head(length), b"", 1.0),
        "a body that stops in the middle": _dripping(head(length) + _BODY[:20], b"", 1.0),
        "Expect: 100-continue without a body": _dripping(
            head(length, b"Expect: 100-continue"), b"", 1.0
        ),
        "endless chunks": _dripping(chunked, b"1\r\n \r\n" * 100_000, 0.002),
        "a chunk that never ends": _dripping(chunked + b"FFFFFFF\r\n", b" " * 10**6, 0.5),
        "headers of one byte in a second": _dripping(b"", head(length), 1.0),
        "headers that never end": _dripping(b"POST / HTTP/1.1\r\n", b"A: b\r\n" * 10**6, 0.2),
        "a connection without a request": _dripping(b"", b"", 1.0),
    }
    for name, send in sends.items():
        yield Attack("slow client", name, send, CLOSES, _SLOW_S)
    yield Attack("slow client", "700 connections without a request", _idle(700), ("left",), _SLOW_S)
    yield Attack("slow client", "50 streams that nobody reads", _unread(50), ("left",), _SLOW_S)


def _dripping(start: bytes, rest: bytes, pause_s: float) -> Send:
    """Return a function that sends `start`, then `rest` in small pieces until the server answers.

    The server must end the connection within the time limit, with or without an answer.
    """
    size = 6 if len(rest) > 10_000 else 1

    def send(target: Target, limit_s: float) -> Outcome:
        deadline = time.monotonic() + limit_s
        with socket.create_connection(("127.0.0.1", target.openai), timeout=limit_s) as connection:
            connection.sendall(start.replace(b"{key}", target.key.encode()))
            connection.settimeout(pause_s)
            filled = rest.replace(b"{key}", target.key.encode())
            position = 0
            while time.monotonic() < deadline:
                outcome = read_raw(connection)
                if outcome.status != "hung":
                    return outcome
                with suppress(OSError):
                    connection.sendall(filled[position : position + size])
                position += size
        return Outcome("hung")

    return send


def _idle(count: int) -> Send:
    """Return a function that opens connections, waits for a few seconds, and closes them."""

    def send(target: Target, limit_s: float) -> Outcome:
        connections = [
            socket.create_connection(("127.0.0.1", target.openai), timeout=limit_s)
            for _ in range(count)
        ]
        time.sleep(4)
        for connection in connections:
            connection.close()
        return Outcome("left")

    return send


def _unread(count: int) -> Send:
    """Return a function that starts streams, reads nothing for a few seconds, and closes them."""
    body = json.dumps(chat(stream=True, max_tokens=500, ignore_eos=True, logprobs=True)).encode()
    sent = head(b"Content-Length: %d" % len(body)) + body

    def send(target: Target, limit_s: float) -> Outcome:
        connections = []
        for _ in range(count):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(limit_s)
            connection.connect(("127.0.0.1", target.openai))
            connection.sendall(sent.replace(b"{key}", target.key.encode()))
            connections.append(connection)
        time.sleep(6)
        for connection in connections:
            connection.close()
        return Outcome("left")

    return send
