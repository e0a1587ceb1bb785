"""Tests of custom tools with the openai library, on a frontend with the echo model."""

import json
from types import SimpleNamespace

import openai
import pydantic
import pytest
from fakes.batches import create, finished, library, line, results
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend, wait_for
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionMessageCustomToolCall
from openai.types.responses import ResponseCustomToolCall, ResponseStreamEvent

PATCH = '*** Begin Patch\n+print("é 😀\\n")\t\\d\n*** End Patch'
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
FLAT = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": LARK}
CUSTOM = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}},
    },
}
FUNCTION = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


def call_text(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


SAID = f"ok {call_text('apply_patch', {'input': PATCH})}"
SAID_BOTH = SAID + call_text("g", {"a": 1}) + call_text("apply_patch", {"input": ""})
SAID_OTHER = call_text("apply_patch", {"patch": "a"})


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    backend = FakeBackend()
    folder = tmp_path_factory.mktemp("batches")
    with (
        live_frontend(backend, batch_folder=str(folder)) as port,
        library(port) as client,
    ):
        yield SimpleNamespace(backend=backend, client=client.with_options(max_retries=0))


@pytest.fixture
def client(served):
    return served.client


def chat(client, text, **fields):
    return client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": text}],
        tools=[CUSTOM, FUNCTION],
        **fields,
    )


def test_a_chat_contains_calls_of_custom_tools_and_of_functions(client):
    (choice,) = chat(client, SAID_BOTH).choices
    first, second, third = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert isinstance(first, ChatCompletionMessageCustomToolCall)
    assert first.id == "call_0"
    assert (first.custom.name, first.custom.input) == ("apply_patch", PATCH)
    assert (second.type, second.function.name) == ("function", "g")
    assert json.loads(second.function.arguments) == {"a": 1}
    assert (third.type, third.custom.input) == ("custom", "")


def contents(call):
    """Return the id, type, name and input of a call.

    The result omits the fields that the openai library adds only to streamed calls.
    """
    fields = call.to_dict()
    text_field = {"custom": "input", "function": "arguments"}[call.type]
    return call.id, call.type, fields[call.type]["name"], fields[call.type][text_field]


@pytest.mark.parametrize("text", [SAID, SAID_BOTH, SAID_OTHER])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_the_chunks_of_a_chat_add_up_to_the_whole_chat(client, text, num_choices):
    whole = chat(client, text, n=num_choices)
    state = ChatCompletionStreamState()
    for chunk in chat(client, text, n=num_choices, stream=True):
        state.handle_chunk(chunk)
    streamed = state.current_completion_snapshot
    assert len(streamed.choices) == num_choices
    for choice, expected in zip(streamed.choices, whole.choices, strict=True):
        streamed_calls = [contents(call) for call in choice.message.tool_calls]
        assert streamed_calls == [contents(call) for call in expected.message.tool_calls]
        assert choice.finish_reason == expected.finish_reason == "tool_calls"


def test_the_conversation_of_a_chat_goes_on_with_the_output_of_the_tool(client, served):
    message = chat(client, SAID).choices[0].message
    (call,) = message.tool_calls
    client.chat.completions.create(
        model="echo",
        messages=[
            {"role": "user", "content": SAID},
            message.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
            {"role": "user", "content": "thanks"},
        ],
        tools=[CUSTOM],
    )
    sent = json.loads(served.backend.generations[-1].chat_request)["messages"]
    function = sent[1]["tool_calls"][0]["function"]
    assert function["name"] == "apply_patch"
    assert json.loads(function["arguments"]) == {"input": PATCH}
    assert sent[2] == {"role": "tool", "tool_call_id": call.id, "content": "done"}


def respond(client, given, **fields):
    flat_function = {"type": "function", "name": "g", "parameters": {"type": "object"}}
    return client.responses.create(model="echo", input=given, tools=[FLAT, flat_function], **fields)


