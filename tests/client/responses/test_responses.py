"""Tests of `POST /v1/responses` with the echo model: fields, responses, and errors."""

import json

import pytest
from fakes.response_events import StreamCheck, text_of
from nereid_client.protocol.responses_request import REFUSED_IN_RESPONSES
from nereid_client.protocol.responses_tools import REFUSED_IN_TOOLS

pytestmark = pytest.mark.anyio

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'
MARKUP = f"<think>it asks</think>let me look{CALL}{CALL}"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TURN = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
LOGPROBS = ["message.output_text.logprobs"]
TOOL_CHOICE_MESSAGE = (
    'tool_choice must be "none", "auto", "required", {"type": "function", "name"}, {"type": '
    '"custom", "name"} or {"type": "allowed_tools", "mode", "tools"}, but the request has '
)


@pytest.fixture
def respond(post):
    """A function: `await respond(input, **fields)` sends a request and returns the response."""

    async def send(given, **fields):
        return await post("/v1/responses", input=given, **fields)

    return send


def events_of(response):
    """Return the events of a stream, and check that each event is named after its type."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without_ids(items):
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


def passed_on(backend):
    return json.loads(backend.generations[-1].chat_request)


async def test_a_response_has_text_usage_and_repeats_its_request(respond):
    body = (await respond("one two three", temperature=0.5, metadata={"a": "b"})).json()
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "one two three", "annotations": [], "logprobs": []}
    ]
    assert body["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 6,
    }
    assert (body["object"], body["model"], body["status"]) == ("response", "echo", "completed")
    assert (body["temperature"], body["metadata"], body["store"]) == (0.5, {"a": "b"}, True)
    assert body["completed_at"] >= body["created_at"]


async def test_a_response_repeats_the_penalties_that_openrouters_library_requires(respond):
    body = (await respond("one", presence_penalty=0.5)).json()
    assert (body["presence_penalty"], body["frequency_penalty"]) == (0.5, None)


async def test_reasoning_text_and_calls_are_items_of_their_own(respond):
    output = (await respond(MARKUP)).json()["output"]
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in output] == kinds
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "it asks"}]
    assert output[0]["summary"] == []
    assert text_of(output[1]) == "let me look"
    assert [item["name"] for item in output[2:]] == ["get_weather"] * 2
    assert json.loads(output[2]["arguments"]) == {"city": "Bern"}
    assert output[2]["call_id"] != output[3]["call_id"]
    assert len({item["id"] for item in output}) == 4


@pytest.mark.parametrize(
    "text",
    [
        MARKUP,
        "one <hold>two three</hold> four",
        "é日本 👩‍👩‍👧 \u2028 x",
        CALL,
        "<think>a b</think>",
    ],
)
async def test_a_stream_is_well_formed_and_says_what_the_whole_answer_says(respond, text):
    final = StreamCheck().run(events_of(await respond(text, stream=True)))
    whole = (await respond(text)).json()
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"] == whole["usage"]
    assert set(final) == set(whole)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_off_is_incomplete(respond, stream):
    response = await respond("one two three", max_output_tokens=2, stream=stream)
    body = StreamCheck().run(events_of(response)) if stream else response.json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    assert text_of(body["output"][0]) == "one two "
    assert body["completed_at"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_is_a_plain_answer(respond, stream):
    failing = "<fail INVALID_ARGUMENT reasoning_effort: is unknown>"
    response = await respond(failing, stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "reasoning.effort"
    assert error["message"] == "reasoning.effort is unknown"

    response = await respond("<fail UNAVAILABLE the queue is full; try again in 7 s>")
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")


@pytest.mark.parametrize(
    ("backend_message", "message", "param"),
    [
        ("messages: cannot be rendered", "input cannot be rendered", "input"),
        ("max_tokens: must be less", "max_output_tokens must be less", "max_output_tokens"),
        ("response_format: bad schema", "text.format: bad schema", "text.format"),
        ("top_p: messages: no", "top_p: messages: no", "top_p"),
        ("it has no field", "it has no field", None),
    ],
)
async def test_an_error_of_the_backend_names_the_field_of_the_responses_api(
    respond, backend_message, message, param
):
    error = (await respond(f"<fail INVALID_ARGUMENT {backend_message}>")).json()["error"]
    assert (error["message"], error["param"]) == (message, param)


@pytest.mark.parametrize("trouble", ["<fail INTERNAL it broke>", "<vanish>"])
async def test_an_error_in_mid_stream_fails_the_response(respond, trouble):
    final = StreamCheck().run(events_of(await respond(f"one <pause 0.01>{trouble}", stream=True)))
    assert final["status"] == "failed"
    assert final["error"]["code"] == "server_error"
    assert "it broke" in final["error"]["message"] or "finish reason" in final["error"]["message"]
    assert text_of(final["output"][0]) == "one "
    assert (await respond(f"one {trouble}")).status_code == 500


@pytest.mark.parametrize(
    ("fields", "num_alternatives"), [({"include": LOGPROBS}, 0), ({"top_logprobs": 2}, 2)]
)
async def test_logprobs_stand_with_their_text_and_not_with_reasoning(
    respond, fields, num_alternatives
):
    # The echo model sends the text in <hold> as one delta with several tokens.
    text = "<think>why so</think>one <hold>two three</hold>"
    events = events_of(await respond(text, stream=True, **fields))
    (part,) = (await respond(text, **fields)).json()["output"][1]["content"]

    StreamCheck().run(events)
    for event in events:
        if event["type"] == "response.output_text.delta":
            assert "".join(entry["token"] for entry in event["logprobs"]) == event["delta"]
    assert part["text"] == "one two three"
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {num_alternatives}


async def test_the_request_becomes_a_chat_completion(respond, backend):
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    response = await respond(
        "hi",
        model="echo",
        instructions="be brief",
        tools=[TOOL | {"strict": True, "description": None}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": schema},
        reasoning={"effort": "low", "summary": "auto"},
        include=[*LOGPROBS, "reasoning.encrypted_content"],
        top_logprobs=3,
        max_output_tokens=7,
        temperature=0.1,
        top_k=4,
        chat_template_kwargs={"a": 1},
        priority=-1,
        store=False,
        seed=None,
        stream=True,
        stream_options={"include_obfuscation": False},
        truncation="disabled",
    )
    assert response.status_code == 200, response.text
    assert passed_on(backend) == {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
        },
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 3,
        "max_completion_tokens": 7,
        "temperature": 0.1,
        "top_k": 4,
        "chat_template_kwargs": {"a": 1},
        "priority": -1,
    }


@pytest.mark.parametrize(
    ("choice", "choice_of_chat"),
    [
        ("required", "required"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
        ),
    ],
)
async def test_a_tool_choice_is_said_in_a_chats_words(respond, backend, choice, choice_of_chat):
    body = (await respond("hi", tools=[TOOL], tool_choice=choice)).json()
    assert passed_on(backend)["tool_choice"] == choice_of_chat
    assert body["tool_choice"] == choice


@pytest.mark.parametrize(
    ("text_format", "response_format"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (None, None),
    ],
)
async def test_a_text_format_is_a_response_format(respond, backend, text_format, response_format):
    body = (await respond("hi", text={"format": text_format, "verbosity": "medium"})).json()
    assert passed_on(backend).get("response_format") == response_format
    assert body["text"] == {"format": text_format or {"type": "text"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input must not be empty, but the request has []"),
        ({"input": 5}, "input must be a string or a list of objects, but the request has 5"),
        (
            {"input": None},
            "input must be a string or a list of objects, but the request has null",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1, but the request has 0"),
        ({"temperature": 3}, "temperature must be at most 2, but the request has 3"),
        ({"top_logprobs": 21}, "top_logprobs must be at most 20, but the request has 21"),
        (
            {"include": ["x"]},
            "include must contain only the values message.output_text.logprobs and",
        ),
        ({"truncation": "some"}, 'truncation must be auto or disabled, but the request has "some"'),
        (
            {"metadata": {"k": "v" * 513}},
            'metadata: the value of "k" has 513 characters, but the limit is 512',
        ),
        (
            {"metadata": {"k" * 65: "v"}},
            'metadata: the key "kkkkkk',
        ),
        (
            {"metadata": {str(n): "v" for n in range(17)}},
            "metadata must have at most 16 entries, but the request has 17",
        ),
        ({"reasoning": {"effort": 5}}, "reasoning.effort must be a string, but the request has 5"),
        (
            {"reasoning": {"summary": "concise"}},
            'reasoning.summary="concise" is not supported: Nereid does not summarize; auto and',
        ),
        (
            {"reasoning": {"mode": "pro"}},
            'reasoning.mode="pro" is not supported: the only mode is standard. Remove',
        ),
        (
            {"text": {"verbosity": "low"}},
            'text.verbosity="low" is not supported: chat templates have no such variable; ask',
        ),
        (
            {"text": {"format": {"type": "xml"}}},
            "text.format.type must be one of text, json_object, json_schema, structural_tag, but",
        ),
        ({"text": {"format": 5}}, "text.format must be an object, but the request has 5"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema must be a JSON schema (an object, true or false), but the",
        ),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type must be function, custom or namespace, but the request has",
        ),
        (
            {"tools": [TOOL, {"type": "function"}]},
            "tools[1].name is required, but the request does not contain it",
        ),
        (
            {"tools": [TOOL | {"parameters": 5}]},
            "tools[0].parameters must be an object, but the request has 5",
        ),
        (
            {"tools": [TOOL | {"strict": "yes"}]},
            'tools[0].strict must be true or false, but the request has "yes"',
        ),
        (
            {"tool_choice": "sometimes", "tools": [TOOL]},
            'tool_choice must be "none", "auto", "required", {"type": "function", "name"},',
        ),
        (
            {"tool_choice": "required"},
            'tool_choice="required" requires tools, but the request has none',
        ),
        (
            {"tool_choice": {"type": "mcp"}, "tools": [TOOL]},
            'tool_choice must be "none", "auto", "required", {"type": "function", "name"},',
        ),
        (
            {"tool_choice": {"type": "function"}, "tools": [TOOL]},
            f'{TOOL_CHOICE_MESSAGE}{{"type": "function"}}',
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": []}, "tools": [TOOL]},
            f'{TOOL_CHOICE_MESSAGE}{{"type": "allowed_tools", "tools": []}}',
        ),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            'tool_choice={"type": "function", "name": "f"} requires tools, but the request has',
        ),
        (
            {"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]},
            'tool_choice must name one of the tools ["f"], but the request has "g"',
        ),
        (
            {"background": True, "store": False},
            "background=true requires store=true, because the response is retrieved later",
        ),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.incl"),
        ({"stream_options": {}}, "stream_options requires stream=true"),
    ],
)
async def test_a_bad_field_is_named_with_its_value_and_limit(respond, fields, message):
    response = await respond(**{"given": fields.pop("input", "hi"), **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith(message)
    assert message.startswith(error["param"]) or error["param"].startswith(message)


@pytest.mark.parametrize("name", sorted(REFUSED_IN_RESPONSES))
async def test_what_responses_do_not_offer_is_refused_by_name(respond, name):
    refusal = REFUSED_IN_RESPONSES[name]
    response = await respond("hi", **{name: "something"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f'{name}="something" is not supported: {refusal.reason}')
    for harmless in (None, *refusal.harmless):
        assert (await respond("hi", **{name: harmless})).status_code == 200


async def test_an_empty_list_turns_context_management_off(respond):
    assert (await respond("hi", context_management=[])).status_code == 200


@pytest.mark.parametrize("name", sorted(REFUSED_IN_TOOLS))
async def test_what_is_not_offered_of_a_tool_is_refused_by_name(respond, name):
    refusal = REFUSED_IN_TOOLS[name]
    error = (await respond("hi", tools=[TOOL | {name: "something"}])).json()["error"]
    assert error["param"] == f"tools[0].{name}"
    for harmless in (None, *refusal.harmless):
        assert (await respond("hi", tools=[TOOL | {name: harmless}])).status_code == 200


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({}, "input[1].type must be one of message, function_call, function_call_output,"),
        (
            {"type": "web_search_call", "id": "x"},
            "input[1].type must be one of message, function_call, function_call_output,",
        ),
        (
            {"role": "tool", "content": "x"},
            "input[1].role must be one of user, assistant, system, developer, but the request",
        ),
        (
            {"role": "user", "content": None},
            "input[1].content must be a string or a list of parts, but the request has null",
        ),
        (
            {"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[1].content[0].type must be input_text, output_text, text or refusal, but",
        ),
        (
            {"role": "user", "content": [{"type": "input_image", "file_id": "x"}]},
            'input[1].content[0].file_id must be null, but the request has "x". Send image_url',
        ),
        (
            {"role": "user", "content": [{"type": "input_file", "file_url": "x"}]},
            "input[1].content[0].type must be input_text, output_text, text or refusal, but",
        ),
        (
            {"role": "user", "content": ["x"]},
            'input[1].content[0] must be an object, but the request has "x"',
        ),
        (
            {"role": "user", "content": [{"type": "input_text"}]},
            "input[1].content[0].text must be a string, but the request has null",
        ),
        (
            {"role": "user", "content": "x", "id": 5},
            "input[1].id must be a string that is not empty, but the request has 5",
        ),
        (
            {"role": "user", "content": "x", "status": "odd"},
            "input[1].status must be in_progress, completed or incomplete, but the request has",
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}},
            "input[1].arguments must be a string, but the request has {}",
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            "input[1].call_id must be the call_id of an earlier function_call, but the request",
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": 5},
            "input[1].output must be a string or a list of parts, but the request has 5",
        ),
        (
            {"type": "reasoning", "content": [{"type": "input_text", "text": "x"}]},
            "input[1].content[0] must be an object with the type reasoning_text",
        ),
    ],
)
async def test_a_bad_item_is_named_with_its_place(respond, item, message):
    response = await respond([{"role": "user", "content": "hi"}, item])
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith(message)
    assert error["param"] == message.split(" ")[0]


CONVERSATION = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "look"}],
    },
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "let me look", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call", "call_id": "c2", "name": "f", "arguments": ""},
    {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "rain"}],
    },
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": "and?"},
]


async def test_items_of_one_turn_are_one_message(respond, backend):
    assert (await respond(CONVERSATION)).status_code == 200
    assert passed_on(backend)["messages"] == [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "let me look",
            "reasoning": "look",
            "reasoning_content": "look",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": 1}'},
                },
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": ""}},
            ],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
        {"role": "tool", "content": "rain", "tool_call_id": "c2"},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "and?"},
    ]


async def test_reasoning_between_the_calls_of_a_response_stays_in_their_message(respond, backend):
    def reasoning(text):
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    def call(call_id):
        return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}

    def output(call_id):
        return {"type": "function_call_output", "call_id": call_id, "output": "x"}

    calls = [reasoning("one"), call("a"), reasoning("\ntwo"), call("b")]
    await respond([*calls, output("a"), output("b")])
    message, *results = passed_on(backend)["messages"]
    assert message["reasoning"] == "one\ntwo"
    assert [call["id"] for call in message["tool_calls"]] == ["a", "b"]
    assert [result["tool_call_id"] for result in results] == ["a", "b"]


async def test_encrypted_reasoning_of_another_server_is_left_out(respond, backend):
    reasoning = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"}
    response = await respond([reasoning, {"role": "user", "content": "hi"}])
    assert response.status_code == 200
    assert passed_on(backend)["messages"] == [{"role": "user", "content": "hi"}]


async def test_the_output_of_a_tool_may_contain_images(respond, backend):
    output = [
        {"type": "input_text", "text": "seen"},
        {"type": "input_image", "image_url": "data:x"},
    ]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    await respond([call, {"type": "function_call_output", "call_id": "c", "output": output}])
    assert passed_on(backend)["messages"][-1]["content"] == [
        {"type": "text", "text": "seen"},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}},
    ]


async def test_what_opens_the_conversation_is_one_system_message(respond, backend):
    items = [
        {"role": "developer", "content": "b"},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "hi"},
    ]
    await respond(items, instructions="a")
    assert passed_on(backend)["messages"] == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        {"role": "user", "content": "hi"},
    ]
    await respond(items[:1] + items[2:])
    assert passed_on(backend)["messages"][0] == {"role": "developer", "content": "b"}


async def test_a_call_that_was_cut_off_is_left_out(respond, backend):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a'}
    await respond([{"role": "user", "content": "x"}, call | {"status": "incomplete"}])
    assert passed_on(backend)["messages"] == [{"role": "user", "content": "x"}]


async def test_a_call_whose_arguments_the_model_wrote_wrongly_is_passed_on(respond, backend):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a'}
    output = {"type": "function_call_output", "call_id": "c", "output": "invalid JSON"}
    response = await respond([{"role": "user", "content": "x"}, call, output])
    assert response.status_code == 200
    messages = passed_on(backend)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function_call", "arguments": '{"a": 1}', "status": "incomplete"},
        {"type": "function_call", "arguments": '{"a": ', "status": "incomplete"},
        {"type": "function_call", "arguments": "{}", "status": "in_progress"},
        {"type": "custom_tool_call", "input": "ls", "status": "incomplete"},
    ],
)
async def test_a_call_that_the_client_has_run_is_kept_although_its_end_was_cut_off(
    respond, backend, call
):
    fields = {"call_id": "c", "name": "f"}
    output = {"type": f"{call['type']}_output", "call_id": "c", "output": "5"}
    await respond([{"role": "user", "content": "x"}, call | fields, output])
    messages = passed_on(backend)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == "c"


async def test_input_tokens_are_counted_without_generating(post, backend):
    response = await post("/v1/responses/input_tokens", input="one two three")
    assert response.json() == {"object": "response.input_tokens", "input_tokens": 3}
    assert not backend.active
    error = (await post("/v1/responses/input_tokens", input="a", max_tokens=3)).json()["error"]
    assert error["message"].startswith(
        "max_tokens=3 is not supported: the Responses API has the field max_output_tokens"
    )


async def test_another_model_is_a_404(respond):
    response = await respond("hi", model="other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_the_backend_sees_the_callers_request_id(connect, backend):
    async with connect() as client:
        headers = {"X-Request-Id": "trace-7"}
        response = await client.post("/v1/responses", json={"input": "hi"}, headers=headers)
    assert response.headers["x-request-id"] == "trace-7"
    assert backend.generations[0].request_id.startswith("trace-7-")


@pytest.mark.parametrize("fields", [{"metadata": {"a": "\ud800"}}, {"instructions": "\ud800"}])
@pytest.mark.parametrize("background", [False, True])
async def test_what_is_no_text_is_refused_wherever_it_stands(connect, fields, background):
    body = json.dumps({"input": "hi", "background": background, "truncation": "auto", **fields})
    async with connect() as client:
        response = await client.post("/v1/responses", content=body)
    assert response.status_code == 400
    assert (
        "The request body contains '\\ud800', which is half of a surrogate pair and no"
        in response.json()["error"]["message"]
    )


@pytest.mark.parametrize("description", ["", None])
async def test_a_tool_may_have_an_empty_description(respond, backend, description):
    response = await respond("hi", tools=[TOOL | {"description": description}])
    assert response.status_code == 200, response.text
    (tool,) = passed_on(backend)["tools"]
    assert tool["function"].get("description") == description


async def test_a_tool_needs_a_name(respond):
    for name in ("", None, 3):
        error = (await respond("hi", tools=[TOOL | {"name": name}])).json()["error"]
        assert error["param"] == "tools[0].name"
        assert error["message"].startswith("tools[0].name must be a string")


@pytest.mark.parametrize(("field", "kind"), [("summary", "auto"), ("generate_summary", "detailed")])
async def test_reasoning_stands_in_the_summary_where_one_is_asked_for(respond, field, kind):
    fields = {"tools": [TOOL], "reasoning": {field: kind}}
    response = (await respond(MARKUP, **fields)).json()
    reasoning_item = response["output"][0]
    assert reasoning_item["summary"] == [{"type": "summary_text", "text": "it asks"}]
    assert reasoning_item["content"] == []
    assert response["reasoning"]["summary"] == kind

    events = events_of(await respond(MARKUP, stream=True, **fields))
    final = StreamCheck().run(events)
    assert final["output"][0]["summary"] == reasoning_item["summary"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds.count("reasoning_summary_part.added") == 1
    assert kinds.count("reasoning_summary_text.delta") > 1
    assert not any(kind.startswith("reasoning_text") for kind in kinds)


async def test_reasoning_in_a_summary_is_read_when_it_comes_back(respond, backend):
    whole = (await respond(MARKUP, reasoning={"summary": "auto"})).json()
    await respond([{"role": "user", "content": "a"}, whole["output"][0], *TURN])
    assert passed_on(backend)["messages"][1]["reasoning"] == "it asks"


SPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [TOOL]}
CALL_IN_SPACE = '<tool_call>{"name": "crm__f", "arguments": {}}</tool_call>'


async def test_a_function_in_a_namespace_is_called_by_both_names(respond, backend):
    tool_in_space = TOOL | {"description": "Finds one."}
    fields = {"tools": [TOOL, SPACE | {"tools": [tool_in_space]}], "store": False}

    # The client gets the namespace and the name, and the model gets one name of both.
    (call,) = (await respond(CALL_IN_SPACE, **fields)).json()["output"]
    assert (call["namespace"], call["name"]) == ("crm", "f")
    functions = [tool["function"] for tool in passed_on(backend)["tools"]]
    assert [function["name"] for function in functions] == ["f", "crm__f"]
    assert functions[1]["description"] == "Customers.\n\nFinds one."

    final = StreamCheck().run(events_of(await respond(CALL_IN_SPACE, stream=True, **fields)))
    assert (final["output"][0]["namespace"], final["output"][0]["name"]) == ("crm", "f")

    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
    assert (await respond([call, output], **fields)).status_code == 200
    (passed_call,) = passed_on(backend)["messages"][0]["tool_calls"]
    assert passed_call["function"]["name"] == "crm__f"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([SPACE | {"name": ""}], "tools[0].name"),
        ([SPACE | {"tools": []}], "tools[0].tools"),
        ([SPACE | {"tools": "f"}], "tools[0].tools"),
        ([SPACE | {"tools": ["f"]}], "tools[0].tools[0]"),
        ([SPACE | {"description": 1}], "tools[0].description"),
        ([TOOL, SPACE | {"tools": [{"type": "mcp", "name": "f"}]}], "tools[1].tools[0].type"),
        ([SPACE, TOOL | {"name": "crm__f"}], "tools"),
    ],
)
async def test_a_namespace_that_cannot_be_is_refused_with_its_place(respond, tools, param):
    response = await respond("hi", tools=tools)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
