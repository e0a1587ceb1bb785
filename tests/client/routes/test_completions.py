"""Tests of `POST /v1/completions` with the echo model."""

import json

import pytest
from fakes.echo import logprob_of, token_id_of
from nereid_client.streaming.openai_logprobs import join_logprobs

pytestmark = pytest.mark.anyio


@pytest.fixture
def complete(post):
    async def send(prompt, **fields):
        return await post("/v1/completions", prompt=prompt, **fields)

    return send


async def test_a_string_gives_one_choice(complete):
    body = (await complete("one two")).json()
    assert body["object"] == "text_completion"
    assert [choice["text"] for choice in body["choices"]] == ["one two"]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] == 4


async def test_the_text_is_the_raw_one_markup_and_all(complete):
    body = (await complete('<tool_call>{"name": "f", "arguments": {}}</tool_call>')).json()
    assert body["choices"][0]["text"] == '{"name": "f", "arguments": {}}'


async def test_several_strings_give_choices_in_order_and_one_usage(complete):
    body = (await complete(["<pause 0.02>late one", "two"])).json()
    assert [choice["text"] for choice in body["choices"]] == ["late one", "two"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 3


async def test_several_prompts_run_at_the_same_time(complete, backend):
    await complete(["<pause 0.01>a", "<pause 0.01>b", "<pause 0.01>c"])
    assert backend.most_active == 3


async def test_token_ids_are_passed_on_as_ids(complete, backend):
    body = (await complete([5, 6])).json()
    assert backend.generations[0].input_ids == (5, 6)
    assert backend.generations[0].text_input is None
    assert body["choices"][0]["text"] == "5 6"


async def test_lists_of_token_ids_give_a_choice_each(complete):
    body = (await complete([[5], [6, 7]])).json()
    assert [choice["text"] for choice in body["choices"]] == ["5", "6 7"]


async def test_echo_puts_the_prompt_before_the_answer(complete, chunks_of):
    body = (await complete(["a b", "c"], echo=True)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a ba b", "cc"]
    texts = ["", ""]
    for chunk in chunks_of(await complete(["a b", "c"], echo=True, stream=True)):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["a ba b", "cc"]


async def test_echo_puts_the_text_of_token_ids_before_the_answer(complete):
    body = (await complete([[5], [6, 7]], echo=True)).json()
    assert [choice["text"] for choice in body["choices"]] == ["5<end>5", "6 7<end>6 7"]
    error = (await complete([50_000], echo=True)).json()["error"]
    assert error["param"] == "prompt"


async def test_n_choices_of_each_prompt_follow_one_another(complete, backend):
    body = (await complete(["a b", "c"], n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a b", "a b #1", "c", "c #1"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 2 + 1
    assert body["usage"]["completion_tokens"] == 2 + 3 + 1 + 2
    assert len(backend.generations) == 2


async def test_n_choices_of_each_prompt_are_streamed_with_their_index(complete, chunks_of):
    chunks = chunks_of(await complete(["a b", "c"], n=2, stream=True))
    texts = [""] * 4
    ends = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert texts == ["a b", "a b #1", "c", "c #1"]
    assert sorted(ends) == [0, 1, 2, 3]


async def test_best_of_gives_the_likeliest_tokens_on_average_first(complete, backend):
    body = (await complete("a", n=3, best_of=5)).json()
    assert json.loads(backend.generations[0].sampling_parameters)["n"] == 5
    ranked = sorted(range(5), key=logprob_of, reverse=True)
    assert ranked != list(range(5))
    assert [choice["text"] for choice in body["choices"]] == [
        "a" + (f" #{index}" if index else "") for index in ranked[:3]
    ]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 1 + 4 * 2  # the tokens of all five choices


async def test_best_of_as_many_as_n_keeps_their_order(complete):
    body = (await complete("a", n=3, best_of=3)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "a #1", "a #2"]


async def test_logprobs_have_openais_lists(complete):
    body = (await complete("één two", logprobs=1)).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["één ", "two"],
        "token_logprobs": [-0.1, -0.1],
        "top_logprobs": [{"één ": -0.1}, {"two": -0.1}],
        "text_offset": [0, 4],
    }
    body = (await complete("one", logprobs=2)).json()
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"one": -0.1, "o1": -1.0}]
    body = (await complete("one", logprobs=0)).json()
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"one": -0.1}]


async def test_logprobs_are_streamed_once_with_offsets_in_the_whole_text(complete, chunks_of):
    prompt, fields = "a <hold>b c d</hold> e", {"logprobs": 1, "n": 2}
    whole = [choice["logprobs"] for choice in (await complete(prompt, **fields)).json()["choices"]]
    parts = [[], []]
    for chunk in chunks_of(await complete(prompt, stream=True, **fields)):
        (choice,) = chunk["choices"]
        if choice["logprobs"]:
            parts[choice["index"]].append(choice["logprobs"])
    assert [join_logprobs(part) for part in parts] == whole
    assert whole[0]["text_offset"] == [0, 2, 4, 6, 7]


