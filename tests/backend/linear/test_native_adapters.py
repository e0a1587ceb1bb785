"""Tests that the kernels add the products of adapters, for many sizes and instruction sets."""

import copy
from types import SimpleNamespace

import pytest
import torch
from backend.torch_threads import use_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend.attention.cpu.cpu_library import forced_instruction_set
from nereid_backend.core.adapter import Adapter
from nereid_backend.linear import native_linear
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.lora_layers import LoraLayers
from nereid_backend.linear.merged_linear import merge_linears
from nereid_backend.linear.native_adapters import LayerPair, adapter_bytes
from nereid_backend.linear.native_linear import NativeLinear
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.linear.quantise_weights import quantise_linears
from torch import nn

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
pytestmark = pytest.mark.skipif(not native_linear.is_available(), reason="no compiler, or no AVX2")


class Layers(nn.Module):
    """Three layers with the same input.

    `kind` is "plain", "packed" or "merged". Merged layers are also packed. The adapters of plain
    layers need hooks.
    """

    def __init__(self, dim, outputs, dtype, kind="merged"):
        super().__init__()
        # The outputs of all merged layers except the last must fill whole panels of 16 outputs.
        sizes = (16 * outputs, 16, outputs)
        self.parts = nn.ModuleList([nn.Linear(dim, size, dtype=dtype) for size in sizes])
        self.plain = [part.weight.detach().double() for part in self.parts]
        if kind != "plain":
            assert prepack_linears(self) == 3
        if kind == "merged":
            merge_linears(self, lambda: self(torch.zeros(1, dim, dtype=dtype)))

    @torch.inference_mode()
    def forward(self, x):
        return [part(x) for part in self.parts]


def serve(lora_layers, adapters_of_chunks, num_rows):
    """Return a context for a step: chunk i has `num_rows[i]` rows and the i-th adapter."""
    return lora_layers.serving(
        [
            SimpleNamespace(sequence=SimpleNamespace(adapter=adapter), num_tokens=count)
            for adapter, count in zip(adapters_of_chunks, num_rows, strict=True)
        ]
    )


def make_adapters(lora_layers, model, ranks, dtype):
    """Add one adapter for each rank. The second adapter does not change the second layer.

    Returns:
        The matrices of each adapter: a dict from the name of a layer to a `LayerPair`.
    """
    matrices_of_adapters = {}
    for number, rank in enumerate(ranks):
        adapter = Adapter(name=str(number), path="", digest=bytes([number]))
        pairs = {
            f"parts.{index}": LayerPair(
                torch.randn(rank, part.in_features).to(dtype),
                torch.randn(part.out_features, rank).to(dtype),
            )
            for index, part in enumerate(model.parts)
            if (number, index) != (1, 1)
        }
        lora_layers.add(adapter, pairs)
        matrices_of_adapters[adapter] = pairs
    return matrices_of_adapters


def expected_outputs(model, x, adapters_of_rows, matrices_of_adapters):
    """Return the outputs of each layer, computed in double precision."""
    outputs = []
    for index, (part, weight) in enumerate(zip(model.parts, model.plain, strict=True)):
        rows = []
        for row, adapter in zip(x.double(), adapters_of_rows, strict=True):
            output = weight @ row + part.bias.double()
            pair = matrices_of_adapters.get(adapter, {}).get(f"parts.{index}")
            if pair is not None:
                output = output + pair.up.double() @ (pair.down.double() @ row)
            rows.append(output)
        outputs.append(torch.stack(rows))
    return outputs


def assert_close(outputs, expected_outputs, dtype):
    """Check that the outputs of each layer are equal within the rounding errors of `dtype`."""
    for output, expected in zip(outputs, expected_outputs, strict=True):
        scale = expected.abs().max().clamp(min=1.0)
        assert ((output.double() - expected).abs().max() / scale).item() < TOLERANCE[dtype]


