import json
import time

import pytest
from nereid_backend import ModelError, RequestError, SamplingParams
from nereid_backend.serving.tokenizer.read_sampling import (
    ignored_defaults,
    read_generation_defaults,
    read_sampling,
)
from nereid_backend.serving.tokenizer.request_fields import refuse_unknown


def test_fields_win_over_the_checkpoints_defaults():
    params, _ = read_sampling({"temperature": 0.2}, {"temperature": 0.9, "top_k": 20})
    assert (params.temperature, params.top_k) == (0.2, 20)


def test_null_means_the_default():
    params, options = read_sampling({"temperature": None, "stop": None}, {"temperature": 0.9})
    assert params.temperature == 0.9
    assert options.stop == ()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_tokens", "256", 256),
        ("temperature", "0.5", 0.5),
        ("temperature", ".5", 0.5),
        ("temperature", "1", 1.0),
        ("ignore_eos", "true", True),
        ("ignore_eos", " False", False),
        ("stop_token_ids", "[1, 2]", (1, 2)),
        ("logit_bias", '{"5": -1}', ((5, -1.0),)),
        ("logprobs", "3", 3),
        ("cache_salt", "5", "5"),
        ("client_id", "42", "42"),
        ("client_id", "true", "true"),
    ],
)
def test_values_can_be_texts(name, text, value):
    params, _ = read_sampling({name: text}, {})
    assert getattr(params, name) == value


def test_text_that_is_nested_too_deeply_is_refused():
    with pytest.raises(RequestError, match="stop_token_ids: the value must be a list"):
        read_sampling({"stop_token_ids": "[" * 100_000}, {})


def test_a_single_stop_string_needs_no_list():
    _, options = read_sampling({"stop": "END"}, {})
    assert options.stop == ("END",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": float("nan")}, "temperature: the value must be a finite number"),
        ({"max_tokens": 0}, "max_tokens: the value must be at least 1, but the request has 0."),
        ({"max_tokens": -4}, "max_tokens: the value must be at least 1, but the request has -4."),
        (
            {"max_tokens": "many"},
            'max_tokens: the value must be an integer, but the request has "many"',
        ),
        ({"stop": [""]}, "stop: an empty string"),
        ({"stop": [1]}, "stop: each item must be a string, but the request has 1."),
        ({"stop": 1}, "stop: the value must be a list, but the request has 1."),
        (
            {"stop": ["x"] * 17},
            "stop: the value must be a list of at most 16 items, but the request has 17.",
        ),
        ({"n": 0}, "n: the value must be at least 1, but the request has 0."),
        (
            {"presence_penalty": 2.5},
            "presence_penalty: the value must be at most 2, but the request has 2.5.",
        ),
        (
            {"logit_bias": {"x": 1}},
            'logit_bias: each key must be a token id, but the request has ["x"]',
        ),
        (
            {"logit_bias": {"5": 101}},
            "logit_bias: each item must be at most 100, but the request has 101.",
        ),
        (
            {"logprobs": 21},
            "logprobs: the value must be an integer from 0 to 20, but the request has 21.",
        ),
        (
            {"logprobs": True, "top_logprobs": 30},
            "top_logprobs: the value must be at most 20, but the request has 30.",
        ),
        ({"top_logprobs": 3}, "top_logprobs: this field requires logprobs=true."),
        ({"bad_words": "no"}, 'bad_words: the value must be a list, but the request has "no".'),
        ({"bad_words": ["no"]}, "bad_words: this server has no tokenizer"),
        ({"best_of": 3}, "best_of: the value must equal n"),
        (
            {"skip_special_tokens": 1},
            "skip_special_tokens: the value must be true or false, but the request has 1.",
        ),
        ({"cache_salt": 5}, "cache_salt: the value must be a string"),
        ({"cache_salt": 5, "extra_key": "a"}, "cache_salt: the value must be a string"),
        ({"reasoning_format": "xml"}, "reasoning_format: the value must be 'none', 'auto' or"),
        ({"guided_json": {}}, "guided_json: structured_outputs.json replaces this field"),
        ({"stop_regex": "a+"}, "stop_regex: a stop condition must be a string or a token id"),
        (
            {"use_beam_search": True},
            "use_beam_search: this server does not support beam search, but the request has "
            "true. Leave the field out or send false.",
        ),
        ({"mirostat": 2}, "mirostat: this server does not support this sampler"),
        ({"typical": 0.5}, "typical: this server does not support this sampler"),
    ],
)
def test_a_wrong_value_is_named(fields, message):
    with pytest.raises(RequestError) as caught:
        read_sampling(fields, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": "1"},
        {"presence_penalty": 0.0, "frequency_penalty": 0},
        {"logprobs": False, "logit_bias": {}},
        {"repetition_penalty": 1.0},
        {"best_of": 1, "use_beam_search": "false", "lora_name": "", "stream_reasoning": True},
        {"allowed_token_ids": [], "bad_words": []},
    ],
)
def test_fields_with_default_values_are_accepted(fields):
    read_sampling(fields, {})


