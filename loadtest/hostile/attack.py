"""An attack: one hostile request, or a few that belong together, and the allowed outcomes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass

_DEFAULT_LIMIT_S = 15.0
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


def make_attacks(
    kind: str,
    sends: Mapping[str, Send],
    *,
    allowed: Statuses = (),
    limit_s: float = _DEFAULT_LIMIT_S,
    own_answers: OwnAnswers = (),
) -> Iterator[Attack]:
    """Yield one attack for each name in `sends`. All attacks have the same other attributes."""
    for name, send in sends.items():
        yield Attack(kind, name, send, allowed=allowed, limit_s=limit_s, own_answers=own_answers)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return one of several outcomes: the outcome that is most likely a fault."""

    def badness(outcome: Outcome) -> tuple[bool, int]:
        status = outcome.status
        return status == "hung", status if isinstance(status, int) else 0

    return max(outcomes, key=badness)
