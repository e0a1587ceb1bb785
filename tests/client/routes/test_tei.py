"""Tests of `/predict`, `/decode` and `/info`, which have the format of TEI.

TEI is Hugging Face's server Text Embeddings Inference.
"""

import pytest

pytestmark = pytest.mark.anyio


MOSTLY_YES = [{"score": 0.75, "label": "yes"}, {"score": 0.25, "label": "no"}]
NO = [{"score": 1.0, "label": "no"}, {"score": 0.0, "label": "yes"}]


@pytest.mark.parametrize(
    ("inputs", "answer"),
    [
        ("yyyn", MOSTLY_YES),
        (["yyyn"], MOSTLY_YES),
        ([["yyyn"], ["n"]], [MOSTLY_YES, NO]),
        ([["yyyn"]], [MOSTLY_YES]),
    ],
)
async def test_labels_are_sorted_by_their_scores(ask, inputs, answer):
    assert (await ask("/predict", inputs=inputs)).json() == answer


async def test_raw_scores_need_no_activation(ask, pooling):
    await ask("/predict", inputs="y", raw_scores=True, truncate=True)
    assert pooling.calls[-1].options == {"activation": "none", "truncate": True}


@pytest.mark.parametrize("inputs", [None, 5, [], ["a", "b"], [["a", "b"]], [["a"], [5]]])
async def test_pairs_and_other_inputs_are_refused(ask, inputs):
    response = await ask("/predict", inputs=inputs)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "inputs"
    assert "Send pairs of texts to /rerank or /v1/score." in error["message"]


async def test_token_ids_are_decoded(ask):
    assert (await ask("/decode", ids=[1, 2])).json() == ["1 2"]
    answer = await ask("/decode", ids=[[1, 2], [3]], skip_special_tokens=False)
    assert answer.json() == ["1 2<end>", "3<end>"]


@pytest.mark.parametrize("ids", [None, [], "a", ["a"], [[1], []], [True], [60_000]])
async def test_wrong_token_ids_are_refused(ask, ids):
    response = await ask("/decode", ids=ids)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "ids"


async def test_info_describes_the_embedding_model_or_the_reranker(connect_pooling, pooling):
    async with connect_pooling() as client:
        answer = (await client.get("/info")).json()
        assert answer["model_id"] == "tiny-embed"
        assert list(answer["model_type"]) == ["embedding"]
        assert answer["max_input_length"] == 12
    pooling.missing.add("embedding")
    async with connect_pooling() as client:
        answer = (await client.get("/info")).json()
    assert answer["model_type"]["classifier"]["id2label"] == {"0": "no", "1": "yes"}
    pooling.kinds["rerank"] = ["score"]
    async with connect_pooling() as client:
        assert list((await client.get("/info")).json()["model_type"]) == ["reranker"]
    pooling.missing.add("rerank")
    async with connect_pooling() as client:
        assert (await client.get("/info")).status_code == 404
