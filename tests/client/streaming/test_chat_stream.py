"""The chunks of a chat completion that is streamed."""

import json

import pytest
from nereid_client.streaming.chat_stream import chat_events
from nereid_client.streaming.completion_frame import CompletionFrame
from nereid_client.streaming.reasoning_view import ReasoningView

pytestmark = pytest.mark.anyio

FRAME = CompletionFrame("id", "echo", 1)


async def chunks_of(*deltas):
    """The chunks for some deltas, except for the first chunk, which contains only the role."""

    async def rest():
        for delta in deltas[1:]:
            yield delta

    written = [data async for data in chat_events(FRAME, ReasoningView(), deltas[0], rest())]
    events = b"".join(written).decode().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
    return [chunk["choices"][0] for chunk in chunks[1:]]


async def test_content_and_each_tool_call_of_one_delta_arrive_in_separate_chunks_as_from_openai():
    calls = [
        {"index": number, "id": f"call_{number}", "name": "f", "arguments": "{}"}
        for number in range(2)
    ]
    delta = {"reasoning": "Hm", "content": "Hi", "tool_calls": calls, "token_ids": [7, 8]}
    *parts, last = await chunks_of(delta, {"finish_reason": "tool_calls"})
    sent = [part["delta"] for part in parts]
    assert sent[:2] == [{"reasoning": "Hm", "reasoning_content": "Hm"}, {"content": "Hi"}]
    assert [[call["id"] for call in part["tool_calls"]] for part in sent[2:]] == [
        ["call_0"],
        ["call_1"],
    ]
    assert [part.get("token_ids") for part in parts] == [[7, 8], None, None, None]
    assert last["finish_reason"] == "tool_calls"
