"""Tests that the frontend cancels a request whose client stops reading from the socket."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager

import uvicorn
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import free_port, wait_for
from nereid_client.app import create_app
from nereid_client.settings import Settings


@contextmanager
def uvicorn_server(app):
    """Run an application in a thread, and yield its port.

    At the end of the `with` block, stop the server and check that the thread ends.
    """
    port = free_port()
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_stream_that_nobody_reads_is_cancelled():
    backend = FakeBackend()
    settings = Settings(served_model_name="echo", unread_timeout_s=1)
    # The echo model sends 40 MB within eight seconds, which is more than the buffers of the sockets
    # can store.
    text = "a " + ("b" * 20_000 + " <pause 0.004>") * 2_000
    body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    with (
        uvicorn_server(create_app(settings, lambda: backend)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        wait_for(lambda: backend.active)
        wait_for(lambda: backend.aborted)