def test_a_response_contains_calls_of_custom_tools_and_of_functions(client):
    _, first, second, third = respond(client, SAID_BOTH).output
    assert isinstance(first, ResponseCustomToolCall)
    assert (first.type, first.name, first.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert first.id.startswith("ctc_")
    assert first.call_id == "call_0"
    assert (second.type, second.name) == ("function_call", "g")
    assert (third.type, third.input) == ("custom_tool_call", "")


def events_of_custom_call(events):
    """Return all events of the first output item that is a custom tool call."""
    items = [event["item"] for event in events if "item" in event]
    item_id = next(item["id"] for item in items if item["type"] == "custom_tool_call")
    return [
        event
        for event in events
        if event.get("item_id", event.get("item", {}).get("id")) == item_id
    ]


@pytest.mark.parametrize(("text", "expected"), [(SAID, PATCH), (SAID_OTHER, '{"patch": "a"}')])
def test_the_events_of_a_custom_call_add_up_to_its_item(client, text, expected):
    events = [event.to_dict() for event in respond(client, text, stream=True)]
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    added, *deltas, input_done, item_done = events_of_custom_call(events)
    index = added["output_index"]
    assert added["type"] == "response.output_item.added"
    assert (added["item"]["status"], added["item"]["input"]) == ("in_progress", "")
    assert {event["type"] for event in deltas} == {"response.custom_tool_call_input.delta"}
    assert all(event["delta"] for event in deltas)
    assert "".join(event["delta"] for event in deltas) == expected
    assert input_done["type"] == "response.custom_tool_call_input.done"
    assert set(input_done) == {"type", "sequence_number", "item_id", "output_index", "input"}
    assert (input_done["input"], input_done["output_index"]) == (expected, index)
    assert item_done["type"] == "response.output_item.done"
    item = item_done["item"]
    assert (item["status"], item["input"]) == ("completed", expected)
    assert events[-1]["response"]["output"][index] == item


def test_the_library_collects_a_streamed_response(client):
    with client.responses.stream(model="echo", input=SAID, tools=[FLAT]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    _, call = final.output
    assert (call.type, call.input) == ("custom_tool_call", PATCH)
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH


@pytest.mark.parametrize("background", [False, True])
def test_a_stored_response_goes_on_with_the_output_of_the_tool(client, served, background):
    first = respond(client, SAID, background=background)
    wait_for(lambda: client.responses.retrieve(first.id).status == "completed")
    first = client.responses.retrieve(first.id)
    call = first.output[-1]
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    second = respond(client, [output], previous_response_id=first.id)

    messages = json.loads(served.backend.generations[-1].chat_request)["messages"]
    (passed_call,) = messages[1]["tool_calls"]
    assert json.loads(passed_call["function"]["arguments"]) == {"input": PATCH}
    assert messages[2] == {"role": "tool", "content": "done", "tool_call_id": call.call_id}
    items = client.responses.input_items.list(second.id, order="asc").data
    kinds = ["message", "message", "custom_tool_call", "custom_tool_call_output"]
    assert [item.type for item in items] == kinds
    assert items[2].input == PATCH


def test_a_wrong_tool_is_an_error_of_the_library(client):
    wrong = FLAT | {"format": LARK | {"syntax": "regex", "definition": "(a"}}
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="echo", input="hi", tools=[wrong])
    assert raised.value.param == "tools[0].format.definition"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_line_of_a_batch_may_have_custom_tools(client, path):
    body = {"model": "echo", "messages": [{"role": "user", "content": SAID}], "tools": [CUSTOM]}
    if path == "/v1/responses":
        body = {"model": "echo", "input": SAID, "tools": [FLAT]}
    batch = create(client, [line(0, url=path, **body)], endpoint=path)
    (result,) = results(client, finished(client, batch).output_file_id)
    answer = result["response"]["body"]
    if path == "/v1/responses":
        assert answer["output"][-1]["input"] == PATCH
    else:
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["custom"] == {"name": "apply_patch", "input": PATCH}
