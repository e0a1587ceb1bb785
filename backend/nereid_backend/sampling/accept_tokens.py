# SPDX-License-Identifier: Apache-2.0
"""Converts the sampled tokens of a step to the new tokens of each sequence.

The sampled tokens verify the draft tokens. The grammar of a request may add forced tokens.
"""

import logging

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled
from nereid_backend.errors import RequestError
from nereid_backend.sampling.draft_verification import Position, Sampling
from nereid_backend.sampling.sampler import NOT_FINITE, SampledTokens
from nereid_backend.sampling.token_masks import StepMasks, guide_of

logger = logging.getLogger(__name__)


def read_sampled(
    sampling: Sampling, sampled_tokens: SampledTokens, masks: StepMasks
) -> list[Sampled]:
    """Return the new tokens of each sequence for which the step sampled at least one token.

    The step samples one token for an ordinary sequence. For a sequence with k draft tokens, it
    samples k + 1 tokens: one in place of each draft token, and one after the last draft token.
    Example: the second of two sequences has 2 draft tokens. The sampled token with the index 0
    belongs to the first sequence, and the tokens with the indices 1 to 3 belong to the second.

    Args:
        sampling: the positions at which tokens were sampled. The positions of a sequence are
            adjacent, and the last position follows all draft tokens of the sequence.
        sampled_tokens: one sampled token for each position.
        masks: the token masks of the step, with the errors of guides.
    """
    if _all_sequences_have_one_plain_token(sampling, sampled_tokens):
        # This shortcut applies in nearly all steps. It returns the same tokens as the loop below,
        # but in less time.
        return [
            Sampled([token_id], [logprob])
            for token_id, logprob in zip(
                sampled_tokens.token_ids, sampled_tokens.logprobs, strict=True
            )
        ]
    sampled = []
    first = 0
    for num_positions in sampling.counts:
        last_position = sampling.positions[first + num_positions - 1]
        sampled.append(_read_sequence(last_position, first, sampled_tokens, masks))
        first += num_positions
    return sampled


def _read_sequence(
    last_position: Position, first_index: int, sampled_tokens: SampledTokens, masks: StepMasks
) -> Sampled:
    """Return the new tokens of one sequence, or the error of its grammar or its sampling.

    Example: two sequences have 0 and 2 draft tokens. The step then has 1 + 3 positions. For the
    second sequence, `first_index` is 1, and `last_position` is the position with the index 3.

    Args:
        last_position: the last position of the sequence, which follows all its draft tokens.
        first_index: the index of the sequence's first position among all positions of the step.
        sampled_tokens: the sampled tokens of all sequences of the step.
        masks: the token masks of the step. The key of an error is the index of the first position.
    """
    if first_index in masks.errors:
        return Sampled(token_ids=[], logprobs=[], error=masks.errors[first_index])
    sequence = last_position.sequence
    drafts = last_position.drafts
    if drafts or sequence.guide is not None or first_index in sampled_tokens.errors:
        return _accept_or_return_error(sequence, drafts, sampled_tokens, first_index)
    # The sequence has no draft tokens and no grammar. Therefore, it has only one position, and the
    # sampled token is its only new token and needs no check.
    token_id, logprob = sampled_tokens.token_ids[first_index], sampled_tokens.logprobs[first_index]
    top = [sampled_tokens.top[first_index]] if first_index in sampled_tokens.top else None
    return Sampled([token_id], [logprob], top=top)


def _all_sequences_have_one_plain_token(sampling: Sampling, sampled_tokens: SampledTokens) -> bool:
    """Return whether every sampled token is the only new token of its sequence in this step.

    The tokens then need no further processing. This is the case if no sequence has draft tokens or
    a grammar, no request asks for log-probabilities, and no position has an error.
    """
    num_sequences = len(sampling.counts)
    # A sequence with draft tokens has several positions.
    has_drafts = len(sampling.positions) > num_sequences
    if has_drafts or sampled_tokens.top or sampled_tokens.errors:
        return False
    # This function runs in every step, and a loop takes less time than a generator.
    for sequence, _drafts in sampling.positions:  # noqa: SIM110
        if sequence.guide is not None:
            return False
    return True


def _accept_or_return_error(
    sequence: Sequence, drafts: list[int], sampled_tokens: SampledTokens, first: int
) -> Sampled:
    """Return the new tokens of a sequence. If its grammar fails, return an error instead.

    The error ends the sequence.

    Args:
        sequence: the sequence. Its grammar is advanced by the new tokens.
        drafts: the draft tokens (guesses for the next tokens) that the sampled tokens verify.
        sampled_tokens: the sampled tokens of all sequences of the step.
        first: the index in `sampled_tokens` of the first token of this sequence.
    """
    try:
        return _accept(sequence, drafts, sampled_tokens, first)
    except RequestError as error:
        return Sampled(token_ids=[], logprobs=[], error=str(error), is_refused=True)
    except Exception as error:
        # A grammar library can raise any exception. The exception ends only this sequence.
        logger.exception("The grammar of request %s failed.", sequence.request_id)
        message = f"The grammar of the request failed: {type(error).__name__}: {error}"
        return Sampled(token_ids=[], logprobs=[], error=message)


