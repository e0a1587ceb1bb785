"""Check replies, and classify their faults.

If the expected answer consists of numbered tokens, each wrong token has a kind of fault:

    lost        a token is missing, although a later token arrived
    doubled     a token arrived twice
    reordered   a token arrived after a token that should follow it
    truncated   the answer stops before its last token
    foreign     a token or a chunk belongs to another answer, or a token follows the last one
    garbled     a piece of text is not a token

Every answer can also have these faults:

    different   the answer or its finish reason differs from the first answer to the same request
    unended     the stream has no finish reason, or two of them
    miscounted  the server's token count is wrong
    error       the server answered with an error, or with another status than the expected one
    refused     the server answered with status 429 or 503
    accepted    the server answered a request that it should have rejected
    broken      the connection broke
    hung        the answer took longer than the time limit
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.client.ask import Ask
from loadtest.client.reply import Reply
from loadtest.load.numbered_answers import TOKEN
from loadtest.load.prompts import Expected

Kind = Literal[
    "lost", "doubled", "reordered", "truncated", "foreign", "garbled", "different", "unended",
    "miscounted", "error", "refused", "accepted", "broken", "hung",
]  # fmt: skip

# Embeddings may differ by float32 rounding, because other texts are computed in the same batch.
_TOLERANCE = 1e-3
_FEW = 5


@dataclass(frozen=True)
class Fault:
    """One fault of a reply.

    Attributes:
        kind: one of the kinds in the description of this module.
        detail: the tokens or the difference, as text.
    """

    kind: Kind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class ReplyChecker:
    """Checks replies, and stores the first reply to each request as the expected one."""

    def __init__(self) -> None:
        self._firsts: dict[str, Reply] = {}

    def faults(self, ask: Ask, reply: Reply) -> list[Fault]:
        """Return the faults of a reply. The list is empty if the reply is correct.

        If the client cancelled the request, the reply is checked as the beginning of an answer.
        """
        found = _faults_of_call(ask, reply)
        if found or ask.refused_with is not None:
            return found
        if len(reply.ids) > 1:
            found.append(Fault("foreign", f"the stream has chunks of {len(reply.ids)} answers"))
        is_whole = reply.end == "whole"
        if is_whole and reply.numbers is None:
            found += _faults_of_end(reply)
        if ask.expected is not None:
            found += against_numbers(ask.expected, reply, is_whole=is_whole)
        elif first := self._firsts.get(ask.key):
            found += against_first(first, reply, is_whole=is_whole)
        elif is_whole and not found:
            self._firsts[ask.key] = reply
        return found


def _faults_of_call(ask: Ask, reply: Reply) -> list[Fault]:
    """Return a fault if the request failed, or was accepted although it is invalid."""
    if reply.end in ("broken", "hung"):
        num_pieces = len(reply.pieces)
        detail = f"after {num_pieces} chunks, the last text is {reply.text[-40:]!r}: {reply.error}"
        return [Fault("broken" if reply.end == "broken" else "hung", detail)]
    if reply.end == "cancelled" and not reply.error:
        return []
    if ask.refused_with is not None:
        if reply.status == ask.refused_with and reply.error:
            return []
        kind: Kind = "accepted" if reply.status == 200 and not reply.error else "error"
        detail = f"status {reply.status} {reply.error}, expected status {ask.refused_with}"
        return [Fault(kind, detail)]
    if reply.error or reply.status != 200:
        kind = "refused" if reply.status in (429, 503) else "error"
        return [Fault(kind, f"status {reply.status} {reply.error}")]
    return []


def _faults_of_end(reply: Reply) -> list[Fault]:
    if len(reply.finish_reasons) == 1:
        return []
    reasons = ", ".join(reply.finish_reasons) or "no finish reason"
    return [Fault("unended", f"{reasons} after {reply.text[-40:]!r}")]


def against_numbers(expected: Expected, reply: Reply, *, is_whole: bool) -> list[Fault]:
    """Return the faults of an answer that should consist of the numbered tokens in `expected`."""
    said = reply.text
    places = {text: place for place, text in enumerate(expected.numbers)}
    found = _faults_of_order(places, TOKEN.findall(said))
    if garbage := "".join(TOKEN.split(said)):
        found.append(Fault("garbled", repr(garbage[:60])))
    seen = {places[text] for text in TOKEN.findall(said) if text in places}
    last = max(seen, default=-1)
    missing = [text for text, place in places.items() if place not in seen]
    found += _fault("lost", [text for text in missing if places[text] < last])
    if not is_whole:
        return found
    found += _fault("truncated", [text for text in missing if places[text] > last])
    if reply.finish_reasons and reply.finish_reasons[0] != expected.finish_reason:
        reasons = f"{reply.finish_reasons[0]}, expected {expected.finish_reason}"
        found.append(Fault("different", f"finish reason {reasons}"))
    # The end-of-sequence token has no text, but it was generated.
    num_due = len(expected.numbers) + (expected.finish_reason == "stop")
    if reply.num_tokens is not None and reply.num_tokens != num_due:
        found.append(Fault("miscounted", f"{reply.num_tokens} tokens, expected {num_due}"))
    return found


def _faults_of_order(places: dict[str, int], texts: Sequence[str]) -> list[Fault]:
    doubled, reordered, foreign = [], [], []
    seen: set[str] = set()
    last = -1
    for text in texts:
        if text not in places:
            foreign.append(text)
        elif text in seen:
            doubled.append(text)
        elif places[text] < last:
            reordered.append(text)
        last = max(last, places.get(text, -1))
        seen.add(text)
    kinds: list[tuple[Kind, list[str]]] = [
        ("doubled", doubled), ("reordered", reordered), ("foreign", foreign)
    ]  # fmt: skip
    return [fault for kind, found in kinds for fault in _fault(kind, found)]


def _fault(kind: Kind, texts: Sequence[str]) -> Iterator[Fault]:
    """Yield one fault for all tokens in `texts`. Its detail contains the first few tokens."""
    if texts:
        more = f" and {len(texts) - _FEW} more" if len(texts) > _FEW else ""
        yield Fault(kind, " ".join(texts[:_FEW]) + more)


def against_first(first: Reply, reply: Reply, *, is_whole: bool) -> list[Fault]:
    """Return a fault if a reply differs from the first reply to the same request."""
    if first.numbers is not None:
        return _against_vector(first.numbers, reply.numbers if is_whole else first.numbers)
    for channel in {**first.channels, **reply.channels}:
        said, due = reply.channels.get(channel, ""), first.channels.get(channel, "")
        if found := _against_text(channel, due, said, is_whole=is_whole):
            return [found]
    if not is_whole:
        return []
    if reply.finish_reasons != first.finish_reasons or reply.num_tokens != first.num_tokens:
        detail = f"{reply.finish_reasons} after {reply.num_tokens} tokens"
        due = f"{first.finish_reasons} after {first.num_tokens} tokens"
        return [Fault("different", f"{detail}, but the first answer ended with {due}")]
    return []


def _against_text(channel: str, due: str, said: str, *, is_whole: bool) -> Fault | None:
    if not due.startswith(said):
        place = next(n for n in range(len(said)) if said[n : n + 1] != due[n : n + 1])
        detail = f"{said[place:][:40]!r}, but the first answer has {due[place:][:40]!r}"
        return Fault("different", f"{channel} at character {place} is {detail}")
    if is_whole and said != due:
        rest = due[len(said) :][:40]
        detail = f"ends with {said[-40:]!r}, but the first answer continues with {rest!r}"
        return Fault("truncated", f"{channel} {detail}")
    return None


def _against_vector(due: list[float], numbers: list[float] | None) -> list[Fault]:
    if numbers is None or len(numbers) != len(due):
        counts = f"{len(numbers or ())} numbers, but the first answer has {len(due)}"
        return [Fault("different", counts)]
    worst = max((abs(a - b) for a, b in zip(due, numbers, strict=True)), default=0.0)
    return (
        []
        if worst < _TOLERANCE
        else [Fault("different", f"the largest difference of two numbers is {worst:.2g}")]
    )
