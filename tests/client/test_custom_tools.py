"""Tests that the frontend translates custom tools to functions for the backend, and back."""

import json

import pytest

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
FUNCTION = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
FLAT = {"type": "custom", "name": "shell", "description": "Runs a command."}
CUSTOM = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
REGEX = {"type": "grammar", "syntax": "regex", "definition": r"^\d+$"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
INPUT_ONLY = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def in_chat(tool_format):
    """Return a custom tool with the given format, as a chat completion request contains it."""
    inner = {name: value for name, value in tool_format.items() if name != "type"}
    nested = {"type": tool_format["type"], **({"grammar": inner} if inner else {})}
    return {"type": "custom", "custom": {**CUSTOM["custom"], "format": nested}}


def call_text(name, text):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'input': text}})}</tool_call>"


def passed_on(backend):
    return json.loads(backend.generations[-1].chat_request)


async def send(post, path, tools, **fields):
    """Send a request with tools (in the format of the path's API), and return the JSON response."""
    given = {"messages": HELLO} if path == CHAT else {"input": "hello"}
    response = await post(path, **{**given, "tools": tools, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("tool_format", [None, {"type": "text"}])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_custom_tool_is_a_function_with_one_string(post, backend, path, tool_format):
    tools = [in_chat(tool_format) if tool_format else CUSTOM]
    if path == RESPONSES:
        tools = [FLAT | {"format": tool_format}]
    await send(post, path, tools)
    function = {"name": "shell", "description": "Runs a command.", "parameters": INPUT_ONLY}
    assert passed_on(backend)["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_regex_is_a_pattern_of_a_strict_function(post, backend, path):
    await send(post, path, [in_chat(REGEX) if path == CHAT else FLAT | {"format": REGEX}])
    (tool,) = passed_on(backend)["tools"]
    assert tool["function"]["strict"] is True
    properties = tool["function"]["parameters"]["properties"]
    assert properties == {"input": {"type": "string", "pattern": r"^(?:\d+)$"}}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_lark_grammar_is_shown_to_the_model_and_not_enforced(post, backend, path):
    await send(post, path, [in_chat(LARK) if path == CHAT else FLAT | {"format": LARK}])
    (tool,) = passed_on(backend)["tools"]
    assert tool["function"]["description"] == (
        'Runs a command.\n\nThe input must match this Lark grammar:\nstart: "a"+'
    )
    assert tool["function"]["parameters"] == INPUT_ONLY
    assert "strict" not in tool["function"]


async def test_calls_in_earlier_messages_are_calls_of_the_function(post, backend):
    custom_call = {"id": "a", "type": "custom", "custom": {"name": "shell", "input": 'echo "é"\n'}}
    function_call = {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": "é"}
    answer = {"role": "assistant", "tool_calls": [custom_call, function_call]}
    await send(post, CHAT, [CUSTOM, FUNCTION], messages=[*HELLO, answer, result])

    _, passed_answer, passed_result = passed_on(backend)["messages"]
    passed_custom_call, passed_function_call = passed_answer["tool_calls"]
    arguments = json.loads(passed_custom_call["function"].pop("arguments"))
    assert arguments == {"input": 'echo "é"\n'}
    assert passed_custom_call == {"id": "a", "type": "function", "function": {"name": "shell"}}
    assert passed_function_call == function_call
    assert passed_result == result


@pytest.mark.parametrize("status", ["completed", "incomplete"])
@pytest.mark.parametrize("output", ["é", [{"type": "input_text", "text": "é"}]])
async def test_items_of_custom_tools_are_calls_of_the_function(post, backend, status, output):
    call = {"type": "custom_tool_call", "call_id": "a", "name": "shell", "input": "ls\n"}
    call |= {"status": status}
    call_output = {"type": "custom_tool_call_output", "call_id": "a", "output": output}
    await send(post, RESPONSES, [FLAT], input=[call, call_output])
    message, result = passed_on(backend)["messages"]
    assert result == {"role": "tool", "content": "é", "tool_call_id": "a"}
    function = {"name": "shell", "arguments": '{"input": "ls\\n"}'}
    assert message["tool_calls"] == [{"id": "a", "type": "function", "function": function}]

    # Without the output of the tool, a call that was cut off is not passed on.
    await send(post, RESPONSES, [FLAT], input=[{"role": "user", "content": "x"}, call])
    has_calls = ["tool_calls" in message for message in passed_on(backend)["messages"]]
    assert has_calls == ([False, True] if status == "completed" else [False])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (
            {"type": "custom", "custom": {"name": "shell"}},
            {"type": "function", "function": {"name": "shell"}},
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [
                        {"type": "custom", "custom": {"name": "shell"}},
                        {"type": "function", "function": {"name": "g"}},
                    ],
                },
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [
                        {"type": "function", "function": {"name": "shell"}},
                        {"type": "function", "function": {"name": "g"}},
                    ],
                },
            },
        ),
    ],
)
async def test_a_tool_choice_names_the_function(post, backend, choice, expected):
    await send(post, CHAT, [CUSTOM, FUNCTION], tool_choice=choice)
    assert passed_on(backend)["tool_choice"] == expected
    flat = {"type": "custom", "name": "shell"}
    if choice["type"] == "allowed_tools":
        tools = [flat, {"type": "function", "name": "g"}]
        flat = {"type": "allowed_tools", "mode": "required", "tools": tools}
    flat_function = {"type": "function", "name": "g"}
    body = await send(post, RESPONSES, [FLAT, flat_function], tool_choice=flat)
    assert passed_on(backend)["tool_choice"] == expected
    assert body["tool_choice"] == flat
    assert body["tools"] == [FLAT, flat_function]


