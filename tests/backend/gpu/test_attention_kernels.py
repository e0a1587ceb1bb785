import pytest
import torch
from backend.gpu.steps import SPECS, Steps, sampled
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.gpu import gpu_attention
from nereid_backend.attention.gpu.gpu_attention import (
    GpuFloat8KVCache,
    GpuInt8KVCache,
    GpuKVCache,
)
from nereid_backend.attention.gpu.gpu_batch import Tiling
from nereid_backend.attention.gpu.gpu_call import AttentionCall, Float8, float8_of
from nereid_backend.attention.gpu.tuning import KERNELS, Device, Entry, Tuning
from nereid_backend.attention.int8_cache import Int8KVCache
from nereid_backend.attention.kv_cache import KVCache, gather_rows, row_indices
from nereid_backend.attention.layers import LayerSpec, LayerWindow

TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


def outputs_of_both(spec, dtype, device, **options):
    """Return the attention outputs of the kernels in `dtype` and of the reference in float32.

    The kernels and the reference compute with the same queries, keys and values. `options` are
    further arguments of `Steps`.
    """
    return [
        Steps(cache_class, spec, used_dtype, device, rounded=dtype, **options).fill().run().float()
        for cache_class, used_dtype in ((GpuKVCache, dtype), (KVCache, torch.float32))
    ]


def check(spec, device, dtype=torch.float32, **options):
    """Compare the attention of the kernels with the attention of the reference."""
    outputs, expected = outputs_of_both(spec, dtype, device, **options)
    torch.testing.assert_close(outputs, expected, **TOLERANCE[dtype])


# Together, these layers run every branch of the kernels.
REPRESENTATIVE = (
    *("three query heads a key head", "eleven query heads a key head"),
    *("forty query heads a key head", "keys and values of 192 and 128"),
    *("keys and values of 24 and 10", "chunks", "window and chunks", "window, softcap and sinks"),
)


@pytest.mark.parametrize("name", sampled(SPECS, *REPRESENTATIVE))
def test_float32_attention_equals_the_reference(name, device):
    check(SPECS[name], device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    sampled(
        ["three query heads a key head", "keys and values of 192 and 128"],
        "keys and values of 192 and 128",
    ),
)
def test_attention_in_half_precision_equals_the_reference_within_its_rounding(name, dtype, device):
    check(SPECS[name], device, dtype)


@pytest.mark.parametrize(
    "name", sampled(["as many key heads as query heads", "sinks", "softcap"], "sinks")
)
def test_the_parts_of_a_long_sequence_are_combined_correctly(name, device):
    check(SPECS[name], device, shapes=[(700, 1), (3, 1)])


def test_parts_of_a_long_sequence_begin_at_its_window(device):
    spec = LayerSpec(2, 1, 16, 16, LayerWindow(size=200), has_sinks=True)
    check(spec, device, shapes=[(700, 1), (150, 1)])


def test_one_launch_computes_sequences_of_very_different_lengths(device):
    check(LayerSpec(2, 1, 16, 16), device, shapes=[(400, 1), (5, 1), (3, 1), (0, 1), (2, 1)])


@pytest.mark.parametrize("block", sampled([1, 5, 32], 5))
def test_blocks_may_have_any_size(block, device):
    check(LayerSpec(2, 1, 16, 16), device, shapes=[(40, 1), (7, 1), (11, 9)], block=block)


