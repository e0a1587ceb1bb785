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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.client.ask import Ask
from loadtest.client.reply import TOLERANCE, Reply
from loadtest.load.numbered_answers import TOKEN
from loadtest.load.prompts import Expected

Kind = Literal[
    "lost", "doubled", "reordered", "truncated", "foreign", "garbled", "different", "unended",
    "miscounted", "error", "refused", "accepted", "broken", "hung",
]  # fmt: skip

# The description of a fault shows at most this many tokens, or this many characters of a text.
_MAX_TOKENS, _MAX_CHARACTERS = 5, 40


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
        self._first_replies: dict[str, Reply] = {}

    def faults(self, ask: Ask, reply: Reply) -> list[Fault]:
        """Return the faults of a reply. The list is empty if the reply is correct.

        If the client cancelled the request, the reply is checked as the beginning of an answer.
        """
        if call_fault := _fault_of_call(ask, reply):
            return [call_fault]
        if ask.refused_with is not None:
            return []
        is_whole = reply.end == "whole"
        faults = _faults_of_stream(reply, is_whole=is_whole)
        if ask.expected is not None:
            return faults + _faults_of_numbers(ask.expected, reply, is_whole=is_whole)
        if first := self._first_replies.get(ask.key):
            return faults + _differences(first, reply, is_whole=is_whole)
        if is_whole and not faults:
            self._first_replies[ask.key] = reply
        return faults


def _fault_of_call(ask: Ask, reply: Reply) -> Fault | None:
    """Return a fault if the connection failed, or if the reply has another status than expected."""
    if reply.end == "broken" or reply.end == "hung":
        last_text = reply.text[-_MAX_CHARACTERS:]
        after = f"after {len(reply.pieces)} chunks, the last text is {last_text!r}"
        return Fault(reply.end, f"{after}: {reply.error}")
    if reply.end == "cancelled" and not reply.error:
        return None
    is_accepted = reply.status == 200 and not reply.error
    status = f"status {reply.status} {reply.error}"
    if ask.refused_with is None:
        return None if is_accepted else Fault("refused" if reply.is_refused else "error", status)
    if reply.status == ask.refused_with and reply.error:
        return None
    kind: Kind = "accepted" if is_accepted else "error"
    return Fault(kind, f"{status}, expected status {ask.refused_with}")


def _faults_of_stream(reply: Reply, *, is_whole: bool) -> list[Fault]:
    """Return a fault for chunks of several answers, and one for a wrong number of finish reasons.

    An answer that consists of numbers, such as an embedding, has no finish reason.
    """
    faults = []
    if len(reply.ids) > 1:
        faults.append(Fault("foreign", f"the stream has chunks of {len(reply.ids)} answers"))
    if is_whole and reply.numbers is None and len(reply.finish_reasons) != 1:
        reasons = ", ".join(reply.finish_reasons) or "no finish reason"
        faults.append(Fault("unended", f"{reasons} after {reply.text[-_MAX_CHARACTERS:]!r}"))
    return faults


def _faults_of_numbers(expected: Expected, reply: Reply, *, is_whole: bool) -> list[Fault]:
    """Return the faults of an answer that should consist of the numbered tokens in `expected`."""
    tokens = TOKEN.findall(reply.text)
    index_of = {token: index for index, token in enumerate(expected.numbers)}
    faults = _faults_of_order(index_of, tokens)
    if garbage := "".join(TOKEN.split(reply.text)):
        faults.append(Fault("garbled", repr(garbage[:_MAX_CHARACTERS])))
    # A missing token is lost if a later token arrived. Otherwise, the answer is truncated.
    received = set(tokens)
    num_reached = 1 + max((index_of.get(token, -1) for token in tokens), default=-1)
    lost = [token for token in expected.numbers[:num_reached] if token not in received]
    faults += _token_faults("lost", lost)
    if is_whole:
        faults += _token_faults("truncated", expected.numbers[num_reached:])
        faults += _faults_of_ending(expected, reply)
    return faults


