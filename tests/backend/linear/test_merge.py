import pytest
import torch
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.linear import native_linear
from nereid_backend.linear.merged_linear import (
    MergedLinear,
    MergedNativeLinear,
    merge_linears,
    separate_linears,
)
from nereid_backend.linear.native_linear import NativeLinear
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.model import load_weights
from torch import nn

IS_PACKED = [
    pytest.param(
        True,
        marks=pytest.mark.skipif(
            not native_linear.can_pack(torch.ones(2, 2)),
            reason="no compiler, or no 512-bit vectors",
        ),
        id="packed",
    ),
    pytest.param(False, id="as loaded"),
]
pytestmark = pytest.mark.parametrize("is_packed", IS_PACKED)


class Layers(nn.Module):
    def __init__(self, sizes, bias=(False, False, False)):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(24, size, bias=has) for size, has in zip(sizes, bias, strict=True)
        )

    def forward(self, x):
        return self.first(x), self.second(x), self.third(x)


def merged_and_expected(layers, x, is_packed):
    expected = [part.clone() for part in layers(x)]
    if is_packed:
        prepack_linears(layers)
    count = merge_linears(layers, lambda: layers(x))
    return count, expected


@pytest.mark.parametrize("bias", [(False, False, False), (True, True, True), (True, False, True)])
@pytest.mark.parametrize("sizes", [(32, 16, 16), (16, 48, 5)])
@torch.inference_mode()
def test_merged_layers_compute_the_same_as_separate_layers(sizes, bias, is_packed):
    layers, x = Layers(sizes, bias), torch.randn(3, 7, 24)
    count, expected = merged_and_expected(layers, x, is_packed)
    assert count == 1
    kind = MergedNativeLinear if is_packed else MergedLinear
    assert all(type(layer) is kind for layer in layers.children())
    for _ in range(2):
        for found, wanted in zip(layers(x), expected, strict=True):
            torch.testing.assert_close(found, wanted)


@torch.inference_mode()
def test_a_layer_after_an_incomplete_panel_is_not_merged(is_packed):
    layers, x = Layers((16, 5, 32)), torch.randn(3, 24)
    count, expected = merged_and_expected(layers, x, is_packed)
    assert count == 1
    assert type(layers.third) is (NativeLinear if is_packed else MergedLinear)
    for found, wanted in zip(layers(x), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@torch.inference_mode()
def test_a_layer_with_another_input_than_its_group_computes_its_own_output(is_packed):
    layers, x, other = Layers((32, 16, 16)), torch.randn(3, 24), torch.randn(5, 24)
    expected = [part.clone() for part in layers(other)]
    merged_and_expected(layers, x, is_packed)
    layers.first(x)
    torch.testing.assert_close(layers.second(other), expected[1])
    torch.testing.assert_close(layers.third(other), expected[2])
    # An equal tensor that is another one does not count as the same input.
    layers.first(other)
    torch.testing.assert_close(layers.second(other.clone()), expected[1])


@torch.inference_mode()
def test_a_layer_that_is_called_twice_or_with_other_inputs_is_not_merged(is_packed):
    class Twice(Layers):
        def forward(self, x):
            return self.first(x), self.first(x), self.second(x + 1), self.third(x)

    layers, x = Twice((32, 16, 16)), torch.randn(3, 24)
    if is_packed:
        prepack_linears(layers)
    assert merge_linears(layers, lambda: layers(x)) == 0


@torch.inference_mode()
def test_no_tensor_of_a_forward_pass_is_kept_after_the_pass(is_packed):
    layers, x = Layers((32, 16, 16)), torch.randn(3, 24)
    merged_and_expected(layers, x, is_packed)
    layers(x)
    assert layers.first.group._input is None
    assert layers.first.group._outputs == []


@torch.inference_mode()
def test_separated_layers_equal_the_original_layers(is_packed):
    layers, x = Layers((32, 16, 16)), torch.randn(3, 24)
    _, expected = merged_and_expected(layers, x, is_packed)
    separate_linears(layers)
    kind = NativeLinear if is_packed else nn.Linear
    assert all(type(layer) is kind for layer in layers.children())
    for found, wanted in zip(layers(x), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@torch.inference_mode()
def test_the_weights_of_a_group_are_stored_once(is_packed):
    layers, x = Layers((32, 16, 16)), torch.randn(3, 24)
    merged_and_expected(layers, x, is_packed)
    names = "packed" if is_packed else "weight"
    held = [getattr(layer, names).untyped_storage().data_ptr() for layer in layers.children()]
    assert set(held) == {layers.first.merged.untyped_storage().data_ptr()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi"])
def test_an_engine_with_merged_layers_gives_the_same_tokens(
    checkpoint, monkeypatch, architecture, is_packed
):
    """As loaded is how a GPU has them."""
    path = checkpoint(architecture)
    expected = tokens(path, prepack=False)
    if not is_packed:
        monkeypatch.setattr(load_weights, "prepack_linears", lambda *_, **__: 1)
    kinds = set()
    assert tokens(path, kinds) == expected
    assert (MergedNativeLinear if is_packed else MergedLinear) in kinds


def tokens(path, kinds=None, **settings):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    config = EngineConfig(str(path), kv_cache_memory="4MiB", dtype="float32", **settings)
    engine = Engine(config)
    try:
        outputs = engine.generate([[5, 9, 11, 4], [7], list(range(3, 40))], params)
        if kinds is not None:
            kinds.update(map(type, engine._parts.runner._path._model.modules()))
        return [output.outputs[0].token_ids for output in outputs]
    finally:
        engine.close()
