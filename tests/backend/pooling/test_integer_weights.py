"""Tests of embedding models and rerankers whose weights are integers of 4 or 8 bits."""

import numpy as np
import pytest
import torch
from backend.pooling.tiny import BY_NAME
from nereid_backend import ConfigError, Embedder, Reranker
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.pooling.loading import integer_weights


def cosines(vectors, expected):
    """Return the cosine similarity of each vector to the expected vector at the same index."""
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    return (vectors * expected).sum(1) / norms


@pytest.mark.parametrize(
    ("family", "dtype"), [*((name, "float32") for name in sorted(BY_NAME)), ("bert", "bfloat16")]
)
def test_embeddings_with_8_bits_are_close_to_those_with_unrounded_weights(
    family, dtype, encoder_of, texts
):
    folder = encoder_of(family)
    unrounded_vectors = Embedder(folder, num_threads=1, dtype="float32").encode(texts)
    rounded = Embedder(folder, num_threads=1, dtype=dtype, weight_dtype="int8")
    assert cosines(unrounded_vectors, rounded.encode(texts)).min() > 0.995
    layers = rounded._engine._model._loaded.encoder.model.modules()
    assert any(isinstance(layer, GroupedLinear) for layer in layers)


def test_4_bits_round_more_than_8_bits(encoder_of, texts):
    folder = encoder_of("bert")
    unrounded_vectors = Embedder(folder, num_threads=1).encode(texts)
    rounded_vectors = {
        dtype: Embedder(folder, num_threads=1, weight_dtype=dtype).encode(texts)
        for dtype in ("int8", "int4")
    }
    smallest_cosines = {
        dtype: cosines(unrounded_vectors, vectors).min()
        for dtype, vectors in rounded_vectors.items()
    }
    assert 0.9 < smallest_cosines["int4"] < smallest_cosines["int8"] < 1 - 1e-7


def test_scores_with_8_bits_are_close_to_those_with_unrounded_weights(encoder_of, texts):
    folder = encoder_of("bert", "sequence", num_labels=1)
    pairs = [(texts[0], text) for text in texts]
    unrounded_scores = Reranker(folder, num_threads=1).score(pairs)
    rounded_scores = Reranker(folder, num_threads=1, weight_dtype="int8").score(pairs)
    assert np.abs(unrounded_scores - rounded_scores).max() < 0.02
    assert (unrounded_scores != rounded_scores).any()


def test_a_gpu_is_refused_by_name(monkeypatch):
    encoder = type("Encoder", (), {"device": torch.device("cuda:0")})()
    with pytest.raises(ConfigError, match=r"weight_dtype: .* int8 requires device=cpu"):
        integer_weights.store_as_integers(encoder, "int8", "BertModel", print)
    integer_weights.store_as_integers(encoder, "auto", "BertModel", print)


def test_a_model_without_linear_layers_is_refused_by_name():
    model = torch.nn.Embedding(4, 4)
    encoder = type("Encoder", (), {"device": torch.device("cpu"), "model": model})()
    with pytest.raises(ConfigError, match="which Table does not have"):
        integer_weights.store_as_integers(encoder, "int4", "Table", print)
