"""An attack: one hostile request, or a few that belong together, and the allowed outcomes."""

import http.client
import json
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

_READ_BYTES = 65536
_MAX_READ = 8 * 2**20


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


@dataclass(frozen=True)
class Attack:
    """One row of the table.

    Attributes:
        kind: the name of the group of attacks.
        name: a short description of this attack.
        send: sends the attack with a time limit in seconds, and returns the outcome.
        allowed: the statuses that are allowed. If it is empty, every status below 500 is allowed.
        limit_s: the time after which the attack counts as hung, on a machine that is not busy.
        own_answers: further answers that are allowed because the Triton server itself sends them,
            as pairs of a status and a part of the text.
    """

    kind: str
    name: str
    send: Send
    allowed: tuple[int | str, ...] = ()
    limit_s: float = 15.0
    own_answers: tuple[tuple[int, str], ...] = ()

    def fault(self, outcome: Outcome) -> str | None:
        """Return the reason why an outcome is a defect of the server; None if it is no defect."""
        status = outcome.status
        if status == "hung":
            return "no complete answer within the time limit"
        if any(status == own and text in outcome.text for own, text in self.own_answers):
            return None
        if isinstance(status, int) and status >= 500 and status in self.allowed:
            return None
        if self.allowed:
            is_allowed = status in self.allowed
        else:
            is_allowed = not isinstance(status, int) or status < 500
        if not is_allowed:
            return f"status {status}"
        for name in ("Traceback (most recent call last)", "RecursionError", '"server_error"'):
            if name in outcome.text:
                return f"the answer contains {name}"
        return None


def post(
    path: str, body: object, headers: Mapping[str, str] | None = None, leave_after_s: float = 0.0
) -> Send:
    """Return a function that sends a POST request to the OpenAI API.

    Args:
        path: the path.
        body: bytes, or a value that is sent as JSON. A function is called when the request is
            sent, so that the table of attacks needs no memory for large bodies.
        headers: headers that replace the default headers.
        leave_after_s: the attacker closes the connection after this time. 0 means never.
    """

    def send(target: Target, limit_s: float) -> Outcome:
        usual = {"Content-Type": "application/json", "Authorization": f"Bearer {target.key}"}
        data = encoded(body() if callable(body) else body, target)
        patience_s = leave_after_s or limit_s
        return exchange(target.openai, "POST", path, data, usual | dict(headers or {}), patience_s,
                        leaves=bool(leave_after_s))  # fmt: skip

    return send


def call(method: str, path: str, *, is_triton: bool = False, body: object = b"") -> Send:
    """Return a function that sends a request with any method to an HTTP endpoint.

    `{foreign}` in the path is replaced by the id of another client's stored response.
    """

    def send(target: Target, limit_s: float) -> Outcome:
        headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
        port = target.http if is_triton else target.openai
        data = encoded(body, target)
        filled = path.replace("{foreign}", target.foreign_response)
        return exchange(port, method, filled, data, headers, limit_s)

    return send


def encoded(body: object, target: Target) -> bytes:
    """Return a body as bytes. In a short body, placeholders are replaced by values of `target`."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if len(data) < 10_000:
        data = data.replace(b"{canary}", str(target.canary).encode())
        data = data.replace(b"{foreign}", target.foreign_response.encode())
    return data


def exchange(  # noqa: PLR0913 - the parts of a request
    port: int,
    method: str,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    limit_s: float,
    *,
    leaves: bool = False,
) -> Outcome:
    """Send one request on a new connection and read the response.

    Args:
        port: the port on 127.0.0.1.
        method: the method.
        path: the path with its query.
        body: the body.
        headers: the headers.
        limit_s: the time limit of each operation of the socket.
        leaves: whether the client closes the connection at the limit on purpose.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        # The server may answer before it has read the whole body.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return Outcome(response.status, response.read(_MAX_READ).decode(errors="replace"))
    except TimeoutError:
        return Outcome("left" if leaves else "hung")
    except (OSError, http.client.HTTPException) as error:
        return Outcome("closed", repr(error))
    finally:
        connection.close()


def raw(*parts: bytes, is_triton: bool = False, leaves_after_s: float = 0.0) -> Send:
    """Return a function that sends bytes to an HTTP endpoint, and reads the first response.

    `{key}` is replaced by the attacker's API key. The attacker closes the connection after
    `leaves_after_s` without a response. 0 means never.
    """

    def send(target: Target, limit_s: float) -> Outcome:
        port = target.http if is_triton else target.openai
        patience_s = leaves_after_s or limit_s
        with socket.create_connection(("127.0.0.1", port), timeout=patience_s) as connection:
            # The server may answer before it has read everything.
            with suppress(OSError):
                for part in parts:
                    connection.sendall(part.replace(b"{key}", target.key.encode()))
            outcome = read_raw(connection)
            has_left = leaves_after_s and outcome.status == "hung"
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
            received = (received + block).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    except TimeoutError:
        return Outcome("hung")
    except OSError as error:
        return Outcome("closed", repr(error))
    words = received.split(b"\r\n", 1)[0].split()
    if len(words) >= 2 and words[1].isdigit():
        return Outcome(int(words[1]), received.decode(errors="replace"))
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
