"""Runs the frontend with the echo model in a thread of the test's process, on a real socket."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from nereid_client.app import create_app
from nereid_client.middleware.http_protocol import protocol_class
from nereid_client.settings import Settings

from fakes.fake_backend import FakeBackend
from loadtest.server.served import free_ports


def free_port() -> int:
    """Return the number of a TCP port that is free at the moment."""
    [port] = free_ports(1)
    return port


@contextmanager
def live_frontend(backend: FakeBackend, pooling=None, **values) -> Iterator[int]:  # type: ignore[no-untyped-def]
    """Run the frontend with the settings `values`, and yield the frontend's port.

    `pooling` is a `PoolingBackend`. Without `pooling`, the frontend serves no embedding model and
    no reranker.
    """
    port = free_port()
    settings = Settings(served_model_name="echo", **values)
    app = create_app(settings, lambda: backend)
    if pooling is not None:
        app.state.make_pooling = lambda: pooling
    http = protocol_class(settings.receive_timeout_s, settings.unread_timeout_s)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", ws="none", http=http)
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def wait_for(condition, timeout_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    """Wait until a condition is true.

    Raises: TimeoutError if the condition is still false after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
