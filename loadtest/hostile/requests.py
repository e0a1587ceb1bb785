"""Functions that send one hostile request to an HTTP endpoint."""

import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from loadtest.hostile.attack import Outcome, Send, Target

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_HOST = "127.0.0.1"
_READ_BYTES = 65536
_MAX_READ = 8 * 2**20
_MAX_FILLED = 10_000
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Request(NamedTuple):
    """An HTTP request."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str]


def call(
    method: str,
    path: str,
    *,
    body: object = b"",
    headers: Mapping[str, str] | None = None,
    leave_after_s: float | None = None,
    is_triton: bool = False,
) -> Send:
    """Return a function that sends a request to an HTTP endpoint.

    Args:
        method: the method.
        path: the path. `{foreign}` is replaced by the id of another client's stored response.
        body: bytes, or a value that is sent as JSON. A function is called when the request is
            sent, so that the table of attacks needs no memory for large bodies.
        headers: headers that replace the default headers.
        leave_after_s: the attacker closes the connection after this time; None means never.
        is_triton: whether the endpoint is the Triton server's instead of the OpenAI API.
    """

    def send(target: Target, limit_s: float) -> Outcome:
        default = {"Content-Type": "application/json", "Authorization": f"Bearer {target.key}"}
        request = Request(
            method,
            path.replace("{foreign}", target.foreign_response),
            encoded(body() if callable(body) else body, target),
            {**default, **(headers or {})},
        )
        port = target.http if is_triton else target.openai
        outcome = exchange(port, request, leave_after_s or limit_s)
        has_left = leave_after_s is not None and outcome.status == "hung"
        return Outcome("left") if has_left else outcome

    return send


def post(
    path: str,
    body: object,
    headers: Mapping[str, str] | None = None,
    leave_after_s: float | None = None,
) -> Send:
    """Return a function that sends a POST request to the OpenAI API. See `call`."""
    return call("POST", path, body=body, headers=headers, leave_after_s=leave_after_s)


def encoded(body: object, target: Target) -> bytes:
    """Return a body as bytes. In a short body, placeholders are replaced by values of `target`."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if len(data) < _MAX_FILLED:
        data = data.replace(b"{canary}", str(target.canary).encode())
        data = data.replace(b"{foreign}", target.foreign_response.encode())
    return data


def exchange(port: int, request: Request, limit_s: float) -> Outcome:
    """Send one request to a port of this machine on a new connection, and read the response.

    `limit_s` is the time limit of each operation of the socket.
    """
    connection = http.client.HTTPConnection(_HOST, port, timeout=limit_s)
    try:
        # The server may answer before it has read the whole body.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(request.method, request.path, request.body, dict(request.headers))
        response = connection.getresponse()
        return Outcome(response.status, response.read(_MAX_READ).decode(errors="replace"))
    except TimeoutError:
        return Outcome("hung")
    except (OSError, http.client.HTTPException) as error:
        return Outcome("closed", repr(error))
    finally:
        connection.close()


def connect(port: int, limit_s: float) -> socket.socket:
    """Connect to a port of this machine, with a time limit for each operation of the socket."""
    return socket.create_connection((_HOST, port), timeout=limit_s)


def with_key(data: bytes, target: Target) -> bytes:
    """Replace `{key}` in the bytes of a request by the API key of the attacker."""
    return data.replace(b"{key}", target.key.encode())


def raw(data: bytes, *, is_triton: bool = False, leave_after_s: float | None = None) -> Send:
    """Return a function that sends bytes to an HTTP endpoint, and reads the first response.

    `{key}` is replaced by the attacker's API key. If `leave_after_s` is given, the attacker closes
    the connection after this time without a response.
    """

    def send(target: Target, limit_s: float) -> Outcome:
        port = target.http if is_triton else target.openai
        with connect(port, leave_after_s or limit_s) as connection:
            with suppress(OSError):  # the server may answer before it has read everything
                connection.sendall(with_key(data, target))
            outcome = read_raw(connection)
        has_left = leave_after_s is not None and outcome.status == "hung"
        return Outcome("left") if has_left else outcome

    return send


def read_raw(connection: socket.socket) -> Outcome:
    """Return the status of the first response on a connection, or "closed" without a response."""
    received = b""
    try:
        while b"\r\n\r\n" not in received and len(received) < _MAX_READ:
            block = connection.recv(_READ_BYTES)
            if not block:
                break
            received = (received + block).removeprefix(_CONTINUE)
    except TimeoutError:
        return Outcome("hung")
    except OSError as error:
        return Outcome("closed", repr(error))
    status_line = received.split(b"\r\n", 1)[0].split()  # such as [b"HTTP/1.1", b"200", b"OK"]
    if len(status_line) >= 2 and status_line[1].isdigit():
        return Outcome(int(status_line[1]), received.decode(errors="replace"))
    return Outcome("closed", received[:200].decode(errors="replace"))


def chat(**fields: object) -> dict[str, object]:
    """Return the body of a small chat completion with further fields."""
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}


def post_chat(**fields: object) -> Send:
    """Return a function that sends a small chat completion with further fields."""
    return post(CHATS, chat(**fields))
