"""Fixtures that call the frontend without a socket. The frontend's backend is the echo model."""

import functools
import json
from contextlib import asynccontextmanager

import pytest
from fakes.app_client import client_of
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
    """Run a frontend with the given backends, and yield an httpx client of the frontend."""
    app = create_app(Settings(served_model_name="echo", **settings), lambda: backend)
    if pooling is not None:
        app.state.make_pooling = lambda: pooling
    async with client_of(app) as client:
        yield client


@pytest.fixture
def connect(backend):
    """A function that runs a frontend: `async with connect(**settings) as client` yields a client.

    The client is an `httpx.AsyncClient` that is connected to the frontend.
    """
    return functools.partial(_open_client, backend)


@pytest.fixture
def post(connect):
    """A function: `await post(path, **body)` sends a request and returns the response."""

    async def send(path, **body):
        async with connect() as client:
            return await client.post(path, json=body)

    return send


@pytest.fixture
def pooling():
    """A backend with an embedding model and a reranker, for `connect_pooling` and `ask`."""
    return FakePooling()


@pytest.fixture
def connect_pooling(backend, pooling):
    """A function like `connect`, whose frontend also serves an embedding model and a reranker."""
    return functools.partial(_open_client, backend, pooling)


@pytest.fixture
def ask(connect_pooling):
    """A function like `post`, whose frontend also serves an embedding model and a reranker."""

    async def send(path, **body):
        async with connect_pooling() as client:
            return await client.post(path, json=body)

    return send


@pytest.fixture
def chat(post):
    """A function: `await chat(text, **fields)` sends a chat of one message.

    The function returns the response.
    """

    async def send(text, **fields):
        messages = [{"role": "user", "content": text}]
        return await post("/v1/chat/completions", messages=messages, **fields)

    return send


@pytest.fixture
def chunks_of():
    """A function that parses a streamed response into its chunks.

    The stream must end with `[DONE]`, unless the argument `done` is false.
    """

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
