# SPDX-License-Identifier: Apache-2.0
"""The repetition, frequency and presence penalties.

A text contains only a few of the vocabulary's tokens. Therefore, counts are stored only for the
distinct tokens of a request, not for all tokens of the vocabulary. The first call for a request
builds the list of its distinct tokens. Later calls add the tokens that were sampled since the
previous call.
"""

from collections import abc
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.device_transfer import upload
from nereid_backend.sampling.draft_verification import Position

# The initial width of the tables: the number of distinct tokens that fit into one row.
_FIRST_WIDTH = 64
# A repetition penalty outside this range is replaced by the nearest limit. Otherwise, the penalty,
# or the penalised logit divided by the temperature, could exceed the range of float32.
_MIN_REPETITION_PENALTY, _MAX_REPETITION_PENALTY = 1e-20, 1e20


def asks_for_penalties(params: SamplingParams) -> bool:
    """Return whether a request uses a repetition, presence or frequency penalty."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


@dataclass(slots=True)
class _CountedTokens:
    """Records which tokens of one request have been counted so far.

    Attributes:
        owner: the request.
        num_counted: the number of counted tokens, from the beginning of the sequence.
        columns: maps each distinct token to its column in the request's row.
    """

    owner: Sequence
    num_counted: int = 0
    columns: dict[int, int] = field(default_factory=dict)

    @property
    def num_distinct(self) -> int:
        """The number of distinct tokens, which is the number of used columns in the row."""
        return len(self.columns)


class TokenCounts:
    """Counts how often each token occurs in the output of each request.

    Each row of the tables belongs to one request. All rows have the same width. Each unused element
    at the end of a row contains the row's first token and the count of this token. Therefore, equal
    tokens in a row always have equal counts, and a scatter over the whole row is unambiguous.
    """

    def __init__(self) -> None:
        self._requests: dict[int, _CountedTokens] = {}
        # Both tables have the shape [rows, width]. `_ids` contains token ids. `_counts` contains
        # the number of times that each of these tokens occurs in the output.
        self._ids: NDArray[np.int64] = np.zeros((0, _FIRST_WIDTH), np.int64)
        self._counts: NDArray[np.float32] = np.zeros((0, _FIRST_WIDTH), np.float32)

    def update_and_read(
        self, rows: abc.Sequence[int], positions: abc.Sequence[Position]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Count the new tokens of some requests. Return the counts of all distinct tokens.

        The result contains the distinct tokens before each position, and how often each of them was
        output. If the request has a repetition penalty, the tokens of the prompt are included.
        Tokens that occur only in the prompt have the count 0. Example: a request with a repetition
        penalty has the prompt [5, 7] and the output [7, 9, 9]. The token ids are [5, 7, 9], and the
        counts are [0, 1, 2].

        Args:
            rows: for each position, the row in which this object stores the tokens of the request.
            positions: the positions. The positions of one request are consecutive. Draft tokens
                before a position (guesses for output tokens) count as output tokens.

        Returns:
            Token ids [n, width] int64 and counts [n, width] float32. Unused elements at the end of
            a row repeat the first token of the row and its count. A row without tokens contains the
            token 0 with the count 0.
        """
        for row, position in zip(rows, positions, strict=True):
            self._count_new_tokens(row, position.sequence)
        max_distinct = max(self._requests[row].num_distinct for row in rows)
        max_drafts = max(len(position.drafts) for position in positions)
        # Each draft token may need a new column. The result has at least one column, even if no
        # request has a token yet.
        width = max(1, max_distinct + max_drafts)
        self._ensure_width(width)
        # Draft tokens may be rejected, so they are counted only in the result. Indexing with a list
        # of rows copies the rows, so the stored counts do not change below.
        ids = self._ids[rows, :width]
        counts = self._counts[rows, :width]
        for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if position.drafts:
                columns_with_drafts = self._requests[row].columns.copy()
                _count_tokens(ids[index], counts[index], position.drafts, columns_with_drafts)
        return ids, counts

    def _count_new_tokens(self, row: int, sequence: Sequence) -> None:
        """Count the output tokens of a request that were sampled since the previous call.

        `row` is the row in which the counts of the request are stored.
        """
        counted = self._requests.get(row)
        if counted is None or counted.owner is not sequence:
            # The row is unused, or contains the counts of an ended request. Count all output
            # tokens of the new request.
            counted = self._reset_row(row, sequence)
        new_token_ids = sequence.token_ids[counted.num_counted :]
        if new_token_ids:
            # In the worst case, all new tokens are distinct, and each of them needs a new column.
            # `num_distinct` columns are already used.
            self._ensure_width(counted.num_distinct + len(new_token_ids))
            _count_tokens(self._ids[row], self._counts[row], new_token_ids, counted.columns)
            counted.num_counted += len(new_token_ids)

    def _reset_row(self, row: int, sequence: Sequence) -> _CountedTokens:
        """Prepare a row of the tables for a new request. No output token is counted yet.

        If the request has a repetition penalty, the row contains the distinct tokens of the prompt,
        because this penalty also applies to the prompt. Otherwise, the row contains no token.

        Returns:
            The object that records which tokens are counted. It is also stored in `_requests`.
        """
        num_prompt = sequence.num_prompt_tokens
        tokens: list[int] = []
        if sequence.params.repetition_penalty != 1:
            tokens = list(dict.fromkeys(sequence.token_ids[:num_prompt]))
        self._write_uncounted(row, tokens)
        # Maps each token id to the column in which `_write_uncounted` has stored the token id.
        columns = {token_id: column for column, token_id in enumerate(tokens)}
        # Only the tokens of the output are counted, so the counting begins after the prompt.
        counted = _CountedTokens(sequence, num_counted=num_prompt, columns=columns)
        self._requests[row] = counted
        return counted

    def _write_uncounted(self, row: int, tokens: list[int]) -> None:
        """Write distinct tokens into all columns of a row, and set the count of each column to 0.

        Example: the tokens [5, 7] in a row of 4 columns give the ids [5, 7, 5, 5]. The unused
        columns repeat the first token, so that the penalties apply to no further token. A row
        without tokens contains the token 0. Its request has no repetition penalty, and the other
        penalties ignore tokens with the count 0.
        """
        self._ensure_num_rows(row + 1)
        self._ensure_width(len(tokens))
        self._ids[row] = tokens[0] if tokens else 0
        self._ids[row, : len(tokens)] = tokens
        self._counts[row] = 0

    def _ensure_num_rows(self, num_rows: int) -> None:
        """Enlarge the tables if they have fewer than `num_rows` rows.

        The new number of rows is `num_rows` or twice the old number, whichever is larger. Doubling
        the number ensures that the tables are seldom copied.
        """
        old_num_rows = len(self._ids)
        missing = num_rows - old_num_rows
        if missing > 0:
            padding = ((0, max(missing, old_num_rows)), (0, 0))
            self._ids = np.pad(self._ids, padding)
            self._counts = np.pad(self._counts, padding)

    def _ensure_width(self, width: int) -> None:
        """Enlarge the tables if they have fewer than `width` columns.

        The new number of columns is `width` or twice the old number, whichever is larger.
        """
        old_width = self._ids.shape[1]
        missing = width - old_width
        if missing > 0:
            padding = ((0, 0), (0, max(missing, old_width)))
            self._ids = np.pad(self._ids, padding)
            self._counts = np.pad(self._counts, padding)
            # Replace the zeros of the padding, because the unused columns of a row must repeat the
            # first token and its count. `apply_penalties` writes one logit for each column, so all
            # copies of a token must have equal counts.
            self._ids[:, old_width:] = self._ids[:, :1]
            self._counts[:, old_width:] = self._counts[:, :1]


