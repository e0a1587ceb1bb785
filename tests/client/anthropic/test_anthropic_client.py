"""Tests of the Messages API with the `anthropic` library, on a frontend with the echo model."""

import json

import anthropic
import pydantic
import pytest
from anthropic import beta_tool
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend, wait_for
from nereid_client.routes import models

pytestmark = pytest.mark.anyio

FIELDS = {"model": "echo", "max_tokens": 100}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
WEATHER = {
    "name": "get_weather",
    "description": "Return the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    backend = FakeBackend()
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    limited = '[limited]\nkey = "limited-key"\nrequests_per_minute = 1\n'
    keys.write_text(f'[team]\nkey = "team-key"\n\n{limited}')
    with live_frontend(backend, api_key="the-key", api_key_file=str(keys)) as port:
        yield backend, port


@pytest.fixture
def backend(shared):
    return shared[0]


@pytest.fixture
def url(shared):
    return f"http://127.0.0.1:{shared[1]}"


@pytest.fixture
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="the-key", max_retries=0) as client:
        yield client


def ask(text):
    return [{"role": "user", "content": text}]


def chat_of(backend):
    """Return the chat completion request that the backend received last."""
    return json.loads(backend.generations[-1].chat_request)


def test_a_message_is_answered(client):
    message = client.messages.create(messages=ask("one two"), **FIELDS)
    assert [(block.type, block.text) for block in message.content] == [("text", "one two")]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "echo", "end_turn")
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens) == (2, 2)
    assert (usage.cache_read_input_tokens, usage.output_tokens_details.thinking_tokens) == (0, 0)
    assert message.id.startswith("msg_")
    assert message._request_id


def test_thinking_text_and_tool_calls_are_blocks_in_their_order(client):
    prompt = f"<think>why not</think>Let me see.{CALL}{CALL}"
    message = client.messages.create(messages=ask(prompt), tools=[WEATHER], **FIELDS)
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "why not")
    assert len(thinking.signature) == 44
    assert text.text == "Let me see."
    assert (first.type, first.name, first.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens == 2


def test_the_stream_helper_collects_the_same_message(client):
    prompt = f"<think>why not</think>Let me see.{CALL}{CALL}"
    fields = {"messages": ask(prompt), "tools": [WEATHER], **FIELDS}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert streamed.to_dict()["content"] == whole.to_dict()["content"]
    assert streamed.usage == whole.usage
    assert (streamed.stop_reason, streamed.stop_sequence) == ("tool_use", None)
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)


