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
from nereid_backend.attention.kv_cache import KVCache, gather_rows, store_rows
from nereid_backend.attention.layers import LayerSpec, LayerWindow

TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


def both(spec, dtype, device, **options):
    """Return the attention outputs of the kernels in `dtype` and of the reference in float32.

    The kernels and the reference compute with the same queries, keys and values.
    """
    return [
        Steps(kind, spec, used, device, rounded=dtype, **options).fill().run().float()
        for kind, used in ((GpuKVCache, dtype), (KVCache, torch.float32))
    ]


def check(spec, device, dtype=torch.float32, **options):
    found, expected = both(spec, dtype, device, **options)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


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
    plain = gpu_attention.prefill

    def counted(query, call, rows, out, tuning):
        launches.append(rows.tiles(Tiling(4, call.spec.window)))
        plain(query, call, rows, out, tuning)

    monkeypatch.setattr(gpu_attention, "prefill", counted)
    check(LayerSpec(2, 1, 16, 16), device, shapes=[(0, 3), (20, 2), (0, 6), (3, 5)])
    tiles = launches[0].tolist()
    assert len(launches) == 1
    assert tiles == [[1, 0], [3, 4], [2, 4], [3, 0], [0, 0], [2, 0]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy warns about NaN
def test_nan_affects_only_its_own_sequence(device):
    steps = Steps(GpuKVCache, SPECS["three query heads a key head"], torch.float32, device)
    clean = Steps(GpuKVCache, SPECS["three query heads a key head"], torch.float32, device)
    found = steps.fill(poison=[(1, 2, 3), (5, 0, 1)]).run()
    expected = clean.fill().run()
    is_hit = torch.zeros(len(found), dtype=torch.bool)
    is_hit[1] = is_hit[-9:] = True
    assert found[is_hit].isnan().all()
    torch.testing.assert_close(found[~is_hit], expected[~is_hit], atol=0, rtol=0)


@pytest.mark.parametrize(
    "window", [LayerWindow(size=21), LayerWindow(chunk=40)], ids=["window", "chunk"]
)
def test_keys_outside_the_window_of_all_tokens_are_not_read(window, device):
    shapes, spec = [(70, 1), (70, 6)], LayerSpec(4, 2, 16, 16, window)
    first = 50 if window.size else 40
    steps = Steps(GpuKVCache, spec, torch.float32, device, shapes=shapes)
    found = steps.fill(poison=[(0, 0, first), (1, 0, first)]).run()
    clean = Steps(GpuKVCache, spec, torch.float32, device, shapes=shapes).fill().run()
    torch.testing.assert_close(found, clean, atol=0, rtol=0)


def test_the_null_block_stays_zero(device):
    steps = Steps(GpuKVCache, SPECS["three query heads a key head"], torch.float32, device)
    steps.fill().run()
    assert not steps.cache.keys[0][steps.cache.null_block].any()
    assert not steps.cache.values[0][steps.cache.null_block].any()


@pytest.mark.parametrize("heads", [3, 130])
def test_gather_returns_the_stored_heads_and_store_skips_negative_slots(heads, device):
    spec = LayerSpec(heads, heads, 24, 10)
    cache = GpuKVCache([spec], num_blocks=3, block_size=4, dtype=torch.float32, device=device)
    key = torch.randn(5, heads, 24, device=device).transpose(0, 1)
    value = torch.randn(heads, 5, 10, device=device)
    slots = torch.tensor([4, 5, -1, 7, 8], device=device)
    call = AttentionCall(spec, cache.keys[0], cache.values[0], 1.0, None)
    gpu_attention.store(key, value, call, slots)
    rows = gather_rows(torch.tensor([[1, 2]], device=device), heads)
    keys, values = cache.gather(0, rows)
    kept = [0, 1, 3, 4]
    torch.testing.assert_close(keys[0, :, kept], key[:, kept], atol=0, rtol=0)
    torch.testing.assert_close(values[0, :, kept], value[:, kept], atol=0, rtol=0)
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
        LayerSpec(64, 8, 64, 64, LayerWindow(size=128), None, True),
        LayerSpec(16, 8, 256, 256, LayerWindow(size=4096), 50.0),
        LayerSpec(16, 16, 192, 128),
        LayerSpec(32, 32, 96, 96),
        LayerSpec(40, 8, 128, 128, LayerWindow(chunk=8192)),
    ],
    ids=["gqa", "window and sinks", "softcap", "mla", "heads of 96", "chunks"],
)
def test_real_shapes_equal_the_reference_on_a_gpu(spec, dtype, device):
    if device.type != "cuda":
        pytest.skip("no GPU")
    shapes = [(9000, 1), (20000, 1), (17, 1), *[(100 * i, 1) for i in range(20)]]
    check(spec, device, dtype, shapes=[*shapes, (0, 2000), (5000, 300), (0, 17)])


@pytest.fixture(params=list(Float8)[1:], ids=lambda way: way.name)
def float8(request, device, monkeypatch):
    """A method by which the kernels convert 8-bit floating point numbers.

    The test is skipped if the GPU does not support the method.
    """
    if device.type == "cuda" and request.param is Float8.DEVICE is not float8_of(device):
        pytest.skip("this device does not convert 8-bit floating point itself")
    monkeypatch.setattr(gpu_attention, "float8_of", lambda device: request.param)
    return request.param


