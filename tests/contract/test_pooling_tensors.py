"""Tests that the code and config.pbtxt agree on the tensors of the pooling models.

The pooling models are the embedding model and the reranker.
"""

import re
from pathlib import Path

import pytest
from nereid_backend.serving import pooling_tensor_names as names

ROOT = Path(__file__).resolve().parents[2]
TENSORS = {
    ("embedding", "input"): {
        names.TEXTS, names.INPUT_IDS, names.INPUT_LENGTHS, names.PARTS, names.OPTIONS,
        names.RETURN_INFO,
    },
    ("embedding", "output"): {
        names.EMBEDDINGS, names.NUM_VECTORS, names.SPARSE, names.NUM_TOKENS, names.INFO,
    },
    ("rerank", "input"): {
        names.QUERY, names.DOCUMENTS, names.PARTS, names.TEXTS, names.OPTIONS, names.RETURN_INFO,
    },
    ("rerank", "output"): {
        names.SCORES, names.PROBABILITIES, names.OFFSETS, names.NUM_TOKENS, names.INFO,
    },
}  # fmt: skip


@pytest.mark.parametrize(("model", "side"), TENSORS)
def test_a_models_tensors_are_those_that_the_code_names(model, side):
    text = (ROOT / "model_repository" / model / "config.pbtxt").read_text()
    body = re.search(rf"^{side} \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    assert set(re.findall(r'name: "(\w+)"', body)) == TENSORS[model, side]
