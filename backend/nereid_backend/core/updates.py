# SPDX-License-Identifier: Apache-2.0
"""What a step's tokens mean for one sequence: where it ends, and what is said of it."""

from collections.abc import Iterable

from nereid_backend.core.outputs import FinishReason, RequestUpdate, TokenLogprobs
from nereid_backend.core.request import Request
from nereid_backend.core.step import Sampled


def append_sampled(request: Request, sampled: Sampled) -> tuple[FinishReason | None, int | None]:
    """Append tokens up to the first that ends the request.

    Returns:
        Why the request ends there, if it does, and at which stop token.
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
    """What is new of a sequence; what is known of its prompt comes with the first tokens.

    Mutates: what was reported of the request.
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
    """How many items two sequences have in common before they differ, or one ends."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
