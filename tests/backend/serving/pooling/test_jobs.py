import msgpack
import numpy as np
import pytest
from nereid_backend.serving.pooling.jobs import Outcome

VALUES = {
    "dense": [np.array([1, 2], dtype=np.float32), np.array([3, 4], dtype=np.float32)],
    "score": [0.5, 0.25],
    "classify": [np.array([0.5, 0.5], dtype=np.float32)] * 2,
    "multi_vector": [np.ones((3, 2), dtype=np.float32), np.zeros((1, 2), dtype=np.float32)],
    "sparse": [{7: 0.5, 3: 0.25}, {}],
}
SHAPES = {
    "dense": (2, 2), "score": (2,), "classify": (2, 2), "multi_vector": (4, 2), "sparse": (0, 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
def test_an_outcome_is_unchanged_after_packing_and_unpacking(kind):
    packed = Outcome.from_values(kind, VALUES[kind], [5, 6])
    row = msgpack.unpackb(msgpack.packb(packed.row(), use_bin_type=True), raw=False)
    unpacked = Outcome.from_row(row)
    assert unpacked.kind == kind
    assert unpacked.values.shape == SHAPES[kind]
    assert np.array_equal(unpacked.values, packed.values)
    assert unpacked.num_tokens.tolist() == [5, 6]
    assert unpacked.counts.tolist() == ([3, 1] if kind == "multi_vector" else [])


def test_sparse_weights_keep_their_tokens():
    read = Outcome.from_row(Outcome.from_values("sparse", VALUES["sparse"], [5, 6]).row())
    assert [(ids.tolist(), weights.tolist()) for ids, weights in read.weights] == [
        ([7, 3], [0.5, 0.25]),
        ([], []),
    ]
