import re
from dataclasses import replace

import pytest
from nereid_backend import RequestError, SamplingParams
from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec


@pytest.mark.parametrize(
    ("field", "value", "requirement", "shown"),
    [
        ("temperature", float("nan"), "a finite number", "NaN"),
        ("temperature", -0.5, "at least 0", "-0.5"),
        ("temperature", "hot", "a number", '"hot"'),
        ("top_p", 0.0, "greater than 0", "0.0"),
        ("top_p", 1.5, "at most 1", "1.5"),
        ("top_p", float("inf"), "a finite number", "Infinity"),
        ("min_p", 1.5, "at most 1", "1.5"),
        ("top_k", -2, "at least -1", "-2"),
        ("top_k", 1.5, "an integer", "1.5"),
        ("max_tokens", 0, "at least 1", "0"),
        ("max_tokens", True, "an integer", "true"),
        ("min_tokens", -1, "at least 0", "-1"),
        ("seed", 2**64, "less than 18446744073709551616", "18446744073709551616"),
        ("stop_token_ids", 5, "a list", "5"),
        ("ignore_eos", 1, "true or false", "1"),
        ("n", 0, "at least 1", "0"),
        ("n", 65, "at most 64", "65"),
        ("logprobs", 21, "at most 20", "21"),
        ("prompt_logprobs", -1, "at least 0", "-1"),
        ("presence_penalty", 2.5, "at most 2", "2.5"),
        ("frequency_penalty", "x", "a number", '"x"'),
        ("repetition_penalty", 0, "greater than 0", "0"),
        ("logit_bias", 5, "an object", "5"),
        ("logit_bias", [5], "an object", "[5]"),
        ("allowed_token_ids", [], "a list of at least 1 item", "0"),
        ("bad_words_token_ids", 5, "a list", "5"),
        ("priority", 1.5, "an integer", "1.5"),
        ("cache_salt", 5, "a string", "5"),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value, requirement, shown):
    message = f"{field}: the value must be {requirement}, but the request has {shown}."
    with pytest.raises(RequestError, match=re.escape(message)):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop_token_ids", [1, -1], "each item must be at least 0, but the request has -1"),
        ("stop_token_ids", ["a"], 'each item must be an integer, but the request has "a"'),
        ("logit_bias", {5: 101}, "each item must be at most 100, but the request has 101"),
        ("logit_bias", {-1: 1.0}, "each key must be at least 0, but the request has -1"),
        ("bad_words_token_ids", [[]], "each item must be a list of at least 1 item"),
        ("grammar", ("yaml", "a"), "the kind must be one of "),
        ("grammar", 5, "the value must be a list of two or three strings"),
        ("thinking", ("<t>", "</t>"), "the value must be a list of five items: the start marker"),
        (
            "thinking",
            ("<t>", "</t>", [1], True, -1),
            "the value must be a list of five items: the start marker",
        ),
    ],
)
def test_a_wrong_item_is_refused_by_name(field, value, message):
    with pytest.raises(RequestError, match=f"{field}: {message}"):
        SamplingParams(**{field: value})


def test_an_unknown_parameter_is_refused_by_name():
    with pytest.raises(RequestError, match="temprature: Unexpected keyword argument"):
        SamplingParams(temprature=1)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens: the value must be at most max_tokens"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_lists_become_specifications_and_pairs():
    params = SamplingParams(
        grammar=["regex", "a+"], thinking=["", "</t>", [5], False, 3], logit_bias={5: 1, 2: -1}
    )
    assert params.grammar == GrammarSpec("regex", "a+")
    assert params.thinking == ThinkingSpec("", "</t>", (5,), False, 3)
    assert params.logit_bias == ((2, -1.0), (5, 1.0))
    assert hash(params)


def test_parameters_can_be_compared_and_hashed():
    assert SamplingParams(stop_token_ids=[1, 2]) == SamplingParams(stop_token_ids=(1, 2))
    params = SamplingParams(stop_token_ids=[1, 2], logit_bias={5: 1})
    assert hash(params) == hash(replace(params))


@pytest.mark.parametrize("name", ["max_tokens", "seed", "top_k", "priority"])
def test_numbers_beyond_64_bits_are_refused_by_name(name):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: 10**40})
