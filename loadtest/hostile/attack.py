"""An attack: one hostile request, or a few that belong together, and the allowed outcomes."""

import http.client
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_HOST = "127.0.0.1"
_DEFAULT_LIMIT_S = 15.0
_READ_BYTES = 65536
_MAX_READ = 8 * 2**20
_MAX_FILLED = 10_000
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_DEFECT_TEXTS = ("Traceback (most recent call last)", "RecursionError", '"server_error"')


@dataclass(frozen=True)
class Target:
    """The addresses of a server, and what an attacker knows.

    Attributes:
        openai, http: the ports of the OpenAI API and of the Triton server's HTTP endpoint.
        grpc: the address of the Triton server's gRPC endpoint.
        key: the API key of the attacker.
        foreign_response: the id of a stored response of another client.
        canary: the port of a server to which nobody should connect.
    """

    openai: int
    http: int
    grpc: str
    key: str
    foreign_response: str
    canary: int


@dataclass(frozen=True)
class Outcome:
    """The reaction of the server to an attack.

    Attributes:
        status: the HTTP status, or one of the words "closed" (the server closed the connection
            without a response), "left" (the attacker closed the connection) and "hung".
        text: the beginning of the body.
    """

    status: int | str
    text: str = ""


Send = Callable[[Target, float], Outcome]
"""A function that sends an attack with a time limit in seconds, and returns the outcome."""
Statuses = tuple[int | str, ...]
OwnAnswers = tuple[tuple[int, str], ...]
"""Pairs of a status and a part of the text, for answers that the Triton server itself sends."""


@dataclass(frozen=True)
class Attack:
    """One row of the table.

    Attributes:
        kind: the name of the group of attacks.
        name: a short description of this attack.
        send: sends the attack.
        allowed: the statuses that are allowed. If it is empty, every status below 500 is allowed.
        limit_s: the time after which the attack counts as hung, on a machine that is not busy.
        own_answers: further answers that are allowed.
    """

    kind: str
    name: str
    send: Send
    _: KW_ONLY
    allowed: Statuses = ()
    limit_s: float = _DEFAULT_LIMIT_S
    own_answers: OwnAnswers = ()

    def fault(self, outcome: Outcome) -> str | None:
        """Return the reason why an outcome is a defect of the server; None if it is no defect."""
        status, text = outcome.status, outcome.text
        if status == "hung":
            return "no complete answer within the time limit"
        if any(status == own_status and part in text for own_status, part in self.own_answers):
            return None
        is_error = isinstance(status, int) and status >= 500
        is_allowed = status in self.allowed if self.allowed else not is_error
        if not is_allowed:
            return f"status {status}"
        if is_error:  # an allowed error may have any text
            return None
        defects = (part for part in _DEFECT_TEXTS if part in text)
        return next((f"the answer contains {part}" for part in defects), None)


def group(
    kind: str,
    sends: Mapping[str, Send],
    *,
    allowed: Statuses = (),
    limit_s: float = _DEFAULT_LIMIT_S,
    own_answers: OwnAnswers = (),
) -> Iterator[Attack]:
    """Yield one attack for each name in `sends`. The attributes that are given apply to all."""
    for name, send in sends.items():
        yield Attack(kind, name, send, allowed=allowed, limit_s=limit_s, own_answers=own_answers)


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


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return one of several outcomes: the outcome that is most likely a fault."""

    def badness(outcome: Outcome) -> tuple[bool, int]:
        status = outcome.status
        return status == "hung", status if isinstance(status, int) else 0

    return max(outcomes, key=badness)


def chat(**fields: object) -> dict[str, object]:
    """Return the body of a small chat completion with further fields."""
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}


def post_chat(**fields: object) -> Send:
    """Return a function that sends a small chat completion with further fields."""
    return post(CHATS, chat(**fields))
