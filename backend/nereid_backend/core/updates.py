# SPDX-License-Identifier: Apache-2.0
"""Functions that append new tokens to a sequence, and functions that report new tokens."""

from collections.abc import Iterable

from nereid_backend.core.draft_tokens.drafter import Drafter
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

    Mutates: `sequence.token_ids` and `sequence.cumulative_logprob`.
    """
    token_ids = sequence.token_ids
    logprobs = sampled.logprobs
    # This function runs for every sequence in every step. `enumerate` takes less time than `zip`.
    for index, token_id in enumerate(sampled.token_ids):
        token_ids.append(token_id)
        sequence.cumulative_logprob += logprobs[index]
        if token_id in sequence.stop_token_ids:
            return "stop", token_id
        if len(token_ids) >= sequence.max_total_tokens:
            return "length", None
    return None, None


def count_accepted_drafts(sequence: Sequence, new_token_ids: list[int], drafter: Drafter) -> None:
    """Record how many draft tokens of a sequence were accepted, and clear the draft tokens.

    The accepted draft tokens are the longest common prefix of the draft tokens and the new tokens.
    Example: the draft tokens are [5, 2, 9], and the new tokens are [5, 2, 7]. The function records
    that 2 of 3 draft tokens were accepted.

    Mutates: `sequence.draft_token_ids`, and `sequence.num_computed_tokens`, because the step has
        already computed the keys and values of the accepted draft tokens.
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
    the fields about the prompt.

    Args:
        sequence: the sequence.
        new_token_ids: the new tokens; empty if the sequence ended without a new token.
        top: one entry for each new token; None if the request did not ask for log-probabilities.

    Mutates: `sequence.was_reported`, and `sequence.prompt_logprobs` in the first update.
    """
    # With keyword arguments, `Scheduler.commit` takes 20 % longer.
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

    Mutates: `update`, and `sequence.prompt_logprobs`, which is cleared.
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
