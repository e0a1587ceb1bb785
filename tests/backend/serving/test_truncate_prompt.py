"""Tests of `truncate_prompt_tokens`, which removes all but the last tokens of a prompt.

The prompt can be a text, a chat or token ids.
"""

import json

import numpy as np
import pytest
from backend.serving.fake_server import DEMO
from backend.serving.pipeline import Pipeline, chat, completion
from nereid_backend import RequestError
from nereid_backend.serving.tokenizer.request_prompts import read_num_kept

TEXT = "One small cat sleeps on the big red chair."


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    script = [{"when": "", "text": "yes"}]
    with pytest.MonkeyPatch.context() as patch:
        yield Pipeline(DEMO / "chat", script, tmp_path_factory.mktemp("pipeline"), patch)


@pytest.fixture
def prompt_of(pipeline):
    """A function that sends a request and returns the token ids of its prompt."""

    def send_and_return_prompt(inputs):
        deltas = [delta for reply in pipeline.ask(**inputs) for delta in reply["delta"]]
        return next(delta["prompt_token_ids"] for delta in deltas if "prompt_token_ids" in delta)

    return send_and_return_prompt


@pytest.mark.parametrize("inputs_of", [chat, completion])
def test_the_last_tokens_of_a_prompt_are_kept(prompt_of, inputs_of):
    whole = prompt_of(inputs_of(TEXT, return_token_ids=True))
    truncated = prompt_of(inputs_of(TEXT, return_token_ids=True, truncate_prompt_tokens=5))
    assert truncated == whole[-5:]
    unchanged = prompt_of(inputs_of(TEXT, return_token_ids=True, truncate_prompt_tokens=5000))
    assert unchanged == whole


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(pipeline, prompt_of):
    limit = pipeline.tokenizer._prompt_builder.limits.max_model_len
    long_text = " ".join(["cat"] * 2 * limit)
    with pytest.raises(RequestError, match="max_model_len"):
        prompt_of(completion(long_text))

    # The value -1 keeps as many tokens as fit together with max_tokens.
    fields = {"return_token_ids": True, "truncate_prompt_tokens": -1, "max_tokens": 10}
    num_kept = limit - 10
    assert len(prompt_of(completion(long_text, **fields))) == num_kept

    long_ids = np.arange(2 * limit, dtype=np.int32) % 300
    inputs = {**completion("", **fields), "input_ids": long_ids}
    del inputs["text_input"]
    assert prompt_of(inputs) == long_ids[-num_kept:].tolist()


def test_an_echo_begins_with_the_tokens_that_are_kept(pipeline):
    inputs = completion(TEXT, stream=False, truncate_prompt_tokens=3)
    (reply,) = pipeline.ask(**inputs)
    assert TEXT.endswith(reply["text_output"][0].removesuffix("yes").strip())
    assert len(reply["text_output"][0]) < len(TEXT)


@pytest.mark.parametrize(("value", "kept"), [(None, None), (7, 7), ("7", 7), (-1, 4086)])
def test_the_number_of_tokens_to_keep(value, kept):
    fields = {"truncate_prompt_tokens": value, "max_tokens": 10}
    assert read_num_kept(fields, 4096) == kept
    assert read_num_kept({}, 4096) is None


@pytest.mark.parametrize("max_tokens", [None, 0, 5000, "a"])
def test_without_a_usable_limit_one_token_can_be_generated(max_tokens):
    fields = {"truncate_prompt_tokens": -1, "max_tokens": max_tokens}
    assert read_num_kept(fields, 4096) == 4095


@pytest.mark.parametrize("value", [0, -2, 1.5, "a", [1]])
def test_other_values_are_refused(value):
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        read_num_kept(json.loads(json.dumps({"truncate_prompt_tokens": value})), 4096)