SCALED = sampled(
    ["window, softcap and sinks", "keys and values of 192 and 128"],
    "keys and values of 192 and 128",
)


def check_scaled(kinds, name, device, dtype=torch.float32):
    found, expected = [
        Steps(kind, SPECS[name], dtype, device).fill().run().float() for kind in kinds
    ]
    # The first four sequences are in the decode phase. For the prompts after them, the reference
    # uses the keys and values of new tokens before these are rounded to 8 bits.
    exact = 2e-5 if dtype == torch.float32 else TOLERANCE[dtype]["atol"]
    torch.testing.assert_close(found[:4], expected[:4], atol=exact, rtol=exact)
    rounding = 0.25 if kinds[1] is Float8KVCache else 5e-2
    torch.testing.assert_close(found, expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("name", SCALED)
def test_attention_over_integers_equals_the_reference_within_their_rounding(name, device):
    check_scaled((GpuInt8KVCache, Int8KVCache), name, device)


@pytest.mark.parametrize("name", SCALED)
def test_attention_over_8_bit_floats_equals_the_reference_within_their_rounding(
    name, device, float8
):
    check_scaled((GpuFloat8KVCache, Float8KVCache), name, device)


@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, torch.float16], torch.bfloat16))
def test_8_bit_floats_work_with_models_in_half_precision(dtype, device, float8):
    check_scaled((GpuFloat8KVCache, Float8KVCache), "heads of 96", device, dtype)


def written(kinds, key, value, device):
    """Store keys and values with the kernel and with the reference, and return both caches."""
    num_heads, num_tokens, key_dim = key.shape
    spec = LayerSpec(num_heads, num_heads, key_dim, value.shape[2])
    slots = torch.arange(4, 4 + num_tokens, device=device)
    blocks = -(-num_tokens // 4) + 1
    ours, theirs = [
        kind([spec], num_blocks=blocks, block_size=4, dtype=torch.float32, device=device)
        for kind in kinds
    ]
    call = AttentionCall(
        spec,
        ours.keys[0],
        ours.values[0],
        1.0,
        None,
        gpu_attention.scales_of(ours, 0),
        gpu_attention.float8_conversion(ours),
    )
    gpu_attention.store(key, value, call, slots)
    theirs.store(0, key.transpose(0, 1), value.transpose(0, 1), store_rows(slots, num_heads, 4))
    return ours, theirs


def odd_vectors(device):
    key = torch.randn(5, 3, 24, device=device).transpose(0, 1)
    value = torch.randn(3, 5, 10, device=device)
    key[0, 1, 3], value[1, 2, 0], key[2, 3] = float("nan"), float("inf"), 0.0
    key[2, 4] = 1e-40
    return key, value


def test_the_kernel_stores_the_same_integers_as_the_reference_and_reports_nan(device):
    ours, theirs = written((GpuInt8KVCache, Int8KVCache), *odd_vectors(device), device)
    for name in ("key_scales", "value_scales"):
        found, expected = getattr(ours, name)[0], getattr(theirs, name)[0]
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert found.isnan().sum() == 1
    for name, factors in (("keys", theirs.key_scales), ("values", theirs.value_scales)):
        # Vectors with tiny scales (below 1e-38) are not compared, because their integers depend on
        # rounding errors.
        is_plain = (factors[0] > 1e-38)[..., None]
        difference = getattr(ours, name)[0].int() - getattr(theirs, name)[0].int()
        assert (difference.abs() * is_plain).max() <= 1


def test_the_kernel_stores_the_same_8_bit_floats_as_the_reference_and_reports_nan(device, float8):
    ours, theirs = written((GpuFloat8KVCache, Float8KVCache), *odd_vectors(device), device)
    for name in ("keys", "values"):
        scales, expected = getattr(ours, name[:-1] + "_scales")[0], getattr(theirs, name)[0]
        torch.testing.assert_close(
            scales, getattr(theirs, name[:-1] + "_scales")[0], equal_nan=True
        )
        assert scales.isnan().sum() == 1
        is_plain = (scales > 1e-38)[..., None]
        # If two 8-bit numbers are neighbours, their bytes differ by one.
        difference = getattr(ours, name)[0].int() - expected.int()
        assert (difference.abs() * is_plain).max() <= 1
        assert ((difference != 0) & is_plain).float().mean() < 0.01
        # A NaN is stored only in the scale of its vector. No byte of the vector may encode NaN.
        assert ((getattr(ours, name)[0] & 0x7F) != 0x7F).all()


def test_every_8_bit_float_is_stored_exactly_and_halves_are_rounded_to_even(device, float8):
    whole = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (whole[1:] + whole[:-1]) / 2
    # With two tokens of 253 heads, the kernel has few programs, so the interpreter is fast.
    key = torch.cat((whole, -whole, between, -between)).view(253, 2, 1).repeat(1, 1, 2)
    # The largest number of each vector is 448, the largest 8-bit float, so that the scale is 1.
    key[..., 1] = 448.0
    key = key.to(device)
    ours, theirs = written((GpuFloat8KVCache, Float8KVCache), key, key, device)
    torch.testing.assert_close(ours.keys[0], theirs.keys[0], atol=0, rtol=0)
