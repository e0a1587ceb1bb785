# SPDX-License-Identifier: Apache-2.0
"""Functions that append new tokens to a sequence, and functions that report new tokens."""

from collections.abc import Iterable

from nereid_backend.core.outputs import FinishReason, RequestUpdate, TokenLogprobs
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled


def append_sampled(sequence: Sequence, sampled: Sampled) -> tuple[FinishReason | None, int | None]:
    """Append sampled tokens to a sequence, up to the first token that ends the sequence.

    Example: the sampled tokens are [5, 2, 9], and 2 is a stop token. The function appends 5 and 2,
    and returns ("stop", 2).

    Returns:
        The finish reason and the id of the stop token. If the sequence continues, both are None. If
        the length limit ended the sequence, the id is None.
    """
    token_ids, logprobs = sequence.token_ids, sampled.logprobs
    # This function runs for every sequence in every step. `enumerate` takes less time than `zip`.
    for index, token_id in enumerate(sampled.token_ids):
        token_ids.append(token_id)
        sequence.cumulative_logprob += logprobs[index]
        if token_id in sequence.stop_token_ids:
            return "stop", token_id
        if len(token_ids) >= sequence.max_total_tokens:
            return "length", None
    return None, None


def make_update(
    sequence: Sequence, new_token_ids: list[int], top: list[TokenLogprobs] | None
) -> RequestUpdate:
    """Create the update that reports new tokens of a sequence.

    The first update of a sequence contains the number of cached tokens. The first update of
    sequence 0 also contains the log-probabilities of the prompt.

    Args:
        sequence: the sequence. `sequence.was_reported` and `sequence.prompt_logprobs` are mutated.
        new_token_ids: the new tokens; empty if the sequence ended without a new token.
        top: one entry for each new token; None if the request did not ask for log-probabilities.
    """
    # Assigning the fields takes less time than passing them as keyword arguments.
    update = RequestUpdate(sequence.request_id, new_token_ids)
    update.cumulative_logprob = sequence.cumulative_logprob
    update.index = sequence.index
    update.logprobs = top
    if not sequence.was_reported:
        sequence.was_reported = True
        update.num_cached_tokens = sequence.num_cached_tokens or 0
        if new_token_ids and sequence.index == 0:
            if sequence.params.prompt_logprobs is not None:
                update.prompt_logprobs = [None, *sequence.prompt_logprobs]
            sequence.prompt_logprobs = []
    return update


def common_prefix_len(first: Iterable[int], second: Iterable[int]) -> int:
    """Return the length of the longest common prefix of two sequences of integers.

    Example: `common_prefix_len([5, 7, 9], [5, 7, 8, 9])` returns 2.
    """
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
