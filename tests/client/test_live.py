"""Tests of the frontend on a real socket, with clients that disconnect and the openai library."""

import itertools
import json
import socket

import openai
import pydantic
import pytest
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend, wait_for


@pytest.fixture(scope="module")
def shared():
    backend = FakeBackend()
    with live_frontend(backend) as port:
        yield backend, port


@pytest.fixture
def backend(shared):
    return shared[0]


@pytest.fixture
def port(shared):
    return shared[1]


@pytest.fixture
def client(port):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        yield client.with_options(max_retries=0)


def start_request(port: int, path: str, **body) -> socket.socket:
    """Send a request, and return the open connection."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.mark.parametrize(
    ("path", "prompt", "stream", "num_generations", "has_started"),
    [
        (CHAT, "one <pause 60>two", True, 1, True),
        (CHAT, "<pause 60>still in the queue", True, 1, False),
        (CHAT, "one <pause 60>two", False, 1, False),
        (TEXT, "one <pause 60>two", True, 1, True),
        (TEXT, "<pause 60>still in the queue", True, 1, False),
        (TEXT, ["a <pause 60>b", "<pause 60>c"], False, 2, False),
    ],
)
def test_a_client_that_goes_away_aborts_its_request(
    backend, port, path, prompt, stream, num_generations, has_started
):
    num_aborted_before = len(backend.aborted)
    messages = [{"role": "user", "content": prompt}]
    with start_request(port, path, messages=messages, prompt=prompt, stream=stream) as connection:
        wait_for(lambda: len(backend.active) == num_generations)
        if has_started:
            assert b"200 OK" in connection.recv(65536)
    wait_for(lambda: not backend.active)
    assert len(backend.aborted) == num_aborted_before + num_generations


def test_a_client_that_does_not_read_does_not_delay_the_backend(backend, port):
    words = " ".join(["word"] * 30_000)
    with start_request(port, TEXT, prompt=words, stream=True, max_tokens=30_000) as connection:
        wait_for(lambda: backend.active)
        wait_for(lambda: not backend.active)  # the backend has generated everything
        received = b""
        while not received.endswith(b"0\r\n\r\n"):  # the last chunk of the HTTP response
            received += connection.recv(1 << 20)

    lines = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == words


def test_openai_client_chats(client):
    answer = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "one two"}]
    )
    assert answer.choices[0].message.content == "one two"
    assert answer.usage.total_tokens == 4


def test_openai_client_streams_and_collects_tool_calls(client):
    prompt = '<think>why</think>yes<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    with client.chat.completions.stream(
        model="echo", messages=[{"role": "user", "content": prompt}]
    ) as stream:
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": 1})
    assert final.choices[0].message.content == "yes"
    assert final.choices[0].finish_reason == "tool_calls"


def test_openai_client_parses_choices_with_logprobs(client):
    answer = client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "one two"}],
        n=3,
        logprobs=True,
        top_logprobs=2,
    )

    # The echo model appends " #1" to the second choice, and " #2" to the third choice.
    texts = [choice.message.content for choice in answer.choices]
    assert texts == ["one two", "one two #1", "one two #2"]
    for choice in answer.choices:
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == choice.message.content
        assert [len(token.top_logprobs) for token in tokens] == [2] * len(tokens)
        assert bytes(tokens[0].bytes).decode() == "one "
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_openai_client_collects_streamed_choices_with_logprobs(client):
    # The echo model sends the text between <hold> and </hold> as one delta, and waits at <pause>.
    # It appends " #1" to the second choice and " #2" to the third choice.
    prompt = "one <hold>two three</hold> <pause 0.01>four"
    with client.chat.completions.stream(
        model="echo",
        messages=[{"role": "user", "content": prompt}],
        n=3,
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
    ) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [
        "one two three four",
        "one two three four #1",
        "one two three four #2",
    ]
    for choice in final.choices:
        tokens = [token.token for token in choice.logprobs.content]
        assert "".join(tokens) == choice.message.content
        assert choice.finish_reason == "stop"
    assert final.usage.completion_tokens == sum(
        len(choice.logprobs.content) for choice in final.choices
    )


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_openai_client_parses_a_schemas_object(client, backend):
    answer = client.chat.completions.parse(
        model="echo",
        messages=[{"role": "user", "content": '{"name": "Ada", "age": 36}'}],
        response_format=Person,
    )
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    passed = json.loads(backend.generations[-1].chat_request)["response_format"]
    assert passed["json_schema"]["strict"] is True
    assert passed["json_schema"]["schema"]["required"] == ["name", "age"]


def test_openai_client_parses_a_tools_arguments(client, backend):
    prompt = '<tool_call>{"name": "Person", "arguments": {"name": "Ada", "age": 36}}</tool_call>'
    answer = client.chat.completions.parse(
        model="echo",
        messages=[{"role": "user", "content": prompt}],
        tools=[openai.pydantic_function_tool(Person)],
        tool_choice={"type": "function", "function": {"name": "Person"}},
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.parsed_arguments == Person(name="Ada", age=36)
    passed = json.loads(backend.generations[-1].chat_request)
    assert passed["tools"][0]["function"]["strict"] is True


def test_openai_client_parses_completions_with_logprobs(client):
    answer = client.completions.create(
        model="echo", prompt=["one two", "three"], n=2, best_of=3, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert "".join(logprobs.tokens) == choice.text
        bounds = itertools.pairwise([*logprobs.text_offset, len(choice.text)])
        assert [choice.text[begin:end] for begin, end in bounds] == logprobs.tokens
        assert len(logprobs.token_logprobs) == len(logprobs.tokens)
        assert len(logprobs.top_logprobs) == len(logprobs.tokens)


def test_openai_client_streams_completions_with_logprobs(client):
    texts, tokens = ["", ""], [[], []]
    for chunk in client.completions.create(
        model="echo", prompt="one <hold>two three</hold> four", n=2, logprobs=0, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == ["one two three four", "one two three four #1"]
    assert ["".join(words) for words in tokens] == texts


def test_openai_client_completes_and_lists_models(client):
    assert client.completions.create(model="echo", prompt="one two").choices[0].text == "one two"
    assert [model.id for model in client.models.list()] == ["echo"]


def test_openai_client_raises_its_own_errors(client):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="echo", messages=messages, temperature=9)
    assert raised.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="other", messages=messages)
    assert raised.value.code == "model_not_found"


def test_openai_client_sees_an_error_in_mid_stream(client):
    messages = [{"role": "user", "content": "one <pause 0.02><fail INTERNAL it broke>"}]
    stream = client.chat.completions.create(model="echo", messages=messages, stream=True)
    with pytest.raises(openai.APIError, match="it broke"):
        list(stream)
