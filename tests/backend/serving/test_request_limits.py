"""Tests that requests beyond a limit are refused quickly, before they are rendered or tokenised."""

import json
import time

import numpy as np
import pytest
from backend.serving.fake_server import DEMO, Request
from nereid_backend import EngineConfig, RequestError
from nereid_backend.serving.tokenizer.request_limits import (
    RequestLimits,
    length_limit,
    measure,
)
from nereid_backend.serving.tokenizer.tokenizer_model import TokenizerModel

MODEL_LEN = 4096


@pytest.fixture(scope="module")
def tokenizer():
    model = TokenizerModel()
    values = {"model": str(DEMO / "chat"), "engine": "scripted"}
    config = {"parameters": {name: {"string_value": value} for name, value in values.items()}}
    model.initialize({"model_config": json.dumps(config), "model_repository": "/tmp"})
    yield model
    model.finalize()


def text(value):
    return np.array([value.encode()], dtype=np.object_)


def chat(*contents, **fields):
    return {"chat_request": text(json.dumps({"messages": list(contents), **fields}))}


def user(content="a"):
    return {"role": "user", "content": content}


def refusal(model, inputs, limit_s=0.5):
    """Return the text of the error response to a request.

    The tokenizer model must refuse the request in less than `limit_s` seconds of CPU time.
    """
    request = Request(**inputs)
    started_s = time.thread_time()
    reply = model.respond(request)
    assert time.thread_time() - started_s < limit_s
    assert reply.error is not None
    return reply.error.text


def deep(levels):
    """Return nested lists with `levels` levels."""
    return json.loads("[" * levels + "]" * levels)


@pytest.mark.parametrize(
    "inputs",
    [
        chat(*[user()] * 20_000),
        chat(user("a " * 2_500_000)),
        {"text_input": text("a b " * 1_250_000)},
        {"input_ids": np.ones(3_000_000, dtype=np.int32)},
        chat(user("é" * 200_000)),
    ],
    ids=["20k messages", "5 MB", "5 MB text", "3M ids", "UTF-8"],
)
def test_a_prompt_that_cannot_fit_is_refused_with_the_context_length(tokenizer, inputs):
    error = refusal(tokenizer, inputs)
    assert "[INVALID_ARGUMENT]" in error
    assert "tokens" in error
    assert f"{MODEL_LEN} (max_model_len)" in error


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        (chat(user(), tools=[{"type": "function", "function": {"name": "f"}}] * 3000), "max_tools"),
        (chat(*[user()] * 100_001), "max_values"),
        (chat(user([{"type": "text", "text": "word"}] * 90_000)), "max_values"),
        (chat(user(), documents=deep(300)), "max_depth"),
        (chat(user(), metadata={"a": deep(300)}), "max_depth"),
        ({"chat_request": text('{"messages": ' + "[" * 50_000)}, "max_depth"),
        ({"chat_request": text('{"messages": [' + "[]," * 200_000 + "[]]}")}, "max_values"),
        (chat(user(), x=list(range(200_000))), "max_values"),
        (
            {"text_input": text("a"), "sampling_parameters": text('{"x": ' + "[" * 50_000)},
            "max_depth",
        ),
    ],
)
def test_a_request_over_a_limit_is_refused_with_its_name(tokenizer, inputs, name):
    error = refusal(tokenizer, inputs)
    assert "[INVALID_ARGUMENT]" in error
    assert name in error


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("[" * 50_000, "max_depth"),
        ("[" * 300 + "]" * 300, "max_depth"),
        ("[],' " * 100_000, "max_values"),
    ],
)
def test_hostile_arguments_of_a_tool_call_are_refused(tokenizer, arguments, problem):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    error = refusal(tokenizer, chat(user(), message, user()))
    assert "[INVALID_ARGUMENT]" in error
    assert problem in error


@pytest.mark.parametrize("role", ["system", "developer", "user"])
@pytest.mark.parametrize("fields", [{}, {"content": None}])
def test_a_message_without_content_is_refused(tokenizer, role, fields):
    error = refusal(tokenizer, chat(user(), {"role": role, **fields}))
    assert "[INVALID_ARGUMENT]" in error
    assert "the content of item 1 is missing or null" in error


@pytest.mark.parametrize("calls", [5, {"a": 1}, "f"])
def test_tool_calls_that_are_no_list_are_refused(tokenizer, calls):
    error = refusal(tokenizer, chat({"role": "assistant", "tool_calls": calls}))
    assert "tool_calls of item 0 must be a list" in error


