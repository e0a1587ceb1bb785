"""Tests of the request fields that control the output, sent with tritonclient to the demo model."""

import asyncio
import collections
import json
import re
import time

import jsonschema
import pytest
from e2e.gauges_page import is_idle
from e2e.triton_client import ask, chat, tensor
from fakes.live_frontend import wait_for

pytestmark = pytest.mark.triton

MAX_TOKENS = 12
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": CITY}}
    for name in ("get_weather", "get_time")
]


def completion(stream=True, text="Once upon a time", **fields):
    return [
        tensor("text_input", text),
        tensor("stream", stream, "BOOL"),
        tensor("sampling_parameters", json.dumps(GREEDY | fields)),
    ]


def run(served, inputs):
    reply = asyncio.run(ask(served.grpc_url, inputs))
    assert reply.error is None, reply.error
    return reply


def choices(reply):
    """Return the joined deltas of each choice: index of the choice -> fields of the choice."""
    choice_of = collections.defaultdict(
        lambda: {"text": "", "content": "", "calls": {}, "logprobs": [], "ids": []}
    )
    for result in reply.outputs:
        deltas = [json.loads(text) for text in result.as_numpy("delta")]
        texts = [text.decode() for text in result.as_numpy("text_output")]
        for delta, text in zip(deltas, texts, strict=True):
            add_delta(choice_of[delta.get("index", 0)], delta, text)
    return dict(choice_of)


def add_delta(choice, delta, text):
    """Add a delta, and the text of the tensor `text_output`, to a choice."""
    choice["text"] += text
    choice["content"] += delta.get("content", "")
    choice["logprobs"] += delta.get("logprobs", [])
    choice["ids"] += delta.get("token_ids", [])
    for piece in delta.get("tool_calls", []):
        call = choice["calls"].setdefault(piece["index"], {"name": "", "arguments": ""})
        call["name"] += piece.get("name", "")
        call["arguments"] += piece["arguments"]
    for field in ("usage", "finish_reason", "stop_reason", "cumulative_logprob"):
        if field in delta:
            choice[field] = delta[field]


def answer_to(served, question, **fields):
    """Send a chat, and return its only choice."""
    (answer,) = choices(run(served, chat(question, temperature=1, seed=5, **fields))).values()
    return answer


def test_n_answers_come_in_one_stream_or_in_one_response(served):
    fields = {"n": 3, "temperature": 1.5, "seed": 11, "return_token_ids": True}
    without_prompt = tensor("exclude_input_in_output", True, "BOOL")
    streamed = choices(run(served, completion(**fields)))
    whole = run(served, [*completion(stream=False, **fields), without_prompt])

    assert len(whole.outputs) == 1
    assert choices(whole) == streamed
    assert list(streamed) == [0, 1, 2]
    assert len({tuple(choice["ids"]) for choice in streamed.values()}) == 3
    assert all(choice["finish_reason"] == "length" for choice in streamed.values())


def test_an_answer_is_the_same_whatever_its_siblings_are(served):
    fields = {"temperature": 1.5, "seed": 11, "return_token_ids": True}
    alone = choices(run(served, completion(**fields)))[0]
    assert choices(run(served, completion(n=3, **fields)))[0]["ids"] == alone["ids"]


def test_log_probabilities_add_up_and_every_token_has_one(served):
    reply = run(served, completion(logprobs=3, return_token_ids=True))
    answer = choices(reply)[0]
    entries = answer["logprobs"]

    assert [entry["token_id"] for entry in entries] == answer["ids"]
    assert len(entries) == MAX_TOKENS
    total = sum(entry["logprob"] for entry in entries)
    assert total == pytest.approx(answer["cumulative_logprob"], abs=1e-3)
    for entry in entries:
        assert entry["rank"] == 1  # with temperature 0, the most likely token is chosen
        assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]
        assert len(entry["top_logprobs"]) == 3
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == answer["text"]


def test_the_tensor_in_the_format_of_vllm_has_the_same_log_probabilities(served):
    inputs = [*completion(logprobs=2), tensor("return_logprobs", True, "BOOL")]
    reply = run(served, inputs)

    texts = [text for result in reply.outputs for text in result.as_numpy("logprobs")]
    vllm_rows = [row for text in texts for row in json.loads(text)]  # one row for each token
    assert len(vllm_rows) == MAX_TOKENS
    for entry, vllm_row in zip(choices(reply)[0]["logprobs"], vllm_rows, strict=True):
        vllm_entry = vllm_row[str(entry["token_id"])]
        assert (vllm_entry["logprob"], vllm_entry["rank"]) == (entry["logprob"], entry["rank"])


