# SPDX-License-Identifier: Apache-2.0
"""The plan of one step, which the scheduler makes, and the result, which the runner returns."""

from dataclasses import dataclass, field
from typing import NamedTuple

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.request import Request


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence that go through the model in this step.

    Attributes:
        request: the sequence.
        start: the index of the first token in request.token_ids. The keys and values of all
            earlier tokens are in the KV cache.
        num_tokens: the number of tokens.
        samples: whether the chunk includes the last known token, so that a token is sampled.
        is_first: whether the sequence has just got its row, so that the row holds no state yet.
        num_logits: the number of last tokens of the chunk whose logits are needed: one to sample
            from, and more to verify draft tokens or to report log-probabilities of the prompt.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    is_first: bool
    num_logits: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step. Chunks of one token come first.

    Attributes:
        chunks: one chunk for each sequence of the step, in the order of the batch. Every sequence
            has its row and its blocks.
        num_tokens: the sum of the chunks' tokens.
        copies: pairs of block ids (from, to) that are copied before the forward pass, because a
            sequence is about to write into a block that it shared until now.
        pending: the chunks whose token is not known yet, because the previous step is sampling it.
            Only a step that was planned ahead has such chunks. Each pair contains the index of the
            chunk in this plan, and the index of its source among the sampling chunks of the
            previous plan.
    """

    chunks: list[Chunk]
    num_tokens: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)


class Sampled(NamedTuple):
    """The new tokens of one chunk that samples.

    Attributes:
        token_ids: the sampled token, followed by tokens that its grammar forces and by draft
            tokens that verification accepted.
        logprobs: one log-probability for each token (0 for a forced token).
        error: a sentence that says why there are no tokens; None if there are.
        top: one entry for each of token_ids if the request asked for log-probabilities.
    """

    token_ids: list[int]
    logprobs: list[float]
    error: str | None = None
    top: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step.

    Attributes:
        sampled: one entry for each chunk of the plan that samples, in the plan's order.
        prompt_logprobs: the log-probabilities of the prompt tokens that follow the tokens of a
            chunk, by the index of the chunk in the plan. Only requests that asked for them have
            an entry.
        device_token_ids: for each of sampled, the token on the device that a step planned ahead
            takes as its input. It rarely differs from the token in sampled.
    """

    sampled: list[Sampled] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    device_token_ids: list[int] = field(default_factory=list)
