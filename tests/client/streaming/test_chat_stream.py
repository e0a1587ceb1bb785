"""The chunks of a chat completion that is streamed."""

import json

import pytest
from nereid_client.streaming.chat_stream import chat_events
from nereid_client.streaming.completion_frame import CompletionFrame
from nereid_client.streaming.reasoning_view import ReasoningView

pytestmark = pytest.mark.anyio

FRAME = CompletionFrame("id", "echo", 1)


async def chunks_of(*deltas):
    """Return the choice of each chunk for some deltas.

    The first chunk, which contains only the role, is left out.
    """

    async def later_deltas():
        for delta in deltas[1:]:
            yield delta

    stream = chat_events(FRAME, ReasoningView(), deltas[0], later_deltas())
    events = b"".join([data async for data in stream]).decode().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
    return [chunk["choices"][0] for chunk in chunks[1:]]


async def test_content_and_each_tool_call_of_one_delta_arrive_in_separate_chunks_as_from_openai():
    calls = [
        {"index": number, "id": f"call_{number}", "name": "f", "arguments": "{}"}
        for number in range(2)
    ]
    delta = {"reasoning": "Hm", "content": "Hi", "tool_calls": calls, "token_ids": [7, 8]}

    *choices, last_choice = await chunks_of(delta, {"finish_reason": "tool_calls"})

    reasoning, content, *call_deltas = [choice["delta"] for choice in choices]
    assert reasoning == {"reasoning": "Hm", "reasoning_content": "Hm"}
    assert content == {"content": "Hi"}
    ids_of_calls = [[call["id"] for call in delta["tool_calls"]] for delta in call_deltas]
    assert ids_of_calls == [["call_0"], ["call_1"]]
    assert [choice.get("token_ids") for choice in choices] == [[7, 8], None, None, None]
    assert last_choice["finish_reason"] == "tool_calls"
