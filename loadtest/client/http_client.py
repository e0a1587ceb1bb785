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
from urllib.parse import urlsplit

from loadtest.client.ask import Ask, Json
from loadtest.client.reply import Reply

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
        seconds = min(ask.cancel_after_s or self._limit_s, self._limit_s)
        connection = _Connection(self._host, self._port, ask, deadline=reply.started + seconds)
        try:
            _read(ask, reply, connection)
        except TimeoutError:
            reply.end = "hung" if ask.cancel_after_s is None else "cancelled"
        except (OSError, HTTPException, ValueError) as error:
            reply.end = "broken"
            reply.error = reply.error or f"{type(error).__name__}: {error}"
        finally:
            connection.close()
            reply.ended = time.monotonic()
        return reply


class _Connection:
    """The connection for one request. Its methods raise TimeoutError after the deadline."""

    def __init__(self, host: str, port: int, ask: Ask, deadline: float) -> None:
        self._connection = HTTPConnection(host, port)
        self._ask = ask
        self._deadline = deadline
        self._socket: socket.socket | None = None

    def post(self) -> HTTPResponse:
        """Send the request, and return the response when its headers have arrived."""
        connection, ask = self._connection, self._ask
        connection.timeout = self._left_s()
        connection.connect()
        self._socket = connection.sock
        if ask.pause_s:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
        body = ask.body if isinstance(ask.body, str) else json.dumps(ask.body)
        connection.request("POST", ask.path, body.encode(), {"Content-Type": "application/json"})
        self._set_timeout()
        return connection.getresponse()

    def blocks(self, response: HTTPResponse) -> Iterator[bytes]:
        """Yield the blocks of the body as they arrive."""
        block_bytes = _SLOW_BUFFER_BYTES // 4 if self._ask.pause_s else _READ_BYTES
        while True:
            self._set_timeout()
            block = response.read1(block_bytes)
            if not block:
                return
            yield block
            if self._ask.pause_s:
                time.sleep(self._ask.pause_s)

    def close(self) -> None:
        """Close the connection, which cancels a request that still runs."""
        self._connection.close()

    def _set_timeout(self) -> None:
        assert self._socket is not None
        self._socket.settimeout(self._left_s())

    def _left_s(self) -> float:
        """Return the seconds until the deadline."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


def _read(ask: Ask, reply: Reply, connection: _Connection) -> None:
    """Send a request, and add the response to `reply`."""
    response = connection.post()
    reply.status = response.status
    blocks = connection.blocks(response)
    if response.status == 200 and ask.is_stream:
        _read_stream(ask, reply, blocks)
        return
    body = b"".join(blocks)
    if response.status == 200:
        _add_whole(json.loads(body), reply)
    else:
        reply.error = _message(body.decode(errors="replace"))
    reply.end = "whole"


def _read_stream(ask: Ask, reply: Reply, blocks: Iterator[bytes]) -> None:
    """Add the events of a stream to `reply` until the stream ends or the client cancels it."""
    # A stream of the OpenAI API must end with [DONE] or an error. A generate_stream has no such
    # event, but http.client raises an error if its body is incomplete.
    has_ended = ask.endpoint == "triton"
    for num_events, event in enumerate(_events(blocks), start=1):
        if event is None:
            has_ended = True
        elif "error" in event:
            reply.error = _message(json.dumps(event))
            has_ended = True
        elif ask.endpoint == "triton":
            _add_generated(event, reply)
        else:
            _add_chunk(event, reply)
        if num_events == ask.cancel_after_events and not reply.finish_reasons:
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


def _add_chunk(chunk: Json, reply: Reply) -> None:
    """Add a chunk of a chat completion or a text completion to the reply."""
    if "id" in chunk:
        reply.ids.add(chunk["id"])
    for choice in chunk["choices"]:
        reply.add_delta(choice.get("delta", choice), choice.get("index", 0))
        reply.add_ending(choice)
    reply.add_ending(chunk)


def _add_generated(response: Json, reply: Reply) -> None:
    """Add a response of `generate_stream` to the reply (see docs/reference/tensors.md)."""
    reply.add_text(response["text_output"])
    reply.add_ending(json.loads(response["delta"]))


def _add_whole(answer: Json, reply: Reply) -> None:
    """Add an answer that is not streamed: embeddings, scores of documents, or a completion."""
    if "data" in answer:
        reply.numbers = [number for item in answer["data"] for number in item["embedding"]]
    elif "results" in answer:
        results = sorted(answer["results"], key=lambda result: result["index"])
        reply.numbers = [result["relevance_score"] for result in results]
    else:
        for choice in answer["choices"]:
            reply.add_delta(choice.get("message", choice), choice.get("index", 0))
            reply.add_ending(choice)
        reply.add_ending(answer)
