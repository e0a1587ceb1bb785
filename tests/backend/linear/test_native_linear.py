"""Tests that the native kernels of linear layers are right with each instruction set of the CPU."""

import pytest
import torch
from backend.torch_threads import use_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend.attention.cpu.cpu_library import forced_instruction_set
from nereid_backend.attention.cpu.instruction_sets import supported_instruction_sets
from nereid_backend.linear import native_linear
from nereid_backend.linear.native_linear import NativeLinear, linear, pack
from nereid_backend.linear.prepack import prepack_linears

DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16)
    if native_linear.can_pack(torch.ones(2, 2, dtype=dtype))
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
pytestmark = pytest.mark.skipif(not DTYPES, reason="no compiler, or no AVX2")


# The other tests use the fastest instruction set of this processor. These tests use two slower
# instruction sets: one without matrix tiles, and the one with the shortest vectors. No further
# instruction sets are tested, because building a library for each of them takes time.
OTHER_KERNELS = [
    s.name for s in supported_instruction_sets()[1:] if s.name in ("avx512_bf16", "avx2")
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHER_KERNELS)
def test_other_instruction_sets_give_the_same_results(name, dtype):
    torch.manual_seed(0)
    sizes = [(1, 64, 48), (2, 6, 5), (5, 90, 21), (12, 300, 150), (23, 70, 90), (40, 128, 33)]
    for rows, dim, outputs in [*sizes, (120, 96, 40)]:
        weight = torch.randn(outputs, dim).to(dtype)
        x = torch.randn(rows, dim).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        expected = linear(x, pack(weight), bias, outputs)

        with forced_instruction_set(name):
            result = linear(x, pack(weight), bias, outputs)
            result_of_first_row = linear(x[:1], pack(weight), bias, outputs)

        tolerance = 2 * TOLERANCE[dtype] * expected.abs().max().item()
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=0)
        assert torch.equal(result_of_first_row, result[:1])


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 80),
    dim=st.integers(1, 90).map(lambda half: 2 * half),
    outputs=st.integers(1, 150),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=60)
def test_a_layer_of_any_size_equals_the_product_in_double_precision(
    dtype, rows, dim, outputs, has_bias, threads, seed
):
    torch.manual_seed(seed)
    weight = torch.randn(outputs, dim).to(dtype)
    x = torch.randn(rows, dim).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None

    with use_threads(threads):
        result = linear(x, pack(weight), bias, outputs)

    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scale = expected.abs().max().clamp(min=1.0)
    assert ((result.double() - expected).abs().max() / scale).item() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_around_the_output_is_not_written(dtype):
    rows, dim, outputs, num_threads = 13, 8, 21, 2
    weight, x = torch.randn(outputs, dim).to(dtype), torch.randn(rows, dim).to(dtype)
    packed = pack(weight)
    # The kernel writes its output to the second third of this memory. It must not change the other
    # two thirds.
    memory = torch.full((3, rows, outputs), 7.0, dtype=dtype)
    native_linear.kernels().nereid_linear(
        dtype == torch.bfloat16,
        *(packed.data_ptr(), None, x.data_ptr(), memory[1].data_ptr()),
        *(rows, dim, outputs, num_threads),
    )
    assert (memory[0] == 7).all()
    assert (memory[2] == 7).all()
    torch.testing.assert_close(memory[1], linear(x, packed, None, outputs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_result_alone_and_with_other_rows(dtype):
    layer = torch.nn.Linear(64, 48).to(dtype)
    model = torch.nn.Sequential(layer)
    assert prepack_linears(model) == 1
    assert type(model[0]) is NativeLinear
    x = torch.randn(37, 64).to(dtype)
    with torch.inference_mode():
        together = model(x)
        for row in range(37):
            assert torch.equal(model(x[row]), together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_that_are_not_finite_give_outputs_that_are_not_finite(dtype):
    packed = pack(torch.ones(20, 6, dtype=dtype))
    x = torch.ones(3, 6, dtype=dtype)
    x[1, 2] = float("nan")
    output = linear(x, packed, None, 20)
    assert output[1].isnan().all()
    assert output[[0, 2]].isfinite().all()


def test_an_input_of_another_size_or_type_is_refused():
    packed = pack(torch.ones(20, 6, dtype=DTYPES[0]))
    with pytest.raises(ValueError, match="The input has 8 features"):
        linear(torch.ones(3, 8, dtype=DTYPES[0]), packed, None, 20)
    with pytest.raises(ValueError, match="float64"):
        linear(torch.ones(3, 6, dtype=torch.float64), packed, None, 20)


def test_an_odd_number_of_bfloat16_inputs_is_not_packed():
    assert not native_linear.can_pack(torch.ones(4, 3, dtype=torch.bfloat16))
    assert not native_linear.can_pack(torch.ones(4, 4, dtype=torch.float16))
