import json

import pytest
from nereid_backend import RequestError
from nereid_backend.serving.sampling import (
    read_generation_defaults,
    read_sampling,
    refuse_unknown,
)


def test_fields_win_over_the_checkpoints_defaults():
    params, _ = read_sampling({"temperature": 0.2}, {"temperature": 0.9, "top_k": 20})
    assert (params.temperature, params.top_k) == (0.2, 20)


def test_null_means_the_default():
    params, options = read_sampling({"temperature": None, "stop": None}, {"temperature": 0.9})
    assert params.temperature == 0.9
    assert options.stop == ()


def test_numbers_may_come_as_text():
    fields = {"max_tokens": "256", "temperature": "0.5", "ignore_eos": "true"}
    params, _ = read_sampling(fields, {})
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (256, 0.5, True)


def test_a_stop_string_may_stand_alone():
    _, options = read_sampling({"stop": "END"}, {})
    assert options.stop == ("END",)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": float("nan")}, "temperature: must be a finite number, got nan"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"max_tokens": -4}, "max_tokens: must be at least 1, got -4"),
        ({"max_tokens": "many"}, "max_tokens: must be an integer, got 'many'"),
        ({"stop": [""]}, "stop: an empty string"),
        ({"stop": [1]}, "stop: must be a string or a list of strings"),
        ({"stop": ["x"] * 17}, "stop: has 17 strings; the limit is 16"),
        ({"n": 3}, "n: is not supported yet, got 3; leave it out or send 1"),
        ({"presence_penalty": 0.5}, "presence_penalty: is not supported yet"),
        ({"logit_bias": {"5": 1}}, "logit_bias: is not supported yet"),
    ],
)
def test_a_wrong_value_is_named(fields, said):
    with pytest.raises(RequestError) as caught:
        read_sampling(fields, {})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": "1"},
        {"presence_penalty": 0.0, "frequency_penalty": 0},
        {"logprobs": False, "logit_bias": {}},
        {"repetition_penalty": 1.0},
    ],
)
def test_a_field_that_asks_for_nothing_passes(fields):
    read_sampling(fields, {})


def test_an_unknown_sampling_parameter_is_refused_with_the_nearest_name():
    with pytest.raises(RequestError, match='did you mean "temperature"'):
        refuse_unknown({"temprature": 1})


def test_do_sample_false_means_greedy_and_silence_does_not(tmp_path):
    path = tmp_path / "generation_config.json"
    assert read_generation_defaults(tmp_path) == {}
    path.write_text(json.dumps({"do_sample": False, "top_p": 0.9}))
    assert read_generation_defaults(tmp_path) == {"temperature": 0.0, "top_p": 0.9}
    path.write_text(json.dumps({"top_p": 0.9}))
    assert read_generation_defaults(tmp_path) == {"top_p": 0.9}
