"""Tests that checking a large request body is fast, because a check blocks all other requests."""

import time

import pytest
from nereid_client.anthropic.chat_translation import chat_request
from nereid_client.anthropic.messages_request import MessagesRequest
from nereid_client.protocol.generation_requests import ChatCompletionRequest
from nereid_client.responses.chat_translation import messages_of
from nereid_client.responses.input_items import read_items

HELLO = [{"role": "user", "content": "hi"}]


def function(number):
    return {"type": "function", "function": {"name": f"f{number}"}}


def many_allowed_tools():
    tools = [function(number) for number in range(15_000)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[::-1]}}
    return {"tools": tools, "tool_choice": choice}


def long_field_name():
    return {"x" * 40_000_000: 1}


@pytest.mark.parametrize("fields", [many_allowed_tools, long_field_name])
def test_a_large_body_is_checked_quickly(fields):
    body = {"messages": HELLO, **fields()}
    started = time.process_time()
    ChatCompletionRequest.model_validate(body)
    assert time.process_time() - started < 2


def test_a_conversation_with_many_pieces_of_reasoning_is_translated_quickly():
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a" * 100}]}
    items = read_items([reasoning] * 20_000, lambda _: None)
    started = time.process_time()
    (message,) = messages_of(None, items)
    assert time.process_time() - started < 2
    assert len(message["reasoning"]) == 2_000_000


def test_a_message_with_many_blocks_is_translated_quickly():
    blocks = [{"type": "text", "text": "a"} for _ in range(300_000)]
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": blocks}]}
    started = time.process_time()
    chat = chat_request(MessagesRequest.model_validate(body), body)
    assert time.process_time() - started < 2
    assert len(chat["messages"][0]["content"]) == 599_999
