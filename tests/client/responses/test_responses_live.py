"""Tests of the Responses API with the openai library, on a frontend with the echo model."""

import json
import socket

import openai
import pydantic
import pytest
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend, wait_for

PATH = "/v1/responses"
CALL = '<think>why</think>yes<tool_call>{"name": "Person", "arguments": {"name": "A", "age": 1}}'
CALL += "</tool_call>"


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def shared():
    backend = FakeBackend()
    with live_frontend(backend) as port:
        yield backend, port


@pytest.fixture
def backend(shared):
    return shared[0]


@pytest.fixture
def client(shared):
    url = f"http://127.0.0.1:{shared[1]}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_the_library_creates_retrieves_lists_and_deletes(client):
    made = client.responses.create(model="echo", input="one two", metadata={"a": "b"})
    assert made.output_text == "one two"
    assert made.usage.total_tokens == 4
    assert client.responses.retrieve(made.id) == made
    (item,) = client.responses.input_items.list(made.id).data
    assert item.content[0].text == "one two"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_the_library_pages_through_input_items(client):
    items = [{"role": "user", "content": str(number)} for number in range(7)]
    made = client.responses.create(model="echo", input=items)
    listed = client.responses.input_items.list(made.id, limit=3, order="asc")
    assert [item.content[0].text for item in listed] == [str(number) for number in range(7)]


def test_the_library_goes_on_from_a_response(client, backend):
    first = client.responses.create(model="echo", input="one")
    client.responses.create(model="echo", input="two", previous_response_id=first.id)
    said = json.loads(backend.generations[-1].chat_request)["messages"]
    assert [message["content"] for message in said] == ["one", "one", "two"]


def test_the_library_streams_and_collects(client):
    tool = openai.pydantic_function_tool(Person)["function"] | {"type": "function"}
    with client.responses.stream(model="echo", input=CALL, tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    reasoning, message, call = final.output
    assert reasoning.content[0].text == "why"
    assert message.content[0].text == final.output_text == "yes"
    assert call.parsed_arguments == {"name": "A", "age": 1}
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert events[-1].type == "response.completed"


def test_the_library_parses_a_schemas_object(client, backend):
    text = '{"name": "Ada", "age": 36}'
    answer = client.responses.parse(model="echo", input=text, text_format=Person)
    assert answer.output_parsed == Person(name="Ada", age=36)
    passed = json.loads(backend.generations[-1].chat_request)["response_format"]
    assert passed["json_schema"]["strict"] is True
    assert passed["json_schema"]["schema"]["required"] == ["name", "age"]
    with client.responses.stream(model="echo", input=text, text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)


def test_the_library_runs_polls_and_cancels_in_the_background(client, backend):
    made = client.responses.create(model="echo", input="one <pause 60>two", background=True)
    assert made.status == "queued"
    wait_for(lambda: client.responses.retrieve(made.id).output_text == "one ")
    cancelled = client.responses.cancel(made.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "one ")
    assert not backend.active
    assert client.responses.retrieve(made.id) == cancelled


def test_the_library_takes_up_a_background_stream_that_it_lost(client, backend):
    text = "one <pause 0.05>" * 6
    stream = client.responses.create(model="echo", input=text, background=True, stream=True)
    events = []
    for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta":
            break
    stream.close()

    response_id, last_number = events[0].response.id, events[-1].sequence_number
    events += client.responses.retrieve(response_id, stream=True, starting_after=last_number)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert final.status == "completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == "one " * 6

    with client.responses.stream(response_id=response_id, starting_after=last_number) as stream:
        assert stream.get_final_response().output_text == final.output_text


def test_the_library_counts_tokens(client):
    counted = client.responses.input_tokens.count(model="echo", input="one two three")
    assert counted.input_tokens == 3


def test_the_library_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError) as bad_request:
        client.responses.create(model="echo", input="hi", temperature=9)
    assert bad_request.value.param == "temperature"

    with pytest.raises(openai.NotFoundError) as not_found:
        client.responses.create(model="echo", input="hi", previous_response_id="resp_x")
    assert not_found.value.code == "response_not_found"

    # The echo model sends "one", and then fails with a message.
    text = "one <pause 0.02><fail INTERNAL it broke>"
    events = list(client.responses.create(model="echo", input=text, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "it broke"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", ["one <pause 60>two", "<pause 60>queued"])
def test_a_client_that_goes_away_aborts_its_response(shared, text, stream):
    backend, port = shared
    num_aborted_before = len(backend.aborted)
    data = json.dumps({"input": text, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        wait_for(lambda: backend.active)
    wait_for(lambda: not backend.active)
    assert len(backend.aborted) == num_aborted_before + 1