def _faults_of_order(index_of: dict[str, int], tokens: Sequence[str]) -> list[Fault]:
    """Return the faults of tokens that arrived although others were due.

    `index_of` contains the index of each expected token.
    """
    by_kind: dict[Kind, list[str]] = {"doubled": [], "reordered": [], "foreign": []}
    last_index = -1
    for num_earlier, token in enumerate(tokens):
        index = index_of.get(token)
        if index is None:
            by_kind["foreign"].append(token)
            continue
        if token in tokens[:num_earlier]:
            by_kind["doubled"].append(token)
        elif index < last_index:
            by_kind["reordered"].append(token)
        last_index = max(last_index, index)
    return [fault for kind, wrong in by_kind.items() for fault in _token_faults(kind, wrong)]


def _token_faults(kind: Kind, tokens: Sequence[str]) -> list[Fault]:
    """Return one fault for all tokens, or an empty list if there is no token.

    Example: the tokens `01.003,` and `01.004,` give the detail `01.003, 01.004,`.
    """
    num_more = len(tokens) - _MAX_TOKENS
    more = f" and {num_more} more" if num_more > 0 else ""
    return [Fault(kind, " ".join(tokens[:_MAX_TOKENS]) + more)] if tokens else []


def _faults_of_ending(expected: Expected, reply: Reply) -> list[Fault]:
    """Return a fault for a wrong finish reason, and one for a wrong number of tokens."""
    faults = []
    if reply.finish_reasons and reply.finish_reasons[0] != expected.finish_reason:
        reasons = f"{reply.finish_reasons[0]}, expected {expected.finish_reason}"
        faults.append(Fault("different", f"finish reason {reasons}"))
    # The end-of-sequence token has no text, but it was generated.
    num_expected = len(expected.numbers) + (expected.finish_reason == "stop")
    if reply.num_tokens is not None and reply.num_tokens != num_expected:
        counts = f"{reply.num_tokens} tokens, expected {num_expected}"
        faults.append(Fault("miscounted", counts))
    return faults


def _differences(first: Reply, reply: Reply, *, is_whole: bool) -> list[Fault]:
    """Return a fault if a reply differs from the first reply to the same request."""
    if first.numbers is not None:
        return _differences_of_numbers(first.numbers, reply.numbers or []) if is_whole else []
    for channel in {**first.channels, **reply.channels}:
        expected, text = first.channels.get(channel, ""), reply.channels.get(channel, "")
        if difference := _difference_of_texts(channel, expected, text, is_whole=is_whole):
            return [difference]
    endings = [f"{one.finish_reasons} after {one.num_tokens} tokens" for one in (reply, first)]
    if is_whole and endings[0] != endings[1]:
        return [Fault("different", "{}, but the first answer ended with {}".format(*endings))]
    return []


def _difference_of_texts(channel: str, expected: str, text: str, *, is_whole: bool) -> Fault | None:
    """Return a fault if `text` differs from `expected`, as far as `text` has arrived."""
    num_equal = _num_equal_characters(expected, text)
    expected_rest = expected[num_equal:][:_MAX_CHARACTERS]
    if num_equal < len(text):
        rest = text[num_equal:][:_MAX_CHARACTERS]
        detail = f"{rest!r}, but the first answer has {expected_rest!r}"
        return Fault("different", f"{channel} at character {num_equal} is {detail}")
    if is_whole and expected_rest:
        end = text[-_MAX_CHARACTERS:]
        detail = f"ends with {end!r}, but the first answer continues with {expected_rest!r}"
        return Fault("truncated", f"{channel} {detail}")
    return None


def _num_equal_characters(text: str, other: str) -> int:
    """Return the length of the common beginning. Example: "house" and "hour" give 3."""
    pairs = zip(text, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _differences_of_numbers(expected: list[float], numbers: list[float]) -> list[Fault]:
    """Return a fault if an embedding or the scores of a ranking differ by more than rounding."""
    if len(numbers) != len(expected):
        counts = f"{len(numbers)} numbers, but the first answer has {len(expected)}"
        return [Fault("different", counts)]
    worst = max((abs(a - b) for a, b in zip(expected, numbers, strict=True)), default=0.0)
    if worst < TOLERANCE:
        return []
    return [Fault("different", f"the largest difference of two numbers is {worst:.2g}")]
