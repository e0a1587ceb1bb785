# SPDX-License-Identifier: Apache-2.0
"""The values that the engine returns: updates of requests, finished outputs, and engine facts."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, under the model's own distribution.

    Attributes:
        token_ids: the token at this position, followed by the likeliest tokens in order of
            probability. The token at this position may occur a second time among them.
        logprobs: natural logarithms, one for each of token_ids.
        rank: the rank of the token at this position within the vocabulary; 1 is the likeliest.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """The tokens that one step adds to one sequence of a request.

    The last update of every sequence, and only the last, has a finish_reason.

    Attributes:
        request_id: the id that the caller chose for the request.
        new_token_ids: the tokens that this step adds, in order, including a stop token.
        finish_reason: why the sequence ended; None while it continues.
        stop_reason: the id of the stop token if finish_reason is "stop".
        cumulative_logprob: sum of the log-probabilities of all tokens so far, under the model's own
            distribution (before temperature and filters).
        error: a sentence that says what went wrong if finish_reason is "error".
        index: the number of the sequence among the n sequences of the request, from 0.
        logprobs: one entry for each of new_token_ids if the request asked for log-probabilities.
        prompt_logprobs: one entry for each prompt token (None for the first). Only the first update
            of sequence 0 has them, and only if the request asked for them.
        num_cached_tokens: the number of prompt tokens that were found in the prefix cache.
        is_refused: True if the error is the request's own fault (for example, its grammar does not
            compile). Nothing was generated then.
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
    """One finished sequence. `token_ids` includes the stop token that ended it; `text` does not."""

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
    """A prompt and its finished sequences in the order of their index."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about the loaded model and how the engine runs it.

    Attributes:
        model: path of the checkpoint.
        architecture: the class that the checkpoint's config.json names.
        path: the forward path; "packed" computes all tokens of a step as one row.
        attention: the implementation of attention: "native" for compiled kernels, "reference" for
            plain torch, "eager" for the model's own code.
        dtype: the dtype of weights and KV cache, such as "float32".
        device: the torch device, such as "cpu" or "cuda:0".
        max_model_len: the largest number of prompt and output tokens of one sequence.
        num_blocks: the size of the KV cache in blocks of block_size tokens.
        kv_cache_bytes: the memory of the KV cache in bytes.
        weights_bytes: the memory of the weights in bytes.
        eos_token_ids: the tokens that end a sequence, sorted.
        num_threads: the number of CPU threads that torch uses.
        self_check_difference: the largest relative difference of logits between the engine's steps
            and the model alone.
        load_seconds: the seconds from the start to the first step.
        seconds: the loading time of each phase in seconds.
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
