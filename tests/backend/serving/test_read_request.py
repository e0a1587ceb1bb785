"""Tests of the functions that read the sampling fields of a request to the tokenizer model."""

import numpy as np
import pytest
from backend.serving.fake_server import Request
from nereid_backend import RequestError
from nereid_backend.serving.tokenizer import stream_context
from nereid_backend.serving.tokenizer.prompt_builder import Prompt
from nereid_backend.serving.tokenizer.read_request import json_object, sampling_fields
from nereid_backend.serving.tokenizer.request_limits import RequestLimits

LIMITS = RequestLimits(
    max_model_len=10, max_prompt_bytes=100, max_request_bytes=1000, max_messages=5, max_values=50
)
BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


def request(sampling_parameters):
    return Request(sampling_parameters=np.array([sampling_parameters.encode()], dtype=np.object_))


def test_fields_beside_a_chat_are_refused_instead_of_ignored():
    fields = request('{"temperature": 0, "max_tokens": 7}')
    with pytest.raises(RequestError, match="Put the fields into the JSON object of chat_request"):
        sampling_fields(fields, BODY, LIMITS)


def test_parameters_that_are_not_utf8_are_refused():
    wrong = Request()
    # A call of `decode` raises a UnicodeDecodeError, as `parameters` does in a stub of the server.
    wrong.parameters = b"\xff".decode
    with pytest.raises(RequestError, match=r"^parameters: .* not valid UTF-8: .* byte 0xff"):
        sampling_fields(wrong, None, LIMITS)


@pytest.mark.parametrize("empty", ["{}", " {} "])
def test_an_empty_object_beside_a_chat_is_accepted(empty):
    assert sampling_fields(request(empty), BODY, LIMITS) == BODY


def test_the_fields_of_a_completion_come_from_the_tensor():
    assert sampling_fields(request('{"max_tokens": 7}'), None, LIMITS) == {"max_tokens": 7}


@pytest.mark.parametrize("text", [r'"\ud800"', r'["\ud800"]', r'{"a": "\ud800"}'])
def test_the_error_about_half_of_a_surrogate_pair_can_be_sent(text):
    with pytest.raises(RequestError) as caught:
        json_object(request(text), "sampling_parameters", LIMITS)
    assert "half of a surrogate pair" in str(caught.value).encode().decode()


def text_to_prepend(text, excluded, *, stream=False):
    """Return the text that the output of a completion begins with.

    `text` is the text of the prompt, and `excluded` is the value of `exclude_input_in_output`.
    """
    prompt = Prompt([5, 6], text)
    return stream_context._text_to_prepend(prompt, stream=stream, is_chat=False, excluded=excluded)


def test_the_output_begins_with_the_prompt_only_if_it_is_requested():
    assert text_to_prepend("a", None) == text_to_prepend("a", False) == "a"
    assert text_to_prepend("a", True) == text_to_prepend("a", None, stream=True) == ""
    assert text_to_prepend(None, None) == text_to_prepend(None, True) == ""


@pytest.mark.parametrize(
    ("text", "stream", "message"),
    [(None, False, "requires text_input or chat_request"), ("a", True, "requires stream=false")],
)
def test_an_output_that_cannot_begin_with_the_prompt_is_refused(text, stream, message):
    with pytest.raises(RequestError, match=f"exclude_input_in_output: the value false {message}"):
        text_to_prepend(text, False, stream=stream)
