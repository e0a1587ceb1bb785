"""Tests of the embedding model and the reranker on a real server, over HTTP and over gRPC."""

import asyncio
import concurrent.futures
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import psutil
import pytest
import tritonclient.grpc.aio as triton_grpc
from e2e.triton_client import tensor
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.triton

DEMO = Path(__file__).resolve().parents[2] / "demo"
TEXTS = ["Hugo lives in Pinemark.", "Where does Hugo live?", "x", "The river Cold " * 30]


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served.openai_url.removesuffix("/v1"), timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def expected():
    """The vectors of `TEXTS` that the library transformers computes with the same checkpoint."""
    sys.path.insert(0, str(DEMO))
    from retrieval_scores import Embedder

    return Embedder().encode(TEXTS).numpy()


def embed(http, texts, **fields):
    answer = http.post("/v1/embeddings", json={"input": texts, **fields})
    assert answer.status_code == 200, answer.text
    return np.array([item["embedding"] for item in answer.json()["data"]])


def refusal(http, path, status=400, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def workers(served):
    descendants = psutil.Process(served.process.pid).children(recursive=True)
    return [p for p in descendants if "serving.pooling.pooling_worker" in " ".join(p.cmdline())]


def test_the_page_of_the_frontend_counts_the_requests_of_both_models(http):
    def counts():
        page = http.get("/metrics").text
        name = "nereid:pooling_requests_total"
        rows = re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.MULTILINE)
        return {
            model: sum(float(value) for labels, value in rows if f'model_name="{model}"' in labels)
            for model in ("embedding", "rerank")
        }

    before = counts()
    embed(http, ["a", "b"])
    http.post("/v1/rerank", json={"query": "a", "documents": ["b"]}).raise_for_status()
    deadline = time.monotonic() + 30
    while not all(counts()[model] > before[model] for model in before):
        assert time.monotonic() < deadline, (before, counts())
        time.sleep(0.2)


def test_the_openai_client_gets_the_checkpoints_own_vectors(served, expected):
    with openai.OpenAI(base_url=served.openai_url, api_key="none") as client:
        answer = client.embeddings.create(model="embed", input=TEXTS)
    vectors = np.array([item.embedding for item in answer.data])
    cosines = (vectors * expected).sum(1)
    assert cosines.min() > 0.99999
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 100


def test_a_text_alone_has_the_vector_that_it_has_among_others(http):
    together = embed(http, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        assert np.abs(embed(http, text)[0] - vector).max() < 1e-5


def test_shorter_vectors_are_cut_and_then_normalised(http):
    whole, cut = embed(http, TEXTS), embed(http, TEXTS, dimensions=32)
    assert cut.shape == (len(TEXTS), 32)
    again = whole[:, :32] / np.linalg.norm(whole[:, :32], axis=1, keepdims=True)
    assert np.abs(cut - again).max() < 1e-5


def test_a_prompts_name_puts_its_text_before(http):
    named = embed(http, "Who is Hugo?", prompt_name="query")
    written = embed(http, "question: Who is Hugo?")
    assert np.abs(named - written).max() < 1e-5


def test_documents_are_ordered_by_their_relevance(http):
    documents = ["Hugo has a turtle.", "Hugo lives in Pinemark.", "Bram lives in Korvale."]
    body = {"query": "Where does Hugo live?", "documents": documents}
    results = http.post("/v1/rerank", json=body).json()["results"]
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] > 0.5 > results[1]["relevance_score"]
    raw = http.post("/rerank", json={"query": body["query"], "texts": documents[:2]}).json()
    assert raw[0]["score"] == pytest.approx(results[0]["relevance_score"], abs=1e-5)


def test_an_empty_string_has_a_vector_and_an_empty_list_is_refused(http):
    assert embed(http, "").shape == (1, 128)
    assert "input must not be an empty list" in refusal(http, "/v1/embeddings", input=[])


def test_ten_thousand_texts_come_back_in_order(http):
    texts = [f"Hugo has {n} turtles." for n in range(10_000)]
    vectors = embed(http, texts)
    assert vectors.shape == (10_000, 128)
    assert np.abs(embed(http, texts[7_777])[0] - vectors[7_777]).max() < 1e-5


