"""Tests of the routes for reranking, scoring and classification."""

import asyncio
import json

import numpy as np
import pytest
from fakes.fake_backend import FakeBackend
from fakes.fake_pooling import vector
from nereid_client.app import create_app
from nereid_client.protocol.rerank_requests import text_of
from nereid_client.settings import Settings

pytestmark = pytest.mark.anyio

DOCUMENTS = ["a red fox", "the fox", "no such word"]


def problem(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_results_come_by_falling_relevance_in_the_shape_of_jina_and_vllm(ask, path):
    answer = (await ask(path, model="tiny-rerank", query="red fox", documents=DOCUMENTS)).json()
    assert answer["model"] == "tiny-rerank"
    assert answer["id"].startswith("rerank-")
    assert answer["usage"] == {"prompt_tokens": 28, "total_tokens": 28}
    assert answer["results"] == [
        {"index": 0, "relevance_score": 1.0, "document": {"text": "a red fox"}},
        {"index": 1, "relevance_score": 0.5, "document": {"text": "the fox"}},
        {"index": 2, "relevance_score": 0.0, "document": {"text": "no such word"}},
    ]


async def test_voyages_library_gets_the_results_in_data_and_sets_their_number_with_top_k(ask):
    body = {"query": "red fox", "documents": DOCUMENTS, "truncation": True}
    answer = (await ask("/v1/rerank", **body, top_k=1)).json()
    assert answer["data"] == answer["results"]
    assert [result["index"] for result in answer["data"]] == [0]
    assert len((await ask("/v1/rerank", **body, top_k=None)).json()["data"]) == 3
    assert "data" not in (await ask("/v1/rerank", **body)).json()


async def test_cohere_2_gets_its_meta_and_no_documents_unless_asked(ask):
    answer = (await ask("/v2/rerank", query="red", documents=DOCUMENTS, top_n=1)).json()
    assert answer["results"] == [{"index": 0, "relevance_score": 1.0}]
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    assert answer["meta"]["tokens"] == {"input_tokens": 28}
    answer = (await ask("/v2/rerank", query="a", documents=["a"], return_documents=True)).json()
    assert answer["results"][0]["document"] == {"text": "a"}


@pytest.mark.parametrize("path", ["/v1/rerank?format=sglang", "/v1/rerank"])
async def test_sglangs_bare_list_by_the_query_string_or_the_body(ask, path):
    fields = {} if "?" in path else {"format": "sglang"}
    answer = await ask(path, query="red fox", documents=DOCUMENTS, top_n=2, **fields)
    assert answer.json() == [
        {"score": 1.0, "document": "a red fox", "index": 0, "meta_info": None},
        {"score": 0.5, "document": "the fox", "index": 1, "meta_info": None},
    ]


async def test_texts_select_the_shape_of_tei(ask, pooling):
    answer = (await ask("/rerank", query="red fox", texts=DOCUMENTS[::-1])).json()
    assert answer == [
        {"index": 2, "score": 1.0},
        {"index": 1, "score": 0.5},
        {"index": 0, "score": 0.0},
    ]
    answer = await ask("/rerank", query="red", texts=["red"], return_text=True, raw_scores=True)
    assert answer.json() == [{"index": 0, "text": "red", "score": 10.0}]
    assert pooling.calls[-1].options["activation"] == "none"


async def test_documents_may_be_content_parts(ask):
    documents = [{"text": "red"}, {"type": "text", "text": "fox"}, "x"]
    answer = (await ask("/v1/rerank", query={"text": "fox"}, documents=documents)).json()
    assert [item["index"] for item in answer["results"]] == [1, 0, 2]


async def test_documents_may_be_images(ask, pooling):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    documents = ["a red fox", image, {"content": [{"image": "aGk="}]}]
    answer = (await ask("/v1/rerank", query="image", documents=documents)).json()
    # The fake reranker treats each image like the text "image". The response contains the
    # documents that are texts, but not the images.
    assert answer["results"] == [
        {"index": 1, "relevance_score": 1.0},
        {"index": 2, "relevance_score": 1.0},
        {"index": 0, "relevance_score": 0.0, "document": {"text": "a red fox"}},
    ]
    assert [json.loads(part) for part in pooling.calls[0].tensors["parts"]] == [
        {"text": "a red fox"},
        {"image": "data:image/png;base64,aGk="},
        {"image": "aGk="},
    ]
    scores = (await ask("/v1/score", text_1="image", text_2=documents)).json()["data"]
    assert [pair["score"] for pair in scores] == [0.0, 1.0, 1.0]


async def test_a_text_in_thousands_of_nested_objects_is_read():
    # The JSON parser of Python 3.12 and later accepts 2,000 nested objects, so a request can
    # contain them.
    value = "a"
    for _ in range(2000):
        value = {"content": [value]}
    assert text_of(value, "query", "query") == "a"


async def test_a_document_with_a_text_and_an_image_is_refused(ask):
    documents = ["a", {"text": "b", "image": "aGk="}]
    error = problem(await ask("/v1/rerank", query="x", documents=documents))
    assert error["param"] == "documents"
    assert "documents[1] has both a text and an image" in error["message"]


async def test_an_embedding_model_scores_images_by_their_cosine(ask, pooling):
    pooling.unconfigured = {"rerank"}
    body = {"text_1": "image", "text_2": [{"image": "aGk="}, "image"]}
    scores = (await ask("/v1/score", **body)).json()["data"]
    assert [pair["score"] for pair in scores] == [pytest.approx(1.0)] * 2
    assert "parts" in pooling.calls[-1].tensors


async def test_equal_scores_keep_the_requests_order(ask):
    answer = (await ask("/v1/rerank", query="x", documents=["a", "b", "c"], top_n=0)).json()
    assert [item["index"] for item in answer["results"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("path", "kinds", "body"),
    [
        ("/v1/score", ["dense"], {"text_1": "a", "text_2": "b", "instruction": "be strict"}),
        ("/v1/rerank", ["multi_vector"], {"query": "a", "documents": ["b"], "instruct": "be kind"}),
    ],
)
async def test_an_instruction_for_an_embedding_model_is_refused(ask, pooling, path, kinds, body):
    pooling.unconfigured = {"rerank"}
    pooling.kinds["embedding"] = kinds
    error = problem(await ask(path, **body))
    name = [*body][-1]
    assert error["param"] == name
    assert error["message"] == (
        f"{name} requires a generative reranker, but the model 'tiny-embed' is an embedding model. "
        "Leave the field out."
    )


async def test_an_instruction_reaches_the_model(ask, pooling):
    await ask("/v1/rerank", query="x", documents=["a"], instruct="be strict", truncate=True)
    assert pooling.calls[0].options["instruction"] == "be strict"
    assert pooling.calls[0].options["truncate"] is True


@pytest.mark.parametrize(
    ("fields", "message_part", "param"),
    [
        ({"documents": ["a"]}, "query is required, but the request does not contain it", "query"),
        (
            {"query": "x"},
            "Exactly one of documents and texts is required, but the request has neither of them",
            "documents",
        ),
        ({"query": "x", "documents": []}, "documents must not be an empty list", "documents"),
        ({"query": "x", "texts": []}, "texts must not be an empty list", "texts"),
        (
            {"query": "x", "documents": ["a"], "texts": ["a"]},
            "Exactly one of documents and texts is required, but the request has both of them",
            "documents",
        ),
        (
            {"query": "x", "documents": ["a", 1]},
            'documents[1] must be a string or {"text": ...}, but the request has 1',
            "documents",
        ),
        (
            {"query": "x", "documents": [{"text": "a", "video": "a.mp4"}]},
            "documents[0] has video, but this endpoint reads no videos; send frames as images",
            "documents",
        ),
        (
            {"query": 5, "documents": ["a"]},
            'query must be a string or {"text": ...}, but the request has 5',
            "query",
        ),
        (
            {"query": "x", "documents": ["a"], "top_n": -1},
            "top_n must be at least 0, but the request has -1",
            "top_n",
        ),
        (
            {"query": "x", "documents": ["a"], "format": "xml"},
            "format must be 'jina', 'cohere', 'sglang' or 'tei', but the request has \"xml\"",
            "format",
        ),
        (
            {"query": "x", "documents": ["a"], "max_tokens_per_doc": 5},
            "max_tokens_per_doc must be at least 12, but the request has 5. The server cuts",
            "max_tokens_per_doc",
        ),
        (
            {"query": "x", "documents": ["a"], "max_tokens_per_query": 5},
            "max_tokens_per_query must be at least 12, but the request has 5. The server cuts",
            "max_tokens_per_query",
        ),
    ],
)
async def test_what_is_wrong_is_named(ask, fields, message_part, param):
    error = problem(await ask("/v1/rerank", **fields))
    assert message_part in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("name", ["max_tokens_per_doc", "max_tokens_per_query"])
async def test_a_limit_of_0_tokens_is_no_limit_as_in_vllm(ask, pooling, name):
    response = await ask("/v1/rerank", query="x", documents=["a"], **{name: 0})
    assert response.status_code == 200, response.text
    assert not pooling.calls[-1].options.get("truncate")


async def test_an_unknown_format_in_the_query_string_is_refused(ask):
    error = problem(await ask("/v1/rerank?format=xml", query="x", documents=["a"]))
    assert (
        "format must be 'jina', 'cohere', 'sglang' or 'tei', but the request has \"xml\""
        in error["message"]
    )


async def test_an_embedding_model_is_not_taken_for_a_reranker(ask):
    error = problem(await ask("/v1/rerank", model="tiny-embed", query="x", documents=["a"]))
    assert (
        "The model 'tiny-embed' is an embedding model. Use 'tiny-rerank' for this request,"
        in error["message"]
    )


@pytest.mark.parametrize("why", ["missing", "unconfigured"])
async def test_without_a_reranker_it_is_a_404(ask, pooling, why):
    getattr(pooling, why).add("rerank")
    problem(await ask("/v1/rerank", query="x", documents=["a"]), 404)


async def test_a_client_that_goes_cancels_the_call(pooling):
    pooling.delay_s = 30.0
    app = create_app(Settings(served_model_name="echo"), FakeBackend)
    app.state.make_pooling = lambda: pooling
    body = b'{"query": "x", "documents": ["a"]}'
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        """Return the body first. When the backend has been called, report a disconnect."""
        if messages:
            return messages.pop()
        while not pooling.calls:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = {
        "type": "http", "method": "POST", "path": "/v1/rerank", "raw_path": b"/v1/rerank",
        "query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http",
        "server": ("x", 1), "client": ("y", 2), "asgi": {"version": "3.0"}, "root_path": "",
    }  # fmt: skip
    async with app.router.lifespan_context(app):
        async with asyncio.timeout(25):
            await app(scope, receive, send)
    assert len(pooling.cancelled) == 1


@pytest.mark.parametrize(
    ("left", "right"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_one_text_is_scored_with_each_of_several(ask, path, left, right):
    answer = (await ask(path, **{left: "red fox", right: DOCUMENTS})).json()
    assert answer["object"] == "list"
    assert answer["model"] == "tiny-rerank"
    assert answer["data"] == [
        {"index": 0, "object": "score", "score": 1.0},
        {"index": 1, "object": "score", "score": 0.5},
        {"index": 2, "object": "score", "score": 0.0},
    ]
    assert answer["usage"]["total_tokens"] == 28


@pytest.mark.parametrize("model", ["tiny-rerank", "tiny-embed"])
@pytest.mark.parametrize("name", ["max_tokens_per_doc", "max_tokens_per_query"])
async def test_a_score_request_cuts_texts_only_at_the_models_limit(ask, pooling, model, name):
    texts = {"text_1": "a", "text_2": "b" * 12}
    assert (await ask("/v1/score", model=model, **texts, **{name: 12})).status_code == 200
    assert pooling.calls[-1].options["truncate"] is True
    error = problem(await ask("/v1/score", model=model, **texts, **{name: 5}))
    assert error["param"] == name
    assert error["message"].startswith(f"{name} must be at least 12, but the request has 5.")


async def test_as_many_texts_on_both_sides_are_scored_in_pairs(ask):
    answer = (await ask("/v1/score", text_1=["red", "x"], text_2=["red fox", "fox"])).json()
    assert [item["score"] for item in answer["data"]] == [1.0, 0.0]


async def test_an_embedding_model_scores_by_cosine(ask):
    answer = await ask("/v1/score", model="tiny-embed", text_1="ab", text_2=["ab", "zzz"])
    left, right = np.array(vector("ab")), np.array(vector("zzz"))
    cosine = left @ right / np.linalg.norm(left) / np.linalg.norm(right)
    scores = [item["score"] for item in answer.json()["data"]]
    assert scores == pytest.approx([1.0, cosine], abs=1e-6)


@pytest.mark.parametrize(
    ("left", "right", "place"),
    [
        ("b" * 13, ["a"], "text_1: element 0"),
        ("a", ["a", "b" * 13], "text_2: element 1"),
        (["a", "b" * 13], ["a", "a"], "text_1: element 1"),
    ],
)
async def test_an_embedding_model_names_the_text_that_is_too_long(ask, left, right, place):
    answer = await ask("/v1/score", model="tiny-embed", text_1=left, text_2=right)
    assert problem(answer)["message"] == f"{place}: has 13 tokens; the limit is 12"


async def test_a_sentence_that_is_too_long_is_named(ask):
    inputs = {"source_sentence": "a", "sentences": ["b" * 13]}
    error = problem(await ask("/similarity", inputs=inputs))
    assert error["message"].startswith("inputs.sentences: element 0: has 13 tokens")
    inputs = {"source_sentence": "b" * 13, "sentences": ["a"]}
    error = problem(await ask("/similarity", inputs=inputs))
    assert error["message"].startswith("inputs.source_sentence: element 0: has 13 tokens")


@pytest.mark.parametrize(
    ("fields", "message_part"),
    [
        ({"text_1": "a"}, "text_2 is required, but the request does not contain it"),
        ({"text_1": "a", "text_2": []}, "text_2 must not be an empty list"),
        (
            {"text_1": ["a", "b"], "text_2": ["c"]},
            "text_1 must contain one text, or one text for each text in text_2. The request has 2",
        ),
        (
            {"queries": ["a", "b"], "documents": "c"},
            "queries must contain one text, or one text for each text in documents. The request",
        ),
    ],
)
async def test_sides_that_do_not_fit_are_refused(ask, fields, message_part):
    assert message_part in problem(await ask("/v1/score", **fields))["message"]


async def test_classes_come_with_labels_and_probabilities(ask):
    answer = (await ask("/classify", input=["yyyn", "n"])).json()
    assert answer["data"] == [
        {"index": 0, "label": "yes", "probs": [0.25, 0.75], "num_classes": 2},
        {"index": 1, "label": "no", "probs": [1.0, 0.0], "num_classes": 2},
    ]
    assert answer["model"] == "tiny-rerank"


async def test_a_reranker_without_labels_does_not_classify(ask, pooling):
    pooling.kinds["rerank"] = ["score"]
    error = problem(await ask("/classify", input="y"))
    assert (
        "The model 'tiny-rerank' cannot compute the probabilities of labels. It can compute:"
        in error["message"]
    )


async def test_passages_are_ranked_in_the_format_of_nim(ask, pooling):
    passages = [{"text": "x"}, {"text": "a b"}, "a"]
    answer = (await ask("/v1/ranking", query={"text": "a b"}, passages=passages)).json()
    assert [passage["index"] for passage in answer["rankings"]] == [1, 2, 0]
    logits = [passage["logit"] for passage in answer["rankings"]]
    assert logits == sorted(logits, reverse=True)
    assert answer["usage"]["prompt_tokens"] > 0
    assert pooling.calls[-1].options["activation"] == "none"
    refusal = await ask("/v1/ranking", query={"text": "a"}, passages=[{"image": "x"}])
    assert refusal.status_code == 400
    assert refusal.json()["error"]["param"] == "passages"