@given(
    dtype=st.sampled_from(DTYPES),
    dim=st.integers(1, 45).map(lambda half: 2 * half),
    outputs=st.integers(1, 5),
    ranks=st.lists(st.integers(1, 19), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    kind=st.sampled_from(["plain", "packed", "merged"]),
    threads=st.integers(1, 3),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_every_row_gets_the_product_of_its_adapter(
    dtype, dim, outputs, ranks, counts, kind, threads, data
):
    torch.manual_seed(dim)
    model = Layers(dim, outputs, dtype, kind)
    lora_layers = LoraLayers(model)
    adapters = make_adapters(lora_layers, model, ranks, dtype)
    choices = st.sampled_from([None, *adapters])
    of_chunks = data.draw(st.lists(choices, min_size=len(counts), max_size=len(counts)))
    of_rows = [a for a, count in zip(of_chunks, counts, strict=True) for _ in range(count)]
    x = torch.randn(len(of_rows), dim).to(dtype)

    with use_threads(threads), serve(lora_layers, of_chunks, counts):
        layer_outputs = model(x)

    assert_close(layer_outputs, expected_outputs(model, x, of_rows, adapters), dtype)
    if isinstance(model.parts[0], NativeLinear):
        check_rows_are_independent(model, lora_layers, x, of_rows, layer_outputs)


def check_rows_are_independent(model, lora_layers, x, adapters_of_rows, layer_outputs):
    """Check that the output of a row is bitwise equal to the output of the row alone.

    If the row has no adapter, check also that the output is bitwise equal to the output in a step
    without any adapter.
    """
    plain_outputs = model(x)
    for row, adapter in enumerate(adapters_of_rows):
        with serve(lora_layers, [adapter], [1]):
            outputs_alone = model(x[row : row + 1])
        for output, alone in zip(layer_outputs, outputs_alone, strict=True):
            assert torch.equal(output[row], alone[0])
        if adapter is None:
            for output, plain in zip(layer_outputs, plain_outputs, strict=True):
                assert torch.equal(output[row], plain[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_instruction_set_gives_the_same_products(dtype):
    torch.manual_seed(0)
    model = Layers(90, 3, dtype)
    x = torch.randn(7, 90).to(dtype)
    with forced_instruction_set("avx2"):
        lora_layers = LoraLayers(model)
        adapters = make_adapters(lora_layers, model, [5, 12], dtype)
        first, second = adapters
        of_rows = [first, None, *[second] * 5]
        with serve(lora_layers, of_rows, [1] * 7):
            outputs = model(x)
    assert_close(outputs, expected_outputs(model, x, of_rows, adapters), dtype)


def test_a_layer_that_computes_other_rows_uses_the_adapters_of_the_chunks():
    model = Layers(8, 1, torch.float32)
    lora_layers = LoraLayers(model)
    adapters = make_adapters(lora_layers, model, [4, 4], torch.float32)
    first, second = adapters
    of_chunks = [first, None, second]
    x = torch.randn(6, 8)

    # The layers get two rows for each of the three chunks, although each chunk has one token. Some
    # layers of models compute several rows for a token.
    with serve(lora_layers, of_chunks, [1, 1, 1]):
        outputs = model(x)

    of_rows = [adapter for adapter in of_chunks for _ in range(2)]
    assert_close(outputs, expected_outputs(model, x, of_rows, adapters), torch.float32)
    message = "computed 4 rows, which cannot be divided over the 3"
    with pytest.raises(RuntimeError, match=message), serve(lora_layers, of_chunks, [1, 1, 1]):
        model(x[:4])


def test_layers_with_integers_get_the_products():
    torch.manual_seed(1)
    values = torch.randint(-8, 8, (40, 64), dtype=torch.int8)
    layer = GroupedLinear.from_quantised(values, torch.full((40, 2), 0.01), None, 32, bits=4)
    model = nn.Sequential(layer)
    lora_layers = LoraLayers(model)
    adapter = Adapter(name="a", path="", digest=b"a")
    pair = LayerPair(torch.randn(6, 64), torch.randn(40, 6))
    lora_layers.add(adapter, {"0": pair})
    x = torch.randn(5, 64)

    with torch.inference_mode():
        plain_output = model(x)
        with serve(lora_layers, [adapter, None], [2, 3]):
            output = model(x)

    assert torch.equal(output[2:], plain_output[2:])
    expected = plain_output[:2] + x[:2] @ pair.down.T @ pair.up.T
    torch.testing.assert_close(output[:2], expected)


def test_merged_layers_with_integers_get_the_products_of_separate_layers():
    torch.manual_seed(1)
    separate = Layers(64, 2, torch.float32, "plain")
    quantise_linears(separate, bits=8)
    merged = copy.deepcopy(separate)
    assert merge_linears(merged, lambda: merged(torch.zeros(1, 64))) == 1
    x = torch.randn(5, 64)
    pairs = {
        f"parts.{index}": LayerPair(torch.randn(6, 64), torch.randn(part.out_features, 6))
        for index, part in enumerate(separate.parts)
    }

    def outputs_with_adapter(model):
        lora_layers, adapter = LoraLayers(model), Adapter(name="a", path="", digest=b"a")
        lora_layers.add(adapter, pairs)
        with serve(lora_layers, [adapter, None], [2, 3]):
            return model(x)

    outputs = zip(outputs_with_adapter(merged), outputs_with_adapter(separate), strict=True)
    for output, expected in outputs:
        torch.testing.assert_close(output, expected)


def test_the_stated_memory_is_that_of_the_matrices():
    model = Layers(10, 1, torch.float32)
    lora_layers = LoraLayers(model)
    adapters = make_adapters(lora_layers, model, [5], torch.float32)
    [(adapter, pairs)] = adapters.items()
    matrices = lora_layers._native._stored[adapter].matrices
    num_bytes = sum(pair.down.nbytes + pair.up.nbytes for pair in matrices)
    assert num_bytes == lora_layers.num_bytes(pairs) == sum(map(adapter_bytes, pairs.values()))
    lora_layers.remove(adapter)
    assert not lora_layers._native._stored
