"""Tests that each route answers random bodies, or refuses them with a message.

No route may answer with a status of 500 or more.
"""

import json

import httpx
import pytest
from fuzz.values import ODD_NAMES, json_bytes, mutated, odd

pytestmark = pytest.mark.triton

_WORDS = ["Hello there", "Where does Hugo live?"]
_CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
    ],
    "max_tokens": 3,
    "temperature": 0.5,
}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
BODIES = {
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
    "/v1/chat/completions": _CHAT | {"tools": [_TOOL], "tool_choice": "auto", "stop": ["x"]},
    "/v1/completions": {"prompt": _WORDS, "max_tokens": 3, "logprobs": 2, "echo": True, "n": 2},
    "/v1/embeddings": {"input": _WORDS, "encoding_format": "float", "dimensions": 8},
    "/pooling": {"input": _WORDS, "task": "embed"},
    "/embed": {"inputs": _WORDS, "truncate": True},
    "/embed_all": {"inputs": _WORDS},
    "/embed_sparse": {"inputs": _WORDS},
    "/v1/rerank": {"query": "Hugo?", "documents": _WORDS, "top_n": 1, "return_documents": True},
    "/v2/rerank": {"query": "Hugo?", "documents": _WORDS},
    "/rerank": {"query": "Hugo?", "texts": _WORDS},
    "/score": {"text_1": "Hugo", "text_2": _WORDS},
    "/classify": {"input": _WORDS},
    "/tokenize": {"prompt": "Hello"},
}
_FIELDS = (
    *ODD_NAMES,
    *("max_tokens", "top_p", "top_k", "logit_bias", "response_format", "stream_options"),
    *("logprobs", "top_logprobs", "best_of", "suffix", "user", "model", "prompt_logprobs"),
    *("min_tokens", "presence_penalty", "repetition_penalty", "structured_outputs"),
    *("chat_template_kwargs", "allowed_token_ids", "bad_words", "stop_token_ids"),
    *("priority", "truncate_prompt_tokens"),
)


@pytest.fixture(scope="module")
def client(server):
    url = f"http://127.0.0.1:{server.openai_port}"
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as opened:
        yield opened


def defect_of(response):
    """Return a description of what is wrong with a response, or None if nothing is wrong."""
    if response.status_code >= 500:
        return f"{response.status_code} {response.text}"
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        lines = [line for line in response.text.splitlines() if line.startswith('data: {"error"')]
        errors = [json.loads(line.removeprefix("data: "))["error"] for line in lines]
        return next((str(e) for e in errors if e.get("code") == "internal_error"), None)
    answer = response.json()
    if response.status_code >= 400 and not answer["error"]["message"]:
        return f"{response.status_code} without a message"
    return None


@pytest.mark.parametrize("path", list(BODIES))
def test_a_body_of_any_kind_is_answered_or_refused(client, random_cases, check_server, path):
    for number, rng in random_cases(path, default_number=24):
        body = odd(rng) if rng.random() < 0.05 else mutated(rng, BODIES[path], _FIELDS)
        data = json_bytes(rng, body)
        headers = {"Content-Type": "application/json"}
        try:
            response = client.post(path, content=data, headers=headers)
        except httpx.HTTPError as error:
            pytest.fail(f"case {number}: {error!r} after {data!r}")
        defect = defect_of(response)
        assert defect is None, f"case {number}: {defect} after {data!r}"
    check_server()


@pytest.mark.parametrize("path", ["/v1/models/x", "/nothing", "/v1/chat/completions", "/%00"])
@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "POST"])
def test_any_method_on_any_path_is_answered(client, method, path):
    response = client.request(method, path)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"]
