"""Tests of `POST /abort_request` and `/abort_requests`, which abort requests by their ids."""

import asyncio
import json

import pytest

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
SLOW = [{"role": "user", "content": "one <pause 60>two"}]


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("headers", "fields", "abort"),
    [
        ({"X-Request-Id": "a"}, {}, {"rid": "a"}),
        ({"X-Request-Id": "a"}, {}, {"rid": "chatcmpl-a"}),
        ({}, {"request_id": "a"}, {"request_ids": ["a", "b"]}),
        ({}, {"rid": "a"}, {"rid": "a"}),
        ({}, {}, {"abort_all": True}),
    ],
)
async def test_a_request_is_aborted_by_its_id(connect, backend, headers, fields, abort):
    async with connect() as client:
        task = asyncio.create_task(
            client.post(CHAT, json={"messages": SLOW, **fields}, headers=headers)
        )
        await until(lambda: backend.active)
        assert (await client.post("/abort_request", json=abort)).json() == {"num_aborted": 1}
        response = await task
    assert response.status_code == 499
    assert response.json()["error"]["code"] == "cancelled"
    assert len(backend.aborted) == 1


async def test_too_many_ids_are_refused_before_they_delay_other_requests(connect):
    async with connect() as client:
        response = await client.post("/abort_requests", json={"request_ids": ["a"] * 10_001})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "request_ids"
    assert "at most 10000 items long" in response.json()["error"]["message"]


async def test_a_stream_that_is_aborted_ends_with_an_error(connect, backend, chunks_of):
    async with connect() as client:
        body = {"messages": SLOW, "stream": True, "rid": "a"}
        task = asyncio.create_task(client.post(CHAT, json=body))
        await until(lambda: backend.active)
        for _ in range(100):  # after 100 iterations of the event loop, the response has started
            await asyncio.sleep(0)
        await client.post("/abort_requests", json={"request_ids": ["a"]})
        chunks = chunks_of(await task, done=False)
    assert "aborted" in chunks[-1]["error"]["message"]
    assert len(backend.aborted) == 1


async def test_other_requests_are_not_aborted(connect, backend):
    async with connect() as client:
        messages = [{"role": "user", "content": "one <pause 0.3>two"}]
        task = asyncio.create_task(client.post(CHAT, json={"messages": messages, "rid": "a"}))
        await until(lambda: backend.active)
        answer = await client.post("/abort_request", json={"rid": "b"})
        assert answer.json() == {"num_aborted": 0}
        assert (await task).status_code == 200
        answer = await client.post("/abort_request", json={"rid": "a"})
        assert answer.json() == {"num_aborted": 0}


async def test_a_client_can_abort_only_its_own_requests(connect, backend, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[one]\nkey = "key-1"\n\n[two]\nkey = "key-2"\n')
    async with connect(api_key_file=str(keys), max_concurrent_requests=1) as client:

        async def post(key, path, **body):
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post(path, json=body, headers=headers)

        task = asyncio.create_task(post("key-1", CHAT, messages=SLOW, rid="a"))
        await until(lambda: backend.active)
        answer = await post("key-2", "/abort_request", abort_all=True)
        assert answer.json() == {"num_aborted": 0}
        # One request, the maximum, is running, but the frontend still accepts an abort.
        answer = await post("key-1", "/abort_request", rid="a")
        assert answer.json() == {"num_aborted": 1}
        assert (await task).status_code == 499


async def test_an_id_is_required(post):
    response = await post("/abort_request")
    assert response.status_code == 400
    assert json.loads(response.text)["error"]["param"] == "rid"
