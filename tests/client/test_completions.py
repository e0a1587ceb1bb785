"""POST /v1/completions, over the echo model."""

import json

import pytest

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
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


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


async def test_echo_of_token_ids_is_refused(complete):
    error = (await complete([1], echo=True)).json()["error"]
    assert error["param"] == "echo"


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
    assert (error["param"], error["message"]) == ("prompt", "prompt: is empty")


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
    assert message == "prompt: 3 prompts in one request; the limit is 2 (max_prompts)"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("best_of", 2),
        ("n", 3),
        ("logprobs", 1),
        ("response_format", {"type": "json_object"}),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(complete, field, value):
    response = await complete("a", **{field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert response.json()["error"]["message"].startswith(f"{field}: ")