def apply_penalties(
    logits: Tensor,
    ids: NDArray[np.int64],
    counts: NDArray[np.float32],
    params: abc.Sequence[SamplingParams],
) -> None:
    """Apply the penalties to the logits of tokens that occur in the prompt or the output.

    The repetition penalty applies to the tokens of the prompt and the output: a positive logit is
    divided by the penalty, and a negative logit is multiplied by the penalty. Then the frequency
    penalty is subtracted once for each occurrence of a token in the output. The presence penalty is
    subtracted once if the output contains the token.

    Args:
        logits: [n, vocab_size] float32. Mutated.
        ids: [n, width], the distinct tokens of each row; see `TokenCounts.update_and_read`.
        counts: [n, width], how often each token of `ids` occurs in the output.
        params: the sampling parameters of each row.

    Source: CTRL (Keskar et al. 2019) for repetition; OpenAI's API reference for the other two.
    """
    device = logits.device
    penalties = np.array(
        [(row.repetition_penalty, row.frequency_penalty, row.presence_penalty) for row in params]
    )
    penalties[:, 0] = penalties[:, 0].clip(_MIN_REPETITION_PENALTY, _MAX_REPETITION_PENALTY)
    # The three penalties are uploaded together, because one upload is faster than three. The array
    # [n, 3] becomes [n, 3, 1], and is then divided into three columns [n, 1].
    uploaded = upload(penalties.astype(np.float32), device)
    repetition, frequency, presence = uploaded.unsqueeze(2).unbind(1)
    token_ids = upload(ids, device)
    num_occurrences = upload(counts, device)
    is_in_output = num_occurrences > 0
    values = logits.gather(1, token_ids)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * num_occurrences + presence * is_in_output
    # A row of `ids` can contain a token several times, because its unused elements repeat the first
    # token. All copies of a token have equal counts, so they also have equal values.
    logits.scatter_(1, token_ids, values)


def _count_tokens(
    ids: NDArray[np.int64],
    counts: NDArray[np.float32],
    token_ids: abc.Sequence[int],
    columns: dict[int, int],
) -> None:
    """Add output tokens to one row of token counts.

    Example: the row is empty and has the width 4, and the tokens are [7, 9, 7]. Afterwards, the ids
    are [7, 9, 7, 7], and the counts are [2, 1, 2, 2]. The last two columns are unused, so they
    repeat the first token and its count.

    Args:
        ids: [width], the distinct tokens of the row. Mutated.
        counts: [width], the count of each token in `ids`. Mutated.
        token_ids: the tokens to count.
        columns: maps each distinct token to its column. Mutated: new tokens are added.
    """
    for token_id in token_ids:
        column = columns.get(token_id)
        if column is None:
            column = len(columns)
            columns[token_id] = column
            ids[column] = token_id
            counts[column] = 0
        counts[column] += 1
    _fill_unused_columns(ids, counts, num_used=len(columns))


def _fill_unused_columns(
    ids: NDArray[np.int64], counts: NDArray[np.float32], num_used: int
) -> None:
    """Fill the unused columns at the end of a row with copies of the row's first token and count.

    Equal tokens then have equal counts, so a scatter over the whole row is unambiguous. Example:
    the ids [7, 9, 0, 0] and the counts [2, 1, 0, 0] with num_used=2 become [7, 9, 7, 7] and
    [2, 1, 2, 2].

    Mutates: `ids` and `counts`.
    """
    ids[num_used:] = ids[0]
    counts[num_used:] = counts[0]