@pytest.mark.parametrize(
    "name",
    ["add_generation_prompt", "tools", "messages", "chat_template", "tokenize", "self", "padding"],
)
def test_a_reserved_name_in_chat_template_kwargs_is_refused(tokenizer, name):
    error = refusal(tokenizer, chat(user(), chat_template_kwargs={name: True}))
    assert "[INVALID_ARGUMENT]" in error
    assert f"the name {name} is reserved" in error


def test_a_long_stop_string_is_refused(tokenizer):
    error = refusal(tokenizer, chat(user(), stop=["a" * 5000]))
    assert "[INVALID_ARGUMENT] stop" in error


def test_the_largest_number_of_messages_is_accepted(tokenizer):
    count = tokenizer._prompt_builder.limits.max_messages
    reply = tokenizer.respond(Request(**chat(*[user("")] * count)))
    assert reply.error is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [user("\ud800")]}, "chat_request: a text contains half of a surrogate pair"),
        ({"cache_salt": "\udfff"}, "chat_request: a text contains half of a surrogate pair"),
        ({"tool_choice": 7}, "tool_choice: the value must be auto, required, none or an object"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [7]}}, "tool_choice: the value must"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": 7}}, "tool_choice: the value"),
    ],
)
def test_wrong_values_are_refused_by_name(tokenizer, fields, message):
    error = refusal(tokenizer, chat(**{"messages": [user()], **fields}))
    assert error.startswith(f"[INVALID_ARGUMENT] {message}")


def test_surrogate_pairs_and_huge_budgets_are_accepted(tokenizer):
    request = Request(**chat(user("\U0001f600"), thinking_token_budget=10**400))
    assert tokenizer.respond(request).error is None


def test_a_client_can_ask_for_the_limits(tokenizer):
    request = Request(stream=np.array([True]))
    request.request_parameters = '{"return_limits": true}'
    reply = tokenizer.respond(request)
    published = json.loads(reply.tensors[0].as_numpy().tobytes())
    assert published["max_model_len"] == MODEL_LEN
    assert published["max_messages"] == tokenizer._prompt_builder.limits.max_messages


@pytest.mark.parametrize("skip", [True, False])
def test_a_client_can_ask_for_the_text_of_token_ids(tokenizer, skip):
    ids = tokenizer._prompt_builder.encode("Hello there<|im_end|>")
    request = Request(stream=np.array([True]), input_ids=np.array(ids, np.int32))
    request.request_parameters = json.dumps({"return_text": True, "skip_special_tokens": skip})
    reply = tokenizer.respond(request)
    text = json.loads(reply.tensors[0].as_numpy().tobytes())["text"]
    assert text == ("Hello there" if skip else "Hello there<|im_end|>")


@pytest.mark.parametrize("ids", [[5, 10**6], [-1]])
def test_the_text_of_an_unknown_token_is_refused(tokenizer, ids):
    request = Request(input_ids=np.array(ids, np.int32))
    request.request_parameters = '{"return_text": true}'
    assert tokenizer.respond(request).error.text.endswith(
        f"tokens, but the request has the token id {ids[-1]}."
    )


def test_the_limits_follow_from_the_length_of_the_model():
    limits = RequestLimits.derive(131_072, max_token_bytes=128, min_message_tokens=5)
    assert limits.max_prompt_bytes == 131_072 * 128
    assert limits.max_messages == 26_214
    limits.check_text("a" * limits.max_prompt_bytes)
    with pytest.raises(RequestError, match=r"131073 tokens; the limit is 131072 \(max_model_len\)"):
        limits.check_text("a" * limits.max_prompt_bytes + "a")


def test_a_value_is_measured():
    size = measure({"a": ["é", 1]}, RequestLimits.derive(10, 1))
    assert size == (3, 4, 2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"n_positions": 1024}, "vision_config": {}}, 1024),
        ({"max_position_embeddings": None}, 131_072),
        (
            {"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            2048,
        ),
        (
            {
                "text_config": {
                    "max_position_embeddings": 4096,
                    "rope_parameters": {
                        "full_attention": {
                            "rope_type": "yarn",
                            "factor": 16,
                            "original_max_position_embeddings": 512,
                        }
                    },
                }
            },
            8192,
        ),
    ],
)
def test_the_length_limit_is_read_from_the_checkpoint(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert length_limit(EngineConfig(model=str(tmp_path))) == expected
    assert length_limit(EngineConfig(model=str(tmp_path), max_model_len=99)) == 99
