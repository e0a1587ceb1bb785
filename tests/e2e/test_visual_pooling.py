"""Tests of models that embed and rerank images on a real server.

The tests compare the vectors and scores with the results of the library transformers.
"""

import base64
import json
import struct
import time
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
import tritonclient.http
from backend.pooling.tiny_images import (
    answer_logits,
    last_vectors,
    picture,
    png,
    save_page_model,
    save_towers,
    save_vision_language,
    user,
)
from docs.blocks import Ports, read_blocks, run_block
from e2e.scripted import DEMO, ROOT
from fakes.live_server import serve
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

# The server starts four models, each with a process that decodes images. On a busy machine, this
# takes minutes.
_START_TIMEOUT_S = 1000
pytestmark = [pytest.mark.triton, pytest.mark.timeout(2 * _START_TIMEOUT_S)]

TEXTS = ["a page about birds", "what is in this picture?"]
PAGE = ROOT / "docs" / "how-to" / "serve-embeddings-and-rerankers.md"
IMAGES = [picture(1), picture(2, (40, 72))]
MODELS = """
[chat]
model = "{demo}"
load_at_start = false

[look]
kind = "embedding"
hang_timeout_s = 300
model = "{look}"
task = "embed"

[towers]
kind = "embedding"
hang_timeout_s = 300
model = "{towers}"

[pages]
kind = "embedding"
hang_timeout_s = 300
model = "{pages}"

[judge]
kind = "rerank"
hang_timeout_s = 300
model = "{judge}"
task = "rerank"
"""


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


URLS = [data_url(png(image)) for image in IMAGES]
PARTS = [{"image": URLS[0]}, {"image": URLS[1], "text": TEXTS[1]}, {"text": TEXTS[0]}]


@pytest.fixture(scope="module")
def page_checkpoint(tmp_path_factory):
    """The folder of the checkpoint `pages`, its loaded transformers model, and its processor."""
    folder = tmp_path_factory.mktemp("pages")
    return folder, *save_page_model("ColQwen2", tmp_path_factory.mktemp("vlm"), folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, page_checkpoint):
    """The folders of the checkpoints: name of the model -> folder."""
    look = save_vision_language("qwen2_vl", tmp_path_factory.mktemp("look"))
    towers = save_towers(tmp_path_factory.mktemp("towers"))
    return {"look": look, "towers": towers, "pages": page_checkpoint[0], "judge": look}


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory, fork_server):
    """A server with the models in `MODELS`. A scripted engine replaces the language model."""
    folder = tmp_path_factory.mktemp("models")
    models = folder / "models.toml"
    models.write_text(MODELS.format(demo=DEMO, **folders))
    script = folder / "script.json"
    script.write_text(json.dumps([{"when": "", "text": "hello"}]))
    with serve(
        folder,
        f"--config={models}",
        f"--model-repository={ROOT / 'model_repository'}",
        NEREID_ENGINE="scripted",
        NEREID_SCRIPT=str(script),
        XDG_STATE_HOME=str(folder / "state"),
        **fork_server,
    ) as running:
        running.wait_until_ready(_START_TIMEOUT_S)
        yield running


@pytest.fixture(scope="module")
def post(server):
    """A function that sends a request, and returns the HTTP status and the JSON response.

    The function repeats a request after the status 503. The frontend returns 503 if a busy model
    takes more than five seconds to answer the frontend's request for the model's description.
    """

    def send(path, **body):
        url = f"http://127.0.0.1:{server.ports['openai']}/v1/{path}"
        deadline = time.monotonic() + 120
        while True:
            answer = httpx.post(url, json=body, timeout=120)
            if answer.status_code != 503 or time.monotonic() > deadline:
                return answer.status_code, answer.json()
            time.sleep(0.5)

    return send


@pytest.fixture(scope="module")
def triton(server):
    address = f"127.0.0.1:{server.ports['http']}"
    client = tritonclient.http.InferenceServerClient(address, network_timeout=120)
    yield client
    client.close()


def strings(name, values):
    """Return an input tensor of strings."""
    tensor = tritonclient.http.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode() for value in values], dtype=object))
    return tensor


@pytest.fixture(scope="module")
def look_vectors(folders):
    """The vectors of `PARTS`, computed by transformers."""
    chats = [[user(IMAGES[0])], [user(IMAGES[1], TEXTS[1])], [user(TEXTS[0])]]
    return last_vectors(folders["look"], chats)


@pytest.fixture(scope="module")
@torch.inference_mode()
def page_vectors(page_checkpoint):
    """The token vectors of a query and of two images (as pages), computed by transformers."""
    _, model, processor = page_checkpoint
    batches = [processor.process_queries(text=[TEXTS[0]])]
    batches += [processor.process_images(images=[image]) for image in IMAGES]
    return [model(**batch).embeddings[0].numpy() for batch in batches]


def test_the_openai_client_gets_the_vectors_of_images_and_of_mixed_inputs(server, look_vectors):
    url = f"http://127.0.0.1:{server.ports['openai']}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=9) as client:
        answer = client.embeddings.create(model="look", input=PARTS)
    vectors = [item.embedding for item in answer.data]
    np.testing.assert_allclose(vectors, look_vectors, atol=2e-4)
    assert answer.usage.prompt_tokens > len(IMAGES)


def test_tritonclient_gets_the_vectors_of_images_and_of_mixed_inputs(triton, look_vectors):
    parts = strings("parts", [json.dumps(part) for part in PARTS])
    answer = triton.infer("look", [parts])
    np.testing.assert_allclose(answer.as_numpy("embeddings"), look_vectors, atol=2e-4)
    assert (answer.as_numpy("num_tokens") > 0).all()


