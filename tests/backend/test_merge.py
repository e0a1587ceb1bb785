import pytest
import torch
from nereid_backend.execution import native_linear
from nereid_backend.execution.merge import MergedLinear, merge_linears, separate_linears
from nereid_backend.execution.native_linear import NativeLinear
from nereid_backend.execution.prepack import prepack_linears
from torch import nn

pytestmark = pytest.mark.skipif(
    not native_linear.can_pack(torch.ones(2, 2)), reason="no compiler, or no 512-bit vectors"
)


class Layers(nn.Module):
    def __init__(self, sizes, bias=(False, False, False)):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(24, size, bias=has) for size, has in zip(sizes, bias, strict=True)
        )

    def forward(self, x):
        return self.first(x), self.second(x), self.third(x)


def merged_and_expected(layers, x):
    expected = [part.clone() for part in layers(x)]
    prepack_linears(layers)
    count = merge_linears(layers, lambda: layers(x))
    return count, expected


@pytest.mark.parametrize("bias", [(False, False, False), (True, True, True), (True, False, True)])
@pytest.mark.parametrize("sizes", [(32, 16, 16), (16, 48, 5)])
@torch.inference_mode()
def test_layers_with_one_input_give_what_they_gave_apart(sizes, bias):
    layers, x = Layers(sizes, bias), torch.randn(3, 7, 24)
    count, expected = merged_and_expected(layers, x)
    assert count == 1
    assert all(type(layer) is MergedLinear for layer in layers.children())
    for _ in range(2):
        for found, wanted in zip(layers(x), expected, strict=True):
            torch.testing.assert_close(found, wanted)


@torch.inference_mode()
def test_what_follows_a_part_of_a_panel_stays_apart():
    layers, x = Layers((16, 5, 32)), torch.randn(3, 24)
    count, expected = merged_and_expected(layers, x)
    assert count == 1
    assert type(layers.third) is NativeLinear
    for found, wanted in zip(layers(x), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@torch.inference_mode()
def test_a_layer_that_gets_another_input_than_its_group_computes_for_itself():
    layers, x, other = Layers((32, 16, 16)), torch.randn(3, 24), torch.randn(5, 24)
    expected = [part.clone() for part in layers(other)]
    merged_and_expected(layers, x)
    layers.first(x)
    torch.testing.assert_close(layers.second(other), expected[1])
    torch.testing.assert_close(layers.third(other), expected[2])
    # An equal tensor that is another one does not count as the same input.
    layers.first(other)
    torch.testing.assert_close(layers.second(other.clone()), expected[1])


@torch.inference_mode()
def test_a_layer_that_is_called_twice_or_with_other_inputs_is_not_merged():
    class Twice(Layers):
        def forward(self, x):
            return self.first(x), self.first(x), self.second(x + 1), self.third(x)

    layers, x = Twice((32, 16, 16)), torch.randn(3, 24)
    prepack_linears(layers)
    assert merge_linears(layers, lambda: layers(x)) == 0


@torch.inference_mode()
def test_nothing_of_a_pass_is_kept_after_it():
    layers, x = Layers((32, 16, 16)), torch.randn(3, 24)
    merged_and_expected(layers, x)
    layers(x)
    assert layers.first.group._input is None
    assert layers.first.group._parts == []


@torch.inference_mode()
def test_separated_layers_are_as_before():
    layers, x = Layers((32, 16, 16)), torch.randn(3, 24)
    _, expected = merged_and_expected(layers, x)
    separate_linears(layers)
    assert all(type(layer) is NativeLinear for layer in layers.children())
    for found, wanted in zip(layers(x), expected, strict=True):
        torch.testing.assert_close(found, wanted)
