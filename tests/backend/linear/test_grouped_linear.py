"""Linear layers with integer weights by group: packing, and products close to the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend.linear.grouped_linear import GroupedLinear, pack_values, unpack_values


def quantised(outputs, inputs, group_size, bits, *, has_zeros, signed, seed=0):
    """Return random values, scales and zeros, and the weights that they define."""
    generator = torch.Generator().manual_seed(seed)
    low = -(2 ** (bits - 1)) if signed else 0
    values = torch.randint(low, low + 2**bits, (outputs, inputs), generator=generator)
    groups = -(-inputs // group_size)
    scales = (torch.rand(outputs, groups, generator=generator) + 0.1).half()
    middle = torch.full((outputs, groups), 0 if signed else 2 ** (bits - 1))
    zeros = middle
    if has_zeros:
        zeros = torch.randint(low, low + 2**bits, (outputs, groups), generator=generator)
    index = torch.arange(inputs) // group_size
    weights = (values - zeros[:, index]) * scales.double()[:, index]
    dtype = torch.int8 if signed else torch.uint8
    return values.to(dtype), scales, zeros if has_zeros else None, weights


SIZES = {
    "outputs": st.integers(1, 70),
    "inputs": st.integers(1, 300),
    "group_size": st.sampled_from([8, 32, 40, 64, 128, 192, 1024]),
    "bits": st.sampled_from([4, 8]),
    "has_zeros": st.booleans(),
    "signed": st.booleans(),
}


@given(**SIZES)
@settings(deadline=None, max_examples=60)
def test_the_weights_of_a_layer_are_those_of_the_quantised_tensors(
    outputs, inputs, group_size, bits, has_zeros, signed
):
    values, scales, zeros, weights = quantised(
        outputs, inputs, group_size, bits, has_zeros=has_zeros, signed=signed
    )
    layer = GroupedLinear.from_quantised(values, scales, zeros, group_size, bits=bits)
    torch.testing.assert_close(layer.dequantised(), weights.float(), atol=0, rtol=1e-6)


def test_eight_inputs_of_an_output_become_four_bytes():
    packed = pack_values(torch.arange(1, 9, dtype=torch.uint8)[None], 4, 8)
    assert packed.shape == (1, 1, 16, 4)
    assert packed[0, 0, 0].tolist() == [0x51, 0x62, 0x73, 0x84]
    assert unpack_values(packed, 4)[0].tolist() == list(range(1, 9))


def test_arguments_that_do_not_fit_are_refused():
    values = torch.zeros(4, 64, dtype=torch.int8)
    scales = torch.ones(4, 2)
    with pytest.raises(ValueError, match="bits must be 4 or 8"):
        GroupedLinear.from_quantised(values, scales, None, 32, bits=3)
    with pytest.raises(ValueError, match="group_size must be a multiple of 8"):
        GroupedLinear.from_quantised(values, scales, None, 20, bits=4)
    with pytest.raises(ValueError, match=r"scales must have the shape \(4, 2\)"):
        GroupedLinear.from_quantised(values, torch.ones(4, 3), None, 32, bits=4)
    with pytest.raises(ValueError, match="values must be int8 or uint8"):
        GroupedLinear.from_quantised(values.float(), scales, None, 32, bits=4)


def test_a_layer_has_the_shape_and_bias_of_the_original():
    values, scales, zeros, weights = quantised(20, 64, 32, 4, has_zeros=True, signed=False)
    bias = torch.randn(20)
    layer = GroupedLinear.from_quantised(values, scales, zeros, 32, bits=4, bias=bias)
    assert layer.weight.shape == (20, 64)
    x = torch.randn(2, 3, 64)
    expected = x.double() @ weights.T + bias
    with torch.inference_mode():
        found = layer(x)
    assert found.shape == (2, 3, 20)
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
