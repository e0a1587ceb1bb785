"""Tests of linear layers with groups of integer weights: the packing, and the products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend.attention.cpu.cpu_library import forced_instruction_set, has_kernels
from nereid_backend.attention.cpu.instruction_sets import (
    supported_instruction_sets,
    usable_instruction_sets,
)
from nereid_backend.linear import grouped_linear
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.integer_layout import inputs_per_unit, pack_values, unpack_values

# The fastest and the slowest instruction set with a kernel. They multiply bytes with different
# instructions.
KERNELS = ["best", "avx2"] if has_kernels() and grouped_linear.is_available() else []


ZEROS = ["none", "integers", "fractions"]


def group_size_for(size, bits):
    """Return `size`, rounded up to the next group size that the kernels for `bits` support."""
    unit = inputs_per_unit(bits)
    return -(-size // unit) * unit


def quantised(outputs, inputs, group_size, bits, *, zero_kind, signed, seed=0):
    """Return random integers with scales and zero points, and the dequantised weights.

    `zero_kind` is a member of `ZEROS`.
    """
    generator = torch.Generator().manual_seed(seed)
    low = -(2 ** (bits - 1)) if signed else 0
    values = torch.randint(low, low + 2**bits, (outputs, inputs), generator=generator)
    num_groups = -(-inputs // group_size)
    scales = (torch.rand(outputs, num_groups, generator=generator) + 0.1).half()
    if zero_kind == "none":
        zeros = torch.full((outputs, num_groups), 0 if signed else 2 ** (bits - 1))
    else:
        zeros = torch.randint(low, low + 2**bits, (outputs, num_groups), generator=generator)
    if zero_kind == "fractions":
        zeros = zeros + 0.5
    group_of_input = torch.arange(inputs) // group_size
    weights = (values - zeros[:, group_of_input]) * scales.double()[:, group_of_input]
    dtype = torch.int8 if signed else torch.uint8
    return values.to(dtype), scales, zeros if zero_kind != "none" else None, weights


def with_rounded_rows(x, weights, group_size):
    """Round each group of each row of `x` to 8 bits, and return the product with the weights."""
    num_groups = -(-x.shape[1] // group_size)
    padded = torch.nn.functional.pad(x, (0, num_groups * group_size - x.shape[1]))
    groups = padded.view(len(x), num_groups, group_size).double()
    scales = groups.abs().amax(2, keepdim=True).clamp(min=1e-30) / 127
    rounded = (groups / scales).round() * scales
    return rounded.flatten(1)[:, : x.shape[1]] @ weights.T


def in_kernel(name, layer, x):
    """Return `layer(x)`, computed with the kernels for the instruction set `name`."""
    if name == "best":
        return layer(x)
    with forced_instruction_set(name):
        return layer(x)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("zero_kind", ZEROS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_multiplies_the_integers_of_rows_and_weights(name, zero_kind, bits):
    for rows, outputs, inputs, size in [
        *((1, 16, 32, 32), (2, 70, 300, 40), (3, 33, 256, 128), (5, 5, 7, 1024)),
        *((12, 100, 96, 8), (30, 21, 384, 192)),
    ]:
        group_size = group_size_for(size, bits)
        values, scales, zeros, weights = quantised(
            outputs, inputs, group_size, bits, zero_kind=zero_kind, signed=False, seed=rows
        )
        layer = GroupedLinear.from_quantised(values, scales, zeros, group_size, bits=bits)
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        expected = with_rounded_rows(x, weights, layer.group_size)

        with torch.inference_mode():
            product = in_kernel(name, layer, x)
            product_of_last_row = in_kernel(name, layer, x[-1:])

        # A number halfway between two integers can be rounded to either integer.
        assert (product - expected).abs().max() < 4e-3 * expected.abs().max()
        assert torch.equal(product_of_last_row, product[-1:])


needs_tiles = pytest.mark.skipif(
    "best" not in KERNELS or usable_instruction_sets()[0].name != "amx",
    reason="the processor has no matrix tiles (AMX)",
)


@needs_tiles
@pytest.mark.parametrize("zero_kind", ZEROS)
def test_tiles_of_integers_give_the_same_bits_as_vectors(zero_kind):
    for rows, outputs, inputs, group_size in [
        *((16, 16, 64, 32), (17, 70, 300, 64), (33, 33, 256, 128), (40, 100, 96, 96)),
        *((100, 21, 384, 192), (150, 40, 1024, 64)),
    ]:
        values, scales, zeros, _ = quantised(
            outputs, inputs, group_size, 8, zero_kind=zero_kind, signed=False, seed=rows
        )
        bias = torch.randn(outputs)
        layer = GroupedLinear.from_quantised(values, scales, zeros, group_size, bits=8, bias=bias)
        x = torch.randn(rows, inputs)
        # This instruction set has vector instructions, but no instructions for matrix tiles.
        with torch.inference_mode(), forced_instruction_set("avx512_bf16"):
            expected = layer(x)
        with torch.inference_mode():
            assert torch.equal(layer(x), expected)


@needs_tiles
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("zero_kind", ZEROS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group_size"),
    [(128, 16, 64, 32), (131, 70, 300, 40), (150, 33, 256, 128), (200, 100, 98, 1024)],
)
def test_many_bfloat16_rows_are_multiplied_by_dequantised_weights(
    rows, outputs, inputs, group_size, zero_kind, bits
):
    group_size = group_size_for(group_size, bits)
    values, scales, zeros, weights = quantised(
        outputs, inputs, group_size, bits, zero_kind=zero_kind, signed=False, seed=rows
    )
    bias = torch.randn(outputs).bfloat16()
    layer = GroupedLinear.from_quantised(values, scales, zeros, group_size, bits=bits, bias=bias)
    x = torch.randn(rows, inputs).bfloat16()

    with torch.inference_mode():
        output = layer(x)
        output_of_fewer_rows = layer(x[:128])

    expected = x.double() @ weights.T + bias.double()
    # The kernel rounds weights and outputs to bfloat16, which has 8 significant bits.
    assert (output - expected).abs().max() < 6e-3 * expected.abs().max()
    assert torch.equal(output_of_fewer_rows, output[:128])


@pytest.mark.parametrize("name", KERNELS)
def test_inputs_that_are_not_finite_give_outputs_that_are_not_finite(name):
    values, scales, zeros, _ = quantised(20, 64, 32, 4, zero_kind="none", signed=True)
    layer = GroupedLinear.from_quantised(values, scales, zeros, 32, bits=4)
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    x[0, 3], x[1, 40], x[2] = float("nan"), float("inf"), 0.0
    with torch.inference_mode():
        output = in_kernel(name, layer, x)
    assert output[:2].isnan().all()
    assert not output[2].any()
    assert output[3].isfinite().all()


@pytest.mark.skipif("avx2" not in [s.name for s in supported_instruction_sets()], reason="CPU")
def test_an_unknown_instruction_set_is_refused_with_the_names(monkeypatch):
    monkeypatch.setenv("NEREID_CPU_INSTRUCTIONS", "avx9")
    with pytest.raises(ValueError, match=r"is avx9, but this processor supports .*avx2, native"):
        usable_instruction_sets()


SIZES = {
    "outputs": st.integers(1, 70),
    "inputs": st.integers(1, 300),
    "group_size": st.sampled_from([8, 32, 40, 64, 128, 192, 1024]),
    "bits": st.sampled_from([4, 6, 8]),
    "zero_kind": st.sampled_from(ZEROS),
    "signed": st.booleans(),
}


@given(**SIZES)
@settings(deadline=None, max_examples=60)
def test_the_weights_of_a_layer_are_those_of_the_quantised_tensors(
    outputs, inputs, group_size, bits, zero_kind, signed
):
    group_size = group_size_for(group_size, bits)
    values, scales, zeros, weights = quantised(
        outputs, inputs, group_size, bits, zero_kind=zero_kind, signed=signed
    )
    layer = GroupedLinear.from_quantised(values, scales, zeros, group_size, bits=bits)
    torch.testing.assert_close(layer.dequantised(), weights.float(), atol=0, rtol=1e-6)
    if zero_kind != "none":
        assert layer.zeros.dtype == (torch.uint8 if zero_kind == "integers" else torch.float16)


def test_eight_inputs_of_an_output_become_four_bytes():
    packed = pack_values(torch.arange(1, 9, dtype=torch.uint8)[None], 4, 8)
    assert packed.shape == (1, 1, 16, 4)
    assert packed[0, 0, 0].tolist() == [0x51, 0x62, 0x73, 0x84]
    assert unpack_values(packed, 4)[0].tolist() == list(range(1, 9))


def test_sixteen_inputs_of_six_bits_become_twelve_bytes():
    inputs = torch.arange(16) + 16 * (torch.arange(16) % 4)
    packed = pack_values(inputs.to(torch.uint8)[None], 6, 16)
    assert packed.shape == (1, 3, 16, 4)
    lower_bits = [[0x40, 0x51, 0x62, 0x73], [0xC8, 0xD9, 0xEA, 0xFB]]
    assert packed[0, :, 0].tolist() == [*lower_bits, [0x00, 0x55, 0xAA, 0xFF]]
    assert unpack_values(packed, 6)[0].tolist() == inputs.tolist()


def test_arguments_that_do_not_fit_are_refused():
    values = torch.zeros(4, 64, dtype=torch.int8)
    scales = torch.ones(4, 2)
    with pytest.raises(ValueError, match="bits must be 4, 6 or 8"):
        GroupedLinear.from_quantised(values, scales, None, 32, bits=3)
    with pytest.raises(ValueError, match="group_size must be a multiple of 8"):
        GroupedLinear.from_quantised(values, scales, None, 20, bits=4)
    with pytest.raises(ValueError, match=r"scales must have the shape \(4, 2\)"):
        GroupedLinear.from_quantised(values, torch.ones(4, 3), None, 32, bits=4)
    with pytest.raises(ValueError, match="values must be int8 or uint8"):
        GroupedLinear.from_quantised(values.float(), scales, None, 32, bits=4)


def test_a_layer_has_the_shape_and_bias_of_the_original():
    values, scales, zeros, weights = quantised(20, 64, 32, 4, zero_kind="integers", signed=False)
    bias = torch.randn(20)
    layer = GroupedLinear.from_quantised(values, scales, zeros, 32, bits=4, bias=bias)
    assert layer.weight.shape == (20, 64)
    x = torch.randn(2, 3, 64)
    expected = x.double() @ weights.T + bias
    with torch.inference_mode():
        output = layer(x)
    assert output.shape == (2, 3, 20)
    assert (output - expected).abs().max() < 0.02 * expected.abs().max()
