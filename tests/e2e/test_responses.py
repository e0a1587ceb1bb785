"""Tests of the Responses API on a real server, with the openai library."""

import json
import re
import signal
import time

import openai
import pydantic
import pytest
from e2e.gauges_page import gauge_of, is_busy, is_idle, num_given_up, wait_until_given_up
from fakes.live_frontend import wait_for
from fakes.response_events import StreamCheck

from loadtest.server.served import ALONE, Served

pytestmark = pytest.mark.triton

UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": UNIT},
        "required": ["city"],
    },
}
ASK = "What is the weather in Paris?"
ENDLESS = {"max_output_tokens": 3000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture
def create(client, model):
    """A function that sends a request with the given input and fields."""

    def send(given_input, **fields):
        fields = {"model": model, "temperature": 0, **fields}
        return client.responses.create(**fields, input=given_input)

    return send


@pytest.fixture
def num_before(gauge):
    """The number of requests whose clients disconnected during earlier tests."""
    wait_for(lambda: is_idle(gauge))
    return num_given_up(gauge)


def test_reasoning_and_answer_are_items_and_a_stream_says_the_same(create):
    whole = create("What is 27 + 45?")

    assert whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert "72" in whole.output_text
    assert whole.output[0].content[0].text
    assert whole.usage.output_tokens_details.reasoning_tokens > 0

    events = [event.to_dict() for event in create("What is 27 + 45?", stream=True)]
    final = StreamCheck().run(events)
    assert [event["type"] for event in events].count("response.output_text.delta") > 1
    streamed_texts = [item["content"][0]["text"] for item in final["output"]]
    assert streamed_texts == [item.content[0].text for item in whole.output]


def test_effort_none_leaves_the_reasoning_out(create):
    direct = create("What is 27 + 45?", reasoning={"effort": "none"})
    assert [item.type for item in direct.output] == ["message"]
    assert "72" in direct.output_text


def test_a_call_streams_and_the_conversation_goes_on_with_its_output(create):
    events = [event.to_dict() for event in create(ASK, tools=[WEATHER], stream=True)]
    final = StreamCheck().run(events)
    call = final["output"][-1]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert json.loads(call["arguments"]) == {"city": "Paris"}

    result = '{"temperature": 21, "sky": "clear"}'
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
    # The server has stored the earlier items, or the client sends them again.
    with_stored_items = create([output], tools=[WEATHER], previous_response_id=final["id"])
    assert "21" in with_stored_items.output_text
    items = [{"role": "user", "content": ASK}, *final["output"], output]
    with_sent_items = create(items, tools=[WEATHER], store=False)
    assert with_sent_items.output_text == with_stored_items.output_text


def test_a_forced_call_comes(create):
    choice = {"type": "function", "name": "get_weather"}
    response = create("Hello!", tools=[WEATHER], tool_choice=choice)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["get_weather"]


def custom_tool(regex):
    tool_format = {"type": "grammar", "syntax": "regex", "definition": regex}
    return {"type": "custom", "name": "save_date", "description": "Saves.", "format": tool_format}


@pytest.mark.parametrize(
    "regex",
    [
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
        r"^(yes|no)$|^(?:maybe) \d$",
        r"[a-z]{2,5} (?<n>[^a-z\n]{1,3})é",
    ],
)
def test_the_input_of_a_custom_tool_matches_its_regex(create, regex):
    python_regex = regex.replace("(?<", "(?P<")  # Python's syntax of named groups
    fields = {"tools": [custom_tool(regex)], "tool_choice": "required", "temperature": 1}
    for seed in range(3):
        fields["extra_body"] = {"seed": seed}

        whole = create("Which day is it?", **fields)
        inputs = [item.input for item in whole.output if item.type == "custom_tool_call"]
        assert inputs
        assert all(re.fullmatch(python_regex, text) for text in inputs), inputs

        events = [event.to_dict() for event in create("Hi", stream=True, **fields)]
        deltas = [e["delta"] for e in events if e["type"].endswith("tool_call_input.delta")]
        items = events[-1]["response"]["output"]
        inputs = [item["input"] for item in items if item["type"] == "custom_tool_call"]
        assert inputs
        assert "".join(deltas) == "".join(inputs)
        assert all(re.fullmatch(python_regex, text) for text in inputs), inputs


def test_a_forced_custom_tool_is_called_and_the_conversation_goes_on(create, client, model):
    tool = choice = {"type": "custom", "name": "note"}
    first = create("Hello!", tools=[tool, WEATHER], tool_choice=choice, max_output_tokens=200)
    (call,) = [item for item in first.output if item.type == "custom_tool_call"]
    assert call.name == "note"

    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "saved"}
    second = create([output], tools=[tool], previous_response_id=first.id, max_output_tokens=50)
    assert second.status in ("completed", "incomplete")

    chat_tool = chat_choice = {"type": "custom", "custom": {"name": "note"}}
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hello!"}],
        tools=[chat_tool],
        tool_choice=chat_choice,
        max_tokens=200,
        temperature=0,
    )
    (chat_call,) = chat.choices[0].message.tool_calls
    assert (chat_call.type, chat_call.custom.name) == ("custom", "note")


