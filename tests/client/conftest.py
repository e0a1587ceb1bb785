"""Fixtures: the frontend with the echo model as its backend, called without a socket."""

import functools
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from fakes.fake_backend import FakeBackend
from fakes.fake_pooling import FakePooling
from nereid_client.app import create_app
from nereid_client.settings import Settings


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def backend():
    return FakeBackend()


@asynccontextmanager
async def _open_client(backend, pooling=None, **settings):
    """Run a frontend in front of these backends. The value is an httpx client of it."""
    app = create_app(Settings(served_model_name="echo", **settings), lambda: backend)
    if pooling is not None:
        app.state.make_pooling = lambda: pooling
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://frontend") as client,
    ):
        yield client


@pytest.fixture
def connect(backend):
    """Return a context manager: `async with connect(**settings) as client` is an httpx client."""
    return functools.partial(_open_client, backend)


@pytest.fixture
def post(connect):
    """Return a function: `await post(path, **body)` is the response to one request."""

    async def send(path, **body):
        async with connect() as client:
            return await client.post(path, json=body)

    return send


@pytest.fixture
def pooling():
    """The embedding model and the reranker of the fixtures `connect_pooling` and `ask`."""
    return FakePooling()


@pytest.fixture
def connect_pooling(backend, pooling):
    """Return the same context manager as `connect`, for a frontend with an embedding model."""
    return functools.partial(_open_client, backend, pooling)


@pytest.fixture
def ask(connect_pooling):
    """Return a function: `await ask(path, **body)` is the response to one pooling request."""

    async def send(path, **body):
        async with connect_pooling() as client:
            return await client.post(path, json=body)

    return send


@pytest.fixture
def chat(post):
    """Return a function: `await chat(text, **fields)` is the response to a chat of one message."""

    async def send(text, **fields):
        messages = [{"role": "user", "content": text}]
        return await post("/v1/chat/completions", messages=messages, **fields)

    return send


@pytest.fixture
def chunks_of():
    """Return a function that parses a stream, which must end with [DONE] unless `done` is false."""

    def parse(response, done=True):
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.text.split("\n\n")
        assert events.pop() == ""
        data = [event.removeprefix("data: ") for event in events]
        if done:
            assert data.pop() == "[DONE]"
        return [json.loads(item) for item in data]

    return parse
