# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters of the running sequences, stored in the rows of one array.

Most requests use the default values of most sampling parameters. Reading the parameters from the
Python object of each request in each step would take long. Therefore, each step reads this array
instead. The array shows which sequences need random numbers, filters, log-probabilities or changed
logits.
"""

from collections import abc

import numpy as np
from numpy.typing import NDArray

from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.penalties import asks_for_penalties

Integers = NDArray[np.int64]

# A larger temperature is replaced by this number, because it could exceed the range of float32.
_MAX_TEMPERATURE = 1e30

# The type of one row of the table:
# - temperature, top_p, top_k and min_p: see `SamplingParams`. If top_k is 0, top_k is turned off.
# - seed: the seed of the sequence's random numbers.
# - is_greedy: whether the likeliest token is always selected.
# - has_logprobs: whether log-probabilities of the sampled tokens are reported.
# - changes_logits: whether a parameter changes logits before sampling; see `LogitsParams`.
ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("is_greedy", np.bool_),
        ("has_logprobs", np.bool_),
        ("changes_logits", np.bool_),
    ]
)
# An array of the shape [n] and the dtype ROW.
SamplingRows = NDArray[np.void]


class SamplingTable:
    """The sampling parameters of the running sequences, one row for each sequence.

    When a sequence gets a row, the parameters of the sequence are written into the row once. They
    are not updated later, because the parameters of a request never change.
    """

    def __init__(self) -> None:
        self._rows: SamplingRows = np.zeros(0, ROW)
        # For each row, the sequence whose parameters the row contains. If the row is unused, the
        # element is None.
        self._owners: list[Sequence | None] = []

    def read(self, positions: abc.Sequence[Position]) -> SamplingRows:
        """Return the sampling parameters at each position, [num_positions] of the dtype `ROW`.

        The first call for a sequence stores its parameters in the table. Later calls read the
        stored row. Either all sequences have a row (Sequence.row is set), or no sequence has a row.
        """
        rows: list[int] = []
        owners = self._owners  # `_store` extends this list in place, so `owners` remains valid.
        for index, (sequence, _drafts) in enumerate(positions):
            # A sequence that is not in a scheduler has no row number. For such a sequence, use the
            # index of the position as the row number.
            row = index if sequence.row is None else sequence.row
            rows.append(row)
            is_stored = row < len(owners) and owners[row] is sequence
            if not is_stored:
                # The row is unused, or contains the parameters of an ended sequence.
                self._store(sequence, row)
        return self._rows[rows]

    def _store(self, sequence: Sequence, row: int) -> None:
        """Store the parameters of a new sequence in a row. Enlarge the table if necessary."""
        if row >= len(self._owners):
            self._grow(row + 1)
        self._owners[row] = sequence
        _write_row(self._rows[row], sequence)

    def _grow(self, num_rows: int) -> None:
        """Enlarge the table to `num_rows` rows or twice its present size, whichever is larger."""
        old_num_rows = len(self._owners)
        num_added = max(num_rows, 2 * old_num_rows) - old_num_rows
        self._rows = np.concatenate([self._rows, np.zeros(num_added, ROW)])
        self._owners += [None] * num_added


def changes_logits(params: SamplingParams) -> bool:
    """Return whether a request has a parameter that changes logits before sampling."""
    return bool(
        asks_for_penalties(params)
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.min_tokens
    )


def _write_row(row: np.void, sequence: Sequence) -> None:
    """Write the sampling parameters of a sequence into `row`, one row of the sampling table."""
    params = sequence.params
    row["temperature"] = min(params.temperature, _MAX_TEMPERATURE)
    row["top_p"] = params.top_p
    row["top_k"] = _top_k_or_zero(params)
    row["min_p"] = params.min_p
    row["seed"] = sequence.seed
    row["is_greedy"] = params.is_greedy
    row["has_logprobs"] = params.logprobs is not None
    row["changes_logits"] = changes_logits(params)


def _top_k_or_zero(params: SamplingParams) -> int:
    """Return top_k as an int64 number; 0 if top_k is turned off.

    A request turns top_k off with 0 or -1. A value above the range of int64 keeps all tokens, just
    like the largest int64 number.
    """
    return min(max(0, params.top_k), np.iinfo(np.int64).max)