def test_an_error_that_only_the_grammar_library_finds_is_an_error_of_the_tools(create):
    with pytest.raises(openai.BadRequestError, match="lower bound is larger") as caught:
        create("Hi", tools=[custom_tool("[z-a]")])
    assert caught.value.param == "tools"


class Sum(pydantic.BaseModel):
    left: int
    right: int


def test_an_answer_is_parsed_by_its_schema(client, model):
    response = client.responses.parse(
        model=model, input="What is 27 + 45?", text_format=Sum, max_output_tokens=400
    )
    assert isinstance(response.output_parsed, Sum)


def test_logprobs_belong_to_the_tokens_of_the_text(create):
    response = create("What is 27 + 45?", include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = response.output[-1].content
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == part.text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}


def test_counted_input_tokens_equal_the_usage(client, create, model):
    counted = client.responses.input_tokens.count(model=model, input=ASK, tools=[WEATHER])
    assert counted.input_tokens == create(ASK, tools=[WEATHER]).usage.input_tokens


def test_a_conversation_that_is_too_long_loses_its_beginning_where_that_is_asked_for(create):
    turn = [{"role": "user", "content": "word " * 900}, {"role": "assistant", "content": "Yes."}]
    items = [*(turn * 8), {"role": "user", "content": "What is 27 + 45?"}]
    with pytest.raises(openai.BadRequestError, match=r"the limit is \d+ \(max_model_len\)"):
        create(items)
    response = create(items, truncation="auto")
    assert response.status in ("completed", "incomplete")
    assert response.usage.input_tokens > 900


