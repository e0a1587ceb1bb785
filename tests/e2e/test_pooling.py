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
from fakes.live_frontend import wait_for
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
    """Return the vectors of a text or of several texts: an array with one row for each text."""
    answer = http.post("/v1/embeddings", json={"input": texts, **fields})
    assert answer.status_code == 200, answer.text
    return np.array([item["embedding"] for item in answer.json()["data"]])


def refusal(http, path, **body):
    """Send a wrong request, and return the error message."""
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
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

    counts_before = counts()

    embed(http, ["a", "b"])
    http.post("/v1/rerank", json={"query": "a", "documents": ["b"]}).raise_for_status()

    wait_for(lambda: all(count > counts_before[model] for model, count in counts().items()))


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
    whole, short = embed(http, TEXTS), embed(http, TEXTS, dimensions=32)
    assert short.shape == (len(TEXTS), 32)
    expected_short = whole[:, :32] / np.linalg.norm(whole[:, :32], axis=1, keepdims=True)
    assert np.abs(short - expected_short).max() < 1e-5


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
    message = refusal(http, "/v1/embeddings", input=["x", text])
    assert "element 1: the input has " in message
    assert "the limit is 512" in message
    assert embed(http, text, truncate=True).shape == (1, 128)


@pytest.mark.parametrize(
    ("body", "message"),
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
def test_what_cannot_be_embedded_is_refused_by_name(http, body, message):
    assert message in refusal(http, "/v1/embeddings", **body)


def test_the_embedder_gives_no_sparse_weights(http):
    assert "The model 'embed' cannot compute sparse weights. It can compute: one vector" in refusal(
        http, "/embed_sparse", inputs="x"
    )


def test_all_three_models_are_listed(http):
    listed = http.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["chat", "embed", "rerank"]


def test_small_requests_are_answered_beside_one_of_a_thousand_texts(served, http):
    many_texts = [f"{text} Number {n}." for n in range(250) for text in TEXTS]
    num_clients = 8
    small_delays_s = []

    def send_small_requests(client_number):
        while not large_request.done():
            small_started = time.monotonic()
            embed(http, f"Small {client_number}")
            if not large_request.done():
                small_delays_s.append(time.monotonic() - small_started)

    with concurrent.futures.ThreadPoolExecutor(1 + num_clients) as pool:
        started = time.monotonic()
        large_request = pool.submit(embed, http, many_texts)
        list(pool.map(send_small_requests, range(num_clients)))  # `list` raises the first error
        assert large_request.result().shape == (1000, 128)
        large_delay_s = time.monotonic() - started

    assert len(small_delays_s) >= num_clients, (large_delay_s, small_delays_s)
    assert np.median(small_delays_s) < large_delay_s / 2


def test_the_tensors_take_texts_and_ragged_ids_and_say_what_is_served(served):
    async def infer(model, *inputs):
        async with triton_grpc.InferenceServerClient(served.grpc_url) as client:
            return await client.infer(model, list(inputs))

    ids = tensor("input_ids", [5, 6, 7, 8], "INT32")
    lengths = tensor("input_lengths", [1, 3], "INT32")
    embedded = asyncio.run(infer("embedding", ids, lengths))
    assert embedded.as_numpy("embeddings").shape == (2, 128)
    assert embedded.as_numpy("num_tokens").tolist() == [1, 3]

    query, document = tensor("query", "Who is Hugo?"), tensor("documents", "Hugo is a baker.")
    scored = asyncio.run(infer("rerank", query, document))
    assert scored.as_numpy("scores").shape == (1,)

    described = asyncio.run(infer("embedding", tensor("return_info", True, "BOOL")))
    assert json.loads(described.as_numpy("info")[0])["kinds"] == ["dense"]

    with pytest.raises(InferenceServerException) as caught:
        asyncio.run(infer("rerank", query))
    assert caught.value.message().startswith(
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
    cpu_s_at_start = cpu_seconds(served)

    async def start_and_cancel():
        texts = tensor("texts", [f"{TEXTS[3]} {n}" for n in range(8_000)])
        async with triton_grpc.InferenceServerClient(served.grpc_url) as client:
            call = asyncio.ensure_future(client.infer("embedding", [texts]))
            while cpu_seconds(served) - cpu_s_at_start < 0.5:  # wait until a worker is busy
                assert not call.done()
                await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(start_and_cancel())

    cpu_s_at_cancel = cpu_s = cpu_seconds(served)
    # Wait until the workers use no CPU time. After the cancellation, they may use at most 10 s of
    # CPU time, although the whole request would take about a minute.
    while time.sleep(1.0) or cpu_seconds(served) - cpu_s > 0.05:
        cpu_s = cpu_seconds(served)
        assert cpu_s - cpu_s_at_cancel < 10
    assert embed(http, "x").shape == (1, 128)


def cpu_seconds(served):
    """Return the CPU time of all workers, in seconds."""
    return sum(sum(worker.cpu_times()[:2]) for worker in workers(served))


def test_killed_workers_are_reported_and_started_again(served, http):
    victims = workers(served)
    assert len(victims) == 2
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)

    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ):
        deadline = time.monotonic() + 240
        while (answer := http.post(path, json=body)).status_code != 200:
            message = answer.json()["error"]["message"]
            assert "restarting" in message or "process ended" in message, message
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert not {worker.pid for worker in workers(served)} & {victim.pid for victim in victims}
