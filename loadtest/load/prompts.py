"""Prompts, and the expected answers if they are known in advance."""

import random
from dataclasses import dataclass

from loadtest.client.traffic import QUESTIONS
from loadtest.load import numbered_answers


@dataclass(frozen=True)
class Expected:
    """An answer that is known in advance.

    Attributes:
        numbers: the texts of the tokens, in order.
        finish_reason: the finish reason of the answer.
    """

    numbers: tuple[str, ...]
    finish_reason: str


@dataclass(frozen=True)
class Question:
    """A prompt.

    Attributes:
        text: the prompt.
        numbers: the numbered tokens that the scripted engine returns; None if a model answers.
    """

    text: str
    numbers: tuple[str, ...] | None = None

    def expected(self, max_tokens: int) -> Expected | None:
        """Return the answer within a token limit, or None if it is not known in advance."""
        if self.numbers is None:
            return None
        is_cut = max_tokens <= len(self.numbers)
        return Expected(self.numbers[:max_tokens], "length" if is_cut else "stop")


def plain_question(rng: random.Random) -> Question:
    """Return a random question for a model."""
    return Question(rng.choice(QUESTIONS))


def numbered_question(rng: random.Random) -> Question:
    """Return a random prompt for the scripted engine."""
    series = rng.randrange(numbered_answers.NUM_SERIES)
    return Question(numbered_answers.prompt(series), numbered_answers.tokens(series))
