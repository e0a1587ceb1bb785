"""Tests that the probabilities of each token's labels equal those of transformers."""

import numpy as np
import pytest
import torch
from backend.pooling.tiny import copy_of
from nereid_backend.errors import ConfigError, ModelError, RequestError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_engine import PoolingEngine
from nereid_backend.pooling.pooling_items import PoolingItem
from transformers import AutoModelForTokenClassification, AutoTokenizer

LABELS = {"id2label": {0: "O", 1: "B-X", 2: "I-X"}, "label2id": {"O": 0, "B-X": 1, "I-X": 2}}


def load(folder, **settings):
    """Return a pooling engine for a checkpoint."""
    config = PoolingConfig(str(folder), num_threads=1, **settings)
    return PoolingEngine(config, progress=lambda _: None)


def run(engine, items):
    """Return the results of a request in the order of its inputs."""
    engine.add("a", items)
    results = []
    while engine.has_work():
        results += engine.step()
    assert [result.error for result in results] == [None] * len(items)
    return sorted(results, key=lambda result: result.index)


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2", "qwen3"])
def test_labels_of_tokens_equal_those_of_transformers(encoder_of, texts, family):
    folder = encoder_of(family, "tokens", **LABELS)
    engine = load(folder)
    assert (engine.info.task, engine.info.kinds) == ("classify", ("token_classify",))
    assert engine.info.labels == ("O", "B-X", "I-X")
    model = AutoModelForTokenClassification.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)

    results = run(engine, [PoolingItem(text=text) for text in texts])

    for result, text in zip(results, texts, strict=True):
        inputs = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
        offsets = inputs.pop("offset_mapping")[0]
        expected = model(**inputs).logits[0].softmax(-1)
        np.testing.assert_allclose(result.value, expected.numpy(), rtol=0, atol=2e-5)
        assert result.offsets.tolist() == offsets.tolist()
        assert result.num_tokens == len(result.value) == len(result.offsets)


def test_a_truncated_text_keeps_the_characters_of_its_tokens(encoder_of):
    engine = load(encoder_of("bert", "tokens", **LABELS), max_model_len=8)
    text = "w1 w22 " * 10
    (result,) = run(engine, [PoolingItem(text=text, truncate=True)])
    words = [text[start:end] for start, end in result.offsets]
    assert words == ["", "w1", "w22", "w1", "w22", "w1", "w22", ""]


def test_the_logits_are_returned_without_an_activation(encoder_of):
    engine = load(encoder_of("bert", "tokens", **LABELS))
    logits, probabilities = run(
        engine, [PoolingItem(text="w1 w2", activation="none"), PoolingItem(text="w1 w2")]
    )
    softmax = torch.from_numpy(logits.value).softmax(-1)
    np.testing.assert_allclose(softmax, probabilities.value, atol=1e-6)


def test_pairs_other_kinds_and_reranking_are_refused(encoder_of):
    folder = encoder_of("bert", "tokens", **LABELS)
    engine = load(folder)
    with pytest.raises(RequestError, match="requires one text, but the request has a pair"):
        engine.add("a", [PoolingItem(pair=("w1", "w2"))])
    with pytest.raises(RequestError, match="supports token_classify, but the request has dense"):
        engine.add("a", [PoolingItem("dense", text="w1")])
    with pytest.raises(ConfigError, match="task: reranking requires"):
        load(folder, task="rerank")


def test_a_checkpoint_without_the_weights_of_the_head_is_refused(encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    changed_config = config.replace("BertModel", "BertForTokenClassification")
    (folder / "config.json").write_text(changed_config)
    with pytest.raises(ModelError, match="lacks 2 weights that the task classify needs"):
        load(folder)
