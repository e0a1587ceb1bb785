"""Tests that streams are written in as few parts as possible: each write is a system call."""

import asyncio

import pytest
from nereid_client.errors import BackendError
from nereid_client.streaming import sse
from nereid_client.streaming.chat_stream import chat_events
from nereid_client.streaming.completion_frame import CompletionFrame
from nereid_client.streaming.completion_stream import CompletionOptions, completion_events
from nereid_client.streaming.deltas import interleaved
from nereid_client.streaming.reasoning_view import ReasoningView

pytestmark = pytest.mark.anyio

FRAME = CompletionFrame("id", "echo", 1, include_usage=True)
USAGE = {"prompt_tokens": 1, "completion_tokens": 2}
FIRST = {"content": "a", "text": "a"}
MIDDLE = {"content": "b", "text": "b"}
LAST = {"content": "c", "text": "c", "finish_reason": "stop", "usage": USAGE}
BROKEN = BackendError("INTERNAL", "it broke")


async def source(*items):
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


def chat(*items):
    return chat_events(FRAME, ReasoningView(), FIRST, source(*items))


def completion(*items):
    rest = interleaved([source(*items)])
    return completion_events(FRAME, CompletionOptions(echoed_prompts=["echo"]), (0, FIRST), rest)


async def sent(events, rest):
    messages = []

    async def send(message):
        messages.append(message)

    async def receive():
        await asyncio.Event().wait()

    await sse.EventStream(events, also_close=rest)({}, receive, send)
    return messages


@pytest.mark.parametrize(("events", "at_the_end"), [(chat, 4), (completion, 3)])
async def test_what_is_due_at_once_is_one_piece(events, at_the_end):
    pieces = [piece async for piece in events(MIDDLE, LAST)]
    assert [piece.count(b"data: ") for piece in pieces] == [2, 1, at_the_end]
    assert pieces[-1].endswith(sse.DONE)


@pytest.mark.parametrize("events", [chat, completion])
async def test_an_error_behind_the_end_follows_it_and_nothing_follows_the_error(events):
    *_, last = [piece async for piece in events(LAST, BROKEN)]
    finish, error, nothing = last.split(b"\n\n")[-3:]
    assert b'"finish_reason":"stop"' in finish
    assert b"it broke" in error
    assert not nothing


@pytest.mark.parametrize(
    ("items", "num_bodies"), [((MIDDLE, LAST), 3), ((MIDDLE, BROKEN), 4)], ids=["done", "broken"]
)
async def test_the_last_piece_ends_the_body_and_an_error_is_followed_by_its_end(items, num_bodies):
    start, *bodies = await sent(chat(*items), source())
    assert start["type"] == "http.response.start"
    assert [body["more_body"] for body in bodies] == [True] * (num_bodies - 1) + [False]
    assert b"".join(body["body"] for body in bodies) == b"".join(
        [piece async for piece in chat(*items)]
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("line\u2028", r'"line\u2028"'),
        ("half \ud800 of a pair", r'"half \ud800 of a pair"'),
        ("\U0001f600", r'"\ud83d\ude00"'),
        (float("nan"), "null"),
        (2**70, str(2**70)),
        (-0.00012345, "-0.00012345"),
    ],
)
def test_an_event_is_ascii_and_valid_json(value, text):
    assert sse.event({"a": value}) == f'data: {{"a":{text}}}\n\n'.encode()