async def test_echo_of_a_truncated_prompt_and_a_truncation_to_nothing_are_refused(complete):
    error = (await complete("a b", echo=True, truncate_prompt_tokens=1)).json()["error"]
    assert error["param"] == "echo"
    error = (await complete("a b", truncate_prompt_tokens=0)).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"


async def test_echo_with_logprobs_scores_the_prompt_too(complete, backend):
    body = (await complete("one two", echo=True, logprobs=1, n=2)).json()
    first, second = body["choices"]
    assert first["text"] == "one twoone two"
    assert first["logprobs"]["tokens"] == ["one ", "two", "one ", "two"]
    assert first["logprobs"]["token_logprobs"] == [None, -0.5, -0.1, -0.1]
    assert first["logprobs"]["top_logprobs"][:2] == [None, {"two": -0.5}]
    assert first["logprobs"]["text_offset"] == [0, 4, 7, 11]
    assert second["logprobs"]["token_logprobs"][:2] == [None, -0.5]
    assert second["logprobs"]["text_offset"] == [0, 4, 7, 11, 15]
    assert "token_ids" not in first
    assert "prompt_logprobs" not in first


async def test_no_tokens_with_echo_score_a_prompt(complete, backend):
    body = (await complete("one two three", echo=True, logprobs=1, max_tokens=0)).json()
    choice = body["choices"][0]
    assert choice["text"] == "one two three"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] == 3
    assert json.loads(backend.generations[0].sampling_parameters)["max_tokens"] == 1
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_prompt_logprobs_and_token_ids_stand_in_each_choice(complete, chunks_of):
    ids = [token_id_of("one "), token_id_of("two")]
    body = (await complete("one two", prompt_logprobs=0, return_token_ids=True, n=2)).json()
    for choice in body["choices"]:
        assert choice["prompt_token_ids"] == ids
        assert choice["token_ids"][:1] == ids[:1]
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1][str(ids[1])]["rank"] == 1
    chunks = chunks_of(await complete("one two", return_token_ids=True, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == ids
    assert choices[0]["prompt_token_ids"] == ids


async def test_tokens_of_completions_may_be_written_as_their_ids(complete):
    body = (await complete("one", logprobs=1, return_tokens_as_token_ids=True)).json()
    name = f"token_id:{token_id_of('one')}"
    assert body["choices"][0]["logprobs"]["tokens"] == [name]
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{name: -0.1}]


async def test_sixteen_tokens_are_the_default_limit(complete):
    body = (await complete(" ".join("abcdefghijklmnopqrst"))).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


async def test_only_sampling_fields_are_passed_on(complete, backend):
    await complete("a", temperature=0, stop="x", model="echo", user="me", unheard_of=1)
    passed = json.loads(backend.generations[0].sampling_parameters)
    assert passed == {"temperature": 0, "stop": "x", "max_tokens": 16}


async def test_a_stream_interleaves_choices_and_each_ends_once(complete, chunks_of):
    options = {"include_usage": True}
    response = await complete(["a b", "c"], stream=True, stream_options=options)
    chunks = chunks_of(response)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 6
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1]


async def test_a_prompt_that_the_backend_blames_is_called_prompt(complete):
    error = (await complete("<fail INVALID_ARGUMENT text_input: is empty>")).json()["error"]
    assert (error["param"], error["message"]) == ("prompt", "prompt is empty")


async def test_one_failing_prompt_fails_the_request_and_ends_the_others(complete, backend):
    response = await complete(["<pause 60>a", "<fail INVALID_ARGUMENT prompt: is odd>"])
    assert response.status_code == 400
    assert not backend.active
    assert len(backend.aborted) == 1


async def test_one_failing_prompt_ends_a_stream_and_the_others(complete, backend, chunks_of):
    prompts = ["a <pause 60>b", "c <pause 0.02><fail INTERNAL broke>"]
    chunks = chunks_of(await complete(prompts, stream=True), done=False)
    assert chunks[-1]["error"]["message"] == "broke"
    assert not backend.active
    assert len(backend.aborted) == 1


@pytest.mark.parametrize(
    "prompt", [None, 5, [], [[]], [1, "a"], ["a", 1], [-1], [2**31], [True], [[1], "a"], {}]
)
async def test_a_prompt_of_another_kind_is_refused(complete, prompt):
    response = await complete(prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


async def test_too_many_prompts_are_refused_with_the_limit(connect):
    async with connect(max_prompts=2) as client:
        response = await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    message = response.json()["error"]["message"]
    assert message == (
        "prompt must have at most 2 prompts (the server's setting max_prompts), but the request "
        "has 3. Send the prompts in several requests."
    )
