"""Tests of the OpenAI frontend on a real server, with the openai library."""

import json
import urllib.error
import urllib.request

import openai
import pytest

pytestmark = pytest.mark.triton

HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def test_a_streamed_chat_completion_equals_the_one_without_streaming(client, model):
    fields = {"model": model, "messages": HELLO, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage_chunk = stream

    choices = [chunk.choices[0] for chunk in chunks]
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == (whole.choices[0].message.content or "")
    finish_reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert finish_reasons == [whole.choices[0].finish_reason]
    assert usage_chunk.usage == whole.usage
    assert whole.usage.completion_tokens > 0


def test_a_completion_answers_each_prompt(client, model):
    answer = client.completions.create(
        model=model, prompt=["One", "Two"], max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage.completion_tokens == 10


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 65}, "n"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(client, model, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": model, "messages": HELLO} | fields)
    assert caught.value.param == param


def test_an_unknown_model_is_a_404(client):
    with pytest.raises(openai.NotFoundError, match="gpt-none"):
        client.chat.completions.create(model="gpt-none", messages=HELLO)


def test_broken_json_is_a_400_in_the_apis_shape(served):
    request = urllib.request.Request(
        f"{served.openai_url}/chat/completions",
        b'{"model": ',
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        assert answer.code == 400
        assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"


def test_a_session_is_listed_extended_and_dropped(served, client, model):
    def call(method, query="", body=None):
        data = None if body is None else json.dumps(body).encode()
        url = f"{served.openai_url}/cache{query}"
        request = urllib.request.Request(url, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    def chat_in_session():
        """Send a chat, and return the number of its tokens that were in the cache."""
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me about the sea. " * 12}],
            max_tokens=4,
            prompt_cache_key="e2e session",
            extra_body={"prompt_cache_retention": "1h"},
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    def sessions():
        return {session["prompt_cache_key"]: session for session in call("GET")["sessions"]}

    assert chat_in_session() == 0
    assert sessions()["e2e session"]["num_tokens"] > 0
    assert 3000 < sessions()["e2e session"]["expires_in_s"] <= 3600
    assert chat_in_session() > 0

    one_day = {"prompt_cache_key": "e2e session", "prompt_cache_retention": "24h"}
    assert call("POST", body=one_day) == {"object": "cache", **one_day}
    assert sessions()["e2e session"]["expires_in_s"] > 80_000

    assert call("DELETE", "?prompt_cache_key=e2e%20session")["num_dropped_tokens"] > 0
    assert "e2e session" not in sessions()
    assert chat_in_session() == 0
