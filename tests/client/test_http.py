"""Tests of the frontend's list of models, health routes, request ids, API key and CORS."""

import threading
import time
from functools import partial
from importlib import metadata

import anyio
import pytest
from fakes.fake_backend import FakeBackend
from nereid_client import request_context
from nereid_client.app import create_app
from nereid_client.routes import chat, completions, messages, responses, tokenize
from nereid_client.settings import Settings

pytestmark = pytest.mark.anyio

LIMITS = {
    "max_model_len": 4096,
    "max_prompt_bytes": 65_536,
    "max_request_bytes": 5_000_000,
    "max_messages": 682,
    "max_tools": 2048,
}
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def test_the_served_model_is_listed_and_can_be_fetched(connect):
    async with connect() as client:
        listed = (await client.get("/v1/models")).json()
        fetched = (await client.get("/v1/models/echo")).json()
    assert listed["object"] == "list"
    assert listed["data"] == [fetched]
    assert fetched["id"] == "echo"
    assert fetched["object"] == "model"


async def test_the_list_of_models_may_have_a_slash_at_the_end_of_its_path(connect):
    async with connect() as client:
        listed = (await client.get("/v1/models")).json()
        assert (await client.get("/v1/models/")).json() == listed


async def test_models_have_their_max_model_len_as_in_vllm(connect_pooling, backend):
    backend.limits = LIMITS
    async with connect_pooling() as client:
        models = (await client.get("/v1/models")).json()["data"]
        fetched = (await client.get("/v1/models/echo")).json()
    assert fetched["max_model_len"] == 4096
    assert [model["max_model_len"] for model in models] == [4096, 12, 12]


async def test_another_models_page_is_a_404_also_with_a_slash_in_its_name(connect):
    async with connect() as client:
        response = await client.get("/v1/models/org/name")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/health", "/ping", "/health/ready"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_follows_the_server(connect, backend, path, method):
    async with connect() as client:
        assert (await client.request(method, path)).status_code == 200
        backend.is_up = False
        response = await client.request(method, path)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


async def test_version_is_given(connect):
    async with connect() as client:
        answer = (await client.get("/version")).json()
    assert answer == {"version": metadata.version("nereid-client")}


async def test_a_request_id_is_echoed_and_names_the_answer(connect, backend):
    async with connect() as client:
        headers = {"X-Request-Id": "trace-7"}
        response = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
    assert response.headers["x-request-id"] == "trace-7"
    assert response.json()["id"] == "chatcmpl-trace-7"
    assert backend.generations[0].request_id.startswith("trace-7-")


async def test_the_same_request_id_twice_gives_the_backend_two_names(connect, backend):
    async with connect() as client:
        for _ in range(2):
            headers = {"X-Request-Id": "same"}
            await client.post("/v1/chat/completions", json=HELLO, headers=headers)
    first, second = (generation.request_id for generation in backend.generations)
    assert first != second


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/responses"])
async def test_a_client_that_leaves_in_the_middle_of_its_body_causes_no_error(path):
    app = create_app(Settings(served_model_name="echo"), FakeBackend)
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    messages = [
        {"type": "http.request", "body": b'{"messages": [', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return messages.pop(0)

    async def send(message):
        pass

    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    assert not messages


@pytest.mark.parametrize("given", [None, "", "x" * 129, "two words", "tab\there"])
async def test_a_missing_or_unusable_request_id_is_replaced(connect, given):
    async with connect() as client:
        headers = {} if given is None else {"X-Request-Id": given}
        response = await client.get("/version", headers=headers)
    assert len(response.headers["x-request-id"]) == 32


async def test_with_a_key_only_its_bearer_reaches_the_api(connect):
    async with connect(api_key="s3cret") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            response = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        headers = {"Authorization": "Bearer s3cret"}
        response = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
        assert response.status_code == 200
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "bearer s3cret"}, 200),
        ({"api-key": "s3cret"}, 200),
        ({"api-key": "wrong"}, 401),
        ({"api-key": ""}, 401),
        ({"Authorization": "Bearer wrong", "api-key": "s3cret"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Basic s3cret"}, 401),
        ({"Authorization": "Bearer s3cret s3cret"}, 401),
        ({"Authorization": "Bearer \u00e9".encode("latin-1")}, 401),
    ],
)
async def test_the_key_comes_as_a_bearer_token_or_as_api_key(connect, headers, status):
    async with connect(api_key="s3cret") as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == status


