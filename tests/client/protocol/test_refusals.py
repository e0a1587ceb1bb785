"""Tests that the frontend answers wrong requests with an error in OpenAI's format."""

import gzip
import json
import time

import pytest
from nereid_client.protocol.generation_requests import ChatCompletionRequest
from nereid_client.protocol.refused import REFUSED, REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS
from nereid_client.protocol.responses_request import ResponsesRequest
from pydantic import ValidationError

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def error_of(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "tools",
            [{"type": "web_search"}],
            'tools[0].type must be function or custom, but the request has "web_search". Nereid '
            "has no tools of its own.",
        ),
        ("max_tokens", 0, "max_tokens must be at least 1, but the request has 0"),
        ("max_tokens", -3, "max_tokens must be at least 1, but the request has -3"),
        ("max_tokens", "5", 'max_tokens must be an integer, but the request has "5"'),
        ("max_tokens", True, "max_tokens must be an integer, but the request has true"),
        (
            "max_completion_tokens",
            0,
            "max_completion_tokens must be at least 1, but the request has 0",
        ),
        ("temperature", -0.1, "temperature must be at least 0, but the request has -0.1"),
        ("temperature", 2.5, "temperature must be at most 2, but the request has 2.5"),
        ("top_p", 0, "top_p must be greater than 0, but the request has 0"),
        ("top_k", -2, "top_k must be at least -1, but the request has -2"),
        (
            "seed",
            2**63,
            "seed must be less than 9223372036854775808, but the request has 9223372036854775808",
        ),
        ("n", 0, "n must be at least 1, but the request has 0"),
        ("n", 65, "n must be at most 64, but the request has 65"),
        ("top_logprobs", 21, "top_logprobs must be at most 20, but the request has 21"),
        ("top_logprobs", 2, "top_logprobs requires logprobs=true"),
        ("logprobs", 3, "logprobs must be true or false, but the request has 3"),
        ("prompt_logprobs", -1, "prompt_logprobs must be at least 0, but the request has -1"),
        ("logit_bias", {"x": 1}, 'logit_bias must have token ids as keys, but the request has "x"'),
        (
            "logit_bias",
            {"5": 101},
            "logit_bias must have values from -100 to 100, but the request has 101 for token 5",
        ),
        (
            "response_format",
            {"type": "xml"},
            "response_format.type must be one of text, json_object, json_schema, structural_tag,",
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "response_format.json_schema.schema must be a JSON schema (an object, true or",
        ),
        (
            "parallel_tool_calls",
            "no",
            'parallel_tool_calls must be true or false, but the request has "no"',
        ),
        (
            "tool_choice",
            "sometimes",
            'tool_choice="sometimes" requires tools, but the request has none',
        ),
        (
            "request_id",
            "a b",
            "request_id must match the pattern ^[A-Za-z0-9._:/+=@-]{1,128}$, but the request has",
        ),
        ("messages", [], "messages must have at least 1 item, but the request has an empty list"),
        ("messages", "hi", 'messages must be a list, but the request has "hi"'),
        (
            "messages",
            [{"content": "hi"}],
            "messages[0].role is required, but the request does not contain it",
        ),
        (
            "messages",
            [{"role": "user", "content": 5}],
            "messages[0].content must be a string or a list of objects, but the request has 5",
        ),
        ("stop", 5, "stop must be a string or a list of strings, but the request has 5"),
        (
            "prompt_cache_key",
            "k" * 300,
            "prompt_cache_key must be a string with at most 256 characters, but the request has",
        ),
        ("stream_options", {}, "stream_options requires stream=true"),
    ],
)
async def test_a_bad_field_is_named_with_its_value_and_limit(post, field, value, message):
    response = await post("/v1/chat/completions", **{"messages": HELLO, field: value})
    error = error_of(response, 400)
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)


