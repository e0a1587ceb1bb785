"""Attacks with unusual HTTP: framing, methods, paths, content types, and broken connections."""

import json
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress

from loadtest.hostile.attack import Attack, Outcome, Send, Target, make_attacks
from loadtest.hostile.requests import CHATS, chat, connect, post, raw, read_raw, with_key
from loadtest.hostile.wire import BODY, CLOSES, LENGTH, head, not_smuggled, request

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER is on, with a timeout of 0


def attacks() -> Iterator[Attack]:
    """Yield all attacks of this module."""
    yield from _framing()
    yield from _paths()
    yield from _contents()
    yield from _broken_connections()


def _framing() -> Iterator[Attack]:
    """Yield requests whose body may have one length for a proxy and another length for a server."""
    size = b"%x" % len(BODY)
    chunk = size + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
    sends = {
        **{
            f"with a length: {name}": not_smuggled(head(LENGTH, line) + chunk)
            for name, line in _encodings().items()
        },
        **{
            name: not_smuggled(head(b"Content-Length: " + length) + BODY)
            for name, length in _lengths().items()
        },
        **{
            name: not_smuggled(head(b"Transfer-Encoding: chunked") + body)
            for name, body in _chunked_bodies(chunk, size).items()
        },
    }
    yield from make_attacks("smuggling", sends, allowed=(200, *CLOSES), limit_s=10)


def _encodings() -> dict[str, bytes]:
    """Return header lines that are similar to `Transfer-Encoding: chunked`."""
    return {
        "chunked in capitals": b"Transfer-Encoding: CHUNKED",
        "chunked, identity": b"Transfer-Encoding: chunked, identity",
        "chunked with a parameter": b"Transfer-Encoding: chunked;q=1",
        "chunked in quotes": b'Transfer-Encoding: "chunked"',
        "chunked with NUL": b"Transfer-Encoding: chunked\0",
        "chunked with a comma": b"Transfer-Encoding: ,chunked",
        "an underscore in the name": b"Transfer_Encoding: chunked",
        "gzip, chunked": b"Transfer-Encoding: gzip, chunked",
        "an empty transfer encoding": b"Transfer-Encoding:",
        "a bare line feed before chunked": b"X: a\nTransfer-Encoding: chunked",
        "a bare carriage return before chunked": b"X: a\rTransfer-Encoding: chunked",
    }


def _lengths() -> dict[str, bytes]:
    """Return unusual values of the header `Content-Length`."""
    return {
        "two equal lengths": b"%d, %d" % (len(BODY), len(BODY)),
        "an empty length": b"",
        "a length with an underscore": b"1_0",
        "a length with a fraction": b"%d.0" % len(BODY),
        "a length with an exponent": b"1e2",
        "a length with leading zeros": b"000%d" % len(BODY),
        "a length with a tab": b"\t%d\t" % len(BODY),
        "a length in other digits": "\u0663".encode(),
        "a length with a second word": b"%d x" % len(BODY),
    }


def _chunked_bodies(chunk: bytes, size: bytes) -> dict[str, bytes]:
    """Return variants of `chunk`, a correct body in one chunk. `size` is the size of the chunk."""
    return {
        "a chunk size with a sign": b"+" + chunk,
        "a chunk size with 0x": b"0x" + chunk,
        "a chunk size with blanks": b"  " + size + b"  \r\n" + BODY + b"\r\n0\r\n\r\n",
        "a chunk size with an underscore": b"0_" + chunk,
        "a negative chunk size": b"-1\r\n" + chunk,
        "chunk lines that end with a line feed": chunk.replace(b"\r\n", b"\n"),
        "a chunk extension with a line feed": size + b";a\nb\r\n" + BODY + b"\r\n0\r\n\r\n",
        "a chunk extension with quotes": size + b';a="\r\n"\r\n' + BODY + b"\r\n0\r\n\r\n",
        "a trailer with a length": chunk[:-2] + b"Content-Length: 9\r\n\r\n",
        "bytes after the last chunk": chunk + b"GARBAGE",
        "only the last chunk": b"0\r\n\r\n",
    }


