# SPDX-License-Identifier: Apache-2.0
"""What the engine says to its caller: updates of requests, whole outputs, facts about itself."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, under the model's own distribution.

    Attributes:
        token_ids: the token that stands there, then the likeliest ones, likeliest first (the first
            may come again among them).
        logprobs: natural logarithms, one for each of token_ids.
        rank: of the token that stands there among the whole vocabulary; the likeliest has 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one step adds to one sequence of a request.

    Every sequence of an accepted request gets exactly one update whose finish_reason is not None,
    as its last.

    Attributes:
        request_id: the caller's name of the request.
        new_token_ids: tokens that this step adds, in order; a stop token is among them.
        finish_reason: None while the request goes on.
        stop_reason: the stop token's id when finish_reason is "stop".
        cumulative_logprob: sum of the log-probabilities of all tokens so far, under the model's own
            distribution (before temperature and filters).
        error: what went wrong when finish_reason is "error".
        index: which of the request's n sequences.
        logprobs: one for each of new_token_ids, where the request asked for them.
        prompt_logprobs: one for each token of the prompt (None for the first), in the first update
            of sequence 0, where the request asked for them.
        num_cached_tokens: tokens of the prompt whose keys and values were in the prefix cache.
        is_refused: with an error: the request itself is at fault (its grammar does not compile,
            say), and nothing was generated.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    cumulative_logprob: float = 0.0
    error: str | None = None
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished answer; token_ids include the stop token that ended it, text leaves it out."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: int | None
    cumulative_logprob: float
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its finished answers, in the order of their index."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was loaded and how it will run.

    Attributes:
        model: path of the checkpoint.
        architecture: the class that its config names.
        path: how batches reach the model; "packed" is one row of all tokens.
        attention: what computes attention: "native" kernels, "reference" for plain torch, "eager"
            for the model's own.
        dtype: of weights and KV cache, as in "float32".
        device: as in "cpu" or "cuda:0".
        max_model_len: prompt and answer together have at most so many tokens.
        num_blocks: size of the KV cache in blocks of block_size tokens.
        kv_cache_bytes: memory of the KV cache.
        weights_bytes: memory of the weights.
        eos_token_ids: tokens that end an answer, sorted.
        num_threads: CPU threads of torch.
        self_check_difference: of logits, packed steps against the model alone, relative.
        load_seconds: from the start to the first step.
        seconds: load time by phase.
    """

    model: str
    architecture: str
    path: str
    attention: str
    dtype: str
    device: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    weights_bytes: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_threads: int
    self_check_difference: float
    load_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)
