# SPDX-License-Identifier: Apache-2.0
"""What a stub asks of its worker and what it gets back, and how both cross the channel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Weights = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
Value = npt.NDArray[np.float32] | dict[int, float] | float


@dataclass(frozen=True, slots=True)
class Job:
    """The inputs of one request.

    Attributes:
        field: the tensor that they came in, for messages.
        inputs: (name, value) each, a field of PoolingItem: text, token_ids, pair or image.
        options: fields of PoolingItem that hold for all of them.
    """

    field: str
    inputs: list[tuple[str, Any]]
    options: dict[str, Any]

    def row(self) -> list[Any]:
        """As values that msgpack takes."""
        return [self.field, self.inputs, self.options]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job came to: one value for each input, in order.

    Attributes:
        kind: "dense", "sparse", "multi_vector", "score" or "classify".
        values: dense [n, dim]; multi_vector [sum of counts, dim]; score [n]; classify
            [n, num_labels]; float32. Empty for sparse.
        counts: multi_vector: vectors of each input [n] int32; else empty.
        weights: sparse: token ids [k] int32 and their weights [k] float32, for each input.
        num_tokens: of each input [n] int32.
    """

    kind: str
    values: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    weights: list[Weights]
    num_tokens: npt.NDArray[np.int32]

    @classmethod
    def from_values(
        cls, kind: str, values: Sequence[Value], num_tokens: Sequence[int]
    ) -> "Outcome":
        """Put one value for each input together; `values` must not be empty."""
        counts = np.zeros(0, dtype=np.int32)
        weights: list[Weights] = []
        stacked = np.zeros((0, 0), dtype=np.float32)
        if kind == "sparse":
            weights = [_weights(value) for value in values if isinstance(value, dict)]
        elif kind == "multi_vector":
            arrays = [np.asarray(value, dtype=np.float32) for value in values]
            counts = np.array([len(array) for array in arrays], dtype=np.int32)
            stacked = np.concatenate(arrays)
        else:
            stacked = np.array(values, dtype=np.float32)
        return cls(kind, stacked, counts, weights, np.array(num_tokens, dtype=np.int32))

    def row(self) -> list[Any]:
        """As values that msgpack takes."""
        return [
            self.kind,
            list(self.values.shape),
            self.values.tobytes(),
            self.counts.tobytes(),
            [(ids.tobytes(), weights.tobytes()) for ids, weights in self.weights],
            self.num_tokens.tobytes(),
        ]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> "Outcome":
        """From what `row` gave."""
        kind, shape, values, counts, weights, num_tokens = row
        return cls(
            kind,
            np.frombuffer(values, dtype=np.float32).reshape(shape),
            np.frombuffer(counts, dtype=np.int32),
            [
                (np.frombuffer(ids, dtype=np.int32), np.frombuffer(of_ids, dtype=np.float32))
                for ids, of_ids in weights
            ],
            np.frombuffer(num_tokens, dtype=np.int32),
        )


def _weights(value: dict[int, float]) -> Weights:
    return np.array(list(value), dtype=np.int32), np.array(list(value.values()), dtype=np.float32)
