"""Tests that keys and values of 8 bits are close to the exact numbers and need less memory."""

import dataclasses
import itertools
import shutil

import pytest
import torch
from backend.attention.test_cpu_attention import BLOCK, SPECS, attention_of
from backend.exactness import PROMPTS, equal_tokens, open_engine, run_staggered
from backend.tiny_models import BY_NAME
from backend.torch_threads import use_threads
from nereid_backend import EngineConfig
from nereid_backend.attention.choose_backend import rounded_cache_class
from nereid_backend.attention.cpu.cpu_attention import CpuKVCache
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.int8_cache import CpuInt8KVCache, Int8KVCache
from nereid_backend.attention.kv_cache import KVCache, gather_rows, row_indices
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.errors import ConfigError
from nereid_backend.model import load_weights
from nereid_backend.model.forward_path import path_variants

from backend import shrink

CPU = torch.device("cpu")
HAS_COMPILER = bool(shutil.which("g++") or shutil.which("c++"))
KINDS = [
    Int8KVCache,
    Float8KVCache,
    pytest.param(
        CpuInt8KVCache, marks=pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
    ),
]


def test_an_integer_is_off_by_at_most_half_a_127th_of_its_vectors_largest():
    torch.manual_seed(0)
    numbers = torch.randn(50, 3, 64) * torch.logspace(-6, 4, 50)[:, None, None]
    restored = Int8KVCache.restored(*Int8KVCache.rounded(numbers))
    error = (restored - numbers).abs().amax(-1)
    assert (error <= numbers.abs().amax(-1) / 127 * 0.501).all()


def test_an_8_bit_floating_point_number_is_off_by_at_most_a_16th_however_large_its_neighbours_are():
    torch.manual_seed(0)
    numbers = torch.randn(50, 3, 64) * torch.logspace(-6, 4, 50)[:, None, None]
    numbers[..., 0] *= 1000
    restored = Float8KVCache.restored(*Float8KVCache.rounded(numbers))
    # Near zero, the distance between two 8-bit numbers is about 2 ** -18 of the largest number of
    # the vector.
    allowed_error = numbers.abs() / 16 + numbers.abs().amax(-1, keepdim=True) * 2.0**-18
    assert ((restored - numbers).abs() <= allowed_error * 1.001).all()


@pytest.mark.parametrize("cache_class", [Int8KVCache, Float8KVCache])
def test_zeros_stay_zero_and_infinite_numbers_become_nan(cache_class):
    rounded, scales = cache_class.rounded(
        torch.tensor([[0.0, 0.0], [1.0, float("inf")], [1e-40, 0.0]])
    )
    assert not rounded[0].any()
    assert scales[0] == 0
    assert scales[1].isnan()
    assert cache_class.restored(rounded, scales)[2].abs().max() < 1e-38


