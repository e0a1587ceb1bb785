# SPDX-License-Identifier: Apache-2.0
"""The data classes that the engine returns: updates, outputs, statistics and model information."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(NamedTuple):
    """The log-probabilities of some tokens at one position of a prompt or an answer.

    The probabilities are the softmax of the model's logits, before masks, penalties and temperature
    are applied.

    Attributes:
        token_ids: the token at this position, followed by the likeliest tokens, sorted by
            decreasing probability. If the token at this position is one of the likeliest tokens,
            the list contains that token twice.
        logprobs: the natural logarithm of the probability of each token in `token_ids`.
        rank: the rank of the token at this position within the vocabulary. The likeliest token has
            rank 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


# This class is not frozen, because each step creates one update for each sequence. Creating an
# object of a frozen class takes several times as long.
@dataclass(slots=True)
class RequestUpdate:
    """The tokens that one step adds to one sequence of a request.

    In the last update of a sequence, `finish_reason` is set. In earlier updates, it is None.

    Attributes:
        request_id: the id that the caller chose for the request.
        new_token_ids: the tokens that this step adds, in order, including a stop token.
        finish_reason: the reason why the sequence ended; None while the sequence continues.
        stop_reason: the id of the stop token if `finish_reason` is "stop".
        cumulative_logprob: the sum of the log-probabilities of all output tokens so far, under the
            model's own distribution (before temperature and filters).
        error: a sentence that describes the error if `finish_reason` is "error".
        index: the number of the sequence among the n sequences of the request, from 0.
        logprobs: one entry for each token in `new_token_ids`; None if the request did not ask for
            log-probabilities.
        prompt_logprobs: one entry for each prompt token. The entry of the first prompt token is
            None. Only the first update of sequence 0 contains this list, and only if the request
            asked for log-probabilities of the prompt.
        num_cached_tokens: the number of prompt tokens that were found in the prefix cache. Only the
            first update of a sequence contains this number.
        is_refused: True if the request itself caused the error, for example because its grammar
            does not compile, or because its parameters forbid every token.
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
    """The output of one ended sequence.

    If a stop token ended the sequence, `token_ids` includes the stop token, but `text` does not.
    """

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
    """The prompt of a request, and the outputs of its sequences, sorted by index."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


class EngineStats(NamedTuple):
    """The current load of an engine, and counters that start at 0 when the engine starts.

    The server publishes these values as metrics.

    Attributes:
        num_requests_running: the number of sequences that have a row and blocks of the KV cache.
        num_requests_waiting: the number of sequences that have no row and no blocks yet. They wait
            for a row and blocks, for the computation of their prompt, or for their grammar.
        kv_cache_blocks_used: the number of blocks that requests use. Cached blocks that no request
            uses are not included.
        kv_cache_blocks: the number of blocks in the KV cache.
        num_preemptions: the number of preemptions.
        num_prefix_cache_queries: the number of tokens that were looked up in the prefix cache.
        num_prefix_cache_hits: the number of tokens that were found in the prefix cache.
        num_drafts: the number of drafts that were verified. Each draft has at least one token.
        num_proposed_tokens: the number of draft tokens that were verified.
        num_accepted_tokens: the number of draft tokens that were accepted.
        num_image_encodings: the number of times that the encoder of images or audio was run.
    """

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_blocks_used: int
    kv_cache_blocks: int
    num_preemptions: int = 0
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    num_drafts: int = 0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    num_image_encodings: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Describes the loaded model and the engine that runs the model.

    Attributes:
        model: the path of the checkpoint.
        architecture: the name of the model class in the checkpoint's config.json.
        path: the forward path. For example, "packed" computes all tokens of a step as one row.
        attention: the implementation of attention: "native" for compiled kernels, "reference" for
            plain torch, "eager" for the model's own code.
        dtype: the dtype of weights and KV cache, such as "float32".
        device: the torch device, such as "cpu" or "cuda:0".
        max_model_len: the largest number of prompt and output tokens of one sequence.
        max_num_seqs: the largest number of sequences that run at the same time.
        max_num_batched_tokens: the largest number of tokens in one step.
        block_size: the number of tokens in one block of the KV cache.
        num_blocks: the number of blocks in the KV cache.
        kv_cache_bytes: the size of the KV cache in bytes.
        weights_bytes: the size of the weights in bytes.
        vocab_size: the number of tokens in the vocabulary.
        eos_token_ids: the tokens that end a sequence, sorted.
        num_threads: the number of CPU threads that torch uses.
        self_check_difference: the largest relative difference between the logits of the engine's
            steps and the logits of a plain forward pass of the model.
        load_seconds: the time in seconds from the start of loading to the first step.
        seconds: a mapping from the name of each loading phase to its duration in seconds.
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