def test_prompt_log_probabilities_come_once(served):
    reply = run(served, completion(prompt_logprobs=1, return_token_ids=True))
    first_delta, *other_deltas = reply.deltas
    assert not any("prompt_logprobs" in delta for delta in other_deltas)
    rows, ids = first_delta["prompt_logprobs"], first_delta["prompt_token_ids"]
    assert rows[0] is None
    assert len(rows) == len(ids)
    assert all(str(token) in row for token, row in zip(ids[1:], rows[1:], strict=True))


def test_a_second_request_finds_its_prompt_in_the_cache(served):
    text = "A long prompt that is worth keeping. " * 8
    for _ in range(2):
        answer = choices(run(served, completion(text=text)))[0]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < answer["usage"]["prompt_tokens"]


def num_generated(gauge):
    """Wait until the engine is idle, and return the number of tokens that it has generated so far.

    The first pause is longer than the tenth of a second by which the metrics may be out of date.
    """
    time.sleep(0.3)
    wait_for(lambda: is_idle(gauge))
    return gauge("generation_tokens_total")


def test_a_stop_string_ends_the_generation_long_before_max_tokens(served, gauge):
    plain_text = choices(run(served, completion(max_tokens=40)))[0]["text"]
    stop = plain_text[10:14]
    num_before = num_generated(gauge)

    answers = choices(run(served, completion(max_tokens=3000, stop=[stop], n=2))).values()

    text_before_stop = plain_text[: plain_text.index(stop)]
    assert [answer["text"] for answer in answers] == [text_before_stop] * 2
    assert [answer["stop_reason"] for answer in answers] == [stop] * 2
    # Without the stop string, the two answers would have 6000 tokens. With the stop string, the
    # engine usually generates 8 tokens, but it generates more tokens on a busy machine.
    assert 0 < num_generated(gauge) - num_before < 3000


def test_penalties_biases_and_bans_change_the_answer(served):
    def ids_with(**fields):
        return choices(run(served, completion(return_token_ids=True, **fields)))[0]["ids"]

    ids = ids_with()
    first = ids[0]
    assert first not in ids_with(logit_bias={str(first): -100})
    assert first not in ids_with(allowed_token_ids=[first + 1])
    penalized_ids = ids_with(frequency_penalty=2)
    assert max(map(penalized_ids.count, penalized_ids)) <= max(map(ids.count, ids))


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_a_strict_schema_is_enforced_after_the_reasoning(served, enable_thinking):
    answer = answer_to(
        served,
        "Tell me of a person.",
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "p", "strict": True, "schema": SCHEMA},
        },
        max_tokens=400,
        chat_template_kwargs={"enable_thinking": enable_thinking},
    )

    if answer["finish_reason"] == "stop":
        jsonschema.validate(json.loads(answer["content"]), SCHEMA)
    else:
        assert answer["finish_reason"] == "length"  # the answer is cut off, so it is no valid JSON


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
    ],
)
def test_the_other_grammars_are_enforced_too(served, fields, pattern):
    answer = answer_to(served, "Which way?", max_tokens=50, **fields, **NO_THINKING)
    assert re.fullmatch(pattern, answer["content"].strip())


@pytest.mark.parametrize(
    ("choice", "possible_names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
)
def test_a_required_call_is_made(served, choice, possible_names):
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 300, **NO_THINKING}
    answer = answer_to(served, "Hello!", **fields)
    assert answer["finish_reason"] == "tool_calls"
    for call in answer["calls"].values():
        assert call["name"] in possible_names
        assert set(json.loads(call["arguments"])) == {"city"}


def test_a_thinking_budget_ends_the_reasoning(served):
    question = "What is 27 + 45?"
    unlimited = answer_to(served, question, max_tokens=300)
    assert unlimited["usage"]["completion_tokens_details"]["reasoning_tokens"] > 6
    limited = answer_to(served, question, max_tokens=300, thinking_token_budget=2)
    assert limited["usage"]["completion_tokens_details"]["reasoning_tokens"] < 12
    assert limited["content"]


# Part of the error message -> the request fields.
REFUSED = {
    "response_format: type must be one of": {"response_format": {"type": "xml"}},
    "best_of: the value must equal n (1), but the request has 3.": {"best_of": 3},
    "guided_json: structured_outputs.json replaces this field": {"guided_json": SCHEMA},
    "tool_choice: the request has no tool with the name 'nobody'": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "nobody"}},
    },
    "top_logprobs: the value must be at most 20": {"logprobs": True, "top_logprobs": 21},
    "regex": {"regex": "(a"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(served, message):
    reply = asyncio.run(ask(served.grpc_url, chat("hi", **REFUSED[message])))
    assert message in reply.error
    assert "[INVALID_ARGUMENT]" in reply.error