@pytest.mark.parametrize("cache_class", KINDS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_near_that_over_unrounded_keys_and_values(cache_class, spec, dtype):
    exact = attention_of(KVCache, spec, torch.float32)
    rounded = attention_of(cache_class, spec, dtype).float()
    assert rounded.shape == exact.shape
    # An 8-bit floating-point number has fewer significant bits than an 8-bit integer, so its
    # tolerance is larger.
    tolerance = 4 if cache_class is Float8KVCache else 1
    error = rounded - exact
    assert error.abs().max() < 0.06 * tolerance
    assert error.square().mean().sqrt() < 0.012 * tolerance * exact.square().mean().sqrt()
    # If there were no difference, the cache would not have rounded the numbers to 8 bits.
    assert error.abs().max() > 1e-4


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("threads", [1, 3])
def test_the_native_kernel_equals_the_reference_over_the_same_integers(spec, threads):
    with use_threads(threads):
        attention = attention_of(CpuInt8KVCache, spec, torch.float32)
    expected = attention_of(Int8KVCache, spec, torch.float32)
    torch.testing.assert_close(attention, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_nan_affects_only_its_own_sequence():
    spec = SPECS["three query heads a key head"]
    expected = attention_of(CpuInt8KVCache, spec, torch.float32)
    attention = attention_of(CpuInt8KVCache, spec, torch.float32, poison=2)
    assert attention[0, 2].isnan().all()
    torch.testing.assert_close(attention[0, 3], expected[0, 3])


@pytest.mark.parametrize("cache_class", [Int8KVCache, CpuInt8KVCache, Float8KVCache])
def test_blocks_are_copied_and_cleared_with_their_scales(cache_class):
    spec = LayerSpec(4, 2, 8, 6)
    cache = cache_class([spec], num_blocks=4, block_size=BLOCK, dtype=torch.float32, device=CPU)
    torch.manual_seed(0)
    key, value = torch.randn(BLOCK, 2, 8), torch.randn(BLOCK, 2, 6)
    slots_of_block_1 = torch.arange(BLOCK) + BLOCK
    cache.store(0, key, value, row_indices(slots_of_block_1, 2, BLOCK))

    cache.copy_blocks([(1, 3)])

    original, copy = (cache.gather(0, gather_rows(torch.tensor([[block]]), 2)) for block in (1, 3))
    torch.testing.assert_close(copy, original, atol=0, rtol=0)
    rtol = 1 / 16 if cache_class is Float8KVCache else 0
    keys, _ = original
    torch.testing.assert_close(keys[0], key.transpose(0, 1), atol=0.02, rtol=rtol)
    cache.clear([1])
    assert not any(tensor[1].any() for tensor in cache.tensors())
    assert all(tensor[3].any() for tensor in cache.tensors())


def test_one_setting_chooses_the_stored_type_in_both_layouts():
    assert rounded_cache_class(KVCache, "auto") is KVCache
    assert rounded_cache_class(KVCache, "int8") is Int8KVCache
    assert rounded_cache_class(CpuKVCache, "int8") is CpuInt8KVCache
    assert rounded_cache_class(CpuKVCache, "fp8") is Float8KVCache


DEEPSEEK = "deepseek_v3, k and v of different sizes"
ENGINES = itertools.product([("int8", 4), ("int8", 16), ("fp8", 16)], ["llama", DEEPSEEK, "gemma2"])
REPRESENTATIVE = {("int8", 4, DEEPSEEK), ("int8", 16, "llama"), ("fp8", 16, "gemma2")}


@pytest.mark.parametrize(
    ("stored", "block_size", "name"),
    [
        pytest.param(
            *stored, name, marks=() if (*stored, name) in REPRESENTATIVE else pytest.mark.long
        )
        for stored, name in ENGINES
    ],
)
def test_an_engine_with_a_smaller_cache_returns_mostly_the_same_tokens(
    name, stored, block_size, tmp_path
):
    folder = BY_NAME[name].save(tmp_path / "model")

    def answers_and_bytes_per_token(kv_cache_dtype):
        engine = open_engine(folder, block_size=block_size, kv_cache_dtype=kv_cache_dtype)
        answers, info = run_staggered(engine), engine.info
        engine.close()
        assert len(answers) == len(PROMPTS)
        # The cache also contains the null block, which `num_blocks` does not include.
        return answers, info.kv_cache_bytes / (info.num_blocks + 1) / block_size

    exact_answers, exact_bytes = answers_and_bytes_per_token("auto")
    answers, num_bytes = answers_and_bytes_per_token(stored)

    num_equal, num_tokens = equal_tokens(exact_answers, answers)
    # The weights are random, so the logits of many tokens are nearly equal. After one different
    # token, the rest of an answer is different as well.
    assert num_equal > (0.5 if stored == "int8" else 0.3) * num_tokens
    assert num_bytes < 0.4 * exact_bytes


@pytest.mark.parametrize(("stored", "max_difference"), [("int8", 0.05), ("fp8", 0.15)])
def test_the_self_check_detects_a_window_that_is_off_by_one(
    stored, max_difference, tmp_path, monkeypatch
):
    folder = BY_NAME["mistral, sliding window"].save(tmp_path / "model")
    engine = open_engine(folder, kv_cache_dtype=stored)
    assert engine.info.path == "packed"
    assert engine.info.self_check_difference < max_difference
    engine.close()
    probe_layers = path_variants.probe_layers

    def probe_shorter_windows(*arguments):
        layers = probe_layers(*arguments)
        window = dataclasses.replace(layers[0].window, size=layers[0].window.size - 1)
        return [dataclasses.replace(layer, window=window) for layer in layers]

    monkeypatch.setattr(path_variants, "probe_layers", probe_shorter_windows)
    engine = open_engine(folder, kv_cache_dtype=stored)
    assert engine.info.path != "packed"
    engine.close()


@pytest.mark.parametrize(
    ("model_type", "path"),
    [("bloom", "padded"), pytest.param("qwen3_next", "rows", marks=pytest.mark.long)],
)
def test_every_path_with_blocks_can_store_8_bit_floats(model_type, path, tmp_path):
    engine = open_engine(shrink.save(model_type, tmp_path), kv_cache_dtype="fp8")
    assert engine.info.path == path
    assert 0.001 < engine.info.self_check_difference < 0.3
    assert len(run_staggered(engine)) == len(PROMPTS)
    engine.close()


def test_unsupported_cache_types_are_refused():
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype: the value must be 'auto', .*, but it is 'int4'"
    ):
        EngineConfig("/model", kv_cache_dtype="int4")


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_keys_and_values_of_8_bits_are_not_refused_on_a_gpu(stored):
    config = EngineConfig("/model", kv_cache_dtype=stored)
    load_weights._check_weight_dtype(config, torch.device("cuda:0"))
