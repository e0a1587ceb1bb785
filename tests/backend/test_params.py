import pytest
from nereid_backend import RequestError, SamplingParams


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
    ],
)
def test_a_bad_parameter_is_refused_by_name_and_value(field, value, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**{field: value})


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens: must be at most max_tokens"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_parameters_can_be_compared_and_hashed():
    assert SamplingParams(stop_token_ids=[1, 2]) == SamplingParams(stop_token_ids=(1, 2))
    assert hash(SamplingParams(stop_token_ids=[1, 2]))
