"""Tests of the route `/v1/cache`, and of the request fields that retain cached prefixes."""

import json

import pytest

pytestmark = pytest.mark.anyio

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
FIELDS = {"prompt_cache_key": "chat-1", "prompt_cache_retention": "1h"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {**HELLO, "max_tokens": 5}),
    ],
)
async def test_the_fields_of_a_session_are_passed_on(connect, backend, path, body):
    async with connect() as client:
        response = await client.post(path, json={**body, **FIELDS})
    assert response.status_code == 200, response.text
    generation = backend.generations[-1]
    sent = json.loads(generation.chat_request or generation.sampling_parameters)
    assert {name: sent[name] for name in FIELDS} == FIELDS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_cache_key", 5),
        ("prompt_cache_key", "x" * 257),
        ("prompt_cache_retention", "2h"),
    ],
)
async def test_a_wrong_field_of_a_session_is_refused(connect, field, value):
    async with connect() as client:
        response = await client.post("/v1/chat/completions", json={**HELLO, field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_statistics_name_the_model(connect, backend):
    backend.cache_answer = {"num_blocks": 7, "sessions": []}
    async with connect() as client:
        response = await client.get("/v1/cache")
    expected = {"object": "cache", "model": "echo", "num_blocks": 7, "sessions": []}
    assert response.json() == expected
    assert backend.cache_calls == [{"cache": "statistics"}]


async def test_a_session_is_extended_and_dropped(connect, backend):
    backend.cache_answer = {"num_sessions": 1, "num_dropped_tokens": 64}
    async with connect() as client:
        extended = await client.post("/v1/cache", json=FIELDS)
        dropped = await client.delete("/v1/cache", params={"prompt_cache_key": "chat-1"})
        await client.delete("/v1/cache")
    assert extended.json() == {"object": "cache", **FIELDS}
    assert dropped.json()["num_dropped_tokens"] == 64
    assert backend.cache_calls == [
        {"cache": "extend", "prompt_cache_key": "chat-1", "seconds": "3600"},
        {"cache": "drop", "prompt_cache_key": "chat-1"},
        {"cache": "drop"},
    ]


async def test_an_unknown_session_cannot_be_extended(connect, backend):
    backend.cache_answer = {"num_sessions": 0}
    async with connect() as client:
        response = await client.post("/v1/cache", json=FIELDS)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "cache_key_not_found"


async def test_a_key_with_a_nul_character_does_not_name_another_session(connect, backend):
    async with connect() as client:
        extended = await client.post("/v1/cache", json={**FIELDS, "prompt_cache_key": "a\0b"})
        dropped = await client.delete("/v1/cache", params={"prompt_cache_key": "\0"})
    for response in (extended, dropped):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt_cache_key"
    assert not backend.cache_calls


@pytest.mark.parametrize("body", [{}, {"prompt_cache_key": "a", "prompt_cache_retention": "x"}])
async def test_a_wrong_body_is_refused(connect, backend, body):
    async with connect() as client:
        response = await client.post("/v1/cache", json=body)
    assert response.status_code == 400
    assert not backend.cache_calls


async def test_an_unknown_model_is_refused(connect):
    async with connect() as client:
        response = await client.get("/v1/cache", params={"model": "other"})
    assert response.status_code == 404


async def test_a_client_of_the_key_file_reaches_only_its_own_sessions(connect, backend, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[team-a]\nkey = "sk-a"\n')
    backend.cache_answer = {"sessions": []}
    async with connect(api_key_file=str(path)) as client:
        await client.get("/v1/cache", headers={"Authorization": "Bearer sk-a"})
    assert backend.cache_calls == [{"cache": "statistics", "client_id": "team-a"}]
