import pytest
from nereid_backend import RequestError, SamplingParams
from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", float("nan"), "temperature: must be a finite number, got nan"),
        ("temperature", -0.5, "temperature: must be at least 0, got -0.5"),
        ("temperature", "hot", "temperature: must be a number, got 'hot'"),
        ("top_p", 0.0, "top_p: must be above 0 and at most 1, got 0.0"),
        ("top_p", float("inf"), "top_p: must be a finite number"),
        ("min_p", 1.5, "min_p: must be between 0 and 1"),
        ("top_k", -2, "top_k: must be at least -1, got -2"),
        ("top_k", 1.5, "top_k: must be an integer, got 1.5"),
        ("max_tokens", 0, "max_tokens: must be at least 1, got 0"),
        ("max_tokens", True, "max_tokens: must be an integer, got True"),
        ("min_tokens", -1, "min_tokens: must be at least 0"),
        ("seed", 2**64, "seed: must be below"),
        ("stop_token_ids", [1, -1], "stop_token_ids: must be at least 0, got -1"),
        ("stop_token_ids", 5, "stop_token_ids: must be a list"),
        ("ignore_eos", 1, "ignore_eos: must be true or false"),
        ("n", 0, "n: must be at least 1, got 0"),
        ("n", 65, "n: must be at most 64, got 65"),
        ("logprobs", 21, "logprobs: must be at most 20, got 21"),
        ("prompt_logprobs", -1, "prompt_logprobs: must be at least 0"),
        ("presence_penalty", 2.5, "presence_penalty: must be between -2 and 2, got 2.5"),
        ("frequency_penalty", "x", "frequency_penalty: must be a number"),
        ("repetition_penalty", 0, r"repetition_penalty: must be above 0 \(1 is off\), got 0"),
        ("logit_bias", {5: 101}, "logit_bias: must be between -100 and 100, got 101"),
        ("logit_bias", {-1: 1.0}, "logit_bias: must be at least 0, got -1"),
        ("logit_bias", 5, "logit_bias: must map token ids to numbers, got 5"),
        ("logit_bias", [5], "logit_bias: must map token ids to numbers"),
        ("allowed_token_ids", [], "allowed_token_ids: is empty"),
        ("bad_words_token_ids", [[]], "bad_words_token_ids: a word without tokens"),
        ("bad_words_token_ids", 5, "bad_words_token_ids: must be a list of lists, got 5"),
        ("grammar", ("yaml", "a"), "grammar: kind must be one of .*, got 'yaml'"),
        ("grammar", 5, "grammar: must be a kind, a source and a text, got"),
        ("thinking", ("<t>", "</t>"), "thinking: must be two texts"),
        ("thinking", ("<t>", "</t>", [1], True, -1), "thinking: must be .* at least 0 or none"),
        ("priority", 1.5, "priority: must be an integer"),
        ("cache_salt", 5, "cache_salt: must be a string"),
    ],
)
def test_a_bad_parameter_is_refused_by_name_and_value(field, value, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**{field: value})


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens: must be at most max_tokens"):
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
