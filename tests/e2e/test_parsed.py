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

UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": UNIT},
            "required": ["city"],
        },
    },
}
ASK = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as opened:
        yield opened


def create(client, **fields):
    model = client.models.list().data[0].id
    return client.chat.completions.create(**{"model": model, "temperature": 0} | fields)


def test_reasoning_is_apart_from_the_answer_and_can_be_switched_off(client):
    messages = [{"role": "user", "content": "What is 27 + 45?"}]

    with_reasoning = create(client, messages=messages).choices[0].message
    assert "72" in with_reasoning.content
    assert with_reasoning.reasoning
    assert "think>" not in with_reasoning.content + with_reasoning.reasoning

    no_thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    direct = create(client, messages=messages, extra_body=no_thinking).choices[0].message
    assert "72" in direct.content
    assert not direct.reasoning


def test_a_tool_call_streams_and_its_answer_is_used(client):
    question = {"role": "user", "content": ASK}
    chunks = list(create(client, messages=[question], tools=[WEATHER], stream=True))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    finish_reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    pieces = [piece.function for choice in choices for piece in choice.delta.tool_calls or []]
    assert finish_reasons == ["tool_calls"]
    assert pieces[0].name == "get_weather"
    arguments = "".join(piece.arguments or "" for piece in pieces)
    assert json.loads(arguments) == {"city": "Paris"}

    message = create(client, messages=[question], tools=[WEATHER]).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}

    result = '{"temperature": 21, "sky": "clear"}'
    tool_message = {"role": "tool", "tool_call_id": call.id, "content": result}
    messages = [question, message.model_dump(exclude_none=True), tool_message]
    answer = create(client, messages=messages, tools=[WEATHER]).choices[0].message
    assert "21" in answer.content


def test_plain_triton_clients_get_the_parts_in_the_delta(served):
    reply = asyncio.run(ask(served.grpc_url, chat(ASK, tools=[WEATHER], temperature=0)))
    calls = [call for delta in reply.deltas for call in delta.get("tool_calls", [])]
    assert [call["name"] for call in calls if "name" in call] == ["get_weather"]
    assert reply.finish_reasons == ["tool_calls"]
    assert "<tool_call>" in reply.text


@pytest.mark.long  # test_chat_format.py tests the same behaviour without a server
def test_parsing_can_be_switched_off():
    no_parsers = {"NEREID_REASONING_PARSER": "none", "NEREID_TOOL_PARSER": "none"}
    with Served(environment=no_parsers, arguments=ALONE) as served:
        reply = asyncio.run(ask(served.grpc_url, chat("What is 27 + 45?", temperature=0)))
    assert "".join(delta.get("content", "") for delta in reply.deltas) == reply.text
    assert "</think>" in reply.text
