# SPDX-License-Identifier: Apache-2.0
"""Functions that append new tokens to a sequence, and functions that report new tokens."""

from collections.abc import Iterable
from typing import NamedTuple

from nereid_backend.core.draft_tokens.drafter import Drafter
from nereid_backend.core.outputs import FinishReason, RequestUpdate, TokenLogprobs
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled


class Ending(NamedTuple):
    """The reason why a sequence ends, and the stop token that ended the sequence.

    `stop_token_id` is None if no stop token ended the sequence.
    """

    reason: FinishReason
    stop_token_id: int | None


def append_sampled(sequence: Sequence, sampled: Sampled) -> Ending | None:
    """Append sampled tokens to a sequence, up to the first token that ends the sequence.

    Return the ending of the sequence; None if the sequence continues. Example: the sampled tokens
    are [5, 2, 9], and 2 is a stop token. The function appends 5 and 2, and returns
    Ending("stop", 2).

    Mutates: `sequence.token_ids` and `sequence.cumulative_logprob`.
    """
    token_ids = sequence.token_ids
    logprobs = sampled.logprobs
    # This function runs for every sequence in every step. `enumerate` takes less time than `zip`.
    for index, token_id in enumerate(sampled.token_ids):
        token_ids.append(token_id)
        sequence.cumulative_logprob += logprobs[index]
        if token_id in sequence.stop_token_ids:
            return Ending("stop", token_id)
        if len(token_ids) >= sequence.max_total_tokens:
            return Ending("length", None)
    return None


def settle_drafts(sequence: Sequence, new_token_ids: list[int], drafter: Drafter) -> None:
    """Remove the draft tokens of a sequence, and count the accepted ones as computed tokens.

    The accepted draft tokens are the longest common prefix of the draft tokens and the new tokens.
    The step has already computed their keys and values. Example: the draft tokens are [5, 2, 9],
    and the new tokens are [5, 2, 7]. The sequence then has 2 more computed tokens, and the drafter
    records that 2 of 3 draft tokens were accepted.

    Mutates: `sequence.draft_token_ids` and `sequence.num_computed_tokens`.
    """
    draft_token_ids = sequence.draft_token_ids
    sequence.draft_token_ids = []
    num_accepted = common_prefix_len(draft_token_ids, new_token_ids)
    sequence.num_computed_tokens += num_accepted
    drafter.lengths.record_draft(sequence, len(draft_token_ids), num_accepted)


def report_tokens(
    sequence: Sequence, new_token_ids: list[int], top: list[TokenLogprobs] | None
) -> RequestUpdate:
    """Return an update for the engine's caller, and record that the sequence was reported.

    The update contains the new tokens of the sequence. The first update of a sequence also contains
    the fields about the prompt. If the sequence has ended, the caller adds the reason.

    Args:
        sequence: the sequence, to which the new tokens have already been appended.
        new_token_ids: the new tokens; empty if the sequence ended without a new token.
        top: one entry for each new token; None if the request did not ask for log-probabilities.

    Mutates: `sequence.was_reported`, and `sequence.prompt_logprobs` in the first update.
    """
    # The fields are set one by one, because keyword arguments would take more time. This function
    # runs for every sequence in every step.
    update = RequestUpdate(sequence.request_id, new_token_ids)
    update.cumulative_logprob = sequence.cumulative_logprob
    update.index = sequence.index
    update.logprobs = top
    if not sequence.was_reported:
        sequence.was_reported = True
        _add_prompt_fields(update, sequence)
    return update


def _add_prompt_fields(update: RequestUpdate, sequence: Sequence) -> None:
    """Add the fields about the prompt to the first update of a sequence.

    These fields are the number of cached tokens and, for sequence 0 of a request, the requested
    log-probabilities of the prompt. The caller calls this function only for the first update.

    Mutates: `update`, and `sequence.prompt_logprobs`, which becomes an empty list.
    """
    # The number is None if the sequence ended while it was still waiting.
    update.num_cached_tokens = sequence.num_cached_tokens or 0
    # The first token is sampled when the whole prompt is computed. If there is no token, the
    # sequence has ended earlier, for example because it was aborted.
    has_whole_prompt = bool(update.new_token_ids)
    # All sequences of a request have the same prompt, so only sequence 0 reports the
    # log-probabilities of the prompt.
    if has_whole_prompt and sequence.index == 0:
        if sequence.params.prompt_logprobs is not None:
            # The first token of a prompt has no log-probability.
            update.prompt_logprobs = [None, *sequence.prompt_logprobs]
        sequence.prompt_logprobs = []  # frees memory, because later updates do not report the list


def common_prefix_len(first: Iterable[int], second: Iterable[int]) -> int:
    """Return the length of the longest common prefix of two sequences of integers.

    Example: `common_prefix_len([5, 7, 9], [5, 7, 8, 9])` returns 2.
    """
    length = 0
    for first_number, second_number in zip(first, second, strict=False):
        if first_number != second_number:
            break
        length += 1
    return length