def test_one_launch_computes_many_prompts_and_starts_with_long_tiles(device, monkeypatch):
    launches = []
    prefill = gpu_attention.prefill

    def record_tiles(query, call, rows, out, tuning):
        launches.append(rows.tiles(Tiling(4, call.spec.window)))
        prefill(query, call, rows, out, tuning)

    monkeypatch.setattr(gpu_attention, "prefill", record_tiles)
    check(LayerSpec(2, 1, 16, 16), device, shapes=[(0, 3), (20, 2), (0, 6), (3, 5)])

    assert len(launches) == 1
    # A tile is a pair: the index of the prompt, and the index of the tile's first new token. A tile
    # has at most 4 tokens. The tiles that see the most keys come first.
    assert launches[0].tolist() == [[1, 0], [3, 4], [2, 4], [3, 0], [0, 0], [2, 0]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy warns about NaN
def test_nan_affects_only_its_own_sequence(device):
    spec = SPECS["three query heads a key head"]
    poisoned, clean = (Steps(GpuKVCache, spec, torch.float32, device) for _ in range(2))
    # The second sequence has one new token, and the last sequence has nine new tokens.
    outputs = poisoned.fill(poison=[(1, 2, 3), (5, 0, 1)]).run()
    expected = clean.fill().run()
    is_affected = torch.zeros(len(outputs), dtype=torch.bool)
    is_affected[1] = is_affected[-9:] = True
    assert outputs[is_affected].isnan().all()
    torch.testing.assert_close(outputs[~is_affected], expected[~is_affected], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("window", "first_visible"),
    [(LayerWindow(size=21), 50), (LayerWindow(chunk=40), 40)],
    ids=["window", "chunk"],
)
def test_keys_outside_the_window_of_all_tokens_are_not_read(window, first_visible, device):
    shapes, spec = [(70, 1), (70, 6)], LayerSpec(4, 2, 16, 16, window)
    poisoned, clean = (
        Steps(GpuKVCache, spec, torch.float32, device, shapes=shapes) for _ in range(2)
    )
    outputs = poisoned.fill(poison=[(0, 0, first_visible), (1, 0, first_visible)]).run()
    torch.testing.assert_close(outputs, clean.fill().run(), atol=0, rtol=0)


def test_the_null_block_stays_zero(device):
    steps = Steps(GpuKVCache, SPECS["three query heads a key head"], torch.float32, device)
    steps.fill().run()
    assert not steps.cache.keys[0][steps.cache.null_block].any()
    assert not steps.cache.values[0][steps.cache.null_block].any()


@pytest.mark.parametrize("num_heads", [3, 130])
def test_gather_returns_the_stored_heads_and_store_skips_negative_slots(num_heads, device):
    spec = LayerSpec(num_heads, num_heads, 24, 10)
    cache = GpuKVCache([spec], num_blocks=3, block_size=4, dtype=torch.float32, device=device)
    key = torch.randn(5, num_heads, 24, device=device).transpose(0, 1)
    value = torch.randn(num_heads, 5, 10, device=device)
    # The slot -1 means that the third token is not stored. Blocks 1 and 2 have the slots 4 to 11.
    slots = torch.tensor([4, 5, -1, 7, 8], device=device)
    call = AttentionCall(spec, cache.keys[0], cache.values[0], scale=1.0, sinks=None)

    gpu_attention.store(key, value, call, slots)
    rows = gather_rows(torch.tensor([[1, 2]], device=device), num_heads)
    keys, values = cache.gather(0, rows)

    stored_slots, stored_tokens = [0, 1, 3, 4], [0, 1, 3, 4]
    torch.testing.assert_close(keys[0, :, stored_slots], key[:, stored_tokens], atol=0, rtol=0)
    torch.testing.assert_close(values[0, :, stored_slots], value[:, stored_tokens], atol=0, rtol=0)
    assert not keys[0, :, [2, 5, 6, 7]].any()
    assert not cache.keys[0][0].any()


@pytest.mark.parametrize("tuning", [Tuning(16, 16, 4, 2), Tuning(64, 128, 4, 2)], ids=str)
def test_the_results_do_not_depend_on_the_tuning(tuning, device, monkeypatch):
    device_with_table = Device({name: [Entry(256, 4, tuning)] for name in KERNELS})
    monkeypatch.setattr(gpu_attention, "device_of", lambda device: device_with_table)
    check(LayerSpec(6, 2, 16, 16, LayerWindow(size=21), has_sinks=True), device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec",
    [
        LayerSpec(32, 8, 128, 128),
        LayerSpec(64, 8, 64, 64, LayerWindow(size=128), has_sinks=True),
        LayerSpec(16, 8, 256, 256, LayerWindow(size=4096), softcap=50.0),
        LayerSpec(16, 16, 192, 128),
        LayerSpec(32, 32, 96, 96),
        LayerSpec(40, 8, 128, 128, LayerWindow(chunk=8192)),
    ],
    ids=["gqa", "window and sinks", "softcap", "mla", "heads of 96", "chunks"],
)
def test_real_shapes_equal_the_reference_on_a_gpu(spec, dtype, device):
    if device.type != "cuda":
        pytest.skip("no GPU")
    decode_shapes = [(9000, 1), (20000, 1), (17, 1), *[(100 * i, 1) for i in range(20)]]
    check(spec, device, dtype, shapes=[*decode_shapes, (0, 2000), (5000, 300), (0, 17)])


@pytest.fixture(params=list(Float8)[1:], ids=lambda conversion: conversion.name)
def float8(request, device, monkeypatch):
    """A method by which the kernels convert 8-bit floating point numbers.

    The test is skipped if the GPU does not support the method.
    """
    conversion = request.param
    if device.type == "cuda" and conversion is Float8.DEVICE is not float8_of(device):
        pytest.skip("this device has no instructions that convert 8-bit floating point numbers")
    monkeypatch.setattr(gpu_attention, "float8_of", lambda device: conversion)
    return conversion


SPECS_OF_8_BIT_CACHES = sampled(
    ["window, softcap and sinks", "keys and values of 192 and 128"],
    "keys and values of 192 and 128",
)


def check_8_bit_cache(kernel_cache, reference_cache, name, device, dtype=torch.float32):
    """Check that the kernels and the reference compute the same attention over an 8-bit cache."""
    outputs, expected = [
        Steps(cache_class, SPECS[name], dtype, device).fill().run().float()
        for cache_class in (kernel_cache, reference_cache)
    ]
    # The first four sequences are in the decode phase. For the prompts after them, the reference
    # uses the keys and values of new tokens before these are rounded to 8 bits.
    tolerance = 2e-5 if dtype == torch.float32 else TOLERANCE[dtype]["atol"]
    torch.testing.assert_close(outputs[:4], expected[:4], atol=tolerance, rtol=tolerance)
    rounding = 0.25 if reference_cache is Float8KVCache else 5e-2
    torch.testing.assert_close(outputs, expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("name", SPECS_OF_8_BIT_CACHES)
def test_attention_over_integers_equals_the_reference_within_their_rounding(name, device):
    check_8_bit_cache(GpuInt8KVCache, Int8KVCache, name, device)


@pytest.mark.parametrize("name", SPECS_OF_8_BIT_CACHES)
def test_attention_over_8_bit_floats_equals_the_reference_within_their_rounding(
    name, device, float8
):
    check_8_bit_cache(GpuFloat8KVCache, Float8KVCache, name, device)


@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, torch.float16], torch.bfloat16))
def test_8_bit_floats_work_with_models_in_half_precision(dtype, device, float8):
    check_8_bit_cache(GpuFloat8KVCache, Float8KVCache, "heads of 96", device, dtype)


