"""Tests that the frontend refuses prompts that are too long without calling the Triton server."""

import json
import time
from types import SimpleNamespace

import pytest
from nereid_client.errors import BackendError
from nereid_client.protocol.request_limits import PublishedLimits, RequestLimits

LIMITS = {
    "max_model_len": 4096,
    "max_prompt_bytes": 65_536,
    "max_request_bytes": 5_000_000,
    "max_messages": 682,
    "max_tools": 2048,
    "max_depth": 256,
}
USER = {"role": "user", "content": "a"}

pytestmark = pytest.mark.anyio


@pytest.fixture
def limited(backend):
    backend.limits = LIMITS
    return backend


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER] * 683}, "messages"),
        ("/v1/chat/completions", {"messages": [USER] * 200_000}, None),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 5_000_000}]},
            None,
        ),
        ("/v1/completions", {"prompt": "a" * 5_000_000}, "prompt"),
        # The frontend does not parse a prompt that is longer than two prompts of maximum length, so
        # the error names no field.
        ("/v1/completions", {"prompt": "a" * 11_000_000}, None),
        ("/v1/completions", {"prompt": [100] * 3_000_000}, None),
        ("/v1/completions", {"prompt": ["b", "a" * 70_000]}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 300_000}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [1] * 5000]}, "prompt"),
        ("/v1/responses", {"input": [USER] * 3000}, "input"),
        ("/v1/responses", {"input": "a" * 5_000_000}, None),
        ("/tokenize", {"messages": [USER] * 683}, "messages"),
        ("/tokenize", {"prompt": "a" * 70_000}, "prompt"),
    ],
)
async def test_a_prompt_that_cannot_fit_is_refused(limited, post, path, body, param):
    answer = await post(path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == param
    assert "4096 tokens (max_model_len)" in error["message"]
    assert limited.generations == []


async def test_more_tools_than_the_limit_are_refused_before_they_are_read(limited, post):
    tools = [{"type": "custom", "name": "f"}] * 2049
    for path, prompt in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        answer = await post(path, **{prompt: [USER]}, tools=tools)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tools")
        assert "the limit is 2048 (max_tools)" in error["message"]
    assert limited.generations == []


async def test_anthropics_clients_recognize_a_conversation_that_cannot_fit(limited, post):
    answer = await post("/v1/messages", max_tokens=5, messages=[USER] * 683)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("prompt is too long. Input tokens exceed")
    assert limited.generations == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
async def test_a_body_whose_prompt_cannot_fit_is_refused_before_it_is_read(limited, connect, path):
    num_read_pieces = 0

    async def body():
        nonlocal num_read_pieces
        for _ in range(40):
            num_read_pieces += 1
            yield b" " * 1_000_000

    headers = {"Content-Length": "40000000"}
    async with connect() as client:
        answer = await client.post(path, content=body(), headers=headers)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "the size of the request body is 40000000 bytes" in error["message"]
    assert num_read_pieces == 0
    assert limited.generations == []


@pytest.mark.parametrize("prompt", [b'"' + b"a" * 40_000_000 + b'"', b"[" + b"5," * 20_000_000])
async def test_a_prompt_that_is_too_long_is_not_read_to_its_end(limited, connect, prompt):
    num_read_pieces = 0

    async def body():
        nonlocal num_read_pieces
        text = b'{"prompt": ' + prompt
        for start in range(0, len(text), 250_000):
            num_read_pieces += 1
            yield text[start : start + 250_000]

    async with connect() as client:
        answer = await client.post("/v1/completions", content=body())

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "a prompt in the request body has at least" in error["message"]
    assert num_read_pieces <= 22  # of 160; a prompt cannot fit if its text has more than 5 MB
    assert limited.generations == []


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("/v1/chat/completions", b"nonsense", "not valid JSON at line 1"),
        ("/v1/completions", b"nonsense", "not valid JSON at line 1"),
        ("/v1/chat/completions", b"{}", "messages is required"),
        ("/v1/completions", b"7", "must be a JSON object, but it is a number"),
    ],
)
async def test_a_body_without_prompts_is_not_too_long(limited, connect, path, content, message):
    async with connect() as client:
        answer = await client.post(path, content=content)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_many_prompts_are_read_to_the_end(limited, connect):
    prompts = ["a" * 60_000] * 100
    async with connect() as client:
        answer = await client.post("/v1/completions", json={"prompt": prompts})
    assert answer.status_code == 200
    assert len(limited.generations) == 100


async def test_the_check_takes_no_time():
    limits = RequestLimits(4096, 65_536, 5_000_000, 682, 2048)
    bodies = [{"prompt": [1] * 4096}, {"messages": [USER] * 682}, {"prompt": "a" * 65_536}]
    started = time.thread_time()
    for body in bodies * 100:
        limits.check_parsed_body(body)
    assert time.thread_time() - started < 0.01


async def test_a_prompt_that_fits_is_passed_on(limited, post):
    answer = await post("/v1/chat/completions", messages=[USER])
    assert answer.status_code == 200
    assert len(limited.generations) == 1


async def test_limits_are_asked_for_again_after_a_while_and_outlive_an_outage():
    server = SimpleNamespace(now=0.0, limits=LIMITS)

    async def fetch():
        if server.limits is None:
            raise BackendError("UNAVAILABLE", "the server restarts")
        return server.limits

    limits = PublishedLimits(fetch, lambda: server.now)
    assert (await limits.get()).max_messages == 682

    server.limits = LIMITS | {"max_messages": 9}
    assert (await limits.get()).max_messages == 682
    server.now = 40.0
    assert (await limits.get()).max_messages == 9

    server.limits = None  # the server does not answer
    server.now = 80.0
    assert (await limits.get()).max_messages == 9

    server.limits = {}  # the server publishes no limits
    server.now = 82.0
    assert await limits.get() is None


@pytest.mark.usefixtures("limited")
async def test_leading_zeros_in_the_length_of_a_body_are_ignored(connect):
    body = json.dumps({"messages": [USER]})
    headers = {"Content-Length": f"{len(body):05000}"}
    async with connect() as client:
        answer = await client.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 200
