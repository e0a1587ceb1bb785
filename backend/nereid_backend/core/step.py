# SPDX-License-Identifier: Apache-2.0
"""What the scheduler hands to the runner, and what comes back."""

from dataclasses import dataclass, field
from typing import NamedTuple

from nereid_backend.core.request import Request


class Chunk(NamedTuple):
    """Tokens of one request that go through the model in this step.

    Attributes:
        request: whose tokens.
        start: index in request.token_ids of the first one; all before are in the cache.
        num_tokens: how many.
        samples: whether they reach the last token known, so that a new one is sampled after it.
        is_first: whether the request has just got its row, so that nothing is known of it there.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    is_first: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: chunks in the order in which the batch holds them, those of one token first.

    Attributes:
        chunks: one for each request that takes part. Every request has its row and blocks.
        num_tokens: sum of the chunks' tokens.
    """

    chunks: list[Chunk]
    num_tokens: int


class Sampled(NamedTuple):
    """What the model answered to one chunk that samples.

    Attributes:
        token_ids: new tokens in order; one, until something guesses several at once.
        logprobs: their log-probabilities, one each.
        error: why there are none, else None.
    """

    token_ids: list[int]
    logprobs: list[float]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One Sampled for each chunk of the plan that samples, in the plan's order."""

    sampled: list[Sampled] = field(default_factory=list)
