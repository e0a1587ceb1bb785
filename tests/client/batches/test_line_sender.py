"""Tests that a batch line's request is sent again if the process of the model dies."""

import json

import pytest
from nereid_client.batches import line_requests
from nereid_client.batches.line_requests import LineSender, batch_client

pytestmark = pytest.mark.anyio

DIED = "the engine process ended (signal 9). See the server's log for the reason."


class App:
    """An ASGI application that answers each request with the next of the given error messages.

    The message "" stands for a successful response.
    """

    def __init__(self, *messages):
        self.messages = list(messages)

    async def __call__(self, scope, receive, send):
        message = self.messages.pop(0)
        status = 500 if message else 200
        body = json.dumps({"error": {"message": message}} if message else {}).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})


async def is_ready():
    return True


@pytest.mark.parametrize(
    ("messages", "status", "num_unsent"),
    [
        ([DIED, ""], 200, 0),
        ([DIED, DIED, ""], 500, 1),
        (["the answer does not match the strict schema", ""], 500, 1),
    ],
    ids=["one death", "a request that kills the process", "another error"],
)
async def test_a_line_is_sent_again_once_if_the_engine_dies(
    monkeypatch, messages, status, num_unsent
):
    monkeypatch.setattr(line_requests, "_SHORTEST_WAIT_S", 0.0)
    app = App(*messages)
    response = await LineSender(app, is_ready).send("/v1/completions", b"{}", batch_client(""))
    assert response.status == status
    assert len(app.messages) == num_unsent
