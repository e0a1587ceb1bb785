"""Tests that the frontend passes request fields to the backend unchanged."""

import json

import pytest
from nereid_client.protocol.generation_requests import PASSED_ON as PASSED_ON_OF_COMPLETIONS

pytestmark = pytest.mark.anyio

PASSED_ON = {
    "n": 2,
    "max_tokens": 5,
    "max_completion_tokens": 6,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -1.5},
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "seed": 7,
    "stop": ["x"],
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
    "prompt_logprobs": 3,
    "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "structured_outputs": {"choice": ["a", "b"]},
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "thinking_token_budget": 10,
    "priority": -1,
    "timeout": 2.5,
    "queue_timeout": 1,
    "cache_salt": "mine",
    "prompt_cache_key": "session",
    "prompt_cache_retention": "1h",
    "extra_key": "me",
    "add_special_tokens": False,
    "return_prompt_token_ids": True,
    "reasoning_budget_tokens": 4,
    "thinking": {"type": "enabled", "budget_tokens": 4},
    "documents": [{"title": "a", "text": "b"}],
    "include_reasoning": False,
    "truncate_prompt_tokens": 9,
    "return_token_ids": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "reasoning_effort": "low",
    "separate_reasoning": False,
    "custom_params": {"thinking_budget": 3},
    "someday": [{"x": 2}],
}


@pytest.mark.parametrize("name", PASSED_ON)
async def test_a_field_is_passed_on_as_it_is(chat, backend, name):
    needed = {"logprobs": True} if name == "top_logprobs" else {}
    response = await chat("hi", **{name: PASSED_ON[name]}, **needed)
    assert response.status_code == 200, response.text
    assert json.loads(backend.generations[0].chat_request)[name] == PASSED_ON[name]


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}},
        {"type": "structural_tag", "format": {"type": "any_text"}},
        {"type": "structural_tag", "structures": [], "triggers": ["<f"]},
    ],
)
async def test_every_response_format_is_passed_on(chat, backend, response_format):
    assert (await chat("hi", response_format=response_format)).status_code == 200
    chat_request = json.loads(backend.generations[0].chat_request)
    assert chat_request["response_format"] == response_format


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OTHER_FORMS = [
    {"type": "json_object", "schema": SCHEMA},
    {"type": "json_object", "value": SCHEMA},
    {"type": "json_schema", "schema": SCHEMA, "strict": True},
]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
    ],
)
@pytest.mark.parametrize("response_format", OTHER_FORMS)
async def test_a_schema_in_the_format_itself_is_not_lost(
    post, backend, path, prompt, response_format
):
    response = await post(path, **prompt, response_format=response_format)
    assert response.status_code == 200, response.text
    generation = backend.generations[-1]
    fields = json.loads(generation.chat_request or generation.sampling_parameters)
    passed_format = fields["response_format"]
    assert passed_format["type"] == "json_schema"
    assert passed_format["json_schema"]["schema"] == SCHEMA
    assert passed_format["json_schema"].get("strict") == response_format.get("strict")


async def test_a_schema_in_the_format_itself_must_be_one(chat):
    response = await chat("hi", response_format={"type": "json_object", "schema": "{}"})
    error = response.json()["error"]
    assert error["message"] == (
        "response_format.schema must be a JSON schema (an object, true or false), but the request "
        'has "{}"'
    )


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        "auto",
        "required",
        FUNCTION,
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FUNCTION]}},
    ],
)
async def test_every_tool_choice_is_passed_on(chat, backend, choice):
    response = await chat("hi", tools=[FUNCTION], tool_choice=choice)
    assert response.status_code == 200, response.text
    assert json.loads(backend.generations[0].chat_request)["tool_choice"] == choice


COMPLETION = {
    **dict.fromkeys(PASSED_ON_OF_COMPLETIONS, "as sent"),
    **{name: value for name, value in PASSED_ON.items() if name in PASSED_ON_OF_COMPLETIONS},
    "n": 2,
    "logprobs": 3,
}


@pytest.mark.parametrize("name", sorted(COMPLETION))
async def test_a_field_of_a_completion_is_passed_on_as_it_is(post, backend, name):
    response = await post("/v1/completions", prompt="a", **{name: COMPLETION[name]})
    assert response.status_code == 200, response.text
    passed = json.loads(backend.generations[0].sampling_parameters)
    assert passed == {"max_tokens": 16, name: COMPLETION[name]}


OWN = {
    "stream_reasoning": False,
    "return_tokens_as_token_ids": True,
    "request_id": "a",
    "rid": "b",
    "seed": None,
}


async def test_what_the_frontend_does_itself_is_not_passed_on(chat, backend):
    await chat("hi", **OWN)
    assert set(json.loads(backend.generations[0].chat_request)) == {"messages"}
