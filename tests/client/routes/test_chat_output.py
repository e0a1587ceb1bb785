"""Tests of the fields that control the output of a chat completion.

The fields concern choices, log-probabilities, token ids and reasoning.
"""

import json

import pytest
from fakes.echo import token_id_of

pytestmark = pytest.mark.anyio

MARKUP = "<think>it asks</think>let me look"


def fold(chunks):
    """Return the reasoning and the content that the chunks of a stream add up to."""
    message = {"content": "", "reasoning": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for key in message:
                message[key] += choice["delta"].get(key) or ""
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_tells_cached_and_reasoning_tokens(chat, chunks_of, stream):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await chat("<think>it asks</think>yes", stream=stream, **options)
    usage = (chunks_of(response)[-1] if stream else response.json())["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_n_gives_so_many_choices_and_counts_the_prompt_once(chat):
    body = (await chat("one two", n=3)).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == ["one two", "one two #1", "one two #2"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 2 + 3 + 3


async def test_n_choices_are_streamed_interleaved_and_each_ends_once(chat, chunks_of):
    options = {"include_usage": True}
    chunks = chunks_of(await chat("one <pause 0.01>two", n=3, stream=True, stream_options=options))
    *chunks_of_choices, usage_chunk = chunks
    choices = [choice for chunk in chunks_of_choices for choice in chunk["choices"]]
    texts = ["", "", ""]
    for choice in choices:
        texts[choice["index"]] += choice["delta"].get("content", "")

    assert texts == ["one two", "one two #1", "one two #2"]  # " #1" marks the second choice
    indexes = [choice["index"] for choice in choices]
    assert indexes != sorted(indexes)  # the choices are interleaved
    starts = [choice["index"] for choice in choices if "role" in choice["delta"]]
    assert starts == [0, 1, 2]
    ends = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    # The echo model counts words as tokens. The text <pause 0.01> has two words.
    assert usage_chunk["usage"]["prompt_tokens"] == 3
    assert usage_chunk["usage"]["completion_tokens"] == 8


async def test_a_choice_that_never_ends_is_an_error(chat, backend, chunks_of):
    generate = backend.generate

    async def leave_out_the_end_of_the_second_choice(generation):
        async for delta in generate(generation):
            if delta.get("index") != 1 or "finish_reason" not in delta:
                yield delta

    backend.generate = leave_out_the_end_of_the_second_choice
    assert (await chat("one", n=2)).status_code == 500
    *_, last_event = chunks_of(await chat("one <pause 0.01>", n=2, stream=True), done=False)
    assert "without a finish reason" in last_event["error"]["message"]


async def test_logprobs_have_openais_shape(chat):
    choice = (await chat("één two", logprobs=True, top_logprobs=2)).json()["choices"][0]
    first, second = choice["logprobs"]["content"]
    assert first == {
        "token": "één ",
        "logprob": -0.1,
        "bytes": list("één ".encode()),
        "top_logprobs": [
            {"token": "één ", "logprob": -0.1, "bytes": list("één ".encode())},
            {"token": "o1", "logprob": -1, "bytes": [111, 49]},
        ],
    }
    assert second["token"] == "two"
    assert choice["logprobs"]["refusal"] is None


async def test_without_being_asked_for_logprobs_are_null(chat, chunks_of):
    assert (await chat("one")).json()["choices"][0]["logprobs"] is None
    chunks = chunks_of(await chat("one", stream=True))
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)


async def test_tokens_may_be_written_as_their_ids(chat):
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    entry = (await chat("one", **fields)).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{token_id_of('one')}"


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_each_tokens_logprob_is_streamed_once_also_where_its_text_is_held_back(
    chat, chunks_of, num_choices
):
    # The echo model sends the text between <hold> and </hold> only with the last of its tokens.
    text = "a <hold>b c d</hold> <think>e f</think>g <pause 0.01><hold>h i</hold>"
    fields = {"logprobs": True, "top_logprobs": 1, "n": num_choices}
    whole_choices = (await chat(text, **fields)).json()["choices"]
    chunks = chunks_of(await chat(text, stream=True, **fields))

    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    streamed_logprobs = [[] for _ in range(num_choices)]
    for choice in choices:
        streamed_logprobs[choice["index"]] += choice["logprobs"]["content"]
    assert streamed_logprobs == [choice["logprobs"]["content"] for choice in whole_choices]
    # While the text is held back, chunks without text contain the log-probabilities.
    assert any(choice["delta"] == {} and choice["finish_reason"] is None for choice in choices)


async def test_prompt_logprobs_have_vllms_shape(chat):
    body = (await chat("one two", prompt_logprobs=1)).json()
    first, second = body["prompt_logprobs"]
    assert first is None
    fact = {"logprob": -0.5, "rank": 1, "decoded_token": "two"}
    assert second == {str(token_id_of("two")): fact}
    assert "prompt_logprobs" not in (await chat("one")).json()


async def test_token_ids_of_prompt_and_answer_are_returned_when_asked_for(chat, chunks_of):
    ids = [token_id_of("one "), token_id_of("two")]
    body = (await chat("one two", return_token_ids=True)).json()
    assert body["prompt_token_ids"] == ids
    assert body["choices"][0]["token_ids"] == ids
    chunks = chunks_of(await chat("one two", return_token_ids=True, stream=True))
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [ids]
    assert [token for c in chunks for token in c["choices"][0].get("token_ids", ())] == ids
    assert "token_ids" not in (await chat("one")).json()["choices"][0]


async def test_an_impossible_tokens_logprob_is_a_number_json_can_carry(chat, backend):
    impossible = {"logprob": float("-inf"), "rank": 9}
    token = {"token": "a", "token_id": 1, "bytes": [97], "top_logprobs": [], **impossible}

    async def generate_impossible_token(generation):
        yield {
            "logprobs": [token],
            "prompt_logprobs": [None, {"1": {"decoded_token": "a", **impossible}}],
            "finish_reason": "stop",
        }

    backend.generate = generate_impossible_token
    body = (await chat("a", logprobs=True, prompt_logprobs=0)).json()
    assert body["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    assert body["prompt_logprobs"][1]["1"]["logprob"] == -9999.0


async def test_what_stopped_it_is_given_under_both_names(chat, chunks_of):
    choice = (await chat("one two", stop="two")).json()["choices"][0]
    assert choice["stop_reason"] == choice["matched_stop"] == "two"
    last = chunks_of(await chat("one two", stop="two", stream=True))[-1]["choices"][0]
    assert last["stop_reason"] == last["matched_stop"] == "two"


@pytest.mark.parametrize("asked", ["auto", "default", "flex", "priority"])
async def test_every_service_tier_is_answered_with_default(chat, chunks_of, backend, asked):
    assert (await chat("hi", service_tier=asked)).json()["service_tier"] == "default"
    chunks = chunks_of(await chat("hi", service_tier=asked, stream=True))
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}
    assert "service_tier" not in json.loads(backend.generations[0].chat_request)
    assert "service_tier" not in (await chat("hi")).json()


async def test_reasoning_is_left_out_on_request(chat, chunks_of):
    message = (await chat(MARKUP, include_reasoning=False)).json()["choices"][0]["message"]
    assert message["reasoning"] is None
    assert message["content"] == "let me look"
    streamed = fold(chunks_of(await chat(MARKUP, include_reasoning=False, stream=True)))
    assert streamed["reasoning"] == ""
    assert streamed["content"] == "let me look"


async def test_reasoning_comes_in_one_piece_on_request(chat, chunks_of):
    text = "<think>it <pause 0.01></think><think>asks</think>yes <pause 0.01>yes"
    chunks = chunks_of(await chat(text, stream_reasoning=False, stream=True, n=2))
    pieces = [[], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        if "reasoning" in choice["delta"]:
            pieces[choice["index"]].append(choice["delta"]["reasoning"])
    whole = (await chat(text)).json()["choices"][0]["message"]["reasoning"]
    assert pieces == [[whole], [whole]]


async def test_reasoning_without_an_answer_comes_with_the_end(chat, chunks_of):
    response = await chat("<think>it asks</think>", stream_reasoning=False, stream=True)
    assert fold(chunks_of(response))["reasoning"] == "it asks"


@pytest.mark.parametrize("name", ["request_id", "rid"])
async def test_a_request_id_in_the_body_names_the_answer(chat, name):
    assert (await chat("hi", **{name: "trace-9"})).json()["id"] == "chatcmpl-trace-9"
