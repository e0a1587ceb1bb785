# SPDX-License-Identifier: Apache-2.0
"""Data classes: the plan and the result of a step. A step is one forward pass of the model."""

from dataclasses import dataclass, field
from typing import NamedTuple

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.sequence import Sequence


class Chunk(NamedTuple):
    """The consecutive tokens that one step computes for one sequence.

    Attributes:
        sequence: the sequence.
        start: the index of the chunk's first token in `sequence.token_ids`. The keys and values of
            all earlier tokens are in the KV cache.
        num_tokens: the number of tokens in the chunk.
        samples: whether the step samples a token for the sequence. This is true if the chunk
            includes the last known token.
        is_first: whether this is the first chunk since the sequence got its row. The row then
            contains no state of the sequence yet.
        num_logits: the number of tokens, counted from the end of the chunk, for which the model
            computes logits. To sample a token, 1 is enough. To verify draft tokens or to report
            log-probabilities of the prompt, the number is larger.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    is_first: bool
    num_logits: int


def make_one_token_chunk(sequence: Sequence, start: int) -> Chunk:
    """Return a chunk that contains only the last known token of a running sequence.

    `start` is the index of this token in the sequence. With async scheduling, the token is a
    placeholder while the previous step is still sampling.
    """
    # The last four fields are num_tokens, samples, is_first and num_logits. Passing the fields by
    # position takes less time than passing them by name.
    return Chunk(sequence, start, 1, True, False, 1)


def make_chunk(sequence: Sequence, num_tokens: int, *, is_first: bool) -> Chunk:
    """Return a chunk: the next `num_tokens` known tokens and all draft tokens of a sequence.

    Draft tokens are guesses for the tokens after the last known token. A sequence has draft tokens
    only if the chunk reaches its last known token. `is_first` is whether this is the first chunk
    since the sequence got its row.

    Example: a sequence has 20 known tokens and 3 draft tokens. The first 19 tokens are computed,
    and `num_tokens` is 1. The chunk starts at index 19 and has 4 tokens. The draft tokens are
    verified with the logits of all 4 tokens.
    """
    start = sequence.num_computed_tokens
    has_last_known_token = start + num_tokens == len(sequence.token_ids)
    num_drafts = len(sequence.draft_token_ids)
    if sequence.wants_prompt_logprobs:
        # The log-probability of a prompt token is computed from the logits of the previous token.
        num_known_with_logits = num_tokens
    else:
        num_known_with_logits = int(has_last_known_token)
    return Chunk(
        sequence=sequence,
        start=start,
        num_tokens=num_tokens + num_drafts,
        samples=has_last_known_token,
        is_first=is_first,
        num_logits=num_known_with_logits + num_drafts,
    )


class SnapshotPlan(NamedTuple):
    """The copies of recurrent states that a step loads, saves and deletes.

    A snapshot is a copy of a recurrent state. Each pair contains the index of a chunk in the plan
    and the id of a snapshot. The forward path loads snapshots, then deletes snapshots, then
    computes the chunks, and finally saves snapshots.

    Attributes:
        loads: one pair for each loaded snapshot. The snapshot becomes the state of the chunk's
            sequence.
        saves: one pair for each new snapshot. The snapshot contains the state of the chunk's
            sequence after the chunk.
        deleted: the ids of the snapshots whose memory is released.
    """

    loads: list[tuple[int, int]]
    saves: list[tuple[int, int]]
    deleted: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Lists the tokens to compute in one step. Sequences with only one token come first.

    Attributes:
        chunks: one chunk for each sequence of the step, in the order of the batch. Every sequence
            has its row and its blocks.
        num_tokens: the number of tokens of all chunks together.
        copies: pairs of block ids (from, to). The blocks are copied before the forward pass. A
            sequence needs a copy before it writes into a block that other sequences use, too.
        pending: one pair for each chunk whose token the previous step is still sampling. Only a
            step that was planned ahead has such chunks. The first number of a pair is the index of
            the chunk in this plan. The second number is the index of the token in
            `StepResult.sampled` of the previous step.
        snapshots: the snapshots of recurrent states; None if the model has no snapshots.
    """

    chunks: list[Chunk]
    num_tokens: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)
    snapshots: SnapshotPlan | None = None


class Sampled(NamedTuple):
    """The tokens that one step generates for one sequence.

    A step generates tokens for a sequence only if it computes the last known token of the sequence.

    Attributes:
        token_ids: the new tokens: sampled tokens, draft tokens that verification accepted, and
            tokens that the grammar forces.
        logprobs: one log-probability for each token. The value of a forced token is 0.
        error: a sentence with the reason why no token was sampled; None if tokens were sampled.
        top: one entry for each token in `token_ids`; None if the request did not ask for
            log-probabilities.
        is_refused: True if the request caused the error, because its parameters forbid every token.
            The computed keys and values of the sequence are then valid.
    """

    token_ids: list[int]
    logprobs: list[float]
    error: str | None = None
    top: list[TokenLogprobs] | None = None
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens and log-probabilities that one step has computed.

    Attributes:
        sampled: one entry for each sampling chunk of the plan, in the order of the plan.
        prompt_logprobs: maps the index of a chunk in the plan to log-probabilities of prompt
            tokens. Each of these prompt tokens directly follows a token of the chunk. The mapping
            contains only chunks of requests that asked for log-probabilities of the prompt.
        device_token_ids: for each entry of `sampled`, the token that the device sampled. A step
            that was planned ahead uses this token as its input. In rare cases, this token differs
            from the token in `sampled`.
    """

    sampled: list[Sampled] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    device_token_ids: list[int] = field(default_factory=list)
