# SPDX-License-Identifier: Apache-2.0
"""Guessed tokens: where a step samples, and how far the guesses were right.

A request may go through the model with k guessed tokens behind its last known one (found in its own
text, without a draft model). The logits after each of them come at once, and at every such position
a token is drawn as if the guesses before it were the answer, with the random number that the answer
has there anyway. The first token that differs from its guess is the right one at that place, and
ends the step's answer; all before it are right because they were drawn.

That is exact rejection sampling for guesses of probability one: a guess d is kept with the
probability p(d) that the processed distribution gives it, and otherwise the token comes from the
rest of p, renormalised. Because the random numbers are those of a run without guesses, the tokens
are also the same ones.
Source: Leviathan et al., arXiv:2211.17192, with a proposal that is certain.
"""

from typing import NamedTuple

from nereid_backend.core.request import Request
from nereid_backend.core.step import Chunk, StepPlan


class Position(NamedTuple):
    """A place in a sequence at which a token is chosen.

    Attributes:
        request: whose sequence, with the tokens that are known.
        guessed: tokens that are taken for granted behind the known ones.
    """

    request: Request
    guessed: list[int]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer before this place."""
        return self.request.num_output_tokens + len(self.guessed)


class Sampling(NamedTuple):
    """Where a plan samples.

    Attributes:
        positions: in the order of the plan's chunks, a request's own from left to right.
        rows: the row of the step's logits for each position.
        counts: how many positions each chunk that samples has.
    """

    positions: list[Position]
    rows: list[int]
    counts: list[int]


def sampling_of(plan: StepPlan) -> Sampling:
    """Find the positions at which a plan's step samples."""
    positions: list[Position] = []
    rows: list[int] = []
    counts: list[int] = []
    end = 0
    for chunk in plan.chunks:
        end += chunk.num_logits
        if not chunk.samples:
            continue
        if chunk.num_logits == 1:  # nearly all
            positions.append(Position(chunk.request, []))
            rows.append(end - 1)
            counts.append(1)
            continue
        guessed = guesses_of(chunk)
        count = len(guessed) + 1
        positions.append(Position(chunk.request, []))
        positions += [Position(chunk.request, guessed[:i]) for i in range(1, count)]
        rows += range(end - count, end)
        counts.append(count)
    return Sampling(positions, rows, counts)


def guesses_of(chunk: Chunk) -> list[int]:
    """The guessed tokens that go through the model with a chunk that samples."""
    guessed: list[int] = getattr(chunk.request, "draft_token_ids", None) or []
    # A chunk that reports a prompt's log-probabilities has more logits, but no guesses.
    return guessed[: chunk.num_logits - 1]