@pytest.mark.parametrize(
    "choice",
    [
        "always",
        {"type": "function"},
        {"type": "function", "function": {"name": ""}},
        {"type": "custom", "custom": {"name": ""}},
        {"type": "custom", "name": "f"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "maybe", "tools": [TOOL]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools"},
    ],
)
async def test_a_tool_choice_of_another_form_is_refused(post, choice):
    response = await post("/v1/chat/completions", messages=HELLO, tools=[TOOL], tool_choice=choice)
    assert error_of(response, 400)["message"].startswith(
        'tool_choice must be "none", "auto", "required", a function as {"type": "function",'
    )


NAMED = {"type": "function", "function": {"name": "g"}}
ALLOWED = {"mode": "required", "tools": [NAMED]}


@pytest.mark.parametrize("choice", [NAMED, {"type": "allowed_tools", "allowed_tools": ALLOWED}])
async def test_a_tool_choice_must_be_among_the_tools(post, choice):
    response = await post("/v1/chat/completions", messages=HELLO, tools=[TOOL], tool_choice=choice)
    message = error_of(response, 400)["message"]
    assert message == 'tool_choice must name one of the tools ["f"], but the request has "g"'


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_IN_CHAT])
async def test_what_chat_does_not_offer_is_refused_by_name(post, name):
    refusal = {**REFUSED, **REFUSED_IN_CHAT}[name]
    response = await post("/v1/chat/completions", messages=HELLO, **{name: "something"})
    error = error_of(response, 400)
    assert error["param"] == name
    assert error["message"].startswith(f'{name}="something" is not supported: {refusal.reason}.')


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_IN_COMPLETIONS])
async def test_what_completions_do_not_offer_is_refused_by_name(post, name):
    refusal = {**REFUSED, **REFUSED_IN_COMPLETIONS}[name]
    response = await post("/v1/completions", prompt="a", **{name: "something"})
    error = error_of(response, 400)
    assert error["param"] == name
    assert error["message"].startswith(f'{name}="something" is not supported: {refusal.reason}.')


async def test_harmless_values_of_refused_fields_are_accepted(post):
    quiet = {
        name: refusal.harmless[0] if refusal.harmless else None
        for name, refusal in {**REFUSED, **REFUSED_IN_CHAT}.items()
    }
    response = await post("/v1/chat/completions", messages=HELLO, **quiet)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_prompt_logprobs_are_not_streamed(post, path):
    response = await post(path, messages=HELLO, prompt="a", prompt_logprobs=1, stream=True)
    assert error_of(response, 400)["message"].startswith(
        "prompt_logprobs requires stream=false, because the log-probabilities of a prompt"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"best_of": 2, "n": 3},
            "best_of must be at least n, but the request has best_of=2 and n=3",
        ),
        (
            {"best_of": 2, "stream": True},
            "best_of must not be greater than n if stream=true",
        ),
        ({"best_of": 65}, "best_of must be at most 64, but the request has 65"),
        ({"logprobs": 21}, "logprobs must be at most 20, but the request has 21"),
        ({"logprobs": True}, "logprobs must be an integer, but the request has true"),
        (
            {"max_tokens": 0},
            "max_tokens must be at least 1, but the request has 0. The value 0 is allowed only",
        ),
        (
            {"max_tokens": 0, "echo": True, "stream": True},
            "max_tokens must be at least 1, but the request has 0. The value 0 is allowed only",
        ),
        (
            {"echo": True, "logprobs": 1, "stream": True},
            "echo=true with logprobs requires stream=false",
        ),
    ],
)
async def test_a_completion_that_cannot_be_is_refused_with_the_reason(post, fields, message):
    error = error_of(await post("/v1/completions", prompt="a", **fields), 400)
    assert error["message"].startswith(message)
    assert error["param"] == message.split("=")[0].split(" ")[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            '{"messages": [',
            "The request body is not valid JSON at line 1, column 15: Expecting value",
        ),
        ("", "The request body must be a JSON object, but it is empty"),
        ("[1]", "The request body must be a JSON object, but it is a list"),
        (
            '{"temperature": NaN}',
            "The request body has an invalid number: NaN is not a JSON number",
        ),
        (
            '{"temperature": -Infinity}',
            "The request body has an invalid number: -Infinity is not a JSON number",
        ),
        ('{"temperature": 1e999}', "The request body has an invalid number: 1e999 is too large"),
        (
            '{"seed": ' + "9" * 5000 + "}",
            "The request body has an invalid number: an integer has more than 4300 digits",
        ),
        ('{"messages": ' + "[" * 100_000, "The JSON of the request body is nested too deeply"),
        (
            b'{"messages": "\xff"}',
            "The request body must be JSON in UTF-8, but it is not valid UTF-8 at byte 14",
        ),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            "The request body contains '\\ud800', which is half of a surrogate pair and no",
        ),
        (
            '{"prompt": "x", "messages": [{"role": "u"}], "x": "\\ud800"}',
            "The request body contains '\\ud800', which is half of a surrogate pair and no",
        ),
    ],
)
async def test_a_broken_body_is_answered_with_what_is_wrong(connect, body, message):
    async with connect() as client:
        response = await client.post("/v1/chat/completions", content=body)
        assert error_of(response, 400)["message"].startswith(message)
        next_response = await client.post("/v1/chat/completions", json={"messages": HELLO})
        assert next_response.status_code == 200


