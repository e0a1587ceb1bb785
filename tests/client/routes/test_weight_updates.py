"""Tests of the routes that load and unload LoRA adapters and that replace the model's weights."""

import json

import pytest

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {**HELLO, "max_tokens": 5}),
    ],
)
async def test_the_model_of_a_request_selects_an_adapter(connect, backend, path, body):
    backend.adapters = {"sql": "/a"}
    async with connect() as client:
        for name, expected in (("sql", "sql"), ("echo", ""), ("sql", "sql")):
            response = await client.post(path, json={**body, "model": name})
            assert response.status_code == 200, response.text
            assert response.json()["model"] == name
            assert backend.generations[-1].lora_name == expected


async def test_the_field_lora_name_is_passed_on(connect, backend):
    async with connect() as client:
        response = await client.post(CHAT, json={**HELLO, "lora_name": "x"})
    assert response.status_code == 200
    assert json.loads(backend.generations[-1].chat_request)["lora_name"] == "x"


async def test_adapters_are_loaded_listed_and_unloaded(connect, backend):
    async with connect(allow_lora_updates=True) as client:
        body = {"lora_name": "sql", "lora_path": "/a"}
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
        assert backend.adapters == {"sql": "/a"}
        models = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models][:2] == ["echo", "sql"]

        unload = {"lora_name": "sql"}
        assert (await client.post("/v1/unload_lora_adapter", json=unload)).status_code == 200
        refused = await client.post("/v1/unload_lora_adapter", json=unload)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "lora_name"
        missing = await client.post(CHAT, json={**HELLO, "model": "sql"})
        assert missing.status_code == 404


@pytest.mark.parametrize("name", ["echo", ""])
async def test_an_adapter_cannot_have_the_name_of_the_model_or_none(connect, backend, name):
    async with connect(allow_lora_updates=True) as client:
        body = {"lora_name": name, "lora_path": "/a"}
        response = await client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "lora_name"
    assert not backend.adapters


async def test_an_adapter_cannot_have_the_name_of_the_embedding_model(connect_pooling, backend):
    async with connect_pooling(allow_lora_updates=True) as client:
        models = (await client.get("/v1/models")).json()["data"]
        body = {"lora_name": models[1]["id"], "lora_path": "/a"}
        response = await client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert "must differ from the names" in response.json()["error"]["message"]
    assert not backend.adapters


async def test_clients_cannot_load_adapters_by_default(connect, backend):
    async with connect() as client:
        body = {"lora_name": "sql", "lora_path": "/a"}
        response = await client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "lora_updates_disabled"
    assert not backend.adapters


async def test_the_weights_are_replaced(connect, backend):
    async with connect(allow_lora_updates=True) as client:
        body = {"model": "echo", "path": "/new", "running_requests": "refuse"}
        response = await client.post("/v1/reload", json=body)
        assert response.status_code == 200, response.text
        assert backend.reloads == [("/new", "refuse")]
        assert (await client.post("/v1/reload", json={})).status_code == 200
        assert backend.reloads[1:] == [("", "finish")]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"running_requests": "stop"}, 400, "running_requests"),
        ({"path": 3}, 400, "path"),
        ({"path": "/models/a\0b"}, 400, "path"),
    ],
)
async def test_wrong_requests_to_replace_the_weights(connect, backend, body, status, param):
    async with connect(allow_lora_updates=True) as client:
        response = await client.post("/v1/reload", json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert not backend.reloads


async def test_clients_cannot_replace_the_weights_by_default(connect):
    async with connect() as client:
        response = await client.post("/v1/reload", json={})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "weight_updates_disabled"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/reload", {"path": "\ud800"}),
        ("/v1/cache", {"prompt_cache_key": "\ud800"}),
    ],
)
async def test_a_key_or_path_with_half_of_a_surrogate_pair_is_refused(connect, path, body):
    async with connect(allow_lora_updates=True) as client:
        response = await client.post(path, content=json.dumps(body))
    assert response.status_code == 400
    assert r"'\ud800', which is half of a surrogate pair" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "a\0b", "lora_path": "/a"}, "lora_name"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a\0b"}, "lora_path"),
        ("/v1/unload_lora_adapter", {"lora_name": "a\0b"}, "lora_name"),
    ],
)
async def test_an_adapter_with_a_nul_character_is_refused(connect, backend, path, body, param):
    async with connect(allow_lora_updates=True) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not backend.adapters
