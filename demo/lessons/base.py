"""The output of a lesson, and the rule that keeps evaluation prompts out of training."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
Message = dict[str, Any]
HELD_OUT_ONE_IN = 8
NEVER_TRAINED = ""
"""A key of examples that must not occur in training. (`is_held_out` returns True for it.)"""
_MAX_PROPOSALS = 1000


@dataclass(frozen=True)
class Exchange:
    """One user message and the messages that answer it.

    Attributes:
        skill: The row of the evaluation table in which this exchange is counted.
        messages: OpenAI messages: user, assistant, and for tools also tool results and a second
            assistant message. Assistant messages contain `reasoning_content`.
    """

    skill: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Dialogue:
    """A conversation that ends with the assistant message to learn or to check."""

    skill: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    thinking: bool


class Candidate(NamedTuple, Generic[T]):
    """An example that a lesson proposes.

    Attributes:
        key: Decides whether the example belongs to the evaluation or to the training.
        example: The proposed exchange, exchanges or drawing.
    """

    key: str
    example: T


class Turn(NamedTuple):
    """A question of the user, and the assistant's reasoning and answer."""

    question: str
    reasoning: str
    answer: str


class NoKeyError(Exception):
    """The error of a lesson that has no example for the evaluation, or none for the training."""


def is_held_out(key: str) -> bool:
    """Return whether examples with this key belong to the evaluation and never to training."""
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


Lesson = Callable[[Random, bool], T]
"""A function that draws an example for the evaluation (True) or for the training (False)."""


def draw(propose: Callable[[], Candidate[T]], held_out: bool) -> T:
    """Return the first proposed example whose key belongs to the evaluation or to the training.

    Args:
        propose: Draws a candidate.
        held_out: Whether the example is for the evaluation.

    Raises:
        NoKeyError: no candidate has such a key. For example, a tool without parameters has only a
            few prompts, and possibly none of them is held out.
    """
    for _ in range(_MAX_PROPOSALS):
        candidate = propose()
        if is_held_out(candidate.key) == held_out:
            return candidate.example
    raise NoKeyError(f"none of {_MAX_PROPOSALS} keys has held_out={held_out}")


def lesson(propose: Callable[[Random], Candidate[T]]) -> Lesson[T]:
    """Make a lesson of a function that draws candidates for the evaluation and the training."""

    def draw_example(rng: Random, held_out: bool) -> T:
        return draw(lambda: propose(rng), held_out)

    return draw_example


def plain(skill: str, user: str, *, reasoning: str, answer: str) -> Exchange:
    """Return an exchange in which no tool is called."""
    reply = {"role": "assistant", "reasoning_content": reasoning, "content": answer}
    return Exchange(skill, ({"role": "user", "content": user}, reply))


def vary(rng: Random, text: str) -> str:
    """Return the text with the careless spelling of a chat, in about a third of the calls.

    Example: `What is 2 + 2?` becomes `What is 2 + 2`, `what is 2 + 2?` or `Hey, What is 2 + 2?`.
    """
    if rng.random() < 0.12:
        text = text.rstrip("?.!")
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.08:
        text = rng.choice(["Please: ", "Hey, ", "Hi! ", "OK. ", "Tell me: "]) + text
    return text


def listing(items: Iterable[str]) -> str:
    """Join words as in `a`, `a and b`, or `a, b and c`."""
    *head, last = items
    return f"{', '.join(head)} and {last}" if head else last


def capitalised(text: str) -> str:
    """Return the text with a capital at the beginning. Other letters stay as they are."""
    return text[0].upper() + text[1:]


def with_article(noun: str) -> str:
    """Return `a` or `an` and the noun."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
