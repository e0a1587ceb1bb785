"""Tests that vectors of ColBERT models equal the vectors of sentence-transformers."""

import json
import random

import numpy as np
import pytest
import torch
from backend.pooling.tiny import NORMALIZE, add_modules, copy_of, text
from nereid_backend import Embedder
from nereid_backend.errors import ConfigError, ModelError, RequestError, UnsupportedModelError
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder

TOKENS = {"module_input_name": "token_embeddings"}
IDENTITY = {"activation_function": "torch.nn.modules.linear.Identity"}
DENSE = "sentence_transformers.base.modules.dense.Dense"
MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
FIXED = {"strategy": "fixed", "length": 12}
QUERIES = ["w1", "w3 w5 , w6", "w9 w3 w3 w2 w8 w7", text(random.Random(3), 40)]


def write(path, value):
    """Write `value` as JSON to a file of a copied checkpoint. Replace an existing file."""
    path.unlink(missing_ok=True)  # Writing to this link would change the original checkpoint.
    path.write_text(json.dumps(value))


def add_projection(folder, path="1_Dense", **config):
    """Write the weight of a dense module that maps 48 numbers to 16. Return the module's config."""
    (folder / path).mkdir()
    weight = torch.randn(16, 48, generator=torch.Generator().manual_seed(1)) * 0.2
    save_file({"linear.weight": weight}, folder / path / "model.safetensors")
    sizes = {"in_features": 48, "out_features": 16, "bias": False}
    return {**sizes, **IDENTITY, **config}


@pytest.fixture
def native(encoder_of, tmp_path):
    """A function that writes a checkpoint in the layout of sentence-transformers."""

    def make(settings, family="bert", **mask_settings):
        folder = copy_of(encoder_of(family), tmp_path)
        dense = (DENSE, "1_Dense", add_projection(folder, **TOKENS))
        normalize = (NORMALIZE[0], "2_Normalize", TOKENS)
        skipped_words = {"skiplist_words": ["w3", "w5", "w77", ","]}
        mask = (MASK, "3_Mask", {**skipped_words, **mask_settings})
        add_modules(folder, dense, normalize, mask, model_type="MultiVectorEncoder")
        write(folder / "sentence_bert_config.json", settings)
        return folder

    return make


def assert_equal_to_reference(folder, *, queries=QUERIES, documents=(*QUERIES, "w3 w5 w6 , w8")):
    """Check that the vectors equal those of sentence-transformers, and return the embedder.

    All queries are one batch, and all documents are another batch.
    """
    embedder = Embedder(str(folder), num_threads=1)
    reference = MultiVectorEncoder(str(folder), device="cpu")

    def encode(texts, prompt_name):
        known_name = prompt_name if prompt_name in embedder.info.prompts else None
        return embedder.encode_multi(texts, prompt_name=known_name, truncate=True)

    vectors = [*encode(queries, "query"), *encode(documents, "document")]
    expected = [*reference.encode_query(queries), *reference.encode_document(list(documents))]
    for vectors_of_text, expected_of_text in zip(vectors, expected, strict=True):
        np.testing.assert_allclose(vectors_of_text, np.asarray(expected_of_text), rtol=0, atol=2e-5)
    return embedder


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"query_length": 5, "document_length": 9},
        {"query_expansion": FIXED},
        {"query_expansion": {**FIXED, "attend": True}, "document_length": 20},
        {"query_expansion": {"strategy": "min", "length": 6}, "query_length": 30},
        {"query_expansion": {**FIXED, "token": "w7"}},
    ],
    ids=["no rules", "lengths", "fixed", "attended", "min", "another token"],
)
def test_queries_and_documents_of_sentence_transformers(native, settings):
    assert_equal_to_reference(native(settings))


@pytest.mark.parametrize("family", ["modernbert", "roberta", "mpnet", "qwen3"])
@pytest.mark.parametrize("attend", [False, True], ids=["hidden", "attended"])
def test_expansion_of_other_architectures(native, family, attend):
    folder = native({"query_expansion": {**FIXED, "length": 40, "attend": attend}}, family)
    assert_equal_to_reference(folder)


