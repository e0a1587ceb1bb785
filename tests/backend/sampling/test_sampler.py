import numpy as np
import pytest
import torch
from backend.sampling.one_token import sample
from nereid_backend import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.sampling import random_sampling, sampler, weighted_selection
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.random_numbers import uniform_numbers

VOCAB = 50


def make_sequence(seed=0, num_output=0, prompt_len=3, eos=(), **params):
    sequence = Sequence(
        "r",
        [1] * prompt_len,
        SamplingParams(**params),
        max_total_tokens=999,
        eos_token_ids=eos,
        seed=seed,
    )
    sequence.token_ids += [1] * num_output
    return sequence


def slow_probs(logits, params):
    """Return the probabilities of one row by the definition, sorted in plain Python."""
    probs = (logits.double() / params.temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = [i for i in order if probs[i] >= params.min_p * probs[order[0]]]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, nucleus, reached = sum(probs[i] for i in kept), [], 0.0
    for i in kept:
        if reached >= params.top_p * total:
            break
        nucleus.append(i)
        reached += probs[i]
    out = torch.zeros(len(probs), dtype=torch.float64)
    for i in nucleus:
        out[i] = probs[i] / reached
    return out


def check_distribution(logits, params, num_samples):
    """Check that the frequencies of sampled tokens match the probabilities of `slow_probs`."""
    sequences = [make_sequence(seed=seed, **params) for seed in range(num_samples)]
    outcomes = sample(logits.expand(num_samples, -1), sequences)
    tokens = torch.tensor([outcome.token_ids[0] for outcome in outcomes])
    frequencies = torch.bincount(tokens, minlength=VOCAB).double() / num_samples
    expected = slow_probs(logits, SamplingParams(**params))
    assert (frequencies[expected == 0] == 0).all(), "a token was drawn that the filters exclude"
    sigma = (expected * (1 - expected) / num_samples).sqrt()
    assert ((frequencies - expected).abs() <= 5 * sigma + 1e-12).all()


@pytest.mark.parametrize("top_k", [2**63, 2**64 - 1])
def test_a_top_k_beyond_64_bit_integers_keeps_every_token(top_k):
    logits = torch.randn(2, VOCAB)
    sequences = [make_sequence(seed=5, top_k=top_k), make_sequence(seed=5, top_k=0)]
    limited, unlimited = sample(logits[[0, 0]], sequences)
    assert limited == unlimited


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.filterwarnings("error")
def test_a_temperature_beyond_float32_makes_all_allowed_tokens_equally_likely(filters):
    logits = torch.full((100, VOCAB), -torch.inf)
    logits[:, 7:9] = torch.tensor([3.0, -3.0])
    sequences = [make_sequence(seed=seed, temperature=1e300, **filters) for seed in range(100)]
    tokens = [token for sampled in sample(logits, sequences) for token in sampled.token_ids]
    assert len(tokens) == 100
    assert set(tokens) == {7, 8}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_p": 0.7},
        {"top_k": 5},
        {"top_k": 400},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_by_its_definition(params):
    torch.manual_seed(1)
    check_distribution(torch.randn(VOCAB) * 2, params, num_samples=8000)


@pytest.mark.parametrize("width", [1, 2, 5, 16, 64])
def test_the_tokens_that_filters_keep_do_not_depend_on_the_number_of_examined_tokens(
    monkeypatch, width
):
    torch.manual_seed(0)
    settings = [
        {"top_p": 0.05},
        {"top_p": 0.6, "min_p": 0.01},
        {"top_p": 0.99},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 40, "top_p": 0.7},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.1},
        {"top_p": 0.8, "min_p": 0.5},
    ]
    monkeypatch.setattr(random_sampling, "_LIKELIEST", width)
    for params in settings:
        row = torch.randn(VOCAB) * 2
        check_distribution(row, params, num_samples=1500)


@pytest.mark.parametrize("width", [2, 3, 64])
def test_tokens_with_the_same_logit_as_the_last_kept_token_are_kept(monkeypatch, width):
    monkeypatch.setattr(random_sampling, "_LIKELIEST", width)
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]]).expand(400, -1)
    for params in ({"top_k": 2}, {"top_p": 0.75}):
        found = sample(logits, [make_sequence(seed=seed, **params) for seed in range(400)])
        assert {outcome.token_ids[0] for outcome in found} == {0, 1, 2, 3}


def test_rows_of_a_batch_are_sampled_as_if_each_were_alone():
    torch.manual_seed(2)
    settings = [
        {"temperature": 0.0},
        {},
        {"top_k": 3},
        {"top_p": 0.5, "temperature": 3.0},
        {"min_p": 0.1},
        {"top_k": 7, "top_p": 0.9},
    ]
    sequences = [make_sequence(seed=i, num_output=i, **s) for i, s in enumerate(settings)]
    logits = torch.randn(len(sequences), VOCAB)
    together = sample(logits, sequences)
    alone = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(sequences)]
    assert [s.token_ids for s in together] == [s.token_ids for s in alone]