async def test_an_allowed_origin_may_call_and_others_may_not(connect):
    async with connect(cors_origins="https://a.example, https://b.example", api_key="k") as client:
        preflight = {
            "Origin": "https://b.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        allowed = await client.options("/v1/chat/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://b.example"
        preflight["Origin"] = "https://c.example"
        refused = await client.options("/v1/chat/completions", headers=preflight)
        assert "access-control-allow-origin" not in refused.headers


async def test_a_page_of_an_allowed_origin_may_read_retry_after(connect, backend):
    async with connect(cors_origins="https://a.example") as client:
        backend.is_up = False
        origin = {"Origin": "https://a.example"}
        refused = await client.post("/v1/chat/completions", json=HELLO, headers=origin)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    exposed = refused.headers["access-control-expose-headers"].lower()
    # Anthropic's library reads the header `request-id`.
    names = set(exposed.replace(" ", "").split(","))
    assert {"retry-after", "x-request-id", "request-id"} <= names


async def test_without_cors_origins_no_origin_is_allowed(connect):
    async with connect() as client:
        response = await client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("origin", "site", "status"),
    [
        ("https://c.example", "cross-site", 403),
        ("null", "cross-site", 403),
        ("http://other.localhost", "same-site", 403),
        ("https://a.example", "cross-site", 200),
        ("http://127.0.0.1:9000", "same-origin", 200),
    ],
)
async def test_a_page_of_another_origin_cannot_send_json_as_plain_text(
    connect, origin, site, status
):
    headers = {"Origin": origin, "Sec-Fetch-Site": site, "Content-Type": "text/plain"}
    async with connect(cors_origins="https://a.example") as client:
        response = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
        assert (await client.get("/", headers=headers)).status_code == 200
    assert response.status_code == status
    if status == 403:
        assert origin in response.json()["error"]["message"]


async def test_the_backend_is_closed_at_the_end(connect, backend):
    async with connect():
        assert not backend.is_closed
    assert backend.is_closed


async def test_other_clients_are_served_between_large_bodies(connect, monkeypatch):
    num_parsed = 0
    parse_json_object = request_context.parse_json_object

    def parse_slowly(raw):
        nonlocal num_parsed
        num_parsed += 1
        if len(raw) > request_context._LARGE_BODY_BYTES:
            time.sleep(0.05)
        return parse_json_object(raw)

    monkeypatch.setattr(request_context, "parse_json_object", parse_slowly)
    large = {"prompt": "a" * request_context._LARGE_BODY_BYTES, "max_tokens": "wrong"}
    async with connect() as client, anyio.create_task_group() as large_requests:
        for _ in range(8):
            large_requests.start_soon(partial(client.post, "/v1/completions", json=large))
        while num_parsed == 0:
            await anyio.sleep(0)
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200
        num_parsed_before_the_response = num_parsed
    assert num_parsed == 9  # eight large requests and the chat
    assert num_parsed_before_the_response <= 4


@pytest.mark.parametrize(
    ("route", "path"),
    [
        (chat, "/v1/chat/completions"),
        (completions, "/v1/completions"),
        (messages, "/v1/messages"),
        (messages, "/v1/messages/count_tokens"),
        (responses, "/v1/responses"),
        (tokenize, "/tokenize"),
        (tokenize, "/detokenize"),
    ],
)
async def test_other_clients_are_served_while_a_large_body_is_validated(
    connect, monkeypatch, route, path
):
    has_started, has_ended = threading.Event(), threading.Event()

    def validate_slowly(kind, body):
        has_started.set()
        time.sleep(0.2)
        has_ended.set()
        return request_context.validate(kind, body)

    monkeypatch.setattr(route, "validate", validate_slowly)
    large = {"user": "a" * request_context._LARGE_BODY_BYTES}
    async with connect() as client, anyio.create_task_group() as large_requests:
        large_requests.start_soon(partial(client.post, path, json=large))
        while not has_started.is_set():
            await anyio.sleep(0.001)
        assert (await client.get("/v1/models")).status_code == 200
        assert not has_ended.is_set()


@pytest.mark.parametrize(
    ("route", "name", "path", "body"),
    [
        (
            chat,
            "chat_completion",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "word " * 1100}], "logprobs": True},
        ),
        (
            completions,
            "completion",
            "/v1/completions",
            {"prompt": "word " * 1100, "logprobs": 1, "max_tokens": 1100},
        ),
    ],
)
async def test_other_clients_are_served_while_many_logprobs_are_converted(
    connect, monkeypatch, route, name, path, body
):
    has_started, has_ended = threading.Event(), threading.Event()
    convert = getattr(route, name)

    def convert_slowly(*arguments):
        has_started.set()
        time.sleep(0.2)
        has_ended.set()
        return convert(*arguments)

    monkeypatch.setattr(route, name, convert_slowly)
    answers = []

    async def send(client):
        answers.append(await client.post(path, json=body))

    async with connect() as client, anyio.create_task_group() as large_requests:
        large_requests.start_soon(send, client)
        while not has_started.is_set():
            await anyio.sleep(0.001)
        assert (await client.get("/v1/models")).status_code == 200
        assert not has_ended.is_set()
    assert answers[0].status_code == 200
    assert answers[0].json()["choices"][0]["logprobs"]
