import pytest
import torch
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.linear import native_linear
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.merged_linear import (
    MergedGroupedLinear,
    MergedLinear,
    MergedNativeLinear,
    merge_linears,
    separate_linears,
)
from nereid_backend.linear.native_linear import NativeLinear
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.linear.quantise_weights import quantise_linears
from nereid_backend.model import load_weights
from torch import nn

LAYOUTS = [
    pytest.param(
        "packed",
        marks=pytest.mark.skipif(
            not native_linear.can_pack(torch.ones(2, 2)),
            reason="no compiler, or no 512-bit vectors",
        ),
    ),
    "as loaded",
    "int8",
    "int4",
]
# For each layout, the class of a layer before the merge and the class after the merge.
CLASSES = {
    "packed": (NativeLinear, MergedNativeLinear),
    "as loaded": (nn.Linear, MergedLinear),
    "int8": (GroupedLinear, MergedGroupedLinear),
    "int4": (GroupedLinear, MergedGroupedLinear),
}
pytestmark = pytest.mark.parametrize("layout", LAYOUTS)


class Layers(nn.Module):
    """Three layers with the same input. `sizes` contains the number of outputs of each layer."""

    def __init__(self, sizes, bias=(False, False, False)):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(24, size, bias=has_bias) for size, has_bias in zip(sizes, bias, strict=True)
        )

    def forward(self, x):
        return self.first(x), self.second(x), self.third(x)


def change_layout(layers, layout):
    """Convert the weights of the layers to `layout`: "as loaded", "packed", "int8" or "int4"."""
    if layout == "packed":
        prepack_linears(layers)
    elif layout != "as loaded":
        quantise_linears(layers, bits=int(layout.removeprefix("int")))


def merge(layers, x, layout):
    """Change the layout of the layers, and merge the layers.

    Returns:
        The number of merged groups, and the outputs of the layers before the merge.
    """
    change_layout(layers, layout)
    expected_outputs = [output.clone() for output in layers(x)]
    return merge_linears(layers, lambda: layers(x)), expected_outputs


@pytest.mark.parametrize("bias", [(False, False, False), (True, True, True), (True, False, True)])
@pytest.mark.parametrize("sizes", [(32, 16, 16), (16, 48, 5)])
@torch.inference_mode()
def test_merged_layers_compute_the_same_as_separate_layers(sizes, bias, layout):
    layers, x = Layers(sizes, bias), torch.randn(3, 7, 24)
    num_groups, expected_outputs = merge(layers, x, layout)
    assert num_groups == 1
    assert all(type(layer) is CLASSES[layout][1] for layer in layers.children())
    for _ in range(2):
        for output, expected in zip(layers(x), expected_outputs, strict=True):
            torch.testing.assert_close(output, expected)


@torch.inference_mode()
def test_a_layer_after_an_incomplete_panel_is_not_merged(layout):
    layers, x = Layers((16, 5, 32)), torch.randn(3, 24)
    num_groups, expected_outputs = merge(layers, x, layout)
    assert num_groups == 1
    # Layers without panels can be merged with any number of outputs.
    is_merged = layout == "as loaded"
    assert type(layers.third) is CLASSES[layout][is_merged]
    for output, expected in zip(layers(x), expected_outputs, strict=True):
        torch.testing.assert_close(output, expected)


@torch.inference_mode()
def test_a_layer_with_another_input_than_its_group_computes_its_own_output(layout):
    layers, x, other = Layers((32, 16, 16)), torch.randn(3, 24), torch.randn(5, 24)
    change_layout(layers, layout)
    _, second_output, third_output = (output.clone() for output in layers(other))
    merge_linears(layers, lambda: layers(x))

    # The first layer computes the outputs of all three layers for its input. The other layers must
    # not return these outputs if they get another input.
    layers.first(x)
    torch.testing.assert_close(layers.second(other), second_output)
    torch.testing.assert_close(layers.third(other), third_output)
    # Another tensor with equal numbers does not count as the same input.
    layers.first(other)
    torch.testing.assert_close(layers.second(other.clone()), second_output)


@torch.inference_mode()
def test_a_layer_that_is_called_twice_or_with_other_inputs_is_not_merged(layout):
    class Twice(Layers):
        def forward(self, x):
            return self.first(x), self.first(x), self.second(x + 1), self.third(x)

    layers, x = Twice((32, 16, 16)), torch.randn(3, 24)
    change_layout(layers, layout)
    assert merge_linears(layers, lambda: layers(x)) == 0


@torch.inference_mode()
def test_no_tensor_of_a_forward_pass_is_kept_after_the_pass(layout):
    layers, x = Layers((32, 16, 16)), torch.randn(3, 24)
    merge(layers, x, layout)
    layers(x)
    assert layers.first.group._input is None
    assert layers.first.group._outputs == []


@torch.inference_mode()
def test_separated_layers_equal_the_original_layers(layout):
    layers, x = Layers((32, 16, 16)), torch.randn(3, 24)
    _, expected_outputs = merge(layers, x, layout)
    separate_linears(layers)
    assert all(type(layer) is CLASSES[layout][0] for layer in layers.children())
    for output, expected in zip(layers(x), expected_outputs, strict=True):
        torch.testing.assert_close(output, expected)


@torch.inference_mode()
def test_the_weights_of_a_group_are_stored_once(layout):
    layers, x = Layers((32, 16, 16)), torch.randn(3, 24)
    merge(layers, x, layout)
    for name in CLASSES[layout][1].weight_names:
        merged_weight = getattr(layers.first, f"merged_{name}")
        weights = [getattr(layer, name) for layer in layers.children()]
        if merged_weight is None:
            assert weights == [None] * 3
        else:
            storages = {weight.untyped_storage().data_ptr() for weight in weights}
            assert storages == {merged_weight.untyped_storage().data_ptr()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi"])
def test_an_engine_with_merged_layers_gives_the_same_tokens(
    checkpoint, monkeypatch, architecture, layout
):
    settings = {"weight_dtype": layout} if layout.startswith("int") else {}
    path = checkpoint(architecture)
    expected, _ = tokens_and_classes(path, prepack=False, **settings)
    if layout == "as loaded":
        # On a GPU, the layers keep torch's layout.
        monkeypatch.setattr(load_weights, "prepack_linears", lambda *_, **__: 1)
    tokens, classes = tokens_and_classes(path, **settings)
    assert tokens == expected
    assert CLASSES[layout][1] in classes


def tokens_and_classes(path, **settings):
    """Return the answers of an engine, and the set of classes of its model's modules."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    config = EngineConfig(str(path), kv_cache_memory="4MiB", dtype="float32", **settings)
    engine = Engine(config)
    try:
        outputs = engine.generate([[5, 9, 11, 4], [7], list(range(3, 40))], params)
        classes = {type(module) for module in engine._parts.runner._path._model.modules()}
        return [output.outputs[0].token_ids for output in outputs], classes
    finally:
        engine.close()
