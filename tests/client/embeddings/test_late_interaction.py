"""Tests of `/score` and `/rerank` with a model that has one vector for each token (MaxSim)."""

import threading

import numpy as np
import pytest
from fakes.fake_pooling import FakePooling, _texts
from nereid_client.embeddings.late_interaction import max_sim
from nereid_client.embeddings.pooling_backend import PoolingOutputs

pytestmark = pytest.mark.anyio

DOCUMENTS = ["abc", "xyz", "cab"]


class RecordingArray(np.ndarray):
    """An array of vectors that records the ids of the threads in which it is multiplied."""

    threads: frozenset[int] = frozenset()

    def __matmul__(self, other):
        RecordingArray.threads |= {threading.get_ident()}
        return np.asarray(self) @ np.asarray(other)


class LetterVectors(FakePooling):
    """A backend with an embedding model that gives each letter its own unit vector.

    The backend serves no reranker.
    """

    def __init__(self):
        super().__init__()
        self.kinds["embedding"] = ["multi_vector"]
        self.unconfigured = {"rerank"}

    def _embed(self, call):
        outputs = super()._embed(call)
        letters = "".join(_texts(call))
        vectors = np.eye(26, dtype=np.float32)[[ord(letter) - ord("a") for letter in letters]]
        vectors = vectors.view(RecordingArray)
        return PoolingOutputs({**outputs.arrays, "embeddings": vectors}, {})


@pytest.fixture
def pooling():
    return LetterVectors()


def test_the_score_is_the_sum_of_the_largest_products():
    random = np.random.default_rng(0)
    sizes = [(3, 5), (1, 1), (4, 2)]
    pairs = [(random.normal(size=(m, 8)), random.normal(size=(n, 8))) for m, n in sizes]
    expected = [sum(max(q @ d for d in document) for q in query) for query, document in pairs]
    queries, documents = zip(*pairs, strict=True)
    np.testing.assert_allclose(max_sim(queries, documents), expected, rtol=1e-6)


async def test_documents_are_ranked_by_their_late_interaction(ask, pooling):
    answer = (await ask("/v1/rerank", model="tiny-embed", query="ab", documents=DOCUMENTS)).json()
    ranking = [(result["index"], result["relevance_score"]) for result in answer["results"]]
    assert ranking == [(0, 2.0), (2, 2.0), (1, 0.0)]
    assert answer["model"] == "tiny-embed"
    assert answer["usage"]["prompt_tokens"] == 2 + 9
    assert [call.options.get("prompt_name") for call in pooling.calls] == ["query", "document"]


async def test_pages_that_are_images_are_ranked_by_their_late_interaction(ask, pooling):
    # The fake model treats an image like the text "image".
    documents = ["xyz", {"image": "aGk="}]
    answer = (await ask("/v1/rerank", query="gem", documents=documents)).json()
    ranking = [(result["index"], result["relevance_score"]) for result in answer["results"]]
    assert ranking == [(1, 3.0), (0, 0.0)]
    assert [next(iter(call.tensors)) for call in pooling.calls] == ["texts", "parts"]
    scores = (await ask("/v1/score", text_1="gem", text_2=documents)).json()["data"]
    assert [pair["score"] for pair in scores] == [0.0, 3.0]


async def test_the_event_loop_computes_no_scores(ask):
    RecordingArray.threads = frozenset()
    await ask("/v1/rerank", query="ab", documents=DOCUMENTS)
    assert RecordingArray.threads
    assert threading.get_ident() not in RecordingArray.threads


def test_a_document_without_vectors_has_the_score_0():
    assert max_sim([np.ones((2, 3))], [np.ones((0, 3))]).tolist() == [0.0]


@pytest.mark.parametrize("name", ["passage", "corpus"])
async def test_other_names_of_the_prompt_for_documents_are_used(ask, pooling, name):
    pooling.prompts = {name: "text: "}
    await ask("/v1/rerank", query="ab", documents=DOCUMENTS)
    assert [call.options.get("prompt_name") for call in pooling.calls] == [None, name]


async def test_a_model_that_does_not_answer_is_not_called_a_wrong_model(ask, pooling):
    pooling.down = {"embedding"}
    assert (await ask("/v1/rerank", query="a", documents=DOCUMENTS)).status_code == 503


async def test_pairs_are_scored_one_by_one_or_with_one_query(ask):
    body = {"text_1": ["ab", "zz", "b"], "text_2": DOCUMENTS}
    answer = (await ask("/score", **body)).json()
    assert [pair["score"] for pair in answer["data"]] == [2.0, 2.0, 1.0]
    answer = (await ask("/v1/score", text_1="z", text_2=DOCUMENTS)).json()
    assert [pair["score"] for pair in answer["data"]] == [0.0, 1.0, 0.0]


async def test_a_text_that_is_too_long_is_reported_with_its_field(ask):
    answer = await ask("/rerank", query="a" * 20, documents=["b"])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "query"


async def test_a_model_with_one_vector_for_each_text_is_no_reranker(ask, pooling):
    pooling.kinds["embedding"] = ["dense", "multi_vector"]
    answer = await ask("/rerank", model="tiny-embed", query="a", documents=["b"])
    assert answer.status_code in (400, 404)
