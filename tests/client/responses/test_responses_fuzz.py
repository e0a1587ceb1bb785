"""Tests that the frontend answers or rejects random bodies of `POST /v1/responses`.

After all requests, no request may still be running.
"""

import asyncio
import json
import random

import pytest
from fakes.response_events import StreamCheck
from fuzz.values import ODD_NAMES, json_bytes, mutated

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
BASE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "w"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "two"},
    ],
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "max_output_tokens": 3,
    "stream": False,
    "background": False,
    "store": True,
}
NAMES = (
    *ODD_NAMES,
    *("previous_response_id", "truncation", "top_logprobs", "max_tool_calls", "user", "model"),
    *("parallel_tool_calls", "stream_options", "type", "id", "status", "content", "name"),
)


def read(response):
    """Check an HTTP response. Return its response object, or None if the request was rejected."""
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        return None
    if response.headers["content-type"].startswith("text/event-stream"):
        blocks = response.text.split("\n\n")[:-1]
        return StreamCheck(is_typed=False).run(
            [json.loads(block.split("data: ", 1)[1]) for block in blocks]
        )
    return response.json()


async def use_response(client, response_id):
    """Retrieve a response and continue its conversation. The response may be deleted already."""
    path = f"{PATH}/{response_id}"
    assert (await client.get(path)).status_code in (200, 404)
    assert (await client.get(f"{path}/input_items")).status_code in (200, 404)
    next_turn = {"input": "and?", "previous_response_id": response_id}
    assert (await client.post(PATH, json=next_turn)).status_code in (200, 400, 404)


@pytest.mark.parametrize("seed", range(4))
async def test_a_body_of_any_kind_is_answered_or_refused(connect, backend, seed):
    rng = random.Random(seed)
    num_answered = 0
    async with connect(max_stored_responses=20, max_stored_response_bytes=100_000) as client:
        state = client._transport.app.state
        store = state.responses.store
        for _ in range(100):
            body = BASE | {"stream": rng.random() < 0.3, "background": rng.random() < 0.3}
            body = mutated(rng, body, NAMES)
            response = read(await client.post(PATH, content=json_bytes(rng, body)))
            if response is not None:
                num_answered += 1
                await use_response(client, response["id"])
            assert len(store) <= 20
            assert 0 <= store.num_bytes <= 100_000

        async with asyncio.timeout(60):
            while store.running:
                await asyncio.sleep(0.001)
        assert state.gate.num_requests == 0
    assert not backend.active
    assert num_answered > 3  # at least some of the random bodies were valid
