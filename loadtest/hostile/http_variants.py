"""Attacks with unusual HTTP: framing, methods, paths, content types, and broken connections."""

import json
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress

from loadtest.hostile.attack import Attack, Outcome, Send, Target, chat, post, raw, read_raw
from loadtest.hostile.wire import CLOSES, head, not_smuggled

_CHAT = "/v1/chat/completions"
_BODY = json.dumps(chat()).encode()
_STREAM = json.dumps(chat(stream=True, max_tokens=200, ignore_eos=True)).encode()
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() resets the connection


def attacks() -> Iterator[Attack]:
    """Yield all attacks of this module."""
    yield from _framing()
    yield from _methods_and_paths()
    yield from _contents()
    yield from _broken_connections()


def _framing() -> Iterator[Attack]:
    """Yield requests whose length servers and proxies may read differently."""
    length = b"Content-Length: %d" % len(_BODY)
    size = b"%x" % len(_BODY)
    chunk = size + b"\r\n" + _BODY + b"\r\n0\r\n\r\n"
    encodings = {
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
    for name, line in encodings.items():
        send = not_smuggled(head(length, line) + chunk)
        yield Attack("smuggling", f"with a length: {name}", send, (200, *CLOSES), 10)
    lengths = {
        "two equal lengths": b"%d, %d" % (len(_BODY), len(_BODY)),
        "an empty length": b"",
        "a length with an underscore": b"1_0",
        "a length with a fraction": b"%d.0" % len(_BODY),
        "a length with an exponent": b"1e2",
        "a length with leading zeros": b"000%d" % len(_BODY),
        "a length with a tab": b"\t%d\t" % len(_BODY),
        "a length in other digits": "\u0663".encode(),
        "a length with a second word": b"%d x" % len(_BODY),
    }
    for name, value in lengths.items():
        send = not_smuggled(head(b"Content-Length: " + value) + _BODY)
        yield Attack("smuggling", name, send, (200, *CLOSES), 10)
    chunks = {
        "a chunk size with a sign": b"+" + chunk,
        "a chunk size with 0x": b"0x" + chunk,
        "a chunk size with blanks": b"  " + size + b"  \r\n" + _BODY + b"\r\n0\r\n\r\n",
        "a chunk size with an underscore": b"0_" + chunk,
        "a negative chunk size": b"-1\r\n" + chunk,
        "chunk lines that end with a line feed": chunk.replace(b"\r\n", b"\n"),
        "a chunk extension with a line feed": size + b";a\nb\r\n" + _BODY + b"\r\n0\r\n\r\n",
        "a chunk extension with quotes": size + b';a="\r\n"\r\n' + _BODY + b"\r\n0\r\n\r\n",
        "a trailer with a length": chunk[:-2] + b"Content-Length: 9\r\n\r\n",
        "bytes after the last chunk": chunk + b"GARBAGE",
        "only the last chunk": b"0\r\n\r\n",
    }
    for name, body in chunks.items():
        send = not_smuggled(head(b"Transfer-Encoding: chunked") + body)
        yield Attack("smuggling", name, send, (200, *CLOSES), 10)


def _methods_and_paths() -> Iterator[Attack]:
    end = b" HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n\r\n"
    lines = {
        "PUT": b"PUT " + _CHAT.encode(),
        "PATCH": b"PATCH " + _CHAT.encode(),
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
    allowed = (200, 204, 301, 307, 403, *CLOSES)
    for name, line in lines.items():
        yield Attack("paths", name, raw(line + end), allowed, 10)


def _contents() -> Iterator[Attack]:
    boundary = b"--b\r\nContent-Disposition: form-data; name=file; filename=../../x\r\n\r\n"
    parts = boundary * 20_000 + b"--b--\r\n"
    bomb = zlib.compress(b" " * 50_000_000)
    contents: dict[str, tuple[bytes, dict[str, str]]] = {
        "multipart": (parts, {"Content-Type": "multipart/form-data; boundary=b"}),
        "a boundary of 50,000 characters": (
            parts,
            {"Content-Type": "multipart/form-data; boundary=" + "b" * 50_000},
        ),
        "a form": (b"messages=a&" * 50_000, {"Content-Type": "application/x-www-form-urlencoded"}),
        "XML": (
            b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
            {"Content-Type": "application/xml"},
        ),
        "UTF-16 by its charset": (
            json.dumps(chat()).encode("utf-16"),
            {"Content-Type": "application/json; charset=utf-16"},
        ),
        "an unknown charset": (_BODY, {"Content-Type": "application/json; charset=../../x"}),
        "a damaged content type": (_BODY, {"Content-Type": ";;;=,/"}),
        "two values in the content type": (_BODY, {"Content-Type": "text/plain, application/json"}),
        "deflate": (bomb, {"Content-Encoding": "deflate"}),
        "br": (bomb, {"Content-Encoding": "br"}),
        "gzip ten times": (bomb, {"Content-Encoding": ", ".join(["gzip"] * 10)}),
        "an unknown content encoding": (_BODY, {"Content-Encoding": "x"}),
        "a range": (_BODY, {"Range": "bytes=0-1,5-999999999999,-1"}),
        "1,000 ranges": (_BODY, {"Range": "bytes=" + ",".join(["0-0"] * 1_000)}),
        "conditions": (_BODY, {"If-Match": '"x"', "If-Modified-Since": "Thu, 99 Foo"}),
        "an unknown expectation": (_BODY, {"Expect": "200-ok"}),
        "an accepted type": (_BODY, {"Accept": "image/png;q=nan", "Accept-Encoding": "*;q=-1"}),
        "a forwarded address": (_BODY, {"X-Forwarded-For": "1.1.1.1", "Forwarded": "for=x"}),
        "an origin": (_BODY, {"Origin": "null", "Access-Control-Request-Method": "X"}),
        "the identity of another client": (_BODY, {"X-Client-Id": "neighbour"}),
        "a client id of 50,000 characters": (_BODY, {"X-Client-Id": "c" * 50_000}),
        "basic authorization": (_BODY, {"Authorization": "Basic " + "QQ" * 5_000}),
        "a traceparent": (_BODY, {"traceparent": "00-" + "f" * 5_000}),
        "a method override": (_BODY, {"X-HTTP-Method-Override": "DELETE"}),
    }
    for name, (body, headers) in contents.items():
        send = post(_CHAT, body, headers)
        yield Attack("contents", name, send, (200, 400, 401, 413, 415, 417, 431, "closed"), 10)


def _broken_connections() -> Iterator[Attack]:
    request = head(b"Content-Length: %d" % len(_BODY)) + _BODY
    stream = head(b"Content-Length: %d" % len(_STREAM)) + _STREAM
    sends = {
        "half-closed after the request": _half_closed(request),
        "half-closed after a stream's request": _half_closed(stream),
        "half-closed in the middle of the body": _half_closed(request[:-20]),
        "half-closed in the middle of the headers": _half_closed(request[:30]),
        "half-closed without a request": _half_closed(b""),
        "300 streams that are reset": _reset(300, stream, 0.05),
        "300 requests that are reset in the body": _reset(300, request[:-20], 0.0),
        "300 connections that are reset at once": _reset(300, b"", 0.0),
        "5 pipelined streams": raw(stream * 5),
        "urgent data": _urgent(request),
    }
    for name, send in sends.items():
        yield Attack("connections", name, send, (200, "left", *CLOSES), 20)


def _half_closed(sent: bytes) -> Send:
    """Return a function that sends bytes, and then closes the sending half of its connection."""

    def send(target: Target, limit_s: float) -> Outcome:
        with socket.create_connection(("127.0.0.1", target.openai), timeout=limit_s) as connection:
            connection.sendall(sent.replace(b"{key}", target.key.encode()))
            connection.shutdown(socket.SHUT_WR)
            return read_raw(connection)

    return send


def _reset(count: int, sent: bytes, pause_s: float) -> Send:
    """Return a function that opens and resets several connections, one after the other."""

    def send(target: Target, limit_s: float) -> Outcome:
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", target.openai), timeout=limit_s)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            with suppress(OSError):
                connection.sendall(sent.replace(b"{key}", target.key.encode()))
                time.sleep(pause_s)
            connection.close()
        return Outcome("left")

    return send


def _urgent(sent: bytes) -> Send:
    """Return a function that sends a byte of urgent data within the request."""

    def send(target: Target, limit_s: float) -> Outcome:
        with socket.create_connection(("127.0.0.1", target.openai), timeout=limit_s) as connection:
            data = sent.replace(b"{key}", target.key.encode())
            connection.sendall(data[:40])
            connection.send(b"!", socket.MSG_OOB)
            connection.sendall(data[40:])
            return read_raw(connection)

    return send