async def test_a_custom_tool_in_a_namespace_is_called_by_both_names(post, backend):
    space = {"type": "namespace", "name": "box", "description": "A sandbox.", "tools": [FLAT]}
    text = call_text("box__shell", "ls")

    # The model gets the single name "box__shell". The client gets the namespace and the name.
    body = await send(post, RESPONSES, [space, FLAT], input=text)
    functions = [tool["function"] for tool in passed_on(backend)["tools"]]
    assert [function["name"] for function in functions] == ["box__shell", "shell"]
    assert functions[0]["description"] == "A sandbox.\n\nRuns a command."
    (item,) = body["output"]
    assert item["type"] == "custom_tool_call"
    assert (item["namespace"], item["name"], item["input"]) == ("box", "shell", "ls")

    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "a"}
    await send(post, RESPONSES, [space, FLAT], input=[item, output])
    (call,) = passed_on(backend)["messages"][0]["tool_calls"]
    assert call["function"] == {"name": "box__shell", "arguments": '{"input": "ls"}'}


async def test_the_tokens_of_a_chat_with_custom_tools_are_counted(post, backend):
    custom_call = {"id": "a", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [custom_call]}
    response = await post("/tokenize", messages=[*HELLO, answer, *HELLO], tools=[CUSTOM])
    assert response.status_code == 200, response.text
    (tool,) = passed_on(backend)["tools"]
    assert tool["function"]["parameters"] == INPUT_ONLY
    (call,) = passed_on(backend)["messages"][1]["tool_calls"]
    assert call["function"]["arguments"] == '{"input": "ls"}'

    response = await post("/v1/responses/input_tokens", input="hello", tools=[FLAT])
    assert response.status_code == 200, response.text
    (tool,) = passed_on(backend)["tools"]
    assert tool["function"]["parameters"] == INPUT_ONLY


