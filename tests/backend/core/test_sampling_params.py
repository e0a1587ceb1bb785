import pytest
from nereid_backend import RequestError, SamplingParams
from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "temperature",
            float("nan"),
            "temperature: the value must be a finite number, but it is nan",
        ),
        ("temperature", -0.5, "temperature: the value must be at least 0, but it is -0.5"),
        ("temperature", "hot", "temperature: the value must be a number, but it is 'hot'"),
        ("top_p", 0.0, "top_p: the value must be above 0 and at most 1, but it is 0.0"),
        ("top_p", float("inf"), "top_p: the value must be a finite number"),
        ("min_p", 1.5, "min_p: the value must be between 0 and 1"),
        ("top_k", -2, "top_k: the value must be at least -1, but it is -2"),
        ("top_k", 1.5, "top_k: the value must be an integer, but it is 1.5"),
        ("max_tokens", 0, "max_tokens: the value must be at least 1, but it is 0"),
        ("max_tokens", True, "max_tokens: the value must be an integer, but it is True"),
        ("min_tokens", -1, "min_tokens: the value must be at least 0"),
        ("seed", 2**64, "seed: the value must be below"),
        (
            "stop_token_ids",
            [1, -1],
            "stop_token_ids: each token id must be at least 0, but it is -1",
        ),
        ("stop_token_ids", 5, "stop_token_ids: the value must be a list"),
        ("ignore_eos", 1, "ignore_eos: the value must be true or false"),
        ("n", 0, "n: the value must be at least 1, but it is 0"),
        ("n", 65, "n: the value must be at most 64, but it is 65"),
        ("logprobs", 21, "logprobs: the value must be at most 20, but it is 21"),
        ("prompt_logprobs", -1, "prompt_logprobs: the value must be at least 0"),
        (
            "presence_penalty",
            2.5,
            "presence_penalty: the value must be between -2 and 2, but it is 2.5",
        ),
        ("frequency_penalty", "x", "frequency_penalty: the value must be a number"),
        (
            "repetition_penalty",
            0,
            r"repetition_penalty: the value must be above 0 \(1 turns the penalty off\)",
        ),
        (
            "logit_bias",
            {5: 101},
            "logit_bias: each bias must be between -100 and 100, but one is 101",
        ),
        ("logit_bias", {-1: 1.0}, "logit_bias: each token id must be at least 0, but it is -1"),
        ("logit_bias", 5, "logit_bias: the value must map token ids to numbers, but it is 5"),
        ("logit_bias", [5], "logit_bias: the value must map token ids to numbers"),
        ("allowed_token_ids", [], "allowed_token_ids: the list must contain at least one token id"),
        ("bad_words_token_ids", [[]], "bad_words_token_ids: each list must contain at least one"),
        (
            "bad_words_token_ids",
            5,
            "bad_words_token_ids: the value must be a list of lists of token ids, but it is 5",
        ),
        ("grammar", ("yaml", "a"), "grammar: the kind must be one of .*, but it is 'yaml'"),
        ("grammar", 5, "grammar: the value must be a list of two or three strings"),
        ("thinking", ("<t>", "</t>"), "thinking: the value must be a list of start marker"),
        (
            "thinking",
            ("<t>", "</t>", [1], True, -1),
            "thinking: the value must be .* at least 0, or null",
        ),
        ("priority", 1.5, "priority: the value must be an integer"),
        ("cache_salt", 5, "cache_salt: the value must be a string"),
    ],
)
def test_a_bad_parameter_is_refused_by_name_and_value(field, value, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**{field: value})


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens: the value must be at most max_tokens"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_what_a_wire_brings_as_lists_becomes_specs():
    params = SamplingParams(
        grammar=["regex", "a+"], thinking=["", "</t>", [5], False, 3], logit_bias=[[5, 1], [2, -1]]
    )
    assert params.grammar == GrammarSpec("regex", "a+")
    assert params.thinking == ThinkingSpec("", "</t>", (5,), False, 3)
    assert params.logit_bias == ((2, -1.0), (5, 1.0))
    assert hash(params)


def test_parameters_can_be_compared_and_hashed():
    assert SamplingParams(stop_token_ids=[1, 2]) == SamplingParams(stop_token_ids=(1, 2))
    assert hash(SamplingParams(stop_token_ids=[1, 2]))


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "seed", "top_k", "priority"])
def test_numbers_beyond_64_bits_are_refused_by_name(name):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: 10**40})