def _accept(
    sequence: Sequence, drafts: list[int], sampled_tokens: SampledTokens, first: int
) -> Sampled:
    """Verify the draft tokens of a sequence, and return the new tokens of the sequence.

    The new tokens are sampled tokens. Each sampled token is followed by the tokens that the grammar
    forces next. While the new tokens equal the draft tokens, the next sampled token is valid,
    because the model has computed the logits of this token after the same tokens. Draft tokens
    therefore never change the answer. If the sampling of a valid token has failed, return only the
    error.

    Example: drafts [5, 7, 9] and sampled tokens [5, 7, 4, 2]. The tokens 5 and 7 are accepted, 4
    replaces the draft 9, and 2 is discarded. The result is [5, 7, 4].

    Args:
        sequence: the sequence. Its guide is advanced by the new tokens, except a token that ends
            the answer.
        drafts: the draft tokens that the model has computed after the known tokens.
        sampled_tokens: the tokens of the step. They contain one token after the known tokens and
            one token after each draft token.
        first: the index in `sampled_tokens` of the token after the known tokens.
    """
    guide = guide_of(sequence)
    stop_ids = sequence.stop_token_ids
    token_ids: list[int] = []
    logprobs: list[float] = []
    top: list[TokenLogprobs] | None = None if sequence.params.logprobs is None else []
    # The model has computed the logits after a draft token on the assumption that the draft token
    # is correct. The loop therefore ends after the first new token that differs from the draft
    # token. If all draft tokens are correct, the loop adds one more sampled token, and ends because
    # `token_ids` is then longer than `drafts`.
    while token_ids == drafts[: len(token_ids)]:
        index = first + len(token_ids)
        if index in sampled_tokens.errors:
            error = sampled_tokens.errors[index]
            # There are two kinds of errors. NOT_FINITE means that the logits are not finite. Every
            # other error means that the parameters of the request forbid every token.
            return Sampled(token_ids=[], logprobs=[], error=error, is_refused=error != NOT_FINITE)
        token_ids.append(sampled_tokens.token_ids[index])
        logprobs.append(sampled_tokens.logprobs[index])
        if top is not None:
            top.append(sampled_tokens.top[index])
        if token_ids[-1] in stop_ids:
            break
        if guide is not None:
            guide.accept(token_ids[-1:])
            forced = _usable_forced(sequence, guide.forced(), len(token_ids))
            token_ids += forced
            logprobs += [0.0] * len(forced)
            # `forced` contains the tokens that the grammar forces. It is empty if the request asks
            # for log-probabilities. The list `top` of requested log-probabilities therefore needs
            # no entries for forced tokens.
            if token_ids[-1] in stop_ids:
                break
            if forced:
                guide.accept(forced)
    return Sampled(token_ids, logprobs, top=top)


def _usable_forced(sequence: Sequence, forced: list[int], num_new: int) -> list[int]:
    """Return those tokens of `forced` that can be added without another forward pass.

    A token is forced if the grammar allows no other token at its position. The result ends at the
    first stop token, which is left out if the output would be shorter than min_tokens. If the
    request asks for log-probabilities or forbids tokens itself, the result is empty.

    Args:
        sequence: the sequence.
        forced: the tokens that the grammar forces next.
        num_new: the number of tokens that this step has already added to the sequence.
    """
    params = sequence.params
    # Only a forward pass computes the log-probabilities of the tokens.
    needs_logits = params.logprobs is not None
    # `allowed_token_ids` and `bad_words_token_ids` may forbid a token that the grammar forces. The
    # mask of the next step considers these fields as well as the grammar.
    forbids_tokens = params.allowed_token_ids is not None or bool(params.bad_words_token_ids)
    if needs_logits or forbids_tokens:
        return []
    return _until_stop(sequence, forced, num_before=sequence.num_output_tokens + num_new)


def _until_stop(sequence: Sequence, token_ids: list[int], num_before: int) -> list[int]:
    """Return `token_ids` up to and including the first stop token of a sequence.

    If the answer would be shorter than min_tokens, the stop token is left out, too. Example: if 9
    is a stop token, [4, 9, 6] gives [4, 9]. If min_tokens does not allow the end yet, [4, 9, 6]
    gives [4]. `num_before` is the number of output tokens before `token_ids`.
    """
    for index, token_id in enumerate(token_ids):
        if token_id in sequence.stop_token_ids:
            may_stop = num_before + index >= sequence.params.min_tokens
            return token_ids[: index + 1] if may_stop else token_ids[:index]
    return token_ids
