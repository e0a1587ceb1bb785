"""An HTTP client of the OpenAI API and of the Triton server's `generate_stream`.

The client uses http.client and opens a new connection for each request, so that cancelling a
request closes its connection. Under locust, the client uses the sockets of gevent. In tests, it
uses ordinary sockets.
"""

import json
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from loadtest.client.ask import Ask
from loadtest.client.reply import Reply

Json = dict[str, Any]

# The receive buffer of a slow reader is small, so that the server's writes block soon.
_SLOW_BUFFER_BYTES = 4096
_READ_BYTES = 65536


class HttpEndpoint:
    """A client of one HTTP endpoint.

    Args:
        url: the base URL, such as http://127.0.0.1:9000.
        limit_s: the time limit of a request in seconds.
    """

    def __init__(self, url: str, limit_s: float = 60.0) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self._limit_s = limit_s

    def send(self, ask: Ask) -> Reply:
        """Send a request, and read the reply until its end or until the client cancels it."""
        reply = Reply()
        wire = _Wire(self._host, self._port, reply.started, ask, self._limit_s)
        try:
            _read(ask, reply, wire)
        except TimeoutError:
            reply.end = "hung" if ask.cancel_after_s is None else "cancelled"
        except (OSError, HTTPException, ValueError) as error:
            reply.end = "broken"
            reply.error = reply.error or f"{type(error).__name__}: {error}"
        finally:
            wire.close()
            reply.ended = time.monotonic()
        return reply


class _Wire:
    """A connection for one request. TimeoutError means that the client must cancel the request."""

    def __init__(self, host: str, port: int, started: float, ask: Ask, limit_s: float) -> None:
        self._ends = started + min(ask.cancel_after_s or limit_s, limit_s)
        self._pause_s = ask.pause_s
        self._connection = HTTPConnection(host, port)
        self._ask = ask
        self._socket: socket.socket | None = None

    def post(self) -> HTTPResponse:
        connection = self._connection
        connection.timeout = self._left_s()
        connection.connect()
        self._socket = connection.sock
        if self._pause_s:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
        body = self._ask.body if isinstance(self._ask.body, str) else json.dumps(self._ask.body)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", self._ask.path, body.encode(), headers)
        self._set_timeout()
        return connection.getresponse()

    def blocks(self, response: HTTPResponse) -> Iterator[bytes]:
        """Yield the blocks of the body as they arrive."""
        size = _SLOW_BUFFER_BYTES // 4 if self._pause_s else _READ_BYTES
        while True:
            self._set_timeout()
            block = response.read1(size)
            if not block:
                return
            yield block
            if self._pause_s:
                time.sleep(self._pause_s)

    def close(self) -> None:
        self._connection.close()

    def _set_timeout(self) -> None:
        assert self._socket is not None
        self._socket.settimeout(self._left_s())

    def _left_s(self) -> float:
        left_s = self._ends - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


def _read(ask: Ask, reply: Reply, wire: _Wire) -> None:
    response = wire.post()
    reply.status = response.status
    if response.status != 200 or not ask.is_stream:
        body = b"".join(wire.blocks(response))
        if response.status == 200:
            _take_whole(json.loads(body), reply)
        else:
            reply.error = _message(body.decode(errors="replace"))
        reply.end = "whole"
        return
    # A stream of the OpenAI API must end with [DONE] or an error. A generate_stream has no such
    # event, but http.client raises an error if its body is incomplete.
    has_ended = ask.endpoint == "triton"
    for count, event in enumerate(_events(wire.blocks(response)), start=1):
        if event is None:
            has_ended = True
        elif "error" in event:
            reply.error = _message(json.dumps(event))
            has_ended = True
        elif ask.endpoint == "triton":
            _take_delta(event, reply)
        else:
            _take_chunk(event, reply)
        if count == ask.cancel_after_events and not reply.finish_reasons:
            reply.end = "cancelled"
            return
    reply.end = "whole" if has_ended else "broken"


def _message(body: str) -> str:
    """Return the message in the JSON body of an error, or else the beginning of the body.

    Example: `_message('{"error": {"message": "busy"}}')` returns `"busy"`.
    """
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:300]


def _events(blocks: Iterator[bytes]) -> Iterator[Json | None]:
    """Yield the server-sent events of a body, and None for [DONE]."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data:
                yield None if data == b"[DONE]" else json.loads(data)


def _take_chunk(chunk: Json, reply: Reply) -> None:
    """Add a chunk of a chat completion or a text completion to the reply."""
    reply.ids.update([chunk["id"]] if "id" in chunk else [])
    for choice in chunk["choices"]:
        reply.say_delta(choice.get("delta", choice), choice.get("index", 0))
        if choice.get("finish_reason"):
            reply.finish_reasons.append(choice["finish_reason"])
    if chunk.get("usage"):
        reply.num_tokens = chunk["usage"]["completion_tokens"]


def _take_delta(response: Json, reply: Reply) -> None:
    """Add a response of `generate_stream` to the reply (see docs/reference/tensors.md)."""
    reply.say(response["text_output"])
    delta = json.loads(response["delta"])
    if "finish_reason" in delta:
        reply.finish_reasons.append(delta["finish_reason"])
    if "usage" in delta:
        reply.num_tokens = delta["usage"]["completion_tokens"]


def _take_whole(answer: Json, reply: Reply) -> None:
    """Add an answer that is not streamed to the reply."""
    if "data" in answer:
        reply.numbers = [number for row in answer["data"] for number in row["embedding"]]
    elif "results" in answer:
        rows = sorted(answer["results"], key=lambda row: row["index"])
        reply.numbers = [row["relevance_score"] for row in rows]
    else:
        for choice in answer["choices"]:
            reply.say_delta(choice.get("message", choice), choice.get("index", 0))
            reply.finish_reasons.append(choice["finish_reason"])
        reply.num_tokens = answer["usage"]["completion_tokens"]