def _paths() -> Iterator[Attack]:
    """Yield unusual methods, paths and queries."""
    end = b" HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n\r\n"
    lines = {
        "PUT": b"PUT " + CHATS.encode(),
        "PATCH": b"PATCH " + CHATS.encode(),
        "PROPFIND": b"PROPFIND /",
        "BREW": b"BREW /",
        "a method in lower case": b"get /v1/models",
        "HEAD": b"HEAD /v1/models",
        "OPTIONS *": b"OPTIONS *",
        "dots in percent signs": b"GET /v1/%2e%2e/%2e%2e/etc/passwd",
        "doubly escaped dots": b"GET /v1/%252e%252e/etc/passwd",
        "backslashes": b"GET /v1\\..\\..\\etc\\passwd",
        "many slashes": b"GET " + b"/" * 5_000 + b"v1/models",
        "a path parameter": b"GET /v1/models;a=b",
        "a damaged escape": b"GET /v1/models/%zz%",
        "invalid UTF-8 in escapes": b"GET /v1/models/%ff%fe",
        "a path of raw UTF-8": "GET /v1/m\u00f6del".encode(),
        "a query of 60,000 bytes": b"GET /v1/models?" + b"a=b&" * 15_000,
        "brackets in the query": b"GET /v1/responses/x?include[]=" + b"%5b" * 3_000,
        "negative numbers in the query": b"GET /v1/responses/x/input_items?limit=-1&after=%00",
        "a huge number in the query": b"GET /v1/responses/x/input_items?limit=" + b"9" * 5_000,
        "a fragment": b"GET /v1/models#../../etc",
        "a colon": b"GET /v1/models/a:b:c",
        "the documentation": b"GET /docs/../openapi.json",
        "the metrics with a body": b"GET /metrics",
        "no path": b"GET",
        "a tab instead of a blank": b"GET\t/v1/models",
    }
    sends = {name: raw(line + end) for name, line in lines.items()}
    yield from make_attacks("paths", sends, allowed=(200, 204, 301, 307, 403, *CLOSES), limit_s=10)


def _contents() -> Iterator[Attack]:
    """Yield unusual content types, encodings and other headers."""
    sends = {
        **{
            name: post(CHATS, body, {"Content-Type": content_type})
            for name, (content_type, body) in _typed_bodies().items()
        },
        **{
            name: post(CHATS, body, {"Content-Encoding": encoding})
            for name, (encoding, body) in _encoded_bodies().items()
        },
        **{name: post(CHATS, BODY, headers) for name, headers in _other_headers().items()},
    }
    allowed = (200, 400, 401, 413, 415, 417, 431, "closed")
    yield from make_attacks("contents", sends, allowed=allowed, limit_s=10)


def _typed_bodies() -> dict[str, tuple[str, bytes]]:
    """Return the content type and the body of requests with unusual content types, by name."""
    part = b"--b\r\nContent-Disposition: form-data; name=file; filename=../../x\r\n\r\n"
    form_data = part * 20_000 + b"--b--\r\n"
    xml = b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>'
    utf_16 = json.dumps(chat()).encode("utf-16")
    return {
        "multipart": ("multipart/form-data; boundary=b", form_data),
        "a boundary of 50,000 characters": (
            "multipart/form-data; boundary=" + "b" * 50_000,
            form_data,
        ),
        "a form": ("application/x-www-form-urlencoded", b"messages=a&" * 50_000),
        "XML": ("application/xml", xml),
        "UTF-16 by its charset": ("application/json; charset=utf-16", utf_16),
        "an unknown charset": ("application/json; charset=../../x", BODY),
        "a damaged content type": (";;;=,/", BODY),
        "two values in the content type": ("text/plain, application/json", BODY),
    }


