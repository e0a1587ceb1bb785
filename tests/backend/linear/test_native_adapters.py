"""Tests that the kernels add the products of adapters, for many sizes and instruction sets."""

import copy
from types import SimpleNamespace

import pytest
import torch
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


def serve(adapters, owners, counts):
    """Return a context in which chunk i has `counts[i]` rows that use the adapter `owners[i]`."""
    return adapters.serving(
        [
            SimpleNamespace(sequence=SimpleNamespace(adapter=owner), num_tokens=count)
            for owner, count in zip(owners, counts, strict=True)
        ]
    )


def make_adapters(native, model, ranks, dtype):
    """Add one adapter for each rank. The second adapter leaves the second layer unchanged."""
    made = []
    for number, rank in enumerate(ranks):
        adapter = Adapter(str(number), "", bytes([number]))
        pairs = {
            f"parts.{index}": LayerPair(
                torch.randn(rank, part.in_features).to(dtype),
                torch.randn(part.out_features, rank).to(dtype),
            )
            for index, part in enumerate(model.parts)
            if (number, index) != (1, 1)
        }
        native.add(adapter, pairs)
        made.append((adapter, pairs))
    return made


def expected_outputs(model, x, owners, made):
    """Return the outputs of each layer, computed in double precision."""
    outputs = []
    pairs = dict(made)
    for index, (part, weight) in enumerate(zip(model.parts, model.plain, strict=True)):
        rows = []
        for row, owner in zip(x.double(), owners, strict=True):
            output = weight @ row + part.bias.double()
            pair = None if owner is None else pairs[owner].get(f"parts.{index}")
            if pair is not None:
                output = output + pair.up.double() @ (pair.down.double() @ row)
            rows.append(output)
        outputs.append(torch.stack(rows))
    return outputs


def assert_close(found, expected, dtype):
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max().clamp(min=1.0)
        assert ((one.double() - other).abs().max() / scale).item() < TOLERANCE[dtype]


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
    native = LoraLayers(model)
    made = make_adapters(native, model, ranks, dtype)
    choices = st.sampled_from([None, *(adapter for adapter, _ in made)])
    chunks = data.draw(st.lists(choices, min_size=len(counts), max_size=len(counts)))
    owners = [owner for owner, count in zip(chunks, counts, strict=True) for _ in range(count)]
    x = torch.randn(len(owners), dim).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with serve(native, chunks, counts):
            found = model(x)
    finally:
        torch.set_num_threads(before)
    assert_close(found, expected_outputs(model, x, owners, made), dtype)
    plain = model(x)
    for row, owner in enumerate(owners):
        with serve(native, [owner], [1]):
            alone = model(x[row : row + 1])
        if not isinstance(model.parts[0], NativeLinear):
            continue
        # The bits of a row do not depend on the other rows.
        assert all(torch.equal(one[0], other[row]) for one, other in zip(alone, found, strict=True))
        if owner is None:
            assert all(
                torch.equal(one[row], other[row]) for one, other in zip(plain, found, strict=True)
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_instruction_set_gives_the_same_products(dtype):
    torch.manual_seed(0)
    model = Layers(90, 3, dtype)
    with forced_instruction_set("avx2"):
        native = LoraLayers(model)
        made = make_adapters(native, model, [5, 12], dtype)
        owners = [made[0][0], None, *[made[1][0]] * 5]
        x = torch.randn(7, 90).to(dtype)
        with serve(native, owners, [1] * 7):
            found = model(x)
    assert_close(found, expected_outputs(model, x, owners, made), dtype)


def test_a_layer_that_computes_other_rows_uses_the_adapters_of_the_chunks():
    model = Layers(8, 1, torch.float32)
    native = LoraLayers(model)
    made = make_adapters(native, model, [4, 4], torch.float32)
    chunks = [made[0][0], None, made[1][0]]
    x = torch.randn(6, 8)
    with serve(native, chunks, [1, 1, 1]):
        found = model(x)
    owners = [owner for owner in chunks for _ in range(2)]
    assert_close(found, expected_outputs(model, x, owners, made), torch.float32)
    message = "computed 4 rows, which cannot be divided over the 3"
    with pytest.raises(RuntimeError, match=message), serve(native, chunks, [1, 1, 1]):
        model(x[:4])


def test_layers_with_integers_get_the_products():
    torch.manual_seed(1)
    values = torch.randint(-8, 8, (40, 64), dtype=torch.int8)
    layer = GroupedLinear.from_quantised(values, torch.full((40, 2), 0.01), None, 32, bits=4)
    model = nn.Sequential(layer)
    native = LoraLayers(model)
    adapter = Adapter("a", "", b"a")
    pair = LayerPair(torch.randn(6, 64), torch.randn(40, 6))
    native.add(adapter, {"0": pair})
    x = torch.randn(5, 64)
    with torch.inference_mode():
        plain = model(x)
        with serve(native, [adapter, None], [2, 3]):
            found = model(x)
    assert torch.equal(found[2:], plain[2:])
    torch.testing.assert_close(found[:2], plain[:2] + x[:2] @ pair.down.T @ pair.up.T)


def test_merged_layers_with_integers_get_the_products_of_separate_layers():
    torch.manual_seed(1)
    separate = Layers(64, 2, torch.float32, "plain")
    quantise_linears(separate, bits=8)
    merged = copy.deepcopy(separate)
    assert merge_linears(merged, lambda: merged(torch.zeros(1, 64))) == 1
    x, outputs = torch.randn(5, 64), []
    pairs = {
        f"parts.{index}": LayerPair(torch.randn(6, 64), torch.randn(part.out_features, 6))
        for index, part in enumerate(separate.parts)
    }
    for model in (separate, merged):
        native, adapter = LoraLayers(model), Adapter("a", "", b"a")
        native.add(adapter, pairs)
        with serve(native, [adapter, None], [2, 3]):
            outputs.append(model(x))
    for found, wanted in zip(*outputs, strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_stated_memory_is_that_of_the_matrices():
    model = Layers(10, 1, torch.float32)
    native = LoraLayers(model)
    [(adapter, pairs)] = make_adapters(native, model, [5], torch.float32)
    matrices = native._native._stored[adapter].matrices
    found = sum(pair.down.nbytes + pair.up.nbytes for pair in matrices)
    assert found == native.num_bytes(pairs) == sum(map(adapter_bytes, pairs.values()))
    native.remove(adapter)
    assert not native._native._stored
