# SPDX-License-Identifier: Apache-2.0
"""How a step's tokens change one sequence, and the update that reports the change."""

from collections.abc import Iterable

from nereid_backend.core.outputs import FinishReason, RequestUpdate, TokenLogprobs
from nereid_backend.core.request import Request
from nereid_backend.core.step import Sampled


def append_sampled(request: Request, sampled: Sampled) -> tuple[FinishReason | None, int | None]:
    """Append sampled tokens to a sequence, up to and including the first that ends it.

    Returns:
        The finish reason and the id of the stop token. Both are None if the sequence continues; the
        id is None if the length limit ended the sequence.
    """
    for token_id, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True):
        request.token_ids.append(token_id)
        request.cumulative_logprob += logprob
        if token_id in request.stop_token_ids:
            return "stop", token_id
        if len(request.token_ids) >= request.max_total_tokens:
            return "length", None
    return None, None


def make_update(
    request: Request, new_token_ids: list[int], top: list[TokenLogprobs] | None
) -> RequestUpdate:
    """Return the update that reports new tokens of a sequence.

    The first update of sequence 0 also carries the log-probabilities of the prompt, and the first
    update of any sequence carries the number of cached tokens.

    Mutates: `request.was_reported` and `request.prompt_logprobs`.
    """
    is_first = not request.was_reported
    request.was_reported = True
    prompt: list[TokenLogprobs | None] | None = None
    if is_first and new_token_ids and request.index == 0:
        wanted = request.params.prompt_logprobs is not None
        prompt = [None, *request.prompt_logprobs] if wanted else None
        request.prompt_logprobs = []
    return RequestUpdate(
        request.request_id,
        new_token_ids,
        cumulative_logprob=request.cumulative_logprob,
        index=request.index,
        logprobs=top,
        prompt_logprobs=prompt,
        num_cached_tokens=(request.num_cached_tokens or 0) if is_first else 0,
    )


def num_equal(first: Iterable[int], second: Iterable[int]) -> int:
    """Return the length of the longest common prefix of two sequences of integers.

    Example: `num_equal([5, 7, 9], [5, 7, 8, 9])` returns 2.
    """
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
