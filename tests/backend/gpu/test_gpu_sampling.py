"""Tests that the sampling kernel samples the same tokens as its reference implementation."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from backend.gpu import sampling_reference as reference
from backend.gpu.sampling_reference import settings_of
from backend.gpu.steps import sampled
from nereid_backend import EngineConfig, SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.cpu_threads import CpuThreads
from nereid_backend.model import startup
from nereid_backend.sampling import gpu_sampling, random_sampling, sampler
from nereid_backend.sampling.draft_verification import Position

VOCABS = [1, 3, 700]
# The values of top_p, top_k and min_p.
FILTERS = {
    "none": (1.0, 0, 0.0),
    "top_p": (0.9, 0, 0.0),
    "small top_p": (0.05, 0, 0.0),
    "top_p of next to nothing": (1e-9, 0, 0.0),
    "top_k of one": (1.0, 1, 0.0),
    "top_k": (1.0, 50, 0.0),
    "more than there is": (1.0, 10**9, 0.0),
    "min_p": (1.0, 0, 0.05),
    "min_p of one": (1.0, 0, 1.0),
    "all": (0.8, 40, 0.02),
}


def rows_of(kind, count, vocab_size, seed=0):
    """Return `count` rows of logits of one of the `KINDS`.

    In the kind "text", few tokens are likely, as in the logits of a language model. The other kinds
    are edge cases for the kernel, which searches for the smallest logit that the filters keep.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab_size, generator=generator)
    if kind == "text":
        return logits * 3
    if kind == "wide":
        return logits * 30
    if kind == "flat":
        return torch.zeros(count, vocab_size)
    if kind == "one-hot":
        logits = torch.full((count, vocab_size), -200.0)
        logits[:, vocab_size // 2] = 5.0
        return logits
    if kind == "ties":
        return (logits * 2).round()
    if kind == "masked":
        is_masked = torch.rand(count, vocab_size, generator=generator) < 0.9
        is_masked[:, 0] = False
        return (logits * 3).masked_fill(is_masked, float("-inf"))
    assert kind == "neighbours"
    # Neighbouring logits are neighbouring numbers of float32.
    steps = torch.randperm(vocab_size, generator=generator)
    return (torch.tensor(8.0).view(torch.int32) - steps.int()).view(torch.float32).repeat(count, 1)


KINDS = ["text", "wide", "flat", "one-hot", "ties", "masked", "neighbours"]


def check(logits, settings, device, raw=None):
    """Compare the kernel with the reference, and return the sampled token ids.

    The argument `raw` contains the logits before masks and penalties. By default, it is `logits`.
    """
    raw = logits if raw is None else raw
    logits_on_device = logits.to(device)
    raw_on_device = logits_on_device if raw is logits else raw.to(device)
    token_ids, logprobs, has_allowed = gpu_sampling.sample(
        logits_on_device, raw_on_device, settings
    )
    expected_ids, expected_logprobs, expected_has_allowed = reference.sample(logits, raw, settings)
    if device.type == "cpu":
        assert token_ids.tolist() == expected_ids
        assert has_allowed.tolist() == expected_has_allowed
        torch.testing.assert_close(logprobs, expected_logprobs, equal_nan=True)
    else:
        # The exponential function of a GPU differs in the last bits. This changes few tokens.
        pairs = zip(token_ids.tolist(), expected_ids, strict=True)
        num_different = sum(token != expected for token, expected in pairs)
        assert num_different <= max(1, len(expected_ids) // 50)
    return token_ids.cpu()


@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    sampled(
        itertools.product(KINDS, VOCABS),
        *itertools.product(KINDS, [700]),
        *itertools.product(["ties"], VOCABS),
    ),
)
def test_every_filter_samples_the_token_of_the_reference_for_every_kind_of_row(
    kind, vocab_size, device
):
    random = np.random.default_rng(0)
    rows = []
    for top_p, top_k, min_p in FILTERS.values():
        # With top_k=1, sampling at any temperature must select the same token as greedy sampling.
        for temperature in (0.0, 0.7) if top_k == 1 else (0.7,):
            rows.append((temperature, top_p, min(top_k, vocab_size), min_p, random.random()))
    settings = settings_of(*rows)
    check(rows_of(kind, len(rows), vocab_size), settings, device)


@pytest.mark.parametrize("kind", ["text", "flat", "masked"])
def test_the_tiles_of_a_long_row_are_combined_correctly(kind, device):
    settings = settings_of((0.7, 0.9, 0, 0.0, 0.3), (1.0, 1.0, 300, 0.0, 0.99))
    check(rows_of(kind, 2, 9000), settings, device)


@pytest.mark.parametrize("uniform", sampled([0.0, 1e-300, 0.5, 1 - 2.0**-53], 0.0, 1 - 2.0**-53))
def test_the_limits_of_the_random_number_select_the_first_and_the_last_remaining_token(
    uniform, device
):
    logits = rows_of("masked", 1, 9000)
    settings = settings_of((1.0, 1.0, 0, 0.0, uniform))

    token_ids = check(logits, settings, device)

    remaining_tokens = (logits[0] > float("-inf")).nonzero().flatten().tolist()
    if uniform < 1e-9:
        assert token_ids[0] == remaining_tokens[0]
    if uniform > 0.9:
        assert token_ids[0] == remaining_tokens[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_are_sampled_correctly(dtype, device):
    logits = rows_of("text", 4, 900).to(dtype)
    check(logits, settings_of(*[(0.8, 0.9, 20, 0.0, u) for u in (0.1, 0.4, 0.6, 0.95)]), device)


def test_logprobs_come_from_the_raw_logits_and_the_token_from_the_masked_logits(device):
    raw = rows_of("text", 3, 900)
    logits = raw.clone()
    logits[:, 17:] = float("-inf")
    settings = settings_of((0.0, 1, 0, 0, 0), (1.0, 1, 0, 0, 0.7), (1.5, 0.5, 3, 0.1, 0.2))
    assert (check(logits, settings, device, raw) < 17).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy warns about NaN
def test_rows_without_a_valid_token_are_reported_and_do_not_affect_other_rows(device):
    logits = rows_of("text", 6, 900)
    raw = logits.clone()
    raw[0, 899], raw[1, 0], raw[2] = float("nan"), float("inf"), float("-inf")
    logits[:3] = raw[:3]
    logits[3] = float("-inf")  # No token is allowed.
    settings = settings_of(*[(1.0, 0.9, 0, 0.0, 0.5)] * 5, (0.0, 1.0, 0, 0.0, 0.5))

    token_ids, logprobs, has_allowed = gpu_sampling.sample(
        logits.to(device), raw.to(device), settings
    )

    assert logprobs.isfinite().tolist() == [False] * 3 + [True] * 3
    assert has_allowed[3:].tolist() == [False, True, True]
    assert ((token_ids >= 0) & (token_ids < 900)).all()
    # The last two rows have allowed tokens, so their sampled tokens can be compared.
    check(logits[4:], settings[:, 4:].copy(), device)


def test_logits_that_are_views_are_sampled_correctly(device):
    logits = rows_of("text", 8, 1003)[::2, 1:1001]
    assert not logits.is_contiguous()
    check(logits, settings_of(*[(1.0, 0.9, 0, 0.0, u) for u in (0.1, 0.4, 0.6, 0.95)]), device)


@pytest.mark.parametrize("name", sampled(["none", "top_p", "top_k", "min_p", "all"], "none", "all"))
def test_the_kernel_and_the_sampler_differ_rarely(name, device):
    top_p, top_k, min_p = FILTERS[name]
    vocab_size = 2000
    top_k = min(top_k, vocab_size)
    # The batch has two rows of each kind of logits except the last kind.
    logits = torch.cat([rows_of(kind, 2, vocab_size, seed=2) for kind in KINDS[:6]])
    num_rows = len(logits)
    uniform = np.random.default_rng(1).random(num_rows)

    settings = settings_of(*((0.8, top_p, top_k, min_p, number) for number in uniform))
    kernel_tokens, _, _ = gpu_sampling.sample(logits.to(device), logits.to(device), settings)
    batch = random_sampling.SamplingBatch(
        np.full(num_rows, 0.8, dtype=np.float32),
        np.full(num_rows, top_p, dtype=np.float32),
        np.full(num_rows, top_k, dtype=np.int64),
        np.full(num_rows, min_p, dtype=np.float32),
        uniform,
    )
    sampler_tokens = random_sampling.sample_rows(logits, batch)

    assert (kernel_tokens.cpu() != sampler_tokens).sum() <= 1


def test_the_comparison_at_load_accepts_a_correct_kernel_and_rejects_a_wrong_one(
    device, monkeypatch
):
    assert gpu_sampling.num_wrong_rows(device) == 0
    correct_sample = gpu_sampling.sample

    def sample_without_top_p(logits, raw, settings):
        settings = settings.copy()
        settings[1] = 1.0  # top_p
        return correct_sample(logits, raw, settings)

    monkeypatch.setattr(gpu_sampling, "sample", sample_without_top_p)
    # The check detects the missing top_p even in shorter rows, which take a sixth of the time.
    monkeypatch.setattr(gpu_sampling, "_CHECKED_VOCAB_SIZE", 1500)
    assert "differ from the reference" in gpu_sampling.why_unusable(device)
    gpu_sampling.why_unusable.cache_clear()


def test_a_kernel_that_fails_to_run_is_a_reason_not_an_error(device, monkeypatch):
    def fails(*args):
        raise RuntimeError("ptxas: no such target\nand more")

    monkeypatch.setattr(gpu_sampling, "sample", fails)
    assert gpu_sampling.why_unusable(device) == "RuntimeError: ptxas: no such target"
    gpu_sampling.why_unusable.cache_clear()


def positions_of(*all_params):
    """Return a position of a new sequence for each of the given `SamplingParams`."""
    positions = []
    for number, params in enumerate(all_params):
        sequence = Sequence(str(number), [1, 2, 3], params, max_total_tokens=99)
        sequence.seed = number
        positions.append(Position(sequence, []))
    return positions


def test_a_sampler_with_the_kernel_returns_the_results_of_a_sampler_without_it(device):
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_p=0.8, logprobs=3),
        SamplingParams(top_k=10**12),
        SamplingParams(top_k=20, min_p=0.01, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, logit_bias={5: 100.0}, logprobs=2),
        SamplingParams(allowed_token_ids=[4, 7]),
    ]
    logits = rows_of("text", len(params), 600).to(device)

    with_kernel, without_kernel = (
        sampler.Sampler(has_kernel=has_kernel).sample(logits, positions_of(*params))
        for has_kernel in (True, False)
    )

    assert with_kernel.token_ids == without_kernel.token_ids
    assert with_kernel.token_ids[4] == 5
    assert with_kernel.token_ids[5] in (4, 7)
    torch.testing.assert_close(with_kernel.logprobs, without_kernel.logprobs, atol=1e-5, rtol=0)
    # Only the requests 1 and 4 asked for the likeliest tokens.
    assert set(with_kernel.top) == {1, 4}
    assert with_kernel.top[1].token_ids == without_kernel.top[1].token_ids
    assert not with_kernel.errors


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy warns about NaN
def test_a_sampler_with_the_kernel_reports_the_rows_without_a_token(device):
    logits = rows_of("text", 3, 600)
    logits[0, 7] = float("nan")
    contradiction = SamplingParams(allowed_token_ids=[4], bad_words_token_ids=[[4]])
    positions = positions_of(SamplingParams(), SamplingParams(), contradiction)
    result = sampler.Sampler(has_kernel=True).sample(logits.to(device), positions)
    assert result.errors[0] == sampler.NOT_FINITE
    assert set(result.errors) == {0, 2}


@pytest.mark.parametrize(
    "reason", [None, "2 of 16 tokens differ from the reference implementation's tokens"]
)
def test_the_setting_enables_the_kernel_on_a_gpu_if_the_comparison_passes(reason, monkeypatch):
    monkeypatch.setattr(gpu_sampling, "why_unusable", lambda device: reason)
    reported_lines = []

    def has_kernel(device, *, wanted):
        config = EngineConfig("/model", sampling_kernel=wanted)
        threads = CpuThreads(1, 1, lambda: None)
        checkpoint = SimpleNamespace(device=torch.device(device), vocab_size=16)
        runner = startup._make_runner(config, checkpoint, None, threads, reported_lines.append)
        return runner._sampler.has_kernel

    assert has_kernel("cuda:0", wanted=True) == (reason is None)
    assert not has_kernel("cuda:0", wanted=False)
    assert not has_kernel("cpu", wanted=True)
    assert reported_lines == ([] if reason is None else [f"sampling_kernel: off, because {reason}"])
