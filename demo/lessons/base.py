"""What a lesson produces, and the one rule that keeps evaluation prompts out of training."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
Message = dict[str, Any]
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Exchange:
    """One user message and everything up to the assistant's last word on it.

    Attributes:
        skill: The row of the evaluation table that this counts for.
        messages: OpenAI messages: user, assistant, and for tools also tool results and a second
            assistant message. Assistant messages carry `reasoning_content`.
    """

    skill: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Dialogue:
    """A whole conversation that ends with the assistant message to be learnt or checked."""

    skill: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    thinking: bool


def is_held_out(key: str) -> bool:
    """Whether prompts with this key belong to the evaluation and never to training."""
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def draw(make: Callable[[], tuple[str, T]], held_out: bool) -> T:
    """Call `make` until its key falls on the wanted side."""
    while True:
        key, made = make()
        if is_held_out(key) == held_out:
            return made


def plain(skill: str, user: str, reasoning: str, content: str) -> Exchange:
    """An exchange without tools."""
    answer = {"role": "assistant", "reasoning_content": reasoning, "content": content}
    return Exchange(skill, ({"role": "user", "content": user}, answer))


def vary(rng: Random, text: str) -> str:
    """The careless spelling that users have: no capital, no question mark, a stray blank."""
    if rng.random() < 0.12:
        text = text.rstrip("?.!")
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.08:
        text = rng.choice(["Please: ", "Hey, ", "Hi! ", "OK. ", "Tell me: "]) + text
    return text


def listing(items: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *head, last = items
    return f"{', '.join(head)} and {last}" if head else last