def test_raw_events_are_typed_and_complete(client):
    with client.messages.with_streaming_response.create(
        messages=ask("one two"), stream=True, **FIELDS
    ) as response:
        lines = list(response.iter_lines())

    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data_lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(line) for line in data_lines]
    assert names == [event["type"] for event in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == 2


async def test_the_async_client_streams_text_and_messages(url):
    async with anthropic.AsyncAnthropic(base_url=url, auth_token="the-key") as client:
        async with client.messages.stream(messages=ask("one two"), **FIELDS) as stream:
            assert "".join([text async for text in stream.text_stream]) == "one two"
        message = await client.messages.create(messages=ask("three"), **FIELDS)
        assert message.content[0].text == "three"


def test_a_tool_loop_runs_to_the_last_message(client, backend):
    cities = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Return the weather.

        Args:
            city: the name of the city.
        """
        cities.append(city)
        if city == "Atlantis":
            raise ValueError("no such city")
        return f"sunny in {city}"

    calls = CALL + CALL.replace("Oslo", "Atlantis")
    runner = client.beta.messages.tool_runner(messages=ask(calls), tools=[get_weather], **FIELDS)
    message = runner.until_done()

    assert sorted(cities) == ["Atlantis", "Oslo"]
    assert message.stop_reason == "end_turn"
    messages = chat_of(backend)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    *_, weather, failure = messages
    assert (weather["content"], weather["name"]) == ("sunny in Oslo", "get_weather")
    assert failure["content"].startswith("Error: ")
    assert "no such city" in failure["content"]
    assert message.content[0].text == failure["content"]  # the echo model repeats the last message


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_a_message_is_parsed_with_a_schema(client, backend):
    message = client.messages.parse(
        messages=ask('{"name": "Ada", "age": 36}'), output_format=Person, **FIELDS
    )
    assert message.parsed_output == Person(name="Ada", age=36)
    response_format = chat_of(backend)["response_format"]
    assert response_format["type"] == "json_schema"
    assert response_format["json_schema"]["schema"]["required"] == ["name", "age"]


def test_stop_sequences_and_max_tokens_end_a_message(client):
    message = client.messages.create(
        messages=ask("one two three"), stop_sequences=["two"], **FIELDS
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    message = client.messages.create(messages=ask("one two"), model="echo", max_tokens=1)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)


def test_omitted_thinking_has_a_signature_but_no_text(client):
    fields = {"messages": ask("<think>why</think>yes"), **FIELDS}
    fields["thinking"] = {"type": "adaptive", "display": "omitted"}
    whole = client.messages.create(**fields)
    thinking, text = whole.content
    assert (thinking.thinking, len(thinking.signature), text.text) == ("", 44, "yes")
    with client.messages.stream(**fields) as stream:
        assert stream.get_final_message().to_dict()["content"] == whole.to_dict()["content"]


def test_tokens_are_counted_without_generating(client, backend):
    most_active_before = backend.most_active
    count = client.messages.count_tokens(model="echo", messages=ask("one two three"), system="Hi")
    assert count.input_tokens == 3
    assert backend.most_active == most_active_before


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        (
            {"messages": ask("<fail UNAVAILABLE the queue is full>")},
            anthropic.InternalServerError,
            "overloaded_error",
        ),
        (
            {"messages": ask("<fail RESOURCE_EXHAUSTED too many>")},
            anthropic.RateLimitError,
            "rate_limit_error",
        ),
        ({"messages": ask("<fail INTERNAL bug>")}, anthropic.InternalServerError, "api_error"),
    ],
)
def test_errors_raise_the_client_s_exceptions(client, change, error, kind):
    with pytest.raises(error) as raised:
        client.messages.create(**{"messages": ask("hi"), **FIELDS, **change})
    assert (raised.value.type, raised.value.body["type"]) == (kind, "error")
    assert raised.value.body["request_id"] == raised.value.request_id


def test_an_overloaded_server_has_the_status_of_anthropic_s_api(client):
    with pytest.raises(anthropic.APIStatusError) as raised:
        client.messages.create(messages=ask("<fail UNAVAILABLE full>"), **FIELDS)
    assert raised.value.status_code == 529
    assert raised.value.response.headers["retry-after"] == "1"


def test_a_prompt_that_is_too_long_is_reported_in_the_words_that_agents_expect(client):
    prompt = "<fail INVALID_ARGUMENT prompt has 9000 tokens; the limit is 4096 (max_model_len)>"
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(messages=ask(prompt), **FIELDS)
    assert raised.value.api_message.startswith("prompt is too long: 9000 tokens > 4096 maximum.")


def test_an_error_of_the_backend_names_the_field_of_the_messages_api(client):
    prompt = "<fail INVALID_ARGUMENT stop: the value has too many strings>"
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(messages=ask(prompt), **FIELDS)


def test_an_error_in_mid_stream_is_raised(client):
    prompt = "one <pause 0.02><fail INTERNAL it broke>"
    with (
        pytest.raises(anthropic.APIStatusError, match="it broke") as raised,
        client.messages.stream(messages=ask(prompt), **FIELDS) as stream,
    ):
        stream.until_done()
    assert raised.value.type == "api_error"


@pytest.mark.parametrize("fields", [{"api_key": "wrong"}, {"auth_token": "wrong"}])
def test_a_wrong_key_is_refused(url, fields):
    with (
        anthropic.Anthropic(base_url=url, max_retries=0, **fields) as client,
        pytest.raises(anthropic.AuthenticationError) as raised,
    ):
        client.messages.create(messages=ask("hi"), **FIELDS)
    assert raised.value.type == "authentication_error"


def test_the_keys_of_the_key_file_and_their_limits_apply(url):
    with anthropic.Anthropic(base_url=url, api_key="team-key", max_retries=0) as client:
        assert client.messages.create(messages=ask("hi"), **FIELDS).content[0].text == "hi"
    with anthropic.Anthropic(base_url=url, api_key="limited-key", max_retries=0) as client:
        client.messages.create(messages=ask("hi"), **FIELDS)
        with pytest.raises(anthropic.RateLimitError, match="requests_per_minute") as raised:
            client.messages.create(messages=ask("hi"), **FIELDS)
    assert int(raised.value.response.headers["retry-after"]) > 0


def test_models_are_listed_in_anthropic_s_format(client):
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("echo", "echo", "model")
    assert model.created_at.year >= 2024
    assert client.models.retrieve("echo") == model
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.models.retrieve("other")
    assert raised.value.type == "not_found_error"


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ({}, ["a", "b", "c"], False),
        ({"limit": 2}, ["a", "b"], True),
        ({"limit": 3}, ["a", "b", "c"], False),
        ({"after_id": "a"}, ["b", "c"], False),
        ({"after_id": "a", "limit": 1}, ["b"], True),
        ({"after_id": "c"}, [], False),
        ({"before_id": "c"}, ["a", "b"], False),
        ({"before_id": "c", "limit": 1}, ["b"], True),
        ({"before_id": "a", "limit": 1}, [], False),
        ({"after_id": "c", "before_id": "a"}, [], False),
    ],
)
def test_a_page_of_the_models_is_what_the_query_selects(query, names, has_more):
    assert models._page(["a", "b", "c"], models._PageQuery(**query)) == (names, has_more)


def test_the_pages_of_the_models_contain_each_model_once(client):
    assert [model.id for model in client.models.list(limit=1)] == ["echo"]
    assert list(client.models.list(after_id="echo")) == []
    assert list(client.models.list(before_id="echo")) == []
    with pytest.raises(anthropic.NotFoundError, match="must be the id of a model"):
        client.models.list(after_id="other")
    with pytest.raises(anthropic.BadRequestError, match="limit must be at least 1"):
        client.models.list(limit=0)


def test_a_client_that_goes_away_aborts_its_request(client, backend):
    num_aborted_before = len(backend.aborted)
    with client.messages.stream(messages=ask("one <pause 60>two"), **FIELDS) as stream:
        next(iter(stream))
    wait_for(lambda: len(backend.aborted) == num_aborted_before + 1)
