# SPDX-License-Identifier: Apache-2.0
"""The jobs that a Triton model sends to its worker process, and the results of the jobs."""

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
        field: the name of the tensor that contains the inputs, for error messages.
        inputs: one pair of a name and a value for each input. In most pairs, the name is a field of
            PoolingItem (text, token_ids or pair), and the value is the value of this field.
            If the name is "part", the value is a dict with the key `text`, `image` or both (see
            parse_part). If the name is "document", the value is a document that is scored for
            `query`.
        options: fields of PoolingItem that have the same value for all inputs.
        query: the query for all documents. The query is packed only once. If a query of 60 kB were
            packed with each of 10,000 documents, the message would have 600 MB.
    """

    field: str
    inputs: list[tuple[str, Any]]
    options: dict[str, Any]
    query: str = ""

    def row(self) -> list[Any]:
        """Convert the fields to a list that msgpack can pack."""
        return [self.field, self.inputs, self.options, self.query]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job. It contains one value for each input, in the order of the inputs.

    Attributes:
        kind: "dense", "sparse", "multi_vector", "score", "classify" or "token_classify".
        values: the vectors or scores, in float32. The shape is [n, dim] for dense, [sum of counts,
            dim] for multi_vector, [n] for score, [n, num_labels] for classify, and [sum of
            num_tokens, num_labels] for token_classify. The array is empty for sparse.
        counts: for multi_vector, the number of vectors of each input, int32 [n]. Empty for other
            kinds.
        weights: for sparse, one pair for each input: the token ids, int32 [k], and their weights,
            float32 [k]. Empty for other kinds.
        num_tokens: the number of tokens of each input, int32 [n].
        offsets: for token_classify, the range of characters of each token (see
            PoolingResult.offsets), int32 [sum of num_tokens, 2]. Empty for other kinds.
    """

    kind: str
    values: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    weights: list[Weights]
    num_tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]

    @classmethod
    def from_values(
        cls,
        kind: str,
        values: Sequence[Value],
        num_tokens: Sequence[int],
        offsets: Sequence[npt.NDArray[np.int32]] = (),
    ) -> "Outcome":
        """Combine the values of all inputs into the result of the job.

        Example: the kind "dense", the values [array([1., 2.]), array([3., 4.])] and the token
        counts [5, 6] return an Outcome with `values` of shape [2, 2] and `num_tokens` [5, 6].

        Args:
            kind: "dense", "sparse", "multi_vector", "score", "classify" or "token_classify".
            values: one value for each input, at least one. A value is a dict (token id: weight) for
                sparse, a number for score, and an array for every other kind.
            num_tokens: the number of tokens of each input.
            offsets: for token_classify, one array for each input: the range of characters of each
                token.
        """
        # Only a multi-vector embedding has a different number of vectors for each input.
        counts = [len(np.asarray(value)) for value in values] if kind == "multi_vector" else []
        weights = [_weights(value) for value in values] if kind == "sparse" else []
        return cls(
            kind=kind,
            values=_join_values(kind, values),
            counts=np.array(counts, dtype=np.int32),
            weights=weights,
            num_tokens=np.array(num_tokens, dtype=np.int32),
            offsets=np.concatenate(offsets) if offsets else np.zeros((0, 2), dtype=np.int32),
        )

    @classmethod
    def empty(cls, kind: str) -> "Outcome":
        """Return the result of a job without inputs."""
        return cls(
            kind=kind,
            values=np.zeros(0 if kind == "score" else (0, 0), dtype=np.float32),
            counts=np.zeros(0, dtype=np.int32),
            weights=[],
            num_tokens=np.zeros(0, dtype=np.int32),
            offsets=np.zeros((0, 2), dtype=np.int32),
        )

    def row(self) -> list[Any]:
        """Convert the fields to a list that msgpack can pack."""
        return [
            self.kind,
            list(self.values.shape),
            self.values.tobytes(),
            self.counts.tobytes(),
            [(ids.tobytes(), weights.tobytes()) for ids, weights in self.weights],
            self.num_tokens.tobytes(),
            self.offsets.tobytes(),
        ]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> "Outcome":
        """Build an Outcome from the list that the worker process has sent.

        The method `row` has built the list in the worker process. The list contains the bytes of
        each array. The new arrays share the memory of these bytes.
        """
        kind, shape, values, counts, weights, num_tokens, offsets = row
        return cls(
            kind=kind,
            values=_floats(values).reshape(shape),
            counts=_integers(counts),
            weights=[(_integers(ids), _floats(id_weights)) for ids, id_weights in weights],
            num_tokens=_integers(num_tokens),
            # Each token has two offsets: the beginning and the end of its range of characters.
            offsets=_integers(offsets).reshape(-1, 2),
        )


def _floats(data: bytes) -> npt.NDArray[np.float32]:
    """Return an array that shares the memory of `data`."""
    return np.frombuffer(data, dtype=np.float32)


def _integers(data: bytes) -> npt.NDArray[np.int32]:
    """Return an array that shares the memory of `data`."""
    return np.frombuffer(data, dtype=np.int32)


def _join_values(kind: str, values: Sequence[Value]) -> npt.NDArray[np.float32]:
    """Combine the values of all inputs into one array.

    Sparse values are sent as `Outcome.weights` instead, so their array is empty.

    The shape is [n, dim] for dense, [sum of the numbers of vectors, dim] for multi_vector, [n] for
    score, [n, num_labels] for classify, and [sum of num_tokens, num_labels] for token_classify.
    """
    if kind == "sparse":
        return np.zeros((0, 0), dtype=np.float32)
    if kind in ("multi_vector", "token_classify"):
        # The value of each input is an array with one row for each token of the input.
        return np.concatenate([np.asarray(value, dtype=np.float32) for value in values])
    return np.array(values, dtype=np.float32)


def _weights(embedding: Value) -> Weights:
    """Return the token ids and the weights of a sparse embedding as two arrays."""
    assert isinstance(embedding, dict), "a sparse embedding maps token ids to weights"
    token_ids = np.array(list(embedding), dtype=np.int32)
    weights = np.array(list(embedding.values()), dtype=np.float32)
    return token_ids, weights
