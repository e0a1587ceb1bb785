"""Limits of the frontend: how many requests, how long each, and none while it stops."""

import asyncio
import json
import time

import httpx
import pytest
from nereid_client.app import create_app
from nereid_client.deadlines import Deadlines
from nereid_client.settings import Settings

pytestmark = pytest.mark.anyio

SLOW = "a " + "<pause 0.02>b " * 200


def body(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
async def gated(backend):
    """A client, its app's gate, and two requests in work as the limit allows."""
    app = create_app(Settings(served_model_name="echo", max_concurrent_requests=2), lambda: backend)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://frontend") as client,
    ):
        path = "/v1/chat/completions"
        running = [asyncio.create_task(client.post(path, json=body(SLOW))) for _ in range(2)]
        while len(backend.active) < 2:
            await asyncio.sleep(0.001)
        yield client, app.state.gate
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_one_request_too_many_is_a_429_at_once(gated):
    client, gate = gated
    assert gate.num_requests == 2
    started = time.monotonic()
    answer = await client.post("/v1/chat/completions", json=body("hi"))
    assert time.monotonic() - started < 1
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert "the limit is 2 (max_concurrent_requests)" in answer.json()["error"]["message"]


async def test_pages_are_still_shown_at_the_limit(gated):
    client, _ = gated
    ready = await client.get("/health/ready")
    assert ready.status_code == 200
    assert ready.json() == {"status": "ok", "num_requests": 2}


async def test_while_it_stops_new_requests_get_a_503_and_running_ones_go_on(gated, backend):
    client, gate = gated
    gate.is_draining = True
    answer = await client.post("/v1/embeddings", json={"input": "hi"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    ready = await client.get("/health/ready")
    assert (ready.status_code, ready.json()["num_requests"]) == (503, 2)
    assert len(backend.active) == 2


async def test_what_ended_makes_room(connect, backend):
    async with connect(max_concurrent_requests=1) as client:
        for text in ("one", "<fail INTERNAL broken>", "two"):
            await client.post("/v1/chat/completions", json=body(text))
        assert (await client.get("/health/ready")).json()["num_requests"] == 0


async def test_an_answer_that_takes_too_long_is_a_504_and_is_given_up(connect, backend):
    async with connect() as client:
        headers = {"X-Request-Timeout": "0.1"}
        answer = await client.post("/v1/chat/completions", json=body(SLOW), headers=headers)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    assert "within 0.1 s" in answer.json()["error"]["message"]
    assert len(backend.aborted) == 1


async def test_a_stream_that_takes_too_long_ends_with_an_error_event(connect, backend, chunks_of):
    async with connect() as client:
        headers = {"X-Request-Timeout": "0.1"}
        answer = await client.post(
            "/v1/chat/completions", json=body(SLOW, stream=True), headers=headers
        )
    chunks = chunks_of(answer, done=False)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["error"]["code"] == "timeout"
    assert len(backend.aborted) == 1


async def test_the_server_limit_holds_for_callers_that_ask_for_more(connect, backend):
    async with connect(request_timeout_s=1) as client:
        started = time.monotonic()
        headers = {"X-Request-Timeout": "60"}
        answer = await client.post("/v1/chat/completions", json=body(SLOW), headers=headers)
    assert answer.status_code == 504
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
async def test_an_unusable_timeout_is_a_400(connect, value):
    async with connect() as client:
        headers = {"X-Request-Timeout": value}
        answer = await client.post("/v1/chat/completions", json=body("hi"), headers=headers)
    assert answer.status_code == 400
    assert f"got {value}" in answer.json()["error"]["message"]


async def test_a_client_that_reads_nothing_is_given_up():
    sent, ended = [], []

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            ended.append(True)

    async def unread(message):
        sent.append(message)
        if len(sent) > 3:
            await asyncio.Event().wait()

    scope = {"type": "http", "headers": [], "method": "POST", "path": "/"}
    app = Deadlines(endless, limit_s=0, unread_s=0.1)
    started = time.monotonic()
    await app(scope, None, unread)
    assert time.monotonic() - started < 2
    assert ended == [True]


async def test_a_late_stream_nobody_reads_does_not_wait_for_its_last_word():
    async def silent(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await asyncio.Event().wait()

    async def first_only(message):
        if message["type"] == "http.response.body":
            assert json.loads(message["body"].removeprefix(b"data: "))["error"]["code"] == "timeout"
            await asyncio.Event().wait()

    scope = {"type": "http", "headers": [], "method": "POST", "path": "/"}
    started = time.monotonic()
    await Deadlines(silent, limit_s=0.05, unread_s=0)(scope, None, first_only)
    assert time.monotonic() - started < 3
