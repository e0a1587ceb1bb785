# SPDX-License-Identifier: Apache-2.0
"""Applies the sampling parameters of requests to the logits before a token is sampled.

The parameters are applied in the same order as in vLLM (docs.vllm.ai, vllm.v1.sample.sampler):

    the grammar's mask and allowed_token_ids -> bad_words_token_ids -> min_tokens
    -> logit_bias -> repetition, frequency, presence penalty -> (temperature, min_p, top_k, top_p)

If one stage forbids a token, later stages cannot allow the token again. The last stage, in
parentheses, belongs to random sampling (random_sampling.py). If a request uses none of the other
parameters, its row is not changed.
"""

from collections import abc
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.device_transfer import upload
from nereid_backend.errors import RequestError
from nereid_backend.grammar.vocabulary import TokenMask, mask_of
from nereid_backend.sampling.apply_masks import with_masks
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.penalties import TokenCounts, apply_penalties, asks_for_penalties

Integers = NDArray[np.int64]


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Check that logit_bias, allowed_token_ids and bad_words_token_ids contain valid token ids.

    A token id is valid if it is less than `vocab_size`. Stop tokens are not checked, because a stop
    token outside the vocabulary is harmless: the model never generates it.

    Raises:
        RequestError: a token id is too large. The message names the field, the id and the limit.
    """
    token_ids_of_field: dict[str, abc.Iterable[int]] = {
        "logit_bias": [token_id for token_id, _ in _bias_pairs(params)],
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_token_ids": chain.from_iterable(params.bad_words_token_ids),
    }
    for field, token_ids in token_ids_of_field.items():
        highest = max(token_ids, default=0)
        if highest >= vocab_size:
            raise RequestError(
                f"{field}: the token id {highest} is outside the vocabulary "
                f"(0 to {vocab_size - 1})."
            )


@dataclass(frozen=True, slots=True)
class LogitsParams:
    """The sampling parameters of one request that change the logits.

    The parameters are stored in arrays.

    Attributes:
        owner: the sequence for which the arrays were created. A cache of these objects compares
            `owner` with the current sequence, to detect an entry of an earlier request.
        bias_ids: the token ids of logit_bias, [n] int64.
        bias_values: the biases of the tokens in `bias_ids`, [n] float32.
        allowed: the token mask of allowed_token_ids; None allows every token.
        single_token_bad_words: the bad words that consist of one token.
        longer_bad_words: the bad words that consist of several tokens. Maps the beginning of bad
            words to their last tokens, [n] int64; see `_longer_bad_words`.
        beginning_lengths: the distinct lengths of the keys of `longer_bad_words`.
        stops: the stop tokens that min_tokens forbids. Stop tokens outside the vocabulary are
            omitted.
        has_penalties: whether the request has a penalty, so that its tokens must be counted.
    """

    owner: Sequence
    bias_ids: Integers
    bias_values: NDArray[np.float32]
    allowed: TokenMask | None
    single_token_bad_words: Integers
    longer_bad_words: dict[tuple[int, ...], Integers]
    beginning_lengths: list[int]
    stops: Integers
    has_penalties: bool

    @classmethod
    def from_sequence(cls, sequence: Sequence, vocab_size: int) -> "LogitsParams":
        """Create the arrays that contain the logit-changing sampling parameters of a request.

        `sequence` is a sequence of the request. Example: the logit_bias {4: 1.5, 9: -2} gives the
        `bias_ids` [4, 9] and the `bias_values` [1.5, -2].
        """
        params = sequence.params
        bias = _bias_pairs(params)
        allowed_ids = params.allowed_token_ids
        # A bad word is a sequence of tokens. Bad words of one token are forbidden everywhere.
        single_tokens = [word[0] for word in params.bad_words_token_ids if len(word) == 1]
        longer_bad_words = _longer_bad_words(params)
        # The logits have no columns for stop tokens outside the vocabulary.
        stops = [token_id for token_id in sequence.stop_token_ids if token_id < vocab_size]
        return cls(
            owner=sequence,
            bias_ids=np.array([token_id for token_id, _ in bias], np.int64),
            bias_values=np.array([value for _, value in bias], np.float32),
            allowed=None if allowed_ids is None else mask_of(allowed_ids, vocab_size),
            single_token_bad_words=np.unique(np.array(single_tokens, np.int64)),
            longer_bad_words=longer_bad_words,
            beginning_lengths=sorted({len(beginning) for beginning in longer_bad_words}),
            stops=np.array(stops, np.int64),
            has_penalties=asks_for_penalties(params),
        )

    def forbidden_tokens(self, position: Position) -> list[Integers]:
        """Return the tokens that bad words and min_tokens forbid at a position of the request.

        A bad word is a token sequence that must not occur in the output. Before the output has
        min_tokens tokens, stop tokens are forbidden.

        Example: the bad words are [4] and [5, 7], min_tokens is 8, and the stop token is 2. The
        output has 3 tokens, and its last token is 5. The result contains the arrays [4], [7], [2].
        """
        forbidden: list[Integers] = []
        if len(self.single_token_bad_words):
            forbidden.append(self.single_token_bad_words)
        for length in self.beginning_lengths:
            # Bad words are forbidden only in the output. Ignore bad words that would begin in the
            # prompt.
            if length <= position.num_output_tokens:
                beginning = tuple(position.last_tokens(length))
                if beginning in self.longer_bad_words:
                    forbidden.append(self.longer_bad_words[beginning])
        is_too_short = position.num_output_tokens < self.owner.params.min_tokens
        if is_too_short and len(self.stops):
            forbidden.append(self.stops)
        return forbidden


class LogitsProcessor:
    """Applies sampling parameters that change logits, such as logit_bias and penalties.

    The prepared parameters and the token counts of running requests are cached. The key of the
    caches is the row of the request.
    """

    def __init__(self) -> None:
        self._logits_params: dict[int, LogitsParams] = {}
        self._counts = TokenCounts()

    def process(
        self,
        logits: Tensor,
        positions: abc.Sequence[Position],
        rows_with_params: abc.Iterable[int],
        masks: abc.Mapping[int, TokenMask],
    ) -> Tensor:
        """Apply the sampling parameters and token masks of requests to the logits.

        Args:
            logits: [n, vocab_size], any float dtype. Not changed.
            positions: the position of each row. A position is a place in a sequence at which a
                token is sampled.
            rows_with_params: the rows whose requests have a parameter that changes logits.
            masks: maps the index of a row to the token mask of the request's grammar. The grammar
                forbids no token in rows without an entry.

        Returns:
            `logits` itself if no parameter and no mask applies; otherwise a new tensor in float32.
        """
        vocab_size = logits.shape[1]
        # `_logits_params_of` caches the parameters of a request for later steps.
        params = {
            row: self._logits_params_of(positions[row], row, vocab_size) for row in rows_with_params
        }
        if not params and not masks:
            return logits
        # A request can have two masks: the mask of its grammar, and the mask of the parameter
        # `allowed_token_ids`. The combined mask allows only the tokens that both masks allow.
        combined_masks = _combine_with_allowed_tokens(masks, params)
        # `with_masks` returns a new tensor. The functions below change this tensor in place.
        processed = with_masks(logits.float(), combined_masks)
        if params:
            _forbid_tokens(processed, positions, params)
            _add_bias(processed, params)
            penalised_rows = [row for row, row_params in params.items() if row_params.has_penalties]
            if penalised_rows:
                self._penalise(processed, positions, penalised_rows)
        return processed

    def _logits_params_of(self, position: Position, index: int, vocab_size: int) -> LogitsParams:
        """Return the `LogitsParams` of the request to which a position belongs.

        The first call for a request creates the arrays and stores them in the cache.

        Args:
            position: the position.
            index: the index of the position in the step; see `_cache_row`.
            vocab_size: the size of the vocabulary.
        """
        row = _cache_row(position, index)
        logits_params = self._logits_params.get(row)
        if logits_params is None or logits_params.owner is not position.sequence:
            # The cache contains no entry for this sequence. There is either no entry at `row`, or
            # the entry of a request that has ended.
            logits_params = self._prepare(position.sequence, vocab_size)
            self._logits_params[row] = logits_params
        return logits_params

    def _prepare(self, sequence: Sequence, vocab_size: int) -> LogitsParams:
        """Return new `LogitsParams` of a sequence.

        All sequences of a request share the arrays, because long lists take milliseconds to
        convert, and a request can have 64 sequences.
        """
        for other in self._logits_params.values():
            if other.owner.params is sequence.params:
                return replace(other, owner=sequence)
        return LogitsParams.from_sequence(sequence, vocab_size)

    def _penalise(
        self, logits: Tensor, positions: abc.Sequence[Position], rows: abc.Sequence[int]
    ) -> None:
        """Apply the repetition, frequency and presence penalties of requests to the logits.

        Args:
            logits: [n, vocab_size] float32. Mutated.
            positions: the position of each row of `logits`.
            rows: the rows of `logits` whose requests have a penalty. Other rows are unchanged.
        """
        penalised = [positions[row] for row in rows]
        # The rows in which `_counts` stores the tokens of the requests.
        cache_rows = [_cache_row(positions[row], row) for row in rows]
        # The distinct tokens before each position, and how often each of them occurs.
        ids, counts = self._counts.update_and_read(cache_rows, penalised)
        params = [position.sequence.params for position in penalised]
        if len(rows) == len(logits):  # All rows have a penalty.
            apply_penalties(logits, ids, counts, params)
            return
        # Indexing copies the rows, so the changed rows must be copied back.
        device_rows = upload(np.array(rows), logits.device)
        penalised_logits = logits[device_rows]
        apply_penalties(penalised_logits, ids, counts, params)
        logits.index_copy_(0, device_rows, penalised_logits)


def _longer_bad_words(params: SamplingParams) -> dict[tuple[int, ...], Integers]:
    """Map the beginning of each bad word to the tokens that complete a bad word.

    The beginning consists of all tokens of the bad word except the last token. Bad words of a
    single token are left out, because they have no beginning. The newest output tokens are looked
    up in the result. A search in the list of bad words would take too long if a request has
    thousands of bad words.

    Example: the bad words [5, 7, 9], [5, 7, 8], [7, 8] and [4] give {(5, 7): [8, 9], (7,): [8]}.
    """
    last_tokens: dict[tuple[int, ...], set[int]] = {}
    for *beginning, last_token in params.bad_words_token_ids:
        if beginning:
            last_tokens.setdefault(tuple(beginning), set()).add(last_token)
    return {
        beginning: np.array(sorted(token_ids), np.int64)
        for beginning, token_ids in last_tokens.items()
    }


def explain_no_token(position: Position) -> str:
    """Return an error message for a position at which the request forbids every token.

    The message names the fields of the request that together forbid every token.
    """
    sequence = position.sequence
    params = sequence.params
    limits: list[str] = []
    if sequence.guide is not None:
        limits.append("the grammar")
    if params.allowed_token_ids is not None:
        limits.append("allowed_token_ids")
    if params.bad_words_token_ids:
        limits.append("bad_words_token_ids")
    if position.num_output_tokens < params.min_tokens:
        limits.append("min_tokens")
    return (
        f"No token can be sampled after {position.num_output_tokens} output tokens, because every "
        f"token is forbidden by {' and '.join(limits) or 'the request'}."
    )


def _bias_pairs(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    """Return logit_bias as pairs of a token id and a bias."""
    # `CheckedSamplingParams` converts logit_bias from a mapping to sorted pairs.
    return cast(tuple[tuple[int, float], ...], params.logit_bias)


def _cache_row(position: Position, index_in_step: int) -> int:
    """Return the integer key under which the caches store the data of a sequence.

    The key is the sequence's row. A sequence that is not in a scheduler has no row. For such a
    sequence, the index of the position in the step is used. The caches compare the owner of an
    entry with the sequence, so two sequences never share an entry.
    """
    row = position.sequence.row
    return index_in_step if row is None else row


def _combine_with_allowed_tokens(
    masks: abc.Mapping[int, TokenMask], params: abc.Mapping[int, LogitsParams]
) -> dict[int, TokenMask]:
    """Combine the token masks of the grammars with the token masks of `allowed_token_ids`.

    A combined mask allows a token only if both masks allow the token. The keys of `masks` and of
    the result are the indices of rows.
    """
    combined = dict(masks)
    for index, row_params in params.items():
        allowed = row_params.allowed
        if allowed is not None:
            guide_mask = masks.get(index)
            combined[index] = allowed if guide_mask is None else allowed & guide_mask
    return combined


def _forbid_tokens(
    logits: Tensor, positions: abc.Sequence[Position], params: abc.Mapping[int, LogitsParams]
) -> None:
    """Set logits to -inf for the tokens that bad words and `min_tokens` forbid.

    All rows are changed with one call of torch. Example: row 0 forbids the tokens 4 and 7, and row
    2 forbids the token 9. The changed logits have the rows [0, 0, 2] and the columns [4, 7, 9].

    Args:
        logits: [n, vocab_size] float32. Mutated.
        positions: the position of each row.
        params: maps the index of a row to the logits parameters of the request.
    """
    rows: list[Integers] = []
    columns: list[Integers] = []
    for index, row_params in params.items():
        for token_ids in row_params.forbidden_tokens(positions[index]):
            rows.append(np.full(len(token_ids), index))
            columns.append(token_ids)
    if rows:
        rows_and_columns = (
            _concatenate_on_device(rows, logits),
            _concatenate_on_device(columns, logits),
        )
        # `index_put_` accepts no Python number as the value, only a tensor.
        logits.index_put_(rows_and_columns, logits.new_full((), float("-inf")))


def _add_bias(logits: Tensor, params: abc.Mapping[int, LogitsParams]) -> None:
    """Add the biases of logit_bias to the logits.

    All rows are changed with one call of torch. Example: row 0 has a bias for the tokens 4 and 7,
    and row 2 has a bias for the token 9. The changed logits have the rows [0, 0, 2] and the columns
    [4, 7, 9].

    Args:
        logits: [n, vocab_size] float32. Mutated.
        params: maps the index of a row to the logits parameters of the request.
    """
    rows: list[Integers] = []
    columns: list[Integers] = []
    biases: list[NDArray[np.float32]] = []
    for index, row_params in params.items():
        if len(row_params.bias_ids):
            rows.append(np.full(len(row_params.bias_ids), index))
            columns.append(row_params.bias_ids)
            biases.append(row_params.bias_values)
    if rows:
        rows_and_columns = (
            _concatenate_on_device(rows, logits),
            _concatenate_on_device(columns, logits),
        )
        values = upload(np.concatenate(biases), logits.device)
        logits.index_put_(rows_and_columns, values, accumulate=True)


def _concatenate_on_device(parts: abc.Sequence[Integers], like: Tensor) -> Tensor:
    """Concatenate arrays into one int64 tensor on the device of `like`."""
    return upload(np.concatenate(parts), like.device)