def store_in_both(kernel_cache, reference_cache, key, value, device):
    """Store keys and values with the kernel and with the reference, and return both caches."""
    num_heads, num_tokens, key_dim = key.shape
    spec = LayerSpec(num_heads, num_heads, key_dim, value.shape[2])
    slots = torch.arange(4, 4 + num_tokens, device=device)
    num_blocks = -(-num_tokens // 4) + 1
    by_kernel, by_reference = [
        cache_class([spec], num_blocks=num_blocks, block_size=4, dtype=torch.float32, device=device)
        for cache_class in (kernel_cache, reference_cache)
    ]
    call = AttentionCall(
        spec,
        by_kernel.keys[0],
        by_kernel.values[0],
        scale=1.0,
        sinks=None,
        scales=gpu_attention.scales_of(by_kernel, 0),
        float8=gpu_attention.float8_conversion(by_kernel),
    )
    gpu_attention.store(key, value, call, slots)
    rows = row_indices(slots, num_heads, 4)
    by_reference.store(0, key.transpose(0, 1), value.transpose(0, 1), rows)
    return by_kernel, by_reference


def odd_vectors(device):
    """Return random keys and values that include NaN, infinity, a zero vector and a tiny number."""
    key = torch.randn(5, 3, 24, device=device).transpose(0, 1)
    value = torch.randn(3, 5, 10, device=device)
    key[0, 1, 3] = float("nan")
    value[1, 2, 0] = float("inf")
    key[2, 3] = 0.0
    key[2, 4] = 1e-40
    return key, value


@pytest.mark.parametrize("name", ["keys", "values"])
def test_the_kernel_stores_the_same_integers_as_the_reference_and_reports_nan(name, device):
    by_kernel, by_reference = store_in_both(
        GpuInt8KVCache, Int8KVCache, *odd_vectors(device), device
    )
    scales, expected_scales = scales_in(by_kernel, name), scales_in(by_reference, name)
    torch.testing.assert_close(scales, expected_scales, equal_nan=True)
    assert scales.isnan().sum() == 1
    # If the scale of a vector is tiny (below 1e-38), rounding errors determine the integers of the
    # vector, so such a vector is not compared.
    is_compared = (expected_scales > 1e-38)[..., None]
    difference = getattr(by_kernel, name)[0].int() - getattr(by_reference, name)[0].int()
    assert (difference.abs() * is_compared).max() <= 1


def scales_in(cache, name):
    """Return the scales of the "keys" or of the "values" of an 8-bit cache."""
    return {"keys": cache.key_scales, "values": cache.value_scales}[name][0]


@pytest.mark.parametrize("name", ["keys", "values"])
def test_the_kernel_stores_the_same_8_bit_floats_as_the_reference_and_reports_nan(
    name, device, float8
):
    by_kernel, by_reference = store_in_both(
        GpuFloat8KVCache, Float8KVCache, *odd_vectors(device), device
    )
    scales = scales_in(by_kernel, name)
    torch.testing.assert_close(scales, scales_in(by_reference, name), equal_nan=True)
    assert scales.isnan().sum() == 1
    # The bytes of two adjacent 8-bit numbers differ by one. If the scale of a vector is tiny,
    # rounding errors determine the numbers of the vector, so such a vector is not compared.
    is_compared = (scales > 1e-38)[..., None]
    numbers = getattr(by_kernel, name)[0]
    difference = numbers.int() - getattr(by_reference, name)[0].int()
    assert (difference.abs() * is_compared).max() <= 1
    assert ((difference != 0) & is_compared).float().mean() < 0.01
    # If a vector contains NaN, only its scale is NaN. None of its bytes may encode NaN.
    assert ((numbers & 0x7F) != 0x7F).all()


def test_every_8_bit_float_is_stored_exactly_and_halves_are_rounded_to_even(device, float8):
    positive_floats = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (positive_floats[1:] + positive_floats[:-1]) / 2
    numbers = torch.cat((positive_floats, -positive_floats, halves, -halves))
    # With two tokens of 253 heads, the kernel has few programs, so the interpreter is fast.
    key = numbers.view(253, 2, 1).repeat(1, 1, 2)
    # The largest number of each vector is 448, the largest 8-bit float, so that the scale is 1.
    key[..., 1] = 448.0
    key = key.to(device)

    by_kernel, by_reference = store_in_both(GpuFloat8KVCache, Float8KVCache, key, key, device)

    torch.testing.assert_close(by_kernel.keys[0], by_reference.keys[0], atol=0, rtol=0)
