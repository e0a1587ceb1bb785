"""An httpx client that calls an ASGI application without a socket."""

from contextlib import asynccontextmanager

import httpx


@asynccontextmanager
async def client_of(app):
    """Run the lifespan of an application, and yield an HTTP client for this application.

    An exception in the application becomes a response with the status 500.
    """
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client