def test_an_unknown_sampling_parameter_is_refused_with_the_nearest_name():
    with pytest.raises(RequestError, match='Did you mean "temperature"'):
        refuse_unknown({"temprature": 1})


def test_an_unknown_sampling_parameter_with_a_very_long_name_is_refused_quickly():
    start = time.process_time()
    with pytest.raises(RequestError, match=r"not a known sampling parameter\.$"):
        refuse_unknown({"temperature" * 1_000_000: 1})
    assert time.process_time() - start < 0.3


def test_every_engine_field_reaches_the_engine():
    fields = {
        "n": 3,
        "best_of": 3,
        "presence_penalty": "0.5",
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": -2, "5": 1.5},
        "allowed_token_ids": [1, 2],
        "logprobs": 4,
        "prompt_logprobs": 2,
        "priority": -1,
        "cache_salt": "me",
        "extra_key": "tenant",
    }
    params, _ = read_sampling(fields, {})
    assert params == SamplingParams(
        n=3,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={5: 1.5, 7: -2},
        allowed_token_ids=[1, 2],
        logprobs=4,
        prompt_logprobs=2,
        priority=-1,
        cache_salt="me\0tenant",
    )


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_a_chat_requests_logprobs_with_a_boolean_and_a_number(fields, count):
    assert read_sampling(fields, {}, is_chat=True)[0].logprobs == count
    with pytest.raises(
        RequestError, match="logprobs: the value must be true or false, but the request has 5"
    ):
        read_sampling({"logprobs": 5}, {}, is_chat=True)


def test_a_bad_word_is_also_forbidden_after_a_space_if_that_is_a_single_token():
    # The token ids of each text. " no" is a single token, " way out" is not.
    vocabulary = {"no": [1], " no": [2], "way out": [3, 4], " way out": [5, 6, 7], "x": [8]}
    fields = {"bad_words": [" no", "way out", "x"]}
    params, _ = read_sampling(fields, {}, encode=lambda text: vocabulary.get(text, []))
    assert params.bad_words_token_ids == ((1,), (2,), (3, 4), (8,))


def test_names_of_sglang_and_llamacpp_are_accepted():
    _, options = read_sampling({"no_stop_trim": True, "reasoning_format": "none"}, {})
    assert options.include_stop_str_in_output
    assert not options.separate_reasoning


def test_do_sample_false_means_greedy_and_a_missing_value_does_not(tmp_path):
    path = tmp_path / "generation_config.json"
    assert read_generation_defaults(tmp_path) == {}
    path.write_text(json.dumps({"do_sample": False, "top_p": 0.9}))
    assert read_generation_defaults(tmp_path) == {"temperature": 0.0, "top_p": 0.9}
    path.write_text(json.dumps({"repetition_penalty": 1.1, "max_new_tokens": 9}))
    assert read_generation_defaults(tmp_path) == {"repetition_penalty": 1.1, "max_tokens": 9}
    path.write_text(json.dumps({"top_p": 0.9}))
    assert read_generation_defaults(tmp_path) == {"top_p": 0.9}


def test_defaults_of_the_checkpoint_without_an_effect_are_named(tmp_path):
    assert ignored_defaults(tmp_path) == []
    config = {"top_p": 0.9, "num_beams": 1, "typical_p": 1.0, "min_length": 0, "stop_strings": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert ignored_defaults(tmp_path) == []
    config |= {"num_beams": 4, "suppress_tokens": [7], "token_healing": False, "top_h": 0.4}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert ignored_defaults(tmp_path) == ["num_beams", "suppress_tokens", "top_h"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "generation_config.json: Expecting property name"),
        ("[1]", r"the file must contain a JSON object, but it contains \[1\]\. Correct or delete"),
        ('{"temperature": "hot"}', 'a number, but the file has "hot"\\. Correct'),
        ('{"max_new_tokens": 0}', "max_tokens: the value must be at least 1"),
        ('{"top_p": NaN}', "top_p: the value must be a finite number"),
    ],
)
def test_a_wrong_default_of_the_checkpoint_is_an_error_of_the_checkpoint(tmp_path, text, problem):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=problem):
        read_generation_defaults(tmp_path)


def test_timeouts_are_seconds():
    _, options = read_sampling({}, {})
    assert (options.timeout_s, options.queue_timeout_s) == (None, None)
    _, options = read_sampling({"timeout": 2, "queue_timeout": "0.5"}, {})
    assert (options.timeout_s, options.queue_timeout_s) == (2.0, 0.5)
    for value in (-1, True, "soon", [1], float("inf"), float("nan")):
        with pytest.raises(RequestError, match="queue_timeout: the value must be"):
            read_sampling({"queue_timeout": value}, {})
