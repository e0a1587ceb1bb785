"""Tests of `POST /tokenize` and `POST /detokenize` with the echo model."""

import json

import pytest
from fakes.echo import token_id_of

pytestmark = pytest.mark.anyio

IDS = [token_id_of("one "), token_id_of("two")]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_a_prompt_gives_its_ids_and_their_number(post, path):
    body = (await post(path, model="echo", prompt="one two")).json()
    assert body == {"count": 2, "max_model_len": None, "tokens": IDS, "token_strs": None}


async def test_the_response_has_the_max_model_len(post, backend):
    names = ("max_prompt_bytes", "max_request_bytes", "max_messages", "max_tools")
    backend.limits = {"max_model_len": 4096, **dict.fromkeys(names, 1000)}
    assert (await post("/tokenize", prompt="one two")).json()["max_model_len"] == 4096


async def test_a_chat_is_tokenised_with_what_its_template_reads(post, backend):
    messages = [{"role": "user", "content": "one two"}]
    kwargs = {"enable_thinking": False}
    response = await post("/tokenize", messages=messages, chat_template_kwargs=kwargs)
    assert response.json()["tokens"] == IDS
    passed = json.loads(backend.generations[0].chat_request)
    assert passed == {"messages": messages, "chat_template_kwargs": kwargs}


async def test_special_tokens_are_added_as_for_generation_unless_told(post, backend):
    await post("/tokenize", prompt="one")
    await post("/tokenize", prompt="one", add_special_tokens=False)
    messages = [{"role": "user", "content": "one"}]
    await post("/tokenize", messages=messages, add_special_tokens=True)
    default, without, chat = backend.generations
    assert default.sampling_parameters is None
    assert json.loads(without.sampling_parameters) == {"add_special_tokens": False}
    assert json.loads(chat.chat_request) == {"messages": messages, "add_special_tokens": True}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Exactly one of prompt and messages is required, but the request has neither of them"),
        (
            {"prompt": "a", "messages": []},
            "Exactly one of prompt and messages is required, but the request has both of them",
        ),
        (
            {"prompt": "a", "return_token_strs": True},
            "return_token_strs=true is not supported, because the response contains only token ids",
        ),
        (
            {"prompt": "a", "add_special_tokens": 1},
            "add_special_tokens must be true or false, but the request has 1",
        ),
        ({"prompt": 5}, "prompt must be a string, but the request has 5"),
    ],
)
async def test_unsupported_requests_are_refused_by_name(post, body, message):
    response = await post("/tokenize", **body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


async def test_a_server_that_is_gone_is_a_503(post, backend):
    backend.is_up = False
    assert (await post("/tokenize", prompt="a")).status_code == 503


async def test_both_routes_require_the_api_key(connect):
    async with connect(api_key="s3cret") as client:
        for path in ("/tokenize", "/v1/tokenize"):
            assert (await client.post(path, json={"prompt": "a"})).status_code == 401
            headers = {"Authorization": "Bearer s3cret"}
            response = await client.post(path, json={"prompt": "a"}, headers=headers)
            assert response.status_code == 200


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
async def test_token_ids_become_text_in_both_formats(post, path):
    body = (await post(path, model="echo", tokens=[1, 2])).json()
    assert body == {"prompt": "1 2<end>", "text": "1 2<end>"}
    body = (await post(path, tokens=[1, 2], skip_special_tokens=True)).json()
    assert body["text"] == "1 2"


@pytest.mark.parametrize("tokens", [[], None, "a", [1.5], [-1], [50_000]])
async def test_wrong_token_ids_are_refused_by_name(post, tokens):
    response = await post("/detokenize", tokens=tokens)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"