async def test_a_compressed_body_is_refused_with_the_name_of_the_encoding(connect):
    body = gzip.compress(json.dumps({"messages": HELLO}).encode())
    async with connect() as client:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/files"):
            response = await client.post(path, content=body, headers={"Content-Encoding": "gzip"})
            message = error_of(response, 400)["message"]
            assert message.startswith("The request body must not be compressed, but the request ")
            assert 'the Content-Encoding "gzip"' in message
        headers = {"Content-Encoding": "Identity"}  # this encoding means: not compressed
        accepted = await client.post(
            "/v1/chat/completions", json={"messages": HELLO}, headers=headers
        )
        assert accepted.status_code == 200


async def test_half_a_surrogate_pair_in_the_name_of_a_wrong_field_is_escaped(connect):
    body = '{"messages": [{"role": "user", "content": "a"}], "max_tokens\\ud800": 1}'
    async with connect() as client:
        response = await client.post("/v1/chat/completions", content=body)
    message = error_of(response, 400)["message"]
    assert message.startswith(r'The request has the unknown field "max_tokens\ud800".')


async def test_half_a_surrogate_pair_in_a_prompt_is_refused(connect):
    async with connect() as client:
        response = await client.post("/v1/completions", content='{"prompt": "a\\ud800"}')
    assert "surrogate" in error_of(response, 400)["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_unknown_model_is_a_404_that_names_the_served_one(post, path):
    response = await post(path, model="gpt-9", messages=HELLO, prompt="x")
    error = error_of(response, 404)
    assert error["code"] == "model_not_found"
    assert "'gpt-9'" in error["message"]
    assert "'echo'" in error["message"]


@pytest.mark.parametrize(
    ("code", "status", "error_type"),
    [
        ("INVALID_ARGUMENT", 400, "invalid_request_error"),
        ("UNAVAILABLE", 503, "service_unavailable_error"),
        ("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
        ("CANCELLED", 499, "invalid_request_error"),
        ("DEADLINE_EXCEEDED", 504, "server_error"),
        ("INTERNAL", 500, "server_error"),
        ("NOT_FOUND", 500, "server_error"),
    ],
)
async def test_the_backends_code_chooses_the_status(chat, code, status, error_type):
    # This text makes the echo model fail with a gRPC status code and a message.
    response = await chat(f"<fail {code} said so>")
    error = error_of(response, status)
    assert error["message"] == "said so"
    assert error["type"] == error_type
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_the_field_that_the_backend_blames_is_the_param(chat):
    blame = "max_tokens: must be at most 10, got 11"
    error = error_of(await chat(f"<fail INVALID_ARGUMENT {blame}>"), 400)
    assert error["param"] == "max_tokens"
    assert error["message"] == "max_tokens must be at most 10, got 11"


async def test_a_server_that_is_gone_is_a_503(chat, backend):
    backend.is_up = False
    response = await chat("hello")
    assert "can't be reached" in error_of(response, 503)["message"]
    assert response.headers["retry-after"] == "1"


async def test_an_unknown_path_and_a_wrong_method_have_the_same_shape(connect):
    async with connect() as client:
        assert error_of(await client.get("/v1/nothing"), 404)["message"].startswith("GET /v1/")
        response = await client.get("/v1/completions")
        assert error_of(response, 405)["message"].endswith(
            "does not allow the method GET. Use POST."
        )


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/", "GET, HEAD"), ("/v1/files", "GET, POST"), ("/v1/responses/resp_1", "DELETE, GET")],
)
async def test_a_wrong_method_names_all_methods_of_the_path(connect, path, methods):
    async with connect() as client:
        response = await client.put(path)
    assert error_of(response, 405)["message"].endswith(f"Use {methods}.")
    assert response.headers["allow"] == methods


async def test_a_bug_is_a_500_with_the_request_id_and_no_details(connect, backend):
    async def fail(generation):
        raise ZeroDivisionError("secret")
        yield {}  # makes this function an asynchronous generator, like `generate`

    backend.generate = fail
    async with connect() as client:
        headers = {"X-Request-Id": "abc"}
        response = await client.post(
            "/v1/chat/completions", json={"messages": HELLO}, headers=headers
        )
    message = error_of(response, 500)["message"]
    assert "abc" in message
    assert "secret" not in message


async def test_a_body_over_the_limit_is_a_413_announced_or_not(connect):
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]})

    async def pieces():
        """Yield the body in pieces, so that httpx sends no Content-Length."""
        for begin in range(0, len(body), 400):
            yield body[begin : begin + 400].encode()

    async with connect(max_body_bytes=1000) as client:
        announced = await client.post("/v1/chat/completions", content=body)
        unannounced = await client.post("/v1/chat/completions", content=pieces())

    assert error_of(announced, 413)["message"] == (
        f"The request body has {len(body)} bytes, but the limit is 1000 (max_body_bytes)"
    )
    assert "more than 1000 bytes" in error_of(unannounced, 413)["message"]


