"""Tests of `MessageBuilder`, which builds Anthropic messages from the deltas of the backend."""

import json

import pytest
from nereid_client.anthropic.message_builder import MessageBuilder


@pytest.mark.parametrize(
    "arguments",
    ['{"a": ', "[1]", '{"a": NaN}', '{"a": 1e999}', r'{"a": "\ud83d"}', '{"a":' * 10_000],
)
def test_arguments_that_are_no_json_object_are_kept_as_text(arguments):
    builder = MessageBuilder("msg_1", "a-model")
    call = {"index": 0, "id": "call_1", "name": "f", "arguments": arguments}
    builder.add({"tool_calls": [call], "finish_reason": "tool_calls"})
    message = builder.message()
    assert message["content"][0]["input"] == {"unparsed_arguments": arguments}
    json.dumps(message, ensure_ascii=False, allow_nan=False).encode()  # can be sent


def test_arguments_that_are_a_json_object_are_parsed():
    builder = MessageBuilder("msg_1", "a-model")
    for arguments in ('{"a": ["é\n", ', r'"\ud83d\ude00", 1.5]}'):
        builder.add({"tool_calls": [{"index": 0, "arguments": arguments}]})
    builder.add({"finish_reason": "tool_calls"})
    assert builder.message()["content"][0]["input"] == {"a": ["é\n", "😀", 1.5]}
