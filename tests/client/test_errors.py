"""Tests of the translation of the backend's errors to HTTP errors."""

import pytest
from nereid_client.errors import BackendError, to_api_error, tokens_and_limit


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ("9 requests wait; the limit is 9 (max_num_waiting); try again in 17 s", "17"),
        ("The engine is being restarted. Try again in 4 s.", "4"),
        ("Server is stopping", "1"),
    ],
)
def test_an_unavailable_server_says_when_to_try_again(message, seconds):
    error = to_api_error(BackendError("UNAVAILABLE", message))
    assert (error.status, error.headers) == (503, {"Retry-After": seconds})


def test_an_expired_request_is_a_504_without_a_time_to_try_again():
    error = to_api_error(BackendError("DEADLINE_EXCEEDED", "not finished after 2 s (timeout)"))
    assert (error.status, error.code, error.headers) == (504, "timeout", {})


@pytest.mark.parametrize(
    ("message", "param", "shown"),
    [
        ("seed: must be an integer", "seed", "seed must be an integer"),
        ("seed: the value must be an integer", "seed", "seed must be an integer"),
        ("dimensions: this field requires dense", "dimensions", "dimensions requires dense"),
        ("text_input: is empty", "prompt", "prompt is empty"),
        ("text_input must not be empty", "prompt", "prompt must not be empty"),
        ("max_tokens must be at least 1", "max_tokens", "max_tokens must be at least 1"),
        ("messages[0].role is unknown", "messages[0].role", "messages[0].role is unknown"),
        ("image: cannot be read", "image", "image cannot be read"),
        ("top_p: messages: no", "top_p", "top_p: messages: no"),
        ("The template cannot be rendered", None, "The template cannot be rendered"),
        ("prompt has no tokens", None, "prompt has no tokens"),
    ],
)
def test_the_field_that_a_message_starts_with_is_the_param(message, param, shown):
    error = to_api_error(BackendError("INVALID_ARGUMENT", message))
    assert (error.status, error.param, error.message) == (400, param, shown)


@pytest.mark.parametrize(
    "message",
    [
        "prompt has 9000 tokens; the limit is 4096 (max_model_len)",
        "The prompt has 9000 tokens, but the limit is 4096 (max_model_len).",
        "The prompt has 9000 tokens, but max_model_len is 4096",
    ],
)
def test_a_prompt_that_is_too_long_is_found_in_several_wordings(message):
    assert tokens_and_limit(message) == (9000, 4096)
    error = to_api_error(BackendError("INVALID_ARGUMENT", message))
    assert error.code == "context_length_exceeded"
    assert error.message.startswith("Input tokens exceed the configured limit: ")
    # Agents such as opencode and qwen-code look for these words.
    assert error.message.endswith("This model's maximum context length is 4096 tokens.")
    assert ".." not in error.message


def test_other_messages_with_numbers_are_not_taken_for_a_prompt_that_is_too_long():
    assert tokens_and_limit("max_tokens must be at most 4096") is None
