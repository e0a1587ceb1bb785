"""Tests that a real server obeys random JSON schemas and random tools.

To run more cases: `STRICT_CASES=2000 python -m pytest tests/e2e/test_strict.py -s`
"""

import asyncio
import collections
import importlib.util
import json
import os
import random
from pathlib import Path

import httpx
import jsonschema
import pytest

pytestmark = pytest.mark.triton

NUM_CASES = int(os.environ.get("STRICT_CASES", "60"))
CONCURRENT = 16
PROMPTS = ("What is 27 + 45?", "Hello!", "Tell me about the weather in Tarn.", "Give me JSON.")

_source = Path(__file__).parents[1] / "backend" / "grammar" / "random_schemas.py"
_spec = importlib.util.spec_from_file_location("random_schemas", _source)
random_schemas = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(random_schemas)


def random_tool(rng, number):
    """Return a tool with one to three parameters. The number makes its name unique."""
    function = {
        "name": f"{rng.choice(['get', 'set', 'find'])}_{number}",
        "description": "does something",
        "strict": rng.random() < 0.7,
        "parameters": {
            "type": "object",
            "properties": {
                f"p{i}": random_schemas.schema(rng, 2) for i in range(rng.randint(1, 3))
            },
            "required": ["p0"],
            "additionalProperties": False,
        },
    }
    return {"type": "function", "function": function}


def random_case(number):
    """Return the kind of a random request ("schema", "required", "named" or "auto") and its body.

    "schema" stands for a strict response format. The other kinds are values of `tool_choice`.
    """
    rng = random.Random(number)
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
        "temperature": 1.0,
        "seed": number,
        "max_tokens": 700,
        "chat_template_kwargs": {"enable_thinking": rng.random() < 0.3},
    }
    kind = rng.choice(["schema", "schema", "required", "named", "auto"])
    if kind == "schema":
        schema = {"name": "answer", "strict": True, "schema": random_schemas.schema(rng)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return kind, body
    body["tools"] = [random_tool(rng, number) for number in range(rng.randint(1, 4))]
    if kind == "named":
        name = rng.choice(body["tools"])["function"]["name"]
        body["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        body["tool_choice"] = kind
    return kind, body


def problem_of(kind, body, answer):
    """Return a description of what is wrong with an answer, or None if the answer is correct.

    Raises: ValueError or jsonschema.ValidationError if the content or the arguments of a call do
        not match the schema.
    """
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "length":
        return None
    if kind == "schema":
        schema = body["response_format"]["json_schema"]["schema"]
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        return None
    calls = choice["message"].get("tool_calls") or []
    if kind in ("required", "named") and not calls:
        return "no call was made"
    if calls and choice["finish_reason"] != "tool_calls":
        return f"calls, but finish_reason {choice['finish_reason']}"
    problems = (problem_of_call(kind, body, call["function"]) for call in calls)
    return next(filter(None, problems), None)


def problem_of_call(kind, body, call):
    tools = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
    name = call["name"]
    if name not in tools:
        return f"unknown tool {name}"
    if kind == "named" and name != body["tool_choice"]["function"]["name"]:
        return f"{name} was called instead of the named tool"
    if tools[name]["strict"] or kind in ("required", "named"):
        jsonschema.validate(json.loads(call["arguments"]), tools[name]["parameters"])
    return None


async def run_all(url):
    """Send all requests. Return the number of answers by kind and outcome, and all problems."""
    outcomes, problems = collections.Counter(), []
    concurrency_limit = asyncio.Semaphore(CONCURRENT)

    async def run(client, number):
        kind, body = random_case(number)
        async with concurrency_limit:
            reply = await client.post(f"{url}/chat/completions", json=body)
        answer = reply.json()
        if reply.status_code != 200:
            outcomes[kind, reply.status_code] += 1
            message = answer["error"]["message"]
            if reply.status_code != 400 or "cannot enforce" not in message:
                problems.append((number, kind, reply.status_code, message))
            return
        outcomes[kind, answer["choices"][0]["finish_reason"]] += 1
        try:
            problem = problem_of(kind, body, answer)
        except (ValueError, jsonschema.ValidationError) as error:
            problem = str(error).splitlines()[0]
        if problem is not None:
            problems.append((number, kind, problem, answer["choices"][0]["message"]))

    async with httpx.AsyncClient(timeout=500) as client:
        await asyncio.gather(*(run(client, number) for number in range(NUM_CASES)))
    return outcomes, problems


def test_random_schemas_and_tools_are_obeyed_and_none_is_an_error_of_the_server(served):
    outcomes, problems = asyncio.run(run_all(served.openai_url))
    print(NUM_CASES, "cases:", dict(outcomes))  # noqa: T201 - shown with -s
    assert not problems, f"{len(problems)} of {NUM_CASES}: {problems[:5]}"
    # The kind is followed by the finish reason, or by the status of an error.
    counts = [count for (_, end), count in outcomes.items() if end in ("stop", "tool_calls")]
    assert sum(counts) > 0.6 * NUM_CASES, f"too few answers ended by themselves: {outcomes}"
