# SPDX-License-Identifier: Apache-2.0
"""Step plans, which the scheduler makes, and step results, which the runner returns."""

from dataclasses import dataclass, field
from typing import NamedTuple

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.sequence import Sequence


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence that the model computes in one step.

    Attributes:
        sequence: the sequence.
        start: the index of the first token in `sequence.token_ids`. The keys and values of all
            earlier tokens are in the KV cache.
        num_tokens: the number of tokens.
        samples: whether the chunk includes the last known token, so that the step samples a token.
        is_first: whether the sequence has just got its row, so that the row contains no state of
            the sequence yet.
        num_logits: the number of tokens at the end of the chunk whose logits are needed. Sampling
            needs one. Verifying draft tokens or reporting log-probabilities of the prompt needs
            more.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    is_first: bool
    num_logits: int


class SnapshotPlan(NamedTuple):
    """The recurrent states that a step loads, saves and deletes, by the ids of their snapshots.

    Each pair contains the index of a chunk in the plan and the id of a snapshot. The forward path
    first loads, then deletes, then computes the chunks, and finally saves.

    Attributes:
        loads: a snapshot becomes the state of the chunk's sequence.
        saves: the state of the chunk's sequence after the chunk is copied into a new snapshot.
        deleted: the ids of the snapshots whose memory is released.
    """

    loads: list[tuple[int, int]]
    saves: list[tuple[int, int]]
    deleted: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The tokens that the model computes in one step. Chunks of one token come first.

    Attributes:
        chunks: one chunk for each sequence of the step, in the order of the batch. Every sequence
            has its row and its blocks.
        num_tokens: the number of tokens of all chunks together.
        copies: pairs of block ids (from, to). The blocks are copied before the forward pass,
            because a sequence is about to write into a block that it has shared until now.
        pending: the chunks whose token is not known yet, because the previous step is still
            sampling the token. Only a step that was planned ahead has such chunks. Each pair
            contains two indices: the index of the chunk in this plan, and the index of the chunk
            that samples the token among the sampling chunks of the previous plan.
        snapshots: the snapshots of recurrent states; None if the model has no snapshots.
    """

    chunks: list[Chunk]
    num_tokens: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)
    snapshots: SnapshotPlan | None = None


class Sampled(NamedTuple):
    """The tokens that one step generates for one sequence.

    The chunk ends with the last known token of the sequence, so that the next token can be sampled.

    Attributes:
        token_ids: the new tokens: sampled tokens, draft tokens that verification accepted, and
            tokens that the grammar forces.
        logprobs: one log-probability for each token. The value of a forced token is 0.
        error: a sentence that says why no token was sampled; None if tokens were sampled.
        top: one entry for each token in `token_ids`; None if the request did not ask for
            log-probabilities.
    """

    token_ids: list[int]
    logprobs: list[float]
    error: str | None = None
    top: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens and log-probabilities that one step has generated.

    Attributes:
        sampled: one entry for each chunk of the plan that samples, in the plan's order.
        prompt_logprobs: a mapping from the index of a chunk in the plan to log-probabilities. The
            log-probabilities belong to the prompt tokens that follow the tokens of the chunk. Only
            chunks of requests that asked for log-probabilities of the prompt have an entry.
        device_token_ids: the token on the device for each entry of `sampled`. A step that was
            planned ahead uses this token as its input. The token rarely differs from the token in
            `sampled`.
    """

    sampled: list[Sampled] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    device_token_ids: list[int] = field(default_factory=list)
