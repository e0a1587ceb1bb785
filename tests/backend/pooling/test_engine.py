"""Tests of the pooling engine: the order of its work, its limits, and invalid inputs."""

import itertools
import random

import numpy as np
import pytest
import torch
from backend.pooling.tiny import copy_of, text
from nereid_backend import CapacityError, ConfigError, Embedder, ModelError, RequestError
from nereid_backend.linear.native_linear import NativeLinear
from nereid_backend.linear.prepack import PackedLinear, prepack_linears
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_engine import PoolingEngine
from nereid_backend.pooling.pooling_items import PoolingItem
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def folder(encoder_of):
    return str(encoder_of("bert"))


def engine_of(folder, **settings):
    """Return a pooling engine for a checkpoint."""
    return PoolingEngine(PoolingConfig(folder, num_threads=1, **settings), progress=lambda _: None)


@pytest.fixture(scope="module")
def embedder(folder):
    return Embedder(folder, num_threads=1)


def items(count, length=5):
    """Return `count` inputs with random texts of `length` words."""
    rng = random.Random(count)
    return [PoolingItem(text=text(rng, length)) for _ in range(count)]


def test_a_request_of_a_thousand_texts_does_not_starve_a_request_of_one(folder):
    engine = engine_of(folder, max_batch_tokens=128)
    engine.add("many", items(1000))
    engine.step()
    engine.add("one", items(1, length=60))
    answered_requests = [result.request_id for _ in range(2) for result in engine.step()]
    assert "one" in answered_requests
    engine.abort("many")
    assert not engine.has_work()


def test_every_input_of_every_request_gets_exactly_one_result(folder):
    engine = engine_of(folder, max_batch_tokens=64)
    rng = random.Random(5)
    for request_id in ("a", "b", "c", "d"):
        texts = [text(rng, rng.randint(1, 90)) for _ in range(9)]
        engine.add(request_id, [PoolingItem(text=each) for each in texts])
    answered_inputs = []
    while engine.has_work():
        results = engine.step()
        assert sum(result.num_tokens for result in results) <= 64 or len(results) == 1
        answered_inputs += [(result.request_id, result.index) for result in results]
    assert sorted(answered_inputs) == list(itertools.product("abcd", range(9)))


def test_two_thousand_texts_are_answered_in_their_order(embedder):
    texts = [f"w{i % 7}" for i in range(2000)]
    vectors = embedder.encode(texts)
    assert vectors.shape == (2000, 48)
    np.testing.assert_allclose(vectors[:7], vectors[1960:1967], atol=1e-5)
    assert not np.allclose(vectors[0], vectors[1], atol=1e-3)


def test_an_aborted_request_is_forgotten(folder):
    engine = engine_of(folder)
    engine.add("a", items(2))
    engine.abort("a")
    engine.abort("never")
    assert not engine.has_work()
    assert engine.step() == []
    engine.add("a", items(1))
    assert [result.request_id for result in engine.step()] == ["a"]


def test_a_request_id_that_is_waiting_and_a_full_queue_are_refused(folder):
    engine = engine_of(folder, max_num_waiting=3)
    engine.add("a", items(2))
    with pytest.raises(RequestError, match="the id 'a' is already waiting"):
        engine.add("a", items(1))
    with pytest.raises(CapacityError, match=r"limit is 3 \(max_num_waiting\)"):
        engine.add("b", items(2))
    engine.add("b", items(1))


def test_a_text_that_is_too_long_is_refused_with_its_length_and_the_limit(embedder):
    long_text = text(random.Random(0), 500)
    message = r"input 1: input: the input has 502 tokens, but the limit is 128 \(max_model_len\)"
    with pytest.raises(RequestError, match=message):
        embedder.encode(["w1", long_text])
    # The limit is 128 tokens. Two of them are special tokens, so 126 words remain.
    vectors = embedder.encode(["w1", long_text], truncate=True)
    expected = embedder.encode(" ".join(long_text.split()[:126]))
    np.testing.assert_allclose(vectors[1:], expected, atol=1e-5)


def test_a_text_of_100_kilobytes_is_refused_or_truncated(embedder):
    huge = "w1 w2 w3 w4 " * 9_000
    with pytest.raises(RequestError, match="108000 bytes, which count as at least 6750 tokens"):
        embedder.encode(huge)
    assert embedder.encode(huge, truncate=True).shape == (1, 48)


def test_an_empty_text_has_the_vector_of_its_special_tokens(embedder):
    np.testing.assert_allclose(embedder.encode(""), embedder.encode([[0, 2]]), atol=1e-6)


def test_an_empty_list_returns_no_vectors_offline_and_is_an_error_in_a_request(folder, embedder):
    assert embedder.encode([]).shape == (0, 48)
    with pytest.raises(RequestError, match="input: the list is empty"):
        engine_of(folder).add("a", [])