def _encoded_bodies() -> dict[str, tuple[str, bytes]]:
    """Return the content encoding and the body of requests, by name.

    A body is a compression bomb of 50 MB, or plain JSON in spite of the content encoding.
    """
    bomb = zlib.compress(b" " * 50_000_000)
    return {
        "deflate": ("deflate", bomb),
        "br": ("br", bomb),
        "gzip ten times": (", ".join(["gzip"] * 10), bomb),
        "an unknown content encoding": ("x", BODY),
    }


def _other_headers() -> dict[str, dict[str, str]]:
    """Return unusual headers of requests, by name. The headers do not describe the body."""
    return {
        "a range": {"Range": "bytes=0-1,5-999999999999,-1"},
        "1,000 ranges": {"Range": "bytes=" + ",".join(["0-0"] * 1_000)},
        "conditions": {"If-Match": '"x"', "If-Modified-Since": "Thu, 99 Foo"},
        "an unknown expectation": {"Expect": "200-ok"},
        "an accepted type": {"Accept": "image/png;q=nan", "Accept-Encoding": "*;q=-1"},
        "a forwarded address": {"X-Forwarded-For": "1.1.1.1", "Forwarded": "for=x"},
        "an origin": {"Origin": "null", "Access-Control-Request-Method": "X"},
        "the identity of another client": {"X-Client-Id": "neighbour"},
        "a client id of 50,000 characters": {"X-Client-Id": "c" * 50_000},
        "basic authorization": {"Authorization": "Basic " + "QQ" * 5_000},
        "a traceparent": {"traceparent": "00-" + "f" * 5_000},
        "a method override": {"X-HTTP-Method-Override": "DELETE"},
    }


def _broken_connections() -> Iterator[Attack]:
    """Yield clients that close or reset their connections at unusual moments."""
    chat_request = request()
    stream_body = chat(stream=True, max_tokens=200, ignore_eos=True)
    stream = request(json.dumps(stream_body).encode())
    sends = {
        "half-closed after the request": _half_closed(chat_request),
        "half-closed after a stream's request": _half_closed(stream),
        "half-closed in the middle of the body": _half_closed(chat_request[:-20]),
        "half-closed in the middle of the headers": _half_closed(chat_request[:30]),
        "half-closed without a request": _half_closed(b""),
        "300 streams that are reset": _reset(300, stream, pause_s=0.05),
        "300 requests that are reset in the body": _reset(300, chat_request[:-20], pause_s=0.0),
        "300 connections that are reset at once": _reset(300, b"", pause_s=0.0),
        "5 pipelined streams": raw(stream * 5),
        "urgent data": _urgent(chat_request),
    }
    yield from make_attacks("connections", sends, allowed=(200, "left", *CLOSES), limit_s=20)


def _half_closed(data: bytes) -> Send:
    """Return a function that sends bytes, and then closes the sending half of its connection."""

    def send(target: Target, limit_s: float) -> Outcome:
        with connect(target.openai, limit_s) as connection:
            connection.sendall(with_key(data, target))
            connection.shutdown(socket.SHUT_WR)
            return read_raw(connection)

    return send


def _reset(count: int, data: bytes, pause_s: float) -> Send:
    """Return a function that opens and resets several connections, one after the other.

    Each connection sends `data`, and is reset `pause_s` seconds later.
    """

    def send(target: Target, limit_s: float) -> Outcome:
        for _ in range(count):
            with connect(target.openai, limit_s) as connection, suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                connection.sendall(with_key(data, target))
                time.sleep(pause_s)
        return Outcome("left")

    return send


def _urgent(data: bytes) -> Send:
    """Return a function that sends a byte of urgent data within the request."""

    def send(target: Target, limit_s: float) -> Outcome:
        with connect(target.openai, limit_s) as connection:
            connection.sendall(with_key(data, target)[:40])
            connection.send(b"!", socket.MSG_OOB)
            connection.sendall(with_key(data, target)[40:])
            return read_raw(connection)

    return send
