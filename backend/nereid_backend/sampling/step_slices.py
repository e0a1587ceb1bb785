# SPDX-License-Identifier: Apache-2.0
"""Data types for the inputs and the results of a slice of a step.

A slice consists of consecutive positions. `ranked_logprobs.slices` explains why a step is divided.
"""

from collections import abc
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.grammar.vocabulary import TokenMask
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.random_sampling import UncertainRows
from nereid_backend.sampling.ranked_logprobs import RankedRows
from nereid_backend.sampling.sampling_table import SamplingRows


class SliceInputs(NamedTuple):
    """Consecutive positions at which a step samples tokens, and the inputs of each position.

    Attributes:
        start: the index of the slice's first position among all positions of the step.
        positions: the n positions.
        params: [n] `sampling_table.ROW`, the sampling parameters of the request at each position.
        masks: maps indices of `positions` to token masks. Every token is allowed at positions
            without an entry.
    """

    start: int
    positions: abc.Sequence[Position]
    params: SamplingRows
    masks: abc.Mapping[int, TokenMask]

    @property
    def indices_with_logprobs(self) -> list[int]:
        """The indices of the positions for which a request asks for log-probabilities."""
        return true_indices(self.params["has_logprobs"])

    def select(self, indices: list[int]) -> "SliceInputs":
        """Return the inputs of those positions whose indices are in `indices`.

        These positions need not be consecutive, so `start` of the result is meaningless.
        """
        positions = [self.positions[index] for index in indices]
        masks: dict[int, TokenMask] = {}
        for new_index, index in enumerate(indices):
            if index in self.masks:
                masks[new_index] = self.masks[index]
        return SliceInputs(0, positions, self.params[indices], masks)


class SampledRows(NamedTuple):
    """The sampled token of each row of logits, in tensors that are still on the device.

    Attributes:
        token_ids: [n] int64, the sampled tokens.
        logprobs: [n] float32, the log-probabilities of the sampled tokens under the model's own
            distribution. If the logits of a row are invalid, its value is not finite.
        has_allowed: [n] bool, whether at least one token of the row was allowed.
    """

    token_ids: Tensor
    logprobs: Tensor
    has_allowed: Tensor


class PendingSlice(NamedTuple):
    """The sampling results for consecutive positions, before they are copied to the host.

    A slice consists of consecutive positions.

    Attributes:
        inputs: the positions, their sampling parameters and their masks.
        sampled: the sampled token of each position.
        ranked: the requested log-probabilities, at the positions `inputs.indices_with_logprobs`;
            None if no log-probabilities were requested.
        uncertain: the rows that may have to be sampled again; see `UncertainRows`.
        logits: [n, vocab_size], a copy of the model's own logits. None if no row is uncertain.
    """

    inputs: SliceInputs
    sampled: SampledRows
    ranked: RankedRows | None
    uncertain: UncertainRows | None = None
    logits: Tensor | None = None


def concatenate(parts: list[SampledRows]) -> SampledRows:
    """Concatenate the rows of several `SampledRows` objects into one object."""
    if len(parts) == 1:
        return parts[0]
    return SampledRows(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.has_allowed for part in parts]),
    )


def true_indices(flags: NDArray[np.bool_]) -> list[int]:
    """Return the indices of the true elements of an array."""
    (indices,) = flags.nonzero()
    result: list[int] = indices.tolist()
    return result