def test_temperature_zero_takes_the_likeliest_token():
    logits = torch.randn(3, VOCAB)
    sequences = [make_sequence(temperature=0.0) for _ in range(3)]
    assert [s.token_ids[0] for s in sample(logits, sequences)] == logits.argmax(-1).tolist()


def test_the_logprob_is_that_of_the_models_own_distribution():
    logits = torch.randn(2, VOCAB)
    sequences = [make_sequence(temperature=0.0), make_sequence(temperature=0.1, top_k=2)]
    for row, outcome in zip(logits, sample(logits, sequences), strict=True):
        expected = row.log_softmax(-1)[outcome.token_ids[0]].item()
        assert outcome.logprobs[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_of_that_row_only(value, temperature):
    logits = torch.randn(3, VOCAB)
    logits[1, 7] = value
    outcomes = sample(logits, [make_sequence(temperature=temperature) for _ in range(3)])
    assert [o.error is None for o in outcomes] == [True, False, True]
    assert outcomes[1].token_ids == []


def test_a_model_may_forbid_tokens_with_minus_infinity():
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, 4] = 1.0
    assert sample(logits, [make_sequence()])[0].token_ids == [4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_forbidden_before_min_tokens(temperature):
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 50.0
    params = {"min_tokens": 2, "stop_token_ids": (5, VOCAB + 9), "temperature": temperature}
    early, late = make_sequence(num_output=1, **params), make_sequence(num_output=2, **params)
    first, second = sample(logits, [early, late])
    assert first.token_ids != [5]
    assert second.token_ids == [5]


def test_random_numbers_are_uniform_and_differ_by_seed_and_counter():
    # There are 30,000 numbers: one for each pair of 300 seeds and 100 counters. If they are
    # uniform, each of the 20 intervals contains about 1500 numbers.
    seeds = np.repeat(np.arange(300, dtype=np.uint64), 100)
    counters = np.tile(np.arange(100, dtype=np.uint64), 300)
    numbers = uniform_numbers(seeds, counters)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == len(numbers)
    histogram = np.bincount((numbers * 20).astype(int), minlength=20)
    assert abs(histogram - 1500).max() < 5 * np.sqrt(1500)
    grid = numbers.reshape(300, 100)
    assert abs(np.corrcoef(grid[:, 0], grid[:, 1])[0, 1]) < 0.2
    assert abs(np.corrcoef(grid[0], grid[1])[0, 1]) < 0.35


@pytest.mark.parametrize("block", [3, 7, 25, 50, 512])
def test_a_token_of_probability_zero_is_never_drawn_even_at_the_edges(monkeypatch, block):
    monkeypatch.setattr(weighted_selection, "_BLOCK", block)
    monkeypatch.setattr(weighted_selection, "_MIN_BLOCKS", 1)
    torch.manual_seed(4)
    numbers = np.concatenate([[0.0, np.nextafter(1.0, 0.0)], np.random.default_rng(0).random(200)])
    count = len(numbers)
    for share in (0.04, 0.3, 1.0):
        logits = torch.randn(VOCAB) * 5
        logits[torch.rand(VOCAB) > share] = float("-inf")
        logits[17] = 0.0
        batch = random_sampling.SamplingBatch(
            temperature=np.ones(count, np.float32),
            top_p=np.ones(count, np.float32),
            top_k=np.zeros(count, np.int64),
            min_p=np.zeros(count, np.float32),
            uniform=numbers,
        )
        tokens = random_sampling.sample_rows(logits.expand(count, -1), batch)
        assert logits[tokens].isfinite().all()
        # By the definition, the sampled token is the first at which the sum of the probabilities
        # exceeds the random number.
        sums = logits.double().softmax(-1).cumsum(-1).numpy()
        expected = np.searchsorted(sums, numbers * sums[-1], side="right")
        num_different = (tokens.numpy() != expected).sum()
        assert num_different <= 2, "more than rounding explains"


def test_uncertain_rows_are_sampled_again_when_the_result_is_read(monkeypatch):
    monkeypatch.setattr(random_sampling, "_LIKELIEST_DEFERRED", 2)
    torch.manual_seed(5)
    settings = [{"top_p": 0.9, "logprobs": 2}, {"top_k": 30}, {"temperature": 0.0}, {}]
    positions = [
        Position(make_sequence(seed=seed, **settings[seed % 4]), []) for seed in range(200)
    ]
    logits = torch.randn(len(positions), VOCAB)
    expected = sampler.Sampler(defers=False).sample(logits, positions)
    overwritten_logits = logits.clone()
    pending = sampler.Sampler(defers=True).launch(overwritten_logits, positions)
    overwritten_logits.fill_(float("nan"))  # The next forward pass may overwrite the logits.
    sampled_tokens, device_tokens = pending.result()
    assert sampled_tokens == expected
    assert device_tokens == pending.token_ids.tolist()
    # Only rows with top_p or top_k (the first two of the four settings) may be sampled again, so
    # only their first tokens can be wrong.
    pairs = zip(device_tokens, sampled_tokens.token_ids, strict=True)
    wrong = [index for index, (first, final) in enumerate(pairs) if first != final]
    assert {index % 4 for index in wrong} == {0, 1}
