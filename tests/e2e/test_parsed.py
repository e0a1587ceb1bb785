"""Tests that a server without parser settings parses reasoning and tool calls.

The server infers the format of reasoning and of tool calls from the chat template.
"""

import asyncio
import json

import openai
import pytest
from e2e.triton_client import ask, chat

from loadtest.server.served import ALONE, Served

pytestmark = pytest.mark.triton

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}
ASK = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as made:
        yield made


def create(client, **fields):
    model = client.models.list().data[0].id
    return client.chat.completions.create(**{"model": model, "temperature": 0} | fields)


def test_reasoning_is_apart_from_the_answer_and_can_be_switched_off(client):
    sum_ = [{"role": "user", "content": "What is 27 + 45?"}]
    thinking = create(client, messages=sum_).choices[0].message
    assert "72" in thinking.content
    assert thinking.reasoning
    assert "think>" not in thinking.content + thinking.reasoning
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    direct = create(client, messages=sum_, extra_body=off).choices[0].message
    assert "72" in direct.content
    assert not direct.reasoning


def test_a_tool_call_streams_and_its_answer_is_used(client):
    messages = [{"role": "user", "content": ASK}]
    call, arguments, reasons = None, "", []
    for chunk in create(client, messages=messages, tools=[WEATHER], stream=True):
        for choice in chunk.choices:
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for piece in choice.delta.tool_calls or []:
                call = call or piece
                arguments += piece.function.arguments or ""
    assert reasons == ["tool_calls"]
    assert call.function.name == "get_weather"
    assert json.loads(arguments) == {"city": "Paris"}

    whole = create(client, messages=messages, tools=[WEATHER]).choices[0]
    (again,) = whole.message.tool_calls
    assert json.loads(again.function.arguments) == {"city": "Paris"}
    messages += [
        whole.message.model_dump(exclude_none=True),
        {
            "role": "tool",
            "tool_call_id": again.id,
            "content": '{"temperature": 21, "sky": "clear"}',
        },
    ]
    assert "21" in create(client, messages=messages, tools=[WEATHER]).choices[0].message.content


def test_plain_triton_clients_get_the_parts_in_the_delta(served):
    reply = asyncio.run(ask(served.grpc_url, chat(ASK, tools=[WEATHER], temperature=0)))
    calls = [call for delta in reply.deltas for call in delta.get("tool_calls", [])]
    assert [call["name"] for call in calls if "name" in call] == ["get_weather"]
    assert reply.finish_reasons == ["tool_calls"]
    assert "<tool_call>" in reply.text


@pytest.mark.long  # test_chat_format.py tests the same behaviour without a server
def test_parsing_can_be_switched_off():
    off = {"NEREID_REASONING_PARSER": "none", "NEREID_TOOL_PARSER": "none"}
    with Served(environment=off, arguments=ALONE) as served:
        reply = asyncio.run(ask(served.grpc_url, chat("What is 27 + 45?", temperature=0)))
    assert "".join(delta.get("content", "") for delta in reply.deltas) == reply.text
    assert "</think>" in reply.text