def test_punctuation_of_queries_is_dropped_only_if_the_files_say_so(native):
    assert_equal_to_reference(native({}, skiplist_tasks=["query", "document"]))


@pytest.fixture
def pylate(encoder_of, tmp_path):
    """A function that writes a checkpoint in the layout of PyLate."""

    def make(**saved):
        folder = copy_of(encoder_of("bert"), tmp_path)
        dense = ("pylate.models.Dense.Dense", "1_Dense", add_projection(folder))
        return add_modules(folder, dense, model_type="ColBERT", **saved)

    return make


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"query_prefix": "w1 ", "document_prefix": "w2 ", "query_length": 10},
        {"query_prefix": "[Q] ", "document_prefix": "[D] ", "document_length": 14},
        {"do_query_expansion": False, "query_length": 10, "skiplist_words": ["w6"]},
        {"attend_to_expansion_tokens": True, "query_length": 10, "prompts": {"query": "w4 "}},
    ],
    ids=["defaults", "markers", "unknown markers", "no expansion", "attended"],
)
def test_a_checkpoint_of_pylate(pylate, saved):
    embedder = assert_equal_to_reference(pylate(**saved))
    assert (embedder.info.kinds, embedder.info.dimension) == (("multi_vector",), 16)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"query_maxlen": 10, "doc_maxlen": 14, "mask_punctuation": False},
        {"query_token_id": "w1", "doc_token_id": "w2", "attend_to_mask_tokens": True},
    ],
    ids=["no metadata", "lengths", "markers"],
)
def test_a_checkpoint_of_stanford(encoder_of, tmp_path, metadata):
    folder = copy_of(encoder_of("bert"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | {"architectures": ["HF_ColBERT"]})
    file = folder / "model.safetensors"
    weights = {f"bert.{name}": tensor for name, tensor in load_file(file).items()}
    weights["linear.weight"] = torch.randn(16, 48, generator=torch.Generator().manual_seed(2))
    file.unlink()  # The file is a link to the original, which must stay unchanged.
    save_file(weights, file, metadata={"format": "pt"})
    if metadata is not None:
        write(folder / "artifact.metadata", metadata)

    embedder = assert_equal_to_reference(folder)

    assert (embedder.info.kinds, embedder.info.dimension) == (("multi_vector",), 16)


def test_a_marker_is_one_token(pylate):
    folder = pylate(query_prefix="w1-marker ", query_length=6)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    # The pre-tokenizer splits "w1-marker" at the hyphen, although it is an entry of the vocabulary.
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w1-marker"] = vocabulary.pop("w200")
    write(folder / "tokenizer.json", tokenizer)
    assert_equal_to_reference(folder)


def test_a_query_that_is_too_long_is_refused_or_truncated(native):
    embedder = Embedder(str(native({"query_expansion": FIXED})), num_threads=1)
    with pytest.raises(RequestError, match=r"13 tokens, but the limit is 12 \(query_length\)"):
        embedder.encode_multi([" ".join(["w1"] * 11)], prompt_name="query")
    assert len(embedder.encode_multi(["w1 " * 50], prompt_name="query", truncate=True)[0]) == 12


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"strategy": "double", "length": 9}, UnsupportedModelError, "it is 'double'"),
        ({"strategy": "fixed"}, ModelError, 'has no field "length"'),
        ({"strategy": "fixed", "length": "9"}, ModelError, "at least 1, but it is '9'"),
        ({**FIXED, "token": "[M]"}, ModelError, r"vocabulary .* does not contain"),
        ({**FIXED, "length": 500}, ConfigError, "expands queries to 500 tokens"),
    ],
)
def test_an_expansion_that_cannot_be_followed_is_refused(native, settings, error, message):
    folder = native({"query_expansion": settings, "max_seq_length": 40})
    with pytest.raises(error, match=message):
        Embedder(str(folder))


def test_an_expansion_of_pooled_vectors_is_refused(encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    write(folder / "sentence_bert_config.json", {"query_expansion": FIXED})
    with pytest.raises(UnsupportedModelError, match="query_expansion requires a checkpoint"):
        Embedder(str(folder))