def test_a_megabyte_of_text_is_refused_with_its_length_and_cut_when_asked(http):
    text = "Hugo lives. " * 90_000
    said = refusal(http, "/v1/embeddings", input=["x", text])
    assert "element 1: the input has " in said
    assert "the limit is 512" in said
    assert embed(http, text, truncate=True).shape == (1, 128)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": "x", "dimensions": 0}, "dimensions must be at least 1, but the request has 0"),
        ({"input": "x", "dimensions": 129}, "must be an integer from 1 to 128"),
        ({"input": "x", "prompt_name": "poem"}, "the model has no prompt 'poem'"),
        ({"input": {"image": "data:image/png;base64,aGk="}}, "does not accept images"),
        ({"input": {"image": "%%%"}}, "the image is not valid base64"),
        ({"input": {"image": "https://x.y/z.png"}}, "does not fetch URLs"),
        ({"input": [[1, 99_999_999]]}, "but one is 99999999"),
        ({"input": "x", "model": "rerank"}, "The model 'rerank' is a reranker. Use 'embed'"),
        ({"input": "x", "model": "chat"}, "The model 'chat' is the language model. Use 'embed'"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(http, body, said):
    assert said in refusal(http, "/v1/embeddings", **body)


def test_the_embedder_gives_no_sparse_weights(http):
    assert "The model 'embed' cannot compute sparse weights. It can compute: one vector" in refusal(
        http, "/embed_sparse", inputs="x"
    )


def test_all_three_models_are_listed(http):
    listed = http.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["chat", "embed", "rerank"]


def test_small_requests_are_answered_beside_one_of_a_thousand_texts(served, http):
    big = [f"{text} Number {n}." for n in range(250) for text in TEXTS]
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        started = time.monotonic()
        whole = pool.submit(embed, http, big)
        delays = []

        def small(n):
            while not whole.done():
                begun = time.monotonic()
                embed(http, f"Small {n}")
                if not whole.done():
                    delays.append(time.monotonic() - begun)

        list(pool.map(small, range(8)))
        assert whole.result().shape == (1000, 128)
        took = time.monotonic() - started
    assert len(delays) >= 8, (took, delays)
    assert np.median(delays) < took / 2


def test_the_tensors_take_texts_and_ragged_ids_and_say_what_is_served(served):
    async def ask():
        client = triton_grpc.InferenceServerClient(served.grpc_url)
        ids = [tensor("input_ids", [5, 6, 7, 8], "INT32"), tensor("input_lengths", [1, 3], "INT32")]
        of_ids = await client.infer("embedding", ids)
        scored = await client.infer(
            "rerank",
            [tensor("query", "Who is Hugo?"), tensor("documents", "Hugo is a baker.")],
        )
        info = await client.infer("embedding", [tensor("return_info", True, "BOOL")])
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("rerank", [tensor("query", "Who is Hugo?")])
        await client.close()
        return of_ids, scored, info, caught.value

    of_ids, scored, info, error = asyncio.run(ask())
    assert of_ids.as_numpy("embeddings").shape == (2, 128)
    assert of_ids.as_numpy("num_tokens").tolist() == [1, 3]
    assert scored.as_numpy("scores").shape == (1,)
    assert json.loads(info.as_numpy("info")[0])["kinds"] == ["dense"]
    assert error.message().startswith(
        "[INVALID_ARGUMENT] query: a request to a reranker must have query, and either documents "
        "or parts"
    )


def test_infer_over_http_reaches_the_model_too(served):
    body = {"inputs": [{"name": "texts", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
    url = f"{served.http_url}/v2/models/embedding/infer"
    outputs = httpx.post(url, json=body, timeout=120).json()["outputs"]
    shapes = {output["name"]: output["shape"] for output in outputs}
    assert shapes == {"embeddings": [1, 128], "num_tokens": [1]}


def test_a_cancelled_call_leaves_the_model_free(served, http):
    before = cpu_seconds(served)

    async def give_up():
        client = triton_grpc.InferenceServerClient(served.grpc_url)
        texts = tensor("texts", [f"{TEXTS[3]} {n}" for n in range(8_000)])
        call = asyncio.ensure_future(client.infer("embedding", [texts]))
        while cpu_seconds(served) - before < 0.5:
            assert not call.done()
            await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await client.close()

    asyncio.run(give_up())
    begun = last = cpu_seconds(served)
    # Wait until the workers use no CPU time. After the cancellation, they may use at most 10 s of
    # CPU time, although the whole request would take about a minute.
    while time.sleep(1.0) or cpu_seconds(served) - last > 0.05:
        last = cpu_seconds(served)
        assert last - begun < 10
    assert embed(http, "x").shape == (1, 128)


def cpu_seconds(served):
    return sum(sum(worker.cpu_times()[:2]) for worker in workers(served))


def test_killed_workers_are_reported_and_started_again(served, http):
    victims = workers(served)
    assert len(victims) == 2
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    paths = {
        "/v1/embeddings": {"input": "x"},
        "/v1/rerank": {"query": "x", "documents": ["y"]},
    }
    for path, body in paths.items():
        deadline = time.monotonic() + 240
        while (answer := http.post(path, json=body)).status_code != 200:
            message = answer.json()["error"]["message"]
            assert "restarting" in message or "process ended" in message, message
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert not {worker.pid for worker in workers(served)} & {victim.pid for victim in victims}
