# SPDX-License-Identifier: Apache-2.0
"""What the scheduler hands to the runner, and what comes back."""

from dataclasses import dataclass, field
from typing import NamedTuple

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.request import Request


class Chunk(NamedTuple):
    """Tokens of one request that go through the model in this step.

    Attributes:
        request: whose tokens.
        start: index in request.token_ids of the first one; all before are in the cache.
        num_tokens: how many.
        samples: whether they reach the last token known, so that a new one is sampled after it.
        is_first: whether the request has just got its row, so that nothing is known of it there.
        num_logits: logits are wanted after so many of the chunk's last tokens: one to sample from,
            more to judge guessed tokens or to report a prompt's log-probabilities.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    is_first: bool
    num_logits: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: chunks in the order in which the batch holds them, those of one token first.

    Attributes:
        chunks: one for each request that takes part. Every request has its row and blocks.
        num_tokens: sum of the chunks' tokens.
        copies: pairs of blocks (from, to) to copy before anything is computed: a sequence is about
            to write into a block that it has shared so far.
        pending: only in a step that was planned ahead: chunks whose one token is sampled by the
            step before, and not known yet. Pairs: which chunk of this plan, and which of the chunks
            that sample in the plan before.
    """

    chunks: list[Chunk]
    num_tokens: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)


class Sampled(NamedTuple):
    """What the model answered to one chunk that samples.

    Attributes:
        token_ids: new tokens in order: the one that was chosen, then those that its grammar leaves
            no choice about, or that were guessed and found right.
        logprobs: their log-probabilities, one each (0 for a token that was forced).
        error: why there are none, else None.
        top: one for each of token_ids, where the request asked for log-probabilities.
    """

    token_ids: list[int]
    logprobs: list[float]
    error: str | None = None
    top: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought.

    Attributes:
        sampled: one for each chunk of the plan that samples, in the plan's order.
        prompt_logprobs: by the index of a chunk in the plan: log-probabilities of the prompt tokens
            that come after each token of the chunk (those within the prompt), for requests that
            asked for them.
        drawn: for each of sampled, the token that a step planned ahead was given as its input; the
            one of sampled, but in rare cases.
    """

    sampled: list[Sampled] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    drawn: list[int] = field(default_factory=list)