SPACE = {"type": "namespace", "name": "box"}
CHOICE_OF_FUNCTION = {"type": "custom", "custom": {"name": "g"}}
WRONG_CALL = {"type": "custom", "custom": {"name": "f", "input": 5}}
WRONG_FORMAT = {"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "a"}}
WRONG_REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a(b"}}
LOOKAHEAD = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(?!a)b"}}


@pytest.mark.parametrize(
    ("tools", "param", "message"),
    [
        (
            [{"type": "custom"}],
            "tools[0].custom",
            "tools[0].custom must be an object, but the request has null",
        ),
        (
            [FUNCTION, {"type": "custom", "custom": {"description": "x"}}],
            "tools[1].custom.name",
            "tools[1].custom.name is required, but the request does not contain it",
        ),
        (
            [{"type": "custom", "custom": {"name": "f", "format": {"type": "json"}}}],
            "tools[0].custom.format.type",
            "tools[0].custom.format.type must be 'text' or 'grammar', but the request has \"json\"",
        ),
        (
            [{"type": "custom", "custom": {"name": "f", "format": WRONG_FORMAT}}],
            "tools[0].custom.format.grammar.syntax",
            "tools[0].custom.format.grammar.syntax must be 'regex' or 'lark', but the request has "
            '"ebnf"',
        ),
        (
            [{"type": "custom", "custom": {"name": "f", "format": WRONG_REGEX}}],
            "tools[0].custom.format.grammar.definition",
            "tools[0].custom.format.grammar.definition must be a regular expression that can be "
            "enforced, but the part '(b' at the position 1 has no closing parenthesis",
        ),
        (
            [{"type": "custom", "custom": {"name": "f", "format": LOOKAHEAD}}],
            "tools[0].custom.format.grammar.definition",
            "tools[0].custom.format.grammar.definition must be a regular expression that can be "
            "enforced, but the part '(?!a)b' at the position 0 is incomplete or not supported",
        ),
        (
            [CUSTOM, {"type": "function", "function": {"name": "shell"}}],
            "tools",
            'tools must have different names, but several are called "shell".',
        ),
    ],
)
async def test_a_wrong_custom_tool_of_a_chat_is_refused(post, tools, param, message):
    response = await post(CHAT, messages=HELLO, tools=tools)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (param, message)


@pytest.mark.parametrize(
    ("tools", "param", "message"),
    [
        (
            [FLAT | {"name": ""}],
            "tools[0].name",
            'tools[0].name must be a string with at least 1 character, but the request has ""',
        ),
        (
            [FLAT | {"format": REGEX | {"definition": "a\\"}}],
            "tools[0].format.definition",
            "tools[0].format.definition must be a regular expression that can be enforced, but the "
            r"part '\\' at the position 1 is incomplete or not supported",
        ),
        (
            [FLAT | {"format": REGEX | {"syntax": "ebnf"}}],
            "tools[0].format.syntax",
            "tools[0].format.syntax must be 'regex' or 'lark', but the request has \"ebnf\"",
        ),
        (
            [SPACE | {"tools": [FLAT | {"format": LARK | {"definition": 5}}]}],
            "tools[0].tools[0].format.definition",
            "tools[0].tools[0].format.definition must be a string, but the request has 5",
        ),
        (
            [FLAT | {"defer_loading": True}],
            "tools[0].defer_loading",
            "tools[0].defer_loading=true is not supported: Nereid has no tool search; send only "
            "tools to offer now. Remove tools[0].defer_loading from the request.",
        ),
        (
            [FLAT, {"type": "function", "name": "shell"}],
            "tools",
            'tools must have different names, but several are called "shell". A tool in a '
            "namespace is called NAMESPACE__TOOL.",
        ),
    ],
)
async def test_a_wrong_custom_tool_of_a_response_is_refused(post, tools, param, message):
    response = await post(RESPONSES, input="hello", tools=tools)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (param, message)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            CHAT,
            {"tools": [CUSTOM], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
            'tool_choice must name one of the custom tools ["shell"], but the request has "f"',
        ),
        (
            CHAT,
            {"tools": [CUSTOM, FUNCTION], "tool_choice": CHOICE_OF_FUNCTION},
            'tool_choice must name one of the custom tools ["shell"], but the request has "g"',
        ),
        (
            RESPONSES,
            {"tools": [FLAT], "tool_choice": {"type": "function", "name": "shell"}},
            'tool_choice must name one of the tools [], but the request has "shell"',
        ),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[1].tool_calls[0].custom must be an object, but the request has null",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "assistant", "tool_calls": [WRONG_CALL]}]},
            "messages[0].tool_calls[0].custom.input must be a string, but the request has 5",
        ),
        (
            "/tokenize",
            {"messages": HELLO, "tools": [{"type": "custom"}]},
            "tools[0].custom must be an object, but the request has null",
        ),
        (
            RESPONSES,
            {"input": [{"type": "custom_tool_call", "call_id": "a", "name": "f"}]},
            "input[0].input must be a string, but the request has null",
        ),
        (
            RESPONSES,
            {
                "input": [
                    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                    {"type": "custom_tool_call_output", "call_id": "a", "output": "x"},
                ]
            },
            "input[1].call_id must be the call_id of an earlier custom_tool_call, but the request "
            'has "a". Send the custom_tool_call too, or previous_response_id.',
        ),
    ],
)
async def test_a_wrong_reference_to_a_custom_tool_is_refused(post, path, fields, message):
    prompt = {RESPONSES: {"input": "hello"}, CHAT: {"messages": HELLO}}.get(path, {})
    response = await post(path, **(prompt | fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"] == message
