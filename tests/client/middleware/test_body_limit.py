"""Tests of the limits on the time to receive a request body and on the total size of bodies."""

import asyncio
import json

import pytest
from nereid_client.app import create_app
from nereid_client.settings import Settings

pytestmark = pytest.mark.anyio


async def call(app, messages, headers=()):
    """Call an ASGI application that receives `messages`. Return the status and error message."""
    sent_messages = []
    unreceived_messages = iter(messages)

    async def receive():
        message = next(unreceived_messages, None)
        if message is None:
            await asyncio.Event().wait()  # for ever, like a client that sends nothing more
        return message

    async def send(message):
        sent_messages.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"",
        "query_string": b"", "headers": list(headers), "state": {}, "http_version": "1.1",
        "scheme": "http", "server": ("a", 1), "client": ("b", 2), "root_path": "",
    }  # fmt: skip
    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    start, body = sent_messages
    return start["status"], json.loads(body["body"])["error"]["message"]


def part(data, more=True):
    return {"type": "http.request", "body": data, "more_body": more}


@pytest.fixture
def make_app(backend):
    return lambda **settings: create_app(Settings(**settings), lambda: backend)


async def test_a_body_that_never_ends_is_a_408(make_app):
    app = make_app(receive_timeout_s=1)
    started = asyncio.get_running_loop().time()
    status, message = await call(app, [part(b"{")])
    assert status == 408
    assert "(receive_timeout_s)" in message
    assert asyncio.get_running_loop().time() - started < 30


async def test_bodies_over_the_total_are_a_429_until_the_others_have_ended(make_app):
    app = make_app(max_total_body_bytes=100)
    status, message = await call(app, [part(b" " * 60), part(b" " * 60, more=False)])
    assert status == 429
    assert "(max_total_body_bytes)" in message
    status, message = await call(app, [part(b" " * 90, more=False)])
    assert status == 400


async def test_a_length_of_a_million_digits_is_a_413_at_once(make_app):
    headers = [(b"content-length", b"9" * 10**6)]
    status, _ = await call(make_app(), [], headers)
    assert status == 413