BACKEND_MESSAGE = "prompt has 9000 tokens; the limit is 4096 (max_model_len)"
TOO_LONG = f"<fail INVALID_ARGUMENT {BACKEND_MESSAGE}>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/v1/completions", {"prompt": TOO_LONG}),
        ("/v1/responses", {"input": TOO_LONG}),
    ],
)
async def test_a_prompt_that_is_too_long_has_openais_code_and_words(post, path, body, stream):
    error = error_of(await post(path, **body, stream=stream), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        f"Input tokens exceed the configured limit: {BACKEND_MESSAGE}. This model's maximum "
        "context length is 4096 tokens."
    )


@pytest.mark.parametrize(
    ("path", "field", "known_field"),
    [
        ("/v1/chat/completions", "max_token", "max_tokens"),
        ("/v1/chat/completions", "maxTokens", "max_tokens"),
        ("/v1/chat/completions", "top-p", "top_p"),
        ("/v1/chat/completions", "temprature", "temperature"),
        ("/v1/chat/completions", "max_completion_token", "max_completion_tokens"),
        ("/v1/completions", "max_token", "max_tokens"),
        ("/v1/responses", "max_output_token", "max_output_tokens"),
    ],
)
async def test_an_unknown_field_with_almost_a_known_name_is_refused(post, path, field, known_field):
    prompts = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
    }
    error = error_of(await post(path, **prompts[path], **{field: 5}), 400)
    assert error["param"] == field
    assert error["message"].startswith(
        f'The request has the unknown field "{field}". Did you mean "{known_field}"?'
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_unknown_field_with_the_value_null_counts_as_omitted(post, path):
    response = await post(path, messages=HELLO, prompt="a", responseFormat=None, max_token=None)
    assert response.status_code == 200, response.text


async def test_a_whole_number_may_have_a_decimal_point(post, backend):
    fields = {"max_tokens": 5.0, "top_k": 2.0, "seed": 1e3, "n": 1.0, "temperature": 0.5}
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = await post(path, messages=HELLO, prompt="a", **fields)
        assert response.status_code == 200, response.text
    chat, completion = backend.generations
    passed = [json.loads(chat.chat_request), json.loads(completion.sampling_parameters)]
    for parameters in passed:
        values = [parameters[name] for name in ("max_tokens", "top_k", "seed", "temperature")]
        assert str(values) == "[5, 2, 1000, 0.5]"


async def test_a_number_with_a_fraction_is_no_whole_number(chat):
    for number in (5.5, 1e300):
        error = error_of(await chat("hi", max_tokens=number), 400)
        assert error["message"].startswith("max_tokens must be an integer, but the request has")


FIELDS_OF_OTHER_APIS = {
    "num_ctx": 4096,
    "keep_alive": "5m",
    "repeat_penalty": 1.1,
    "typical": 1.0,
    "mirostat_tau": 5.0,
    "return_tokens": True,
    "cache_prompt": True,
    "enable_thinking": True,
    "models": ["a"],
    "top_a": 0.1,
    "session_id": "a",
    "chat_id": "b",
    "provider": {},
    "extra_body": {},
}


@pytest.mark.parametrize("name", FIELDS_OF_OTHER_APIS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_unknown_field_of_another_api_is_ignored(post, path, name):
    extra = {name: FIELDS_OF_OTHER_APIS[name]}
    response = await post(path, messages=HELLO, prompt="a", **extra)
    assert response.status_code == 200, response.text


async def test_a_body_with_very_many_unknown_fields_is_answered_quickly(chat):
    started = time.process_time()
    response = await chat("hi", **{f"unknown_{number}": 1 for number in range(20_000)})
    assert response.status_code == 200
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatCompletionRequest, {"stop": [1] * 999}),
        (ChatCompletionRequest, {"messages": [{}] * 999}),
        (ChatCompletionRequest, {"logit_bias": {str(token): "x" for token in range(999)}}),
        (ResponsesRequest, {"metadata": {str(key): key for key in range(999)}}),
    ],
)
def test_the_validation_ends_at_the_first_wrong_item_of_a_list(kind, fields):
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"messages": messages, "input": "Hello", **fields})
    assert caught.value.error_count() < 5
