# SPDX-License-Identifier: Apache-2.0
"""What is asked, and what is known of the answer before it comes."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.load import numbered_answers

_PLAIN = (
    "Hello! Who are you?",
    "Where does Hugo live?",
    "Tell me a story about a turtle.",
    "What is 3 + 4?",
    "What is the weather in Paris?",
    "Say the days of the week.",
)


@dataclass(frozen=True)
class Expected:
    """An answer that is known.

    Attributes:
        numbers: the texts of its tokens, in order.
        finish_reason: how it ends.
    """

    numbers: tuple[str, ...]
    finish_reason: str


@dataclass(frozen=True)
class Question:
    """A prompt; `numbers` is all that a scripted server would say to it."""

    text: str
    numbers: tuple[str, ...] | None = None

    def expected(self, max_tokens: int) -> Expected | None:
        """The answer within a limit; None where the first answer has to show it."""
        if self.numbers is None:
            return None
        is_cut = max_tokens <= len(self.numbers)
        return Expected(self.numbers[:max_tokens], "length" if is_cut else "stop")


Chooser = Callable[[random.Random], Question]


def plain(rng: random.Random) -> Question:
    """A question for a model."""
    return Question(rng.choice(_PLAIN))


def recited(rng: random.Random) -> Question:
    """A question for a scripted server."""
    series = rng.randrange(numbered_answers.NUM_SERIES)
    return Question(numbered_answers.prompt(series), numbered_answers.tokens(series))