@torch.inference_mode()
def clip_vectors(folder, texts):
    """Return the vectors of each text and of all `IMAGES`, computed by transformers."""
    model = CLIPModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = CLIPImageProcessor.from_pretrained(folder)
    tokens = [tokenizer(text, return_tensors="pt") for text in texts]
    pixels = processor(images=IMAGES, return_tensors="pt").pixel_values
    text_vectors = [model.get_text_features(**each).pooler_output for each in tokens]
    return text_vectors, model.get_image_features(pixels).pooler_output


def test_towers_embed_texts_and_images(post, triton, folders):
    texts = ["w1 w2 w3", "w9"]
    text_vectors, image_vectors = clip_vectors(folders["towers"], texts)
    expected = torch.cat([text_vectors[0], image_vectors, text_vectors[1]]).numpy()

    inputs = [texts[0], {"image": URLS[0]}, {"image": URLS[1]}, texts[1]]
    status, answer = post("embeddings", model="towers", input=inputs)
    assert status == 200, answer
    vectors = [item["embedding"] for item in answer["data"]]
    np.testing.assert_allclose(vectors, expected, atol=2e-4)

    parts = strings("parts", [json.dumps(PARTS[0])])
    embeddings = triton.infer("towers", [parts]).as_numpy("embeddings")
    np.testing.assert_allclose(embeddings[0], expected[1], atol=2e-4)


def test_queries_and_pages_have_one_vector_for_each_token(triton, post, page_vectors):
    inputs = [{"text": TEXTS[0]}, *({"image": url} for url in URLS)]

    parts = strings("parts", [json.dumps(part) for part in inputs])
    outputs = triton.infer("pages", [parts])
    counts = outputs.as_numpy("num_vectors")
    vectors_from_triton = np.split(outputs.as_numpy("embeddings"), np.cumsum(counts)[:-1])
    for vectors, expected in zip(vectors_from_triton, page_vectors, strict=True):
        np.testing.assert_allclose(vectors, expected, atol=2e-4)

    status, answer = post("embeddings", model="pages", input=inputs)
    assert status == 200, answer
    for item, expected in zip(answer["data"], page_vectors, strict=True):
        np.testing.assert_allclose(item["embedding"], expected, atol=2e-4)


def test_pages_are_ranked_by_maxsim(post, page_vectors):
    query, *pages = page_vectors
    expected_scores = [(query @ page.T).max(axis=1).sum() for page in pages]
    documents = [{"image": url} for url in URLS]

    status, answer = post("rerank", model="pages", query=TEXTS[0], documents=documents)
    assert status == 200, answer
    assert set(answer) == {"id", "model", "usage", "results"}
    ranked = sorted(range(len(pages)), key=lambda page: -expected_scores[page])
    assert [result["index"] for result in answer["results"]] == ranked
    scores = [result["relevance_score"] for result in answer["results"]]
    np.testing.assert_allclose(scores, sorted(expected_scores, reverse=True), atol=2e-3)

    status, answer = post("score", model="pages", text_1=TEXTS[0], text_2=documents)
    assert status == 200, answer
    scores = [item["score"] for item in answer["data"]]
    np.testing.assert_allclose(scores, expected_scores, atol=2e-3)


def test_a_reranker_scores_images_and_texts(post, triton, folders):
    logits = answer_logits(folders["judge"], TEXTS[0], [IMAGES[0], TEXTS[1]])
    expected = 1 / (1 + np.exp(-np.array(logits)))
    documents = [{"type": "image_url", "image_url": {"url": URLS[0]}}, TEXTS[1]]

    status, answer = post("rerank", model="judge", query=TEXTS[0], documents=documents)
    assert status == 200, answer
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    np.testing.assert_allclose([scores[0], scores[1]], expected, atol=1e-3)

    status, answer = post("score", model="judge", queries=TEXTS[0], documents=documents)
    assert status == 200, answer
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, atol=1e-3)

    parts = [json.dumps({"image": URLS[0]}), json.dumps({"text": TEXTS[1]})]
    outputs = triton.infer("judge", [strings("query", TEXTS[:1]), strings("parts", parts)])
    np.testing.assert_allclose(outputs.as_numpy("scores"), expected, atol=1e-3)


def test_the_examples_of_the_manual_print_what_the_page_shows(server, tmp_path):
    (tmp_path / "page.png").write_bytes(png(IMAGES[0]))
    ports = Ports(openai=server.ports["openai"])
    blocks = [block for block in read_blocks(PAGE) if block.reason.startswith(Path(__file__).name)]
    examples = [
        replace(block, output=shown)
        for block, shown in pairwise(blocks)
        if block.language in ("python", "bash")
    ]
    assert len(examples) == 3
    for example in examples:
        run_block(example, ports, tmp_path)


def bomb() -> bytes:
    """Return a PNG file of 40 kB whose header claims an image of 60,000 x 60,000 pixels."""

    def chunk(name, content):
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    # The last five values stand for an RGB image with 8 bits for each colour.
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(40_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (bomb(), "limit of 16000000 pixels"),
        (png(IMAGES[0])[:400], "the image cannot be decoded"),
        (b"<svg/>", "the file is not an image"),
    ],
    ids=["bomb", "truncated", "svg"],
)
@pytest.mark.parametrize("model", ["look", "towers", "pages", "judge"])
def test_a_hostile_image_is_refused_and_the_model_keeps_serving(post, model, data, problem):
    def use_image(url):
        if model == "judge":
            return post("rerank", model=model, query="a", documents=["b", {"image": url}])
        return post("embeddings", model=model, input=["w1", {"image": url}])

    status, answer = use_image(data_url(data))
    assert status == 400, answer
    assert problem in answer["error"]["message"]
    assert "element 1" in answer["error"]["message"]
    assert use_image(URLS[0])[0] == 200
