# SPDX-License-Identifier: Apache-2.0
"""Whether a reply is what it should be, and if not, in which way.

Where the answer consists of numbered tokens, each wrong one is told by name:

    lost        a token is missing before another that came
    doubled     a token came twice
    reordered   a token came after one that stands behind it
    truncated   the answer stops before its last token
    foreign     a token or a chunk of another answer, or a token behind the last
    garbled     text that is no token

Any answer may besides be

    different   not what the same request got first, or with another finish reason
    unended     without its finish reason, with two, or without the protocol's own end
    miscounted  the server's count of its tokens is another
    error, refused, accepted, broken, hung
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.client.reply import Reply
from loadtest.load.load_requests import Ask
from loadtest.load.numbered_answers import TOKEN
from loadtest.load.prompts import Expected

Kind = Literal[
    "lost", "doubled", "reordered", "truncated", "foreign", "garbled", "different", "unended",
    "miscounted", "error", "refused", "accepted", "broken", "hung",
]  # fmt: skip

# What float32 may differ by when other texts are computed in the same batch.
_TOLERANCE = 1e-3
_FEW = 5


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a reply."""

    kind: Kind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class Judge:
    """Remembers the first answer to each request; the others must be like it."""

    def __init__(self) -> None:
        self._firsts: dict[str, Reply] = {}

    def faults(self, ask: Ask, reply: Reply) -> list[Fault]:
        """What is wrong with a reply; nothing, if all is well.

        A client that went away got a beginning of the answer, and that is judged as one.
        """
        found = _faults_of_call(ask, reply)
        if found or ask.refused_with is not None:
            return found
        if len(reply.ids) > 1:
            found.append(Fault("foreign", f"chunks of {len(reply.ids)} answers in one stream"))
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
    """Whether it was answered at all, or refused where it should be."""
    if reply.end in ("broken", "hung"):
        told = f"after {len(reply.pieces)} pieces {reply.text[-40:]!r}: {reply.error}"
        return [Fault("broken" if reply.end == "broken" else "hung", told)]
    if reply.end == "cancelled" and not reply.error:
        return []
    if ask.refused_with is not None:
        if reply.status == ask.refused_with and reply.error:
            return []
        kind: Kind = "accepted" if reply.status == 200 and not reply.error else "error"
        told = f"{reply.status} {reply.error}, where {ask.refused_with} was due"
        return [Fault(kind, told)]
    if reply.error or reply.status != 200:
        kind = "refused" if reply.status in (429, 503) else "error"
        return [Fault(kind, f"{reply.status} {reply.error}")]
    return []


def _faults_of_end(reply: Reply) -> list[Fault]:
    if len(reply.finish_reasons) == 1:
        return []
    reasons = ", ".join(reply.finish_reasons) or "no finish reason"
    return [Fault("unended", f"{reasons} after {reply.text[-40:]!r}")]


def against_numbers(expected: Expected, reply: Reply, *, is_whole: bool) -> list[Fault]:
    """How an answer differs from numbered tokens in their order."""
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
        told = f"finish reason {reply.finish_reasons[0]}, {expected.finish_reason} was due"
        found.append(Fault("different", told))
    # The end-of-sequence token has no text, but it was generated.
    num_due = len(expected.numbers) + (expected.finish_reason == "stop")
    if reply.num_tokens is not None and reply.num_tokens != num_due:
        found.append(Fault("miscounted", f"{reply.num_tokens} tokens, {num_due} were due"))
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
    """One fault for all tokens with which it happened."""
    if texts:
        more = f" and {len(texts) - _FEW} more" if len(texts) > _FEW else ""
        yield Fault(kind, " ".join(texts[:_FEW]) + more)


def against_first(first: Reply, reply: Reply, *, is_whole: bool) -> list[Fault]:
    """How an answer differs from the first one to the same request."""
    if first.numbers is not None:
        return _against_vector(first.numbers, reply.numbers if is_whole else first.numbers)
    for channel in {**first.channels, **reply.channels}:
        said, due = reply.channels.get(channel, ""), first.channels.get(channel, "")
        if found := _against_text(channel, due, said, is_whole=is_whole):
            return [found]
    if not is_whole:
        return []
    if reply.finish_reasons != first.finish_reasons or reply.num_tokens != first.num_tokens:
        told = f"{reply.finish_reasons} after {reply.num_tokens} tokens"
        due = f"{first.finish_reasons} after {first.num_tokens}"
        return [Fault("different", f"{told}, at first {due}")]
    return []


def _against_text(channel: str, due: str, said: str, *, is_whole: bool) -> Fault | None:
    if not due.startswith(said):
        place = next(n for n in range(len(said)) if said[n : n + 1] != due[n : n + 1])
        told = f"{said[place:][:40]!r}, at first {due[place:][:40]!r}"
        return Fault("different", f"{channel} at character {place}: {told}")
    if is_whole and said != due:
        told = f"after {said[-40:]!r} came {due[len(said) :][:40]!r} at first"
        return Fault("truncated", f"{channel} {told}")
    return None


def _against_vector(due: list[float], numbers: list[float] | None) -> list[Fault]:
    if numbers is None or len(numbers) != len(due):
        return [Fault("different", f"{len(numbers or ())} numbers, at first {len(due)}")]
    worst = max((abs(a - b) for a, b in zip(due, numbers, strict=True)), default=0.0)
    return [] if worst < _TOLERANCE else [Fault("different", f"numbers by {worst:.2g}")]