@pytest.mark.parametrize("dimensions", [0, -1, 49, 10**9, 10**400, True, 8.0])
def test_dimensions_larger_than_those_of_the_model_are_refused(dimensions, embedder):
    with pytest.raises(RequestError, match="dimensions: the value must be an integer from 1 to 48"):
        embedder.encode("w1", dimensions=dimensions)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[]], "the list of token ids is empty"),
        ([[1, 250]], "each token id must be from 0 to 249, but one is 250"),
        ([[-1]], "each token id must be from 0 to 249, but one is -1"),
        ([[1, "x"]], "each token id must be an integer, but one is 'x'"),
        ([[5] * 129], "has 129 tokens, but the limit is 128"),
    ],
)
def test_bad_token_ids_are_refused(ids, message, embedder):
    with pytest.raises(RequestError, match=message):
        embedder.encode(ids)


def test_options_that_the_model_does_not_support_are_refused(folder):
    engine = engine_of(folder)
    with pytest.raises(RequestError, match="BertModel supports dense, but the request has sparse"):
        engine.add("a", [PoolingItem("sparse", text="w1")])
    with pytest.raises(
        RequestError, match="the kind dense requires one text, but the request has a pair"
    ):
        engine.add("a", [PoolingItem(pair=("w1", "w2"))])
    with pytest.raises(RequestError, match="requires a reranker whose prompts"):
        engine.add("a", [PoolingItem(text="w1", instruction="w2")])


def change_weights(folder, target, change):
    """Copy a checkpoint to `target`, and change its weights with the function `change`."""
    copy_of(folder, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    # `copy_of` creates links to the original files. Delete the link to keep the original unchanged.
    (target / "model.safetensors").unlink()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def test_weights_that_are_not_numbers_are_found_at_load(encoder_of, tmp_path):
    def change(weights):
        weights["encoder.layer.0.output.dense.weight"][0, 0] = float("nan")

    with pytest.raises(ModelError, match="the vectors are not finite numbers"):
        Embedder(change_weights(encoder_of("bert"), tmp_path, change))


def test_a_text_whose_vector_is_not_finite_fails_without_the_other_texts(encoder_of, tmp_path):
    def break_token_4(weights):
        weights["embeddings.word_embeddings.weight"][4] = float("inf")

    engine = engine_of(change_weights(encoder_of("bert"), tmp_path, break_token_4))
    engine.add("a", [PoolingItem(token_ids=[0, token_id, 2]) for token_id in (20, 4, 21)])
    results = {result.index: result for result in engine.step()}
    assert results[1].value is None
    assert "not finite" in results[1].error
    assert results[0].error is None
    assert np.isfinite(results[2].value).all()


def test_an_input_for_which_the_model_fails_does_not_fail_other_inputs(folder):
    engine = engine_of(folder)
    engine.add("a", [PoolingItem(text="w1"), PoolingItem(token_ids=[3])])
    # The model raises an error for a token id outside its vocabulary.
    failing_input = next(item for item in engine._queue._waiting["a"] if item.index == 1)
    failing_input.prepared.token_ids[0] = 10**6
    results = {result.index: result for result in engine.step()}
    assert results[0].value.shape == (48,)
    assert "the model failed: IndexError" in results[1].error


def test_wrong_settings_are_named(folder):
    with pytest.raises(ConfigError, match="task: the value must be 'auto', 'embed', "):
        PoolingConfig(folder, task="embedding")
    with pytest.raises(ConfigError, match="max_batch_tokens: the value must be greater than 0"):
        PoolingConfig(folder, max_batch_tokens=0)
    with pytest.raises(ConfigError, match=r"must be at most 160 .*, but it is 161"):
        Embedder(folder, max_model_len=161)


def test_position_ids_that_begin_after_the_padding_index_limit_the_length(encoder_of):
    roberta = str(encoder_of("roberta"))
    assert Embedder(roberta, num_threads=1, max_model_len=158).info.max_model_len == 158
    with pytest.raises(ConfigError, match="must be at most 158"):
        Embedder(roberta, max_model_len=159)


def test_an_encoder_that_cannot_be_loaded_without_its_decoder_is_refused(encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    config = folder / "config.json"
    changed = config.read_text().replace('"BertModel"', '"BartModel"').replace('"bert"', '"bart"')
    config.unlink()
    config.write_text(changed)
    with pytest.raises(
        ModelError, match="BartModel is not supported: it has an encoder and a decoder"
    ):
        Embedder(str(folder))


def test_packed_layers_compute_the_same_and_shared_weights_are_not_packed():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(30, 16)
    head = torch.nn.Linear(16, 30, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(
        embedding, torch.nn.Linear(16, 24), torch.nn.Linear(24, 16, bias=False), head
    )
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        expected = model(ids)

        assert prepack_linears(model) == 2

        is_packed = [isinstance(layer, PackedLinear | NativeLinear) for layer in model]
        assert is_packed == [False, True, True, False]
        torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)
        # A packed layer stores its weight in another layout. The attribute `weight` is a
        # placeholder of NaN with the original shape.
        assert model[1].weight.shape == (24, 16)
        assert torch.nn.functional.linear(torch.ones(1, 16), model[1].weight).isnan().all()
