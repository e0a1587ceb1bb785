"""The output of a lesson, and the rule that keeps evaluation prompts out of training."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
Message = dict[str, Any]
HELD_OUT_ONE_IN = 8
_MAX_TRIES = 1000


@dataclass(frozen=True)
class Exchange:
    """One user message and the messages that answer it.

    Attributes:
        skill: The row of the evaluation table in which this exchange is counted.
        messages: OpenAI messages: user, assistant, and for tools also tool results and a second
            assistant message. Assistant messages carry `reasoning_content`.
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


class NoKeyError(Exception):
    """No key of an exchange belongs to the evaluation, or none belongs to training."""


def is_held_out(key: str) -> bool:
    """Return whether prompts with this key belong to the evaluation and never to training."""
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def draw(make: Callable[[], tuple[str, T]], held_out: bool) -> T:
    """Call `make` until it returns a key that is held out, or a key for training.

    Args:
        make: Returns a key, and the value to return.
        held_out: Whether the key must be held out.

    Raises:
        NoKeyError: `make` does not return such a key. For example, a tool without parameters has
            only a few prompts, and possibly none of them is held out.
    """
    for _ in range(_MAX_TRIES):
        key, made = make()
        if is_held_out(key) == held_out:
            return made
    raise NoKeyError(f"none of {_MAX_TRIES} keys has held_out={held_out}")


def plain(skill: str, user: str, reasoning: str, content: str) -> Exchange:
    """Return an exchange without tools."""
    answer = {"role": "assistant", "reasoning_content": reasoning, "content": content}
    return Exchange(skill, ({"role": "user", "content": user}, answer))


def vary(rng: Random, text: str) -> str:
    """Return the text with careless spelling: no capital, no question mark, or an opener."""
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
