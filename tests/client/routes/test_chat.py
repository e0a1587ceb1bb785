"""Tests of `POST /v1/chat/completions` with the echo model."""

import json

import pytest

pytestmark = pytest.mark.anyio

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'
MARKUP = f"<think>it asks</think>let me look{CALL}{CALL}"


def fold(chunks):
    """Return the message that a client builds from the chunks of a stream."""
    message = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for piece in delta.get("tool_calls", ()):
                add_piece(message["tool_calls"], piece)
    return message


def add_piece(calls, piece):
    """Add a streamed piece of a tool call to `calls`. The first piece has the id and the name."""
    if piece["index"] == len(calls):
        function = {"name": piece["function"]["name"], "arguments": ""}
        calls.append({"id": piece["id"], "type": piece["type"], "function": function})
    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


async def test_an_answer_has_text_usage_and_a_reason(chat):
    body = (await chat("one two three")).json()
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "one two three"
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["object"] == "chat.completion"
    assert body["model"] == "echo"
    assert "tool_calls" not in choice["message"]


async def test_every_chunk_has_the_fingerprint_that_strict_libraries_require(chat, chunks_of):
    fingerprint = (await chat("one two")).json()["system_fingerprint"]
    assert fingerprint.startswith("nereid-")
    chunks = chunks_of(await chat("one two", stream=True))
    assert {chunk["system_fingerprint"] for chunk in chunks} == {fingerprint}


async def test_max_tokens_cuts_the_answer_and_says_length(chat):
    body = (await chat("one two three", max_tokens=2)).json()
    assert body["choices"][0]["message"]["content"] == "one two "
    assert body["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_is_another_name_of_max_tokens(chat, backend):
    body = (await chat("one two three", max_completion_tokens=1, max_tokens=3)).json()
    assert body["choices"][0]["message"]["content"] == "one "


async def test_a_stop_string_ends_the_answer_and_is_named(chat):
    body = (await chat("one two three", stop=["two"])).json()
    assert body["choices"][0]["message"]["content"] == "one "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "two"


async def test_reasoning_is_given_under_both_names_and_apart_from_content(chat):
    message = (await chat(MARKUP)).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "it asks"
    assert message["content"] == "let me look"


async def test_calls_of_the_assistant_need_no_content_but_other_messages_do(post):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "a", "content": "b"}
    answer = await post("/v1/chat/completions", messages=[*calls, result])
    assert answer.status_code == 200
    messages = [*calls, result, {"role": "user"}]
    answer = await post("/v1/chat/completions", messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[3].content"
    assert "a message of the role user must have content" in answer.json()["error"]["message"]


async def test_a_content_part_can_be_a_string_as_langchain_sends_it(post, backend):
    strings = {"role": "user", "content": ["a", {"type": "text", "text": "b"}]}
    messages = [strings, {"role": "user", "content": "c"}]
    assert (await post("/v1/chat/completions", messages=messages)).status_code == 200
    assert json.loads(backend.generations[-1].chat_request)["messages"] == messages
    messages = [{"role": "user", "content": ["a", 5]}]
    error = (await post("/v1/chat/completions", messages=messages)).json()["error"]
    assert error["message"] == "messages[0].content[1] must be an object, but the request has 5"


async def test_tool_calls_arrive_whole(chat):
    choice = (await chat(MARKUP)).json()["choices"][0]
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function"
    assert first["function"]["name"] == "get_weather"
    assert json.loads(first["function"]["arguments"]) == {"city": "Bern"}
    assert first["id"] != second["id"]
    assert choice["finish_reason"] == "tool_calls"


async def test_a_tool_call_without_text_has_null_content(chat):
    message = (await chat(CALL)).json()["choices"][0]["message"]
    assert message["content"] is None


async def test_an_empty_answer_has_empty_content(chat):
    message = (await chat(" two", stop="two")).json()["choices"][0]["message"]
    assert message["content"] == ""


async def test_streaming_and_not_streaming_agree(chat, chunks_of):
    whole = (await chat(MARKUP)).json()["choices"][0]["message"]
    streamed = fold(chunks_of(await chat(MARKUP, stream=True)))
    for key in ("content", "reasoning", "reasoning_content", "tool_calls"):
        assert streamed[key] == whole[key]


async def test_a_stream_opens_with_the_role_and_ends_with_the_reason(chat, chunks_of):
    chunks = chunks_of(await chat("one two", stream=True))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


async def test_include_usage_adds_a_chunk_without_choices(chat, chunks_of):
    options = {"include_usage": True}
    chunks = chunks_of(await chat("one two", stream=True, stream_options=options))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_continuous_usage_counts_up(chat, chunks_of):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(await chat("one <pause 0.01> two", stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] == 2


async def test_line_separators_in_text_do_not_cut_an_event(chat, chunks_of):
    text = "one\u2028two\u0085three\rfour"
    response = await chat(text, stream=True)
    assert all(line.startswith("data: ") for line in response.text.splitlines() if line)
    assert fold(chunks_of(response))["content"] == text


async def test_text_beyond_ascii_survives(chat, chunks_of):
    text = "žluťoučký 日本 👩‍👩‍👧"
    assert (await chat(text)).json()["choices"][0]["message"]["content"] == text
    assert fold(chunks_of(await chat(text, stream=True)))["content"] == text


async def test_the_whole_body_is_passed_on_without_nulls(chat, backend):
    await chat("hi", temperature=0.5, seed=None, chat_template_kwargs={"a": 1}, someday=[{"x": 2}])
    passed = json.loads(backend.generations[0].chat_request)
    assert passed["messages"] == [{"role": "user", "content": "hi"}]
    assert passed["chat_template_kwargs"] == {"a": 1}
    assert passed["someday"] == [{"x": 2}]
    assert passed["temperature"] == 0.5
    assert "seed" not in passed


async def test_content_may_come_in_parts(post):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    response = await post("/v1/chat/completions", messages=[{"role": "user", "content": parts}])
    assert response.json()["choices"][0]["message"]["content"] == "one two"


async def test_an_error_before_the_first_token_is_a_plain_answer_even_when_streaming(chat):
    response = await chat("<fail INVALID_ARGUMENT top_p: must be positive>", stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_p"


async def test_an_error_in_mid_stream_is_an_event_and_the_end(chat, chunks_of):
    response = await chat("one <pause 0.01><fail INTERNAL it broke>", stream=True)
    chunks = chunks_of(response, done=False)
    assert chunks[-1]["error"]["message"] == "it broke"
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in response.text


async def test_an_answer_that_ends_without_a_reason_is_an_error(chat, chunks_of):
    assert (await chat("one <vanish>")).status_code == 500
    last = chunks_of(await chat("one <pause 0.01><vanish>", stream=True), done=False)[-1]
    assert "without a finish reason" in last["error"]["message"]
