"""The frontend over the echo model, reached without a socket."""

from contextlib import asynccontextmanager

import httpx
import pytest
from fakes.fake_backend import FakeBackend
from nereid_client.app import create_app
from nereid_client.settings import Settings


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def connect(backend):
    """`async with connect(**settings) as client`: an httpx client of the frontend."""

    @asynccontextmanager
    async def open_client(**settings):
        app = create_app(Settings(served_model_name="echo", **settings), lambda: backend)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://frontend") as client,
        ):
            yield client

    return open_client