def test_the_backends_error_has_the_names_of_this_api(create):
    with pytest.raises(openai.BadRequestError) as caught:
        create("hi", text={"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}})
    assert caught.value.param == "text.format"


def test_a_background_response_is_finished_without_its_client(client, create, gauge):
    response = create("What is 27 + 45?", background=True)
    assert response.status == "queued"
    wait_for(lambda: client.responses.retrieve(response.id).status == "completed")
    assert "72" in client.responses.retrieve(response.id).output_text
    wait_for(lambda: is_idle(gauge))


def test_cancelling_while_it_decodes_frees_its_blocks(client, create, gauge, num_before):
    response = create("For ever and", background=True, **ENDLESS)
    wait_for(lambda: is_busy(gauge) and client.responses.retrieve(response.id).output)
    cancelled = client.responses.cancel(response.id)
    wait_until_given_up(gauge, num_before)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text or cancelled.output


def test_a_response_that_is_cancelled_at_once_is_not_generated(client, create, gauge):
    num_tokens = gauge("generation_tokens_total")
    for _ in range(8):
        response = create("For ever and", background=True, **ENDLESS)
        assert client.responses.cancel(response.id).status == "cancelled"
    time.sleep(1.5)  # wait until the metrics page has been updated after the last request
    wait_for(lambda: is_idle(gauge))
    assert gauge("generation_tokens_total") - num_tokens < 8 * 3000 / 2


def test_deleting_a_running_response_stops_its_request(client, create, gauge, num_before):
    response = create("For ever and", background=True, **ENDLESS)
    wait_for(lambda: is_busy(gauge))
    client.responses.delete(response.id)
    wait_until_given_up(gauge, num_before)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_client_that_leaves_ends_its_response(create, gauge, num_before):
    stream = create("For ever and", stream=True, **ENDLESS)
    for _ in stream:
        if is_busy(gauge):
            break
    stream.close()
    wait_until_given_up(gauge, num_before)


def test_a_background_stream_is_taken_up_again_and_ends_with_a_cancel(
    client, create, gauge, num_before
):
    events = []
    with create("For ever and", stream=True, background=True, **ENDLESS) as stream:
        for event in stream:
            events.append(event.to_dict())
            if event.type.endswith(".delta"):
                break  # leave the stream in the middle of the answer

    response_id = events[0]["response"]["id"]
    assert client.responses.retrieve(response_id).status == "in_progress"
    last_number = events[-1]["sequence_number"]
    stream = client.responses.retrieve(response_id, stream=True, starting_after=last_number)
    for num_read, event in enumerate(stream, start=1):
        events.append(event.to_dict())
        if num_read == 4:
            client.responses.cancel(response_id)

    assert StreamCheck().run(events)["status"] == "cancelled"
    wait_until_given_up(gauge, num_before)


@pytest.fixture(scope="module")
def narrow(fork_server):
    """A server that runs one sequence at a time, and processes prompts 4 tokens at a time."""
    settings = {"NEREID_MAX_NUM_SEQS": "1", "NEREID_MAX_NUM_BATCHED_TOKENS": "4"}
    flags = ["--log-level=warning", "--drain-timeout=240", *ALONE]
    with Served(environment={**settings, **fork_server}, arguments=flags) as running:
        yield running


def test_cancelling_while_it_waits_in_the_queue_takes_it_out(narrow):
    gauge = gauge_of(narrow.metrics_port)
    wait_for(lambda: is_idle(gauge))
    num_before = num_given_up(gauge)
    with openai.OpenAI(base_url=narrow.openai_url, api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        fields = {"model": model, "input": "For ever", "background": True, **ENDLESS}
        running = client.responses.create(**fields)
        wait_for(lambda: gauge("num_requests") == 1)
        waiting = client.responses.create(**fields)
        wait_for(lambda: client.responses.retrieve(running.id).output)
        wait_for(lambda: gauge("num_requests_waiting") == 1)

        cancelled = client.responses.cancel(waiting.id)

        assert (cancelled.status, cancelled.output) == ("cancelled", [])
        wait_for(lambda: gauge("num_requests_waiting") == 0)
        assert client.responses.retrieve(running.id).status == "in_progress"
        client.responses.cancel(running.id)
        wait_until_given_up(gauge, num_before, number=2)
        last = client.responses.create(model=model, input="What is 27 + 45?", temperature=0)
        assert "72" in last.output_text


def test_cancelling_while_it_is_prefilled_frees_its_blocks(narrow):
    gauge = gauge_of(narrow.metrics_port)
    wait_for(lambda: is_idle(gauge))
    num_before = num_given_up(gauge)
    with openai.OpenAI(base_url=narrow.openai_url, api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        # The server processes 4 tokens in a step, so it needs hundreds of steps for this prompt.
        long_prompt = "What is 27 + 45? " * 200
        fields = {"model": model, "input": long_prompt, "background": True, **ENDLESS}
        response = client.responses.create(**fields)
        wait_for(lambda: gauge("num_requests_running") == 1)

        cancelled = client.responses.cancel(response.id)

        wait_until_given_up(gauge, num_before)
        assert (cancelled.status, cancelled.output, cancelled.usage) == ("cancelled", [], None)


def test_a_server_that_stops_waits_for_what_runs_in_the_background(narrow):
    """This test stops the server `narrow`, so it must be the last test that uses this server."""
    with openai.OpenAI(base_url=narrow.openai_url, api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        fields = {"background": True, "stream": True, **ENDLESS, "max_output_tokens": 400}
        with client.responses.create(model=model, input="For ever", **fields) as stream:
            first_event = next(stream)
        response_id = first_event.response.id
        other_events = client.responses.retrieve(response_id, stream=True, starting_after=0)

        narrow.process.send_signal(signal.SIGTERM)

        events = [event.to_dict() for event in (first_event, *other_events)]
        final = StreamCheck().run(events)
    assert final["status"] == "incomplete"
    assert final["usage"]["output_tokens"] == 400
    narrow.process.wait(timeout=240)
    assert "waiting for 1 request to finish" in narrow.output
