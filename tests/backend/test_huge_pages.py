import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend import huge_pages
from nereid_backend.huge_pages import move_weights, zeros
from torch import nn


class Model(nn.Module):
    """A model with the kinds of weights that are difficult to move.

    A weight is shared by two layers, a buffer is a part of another buffer, a parameter is
    transposed, a layer is small, and a buffer was created in inference mode.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(300, 128)
        self.output = nn.Linear(128, 300, bias=False)
        self.output.weight = self.embedding.weight
        self.transposed = nn.Parameter(torch.randn(128, 300).t(), requires_grad=False)
        self.small = nn.Linear(4, 4)
        with torch.inference_mode():
            self.register_buffer("whole", torch.randn(5, 80, 101).bfloat16(), persistent=False)
        self.register_buffer("part", self.whole[2:4])

    def forward(self, ids):
        return self.output(self.embedding(ids)) + self.transposed.sum(-1)[:300]


def test_a_moved_model_computes_equal_outputs_and_its_weights_stay_shared():
    model, ids = Model(), torch.arange(7)
    with torch.inference_mode():
        expected_output = model(ids)
        buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
        strides = {name: tensor.stride() for name, tensor in model.named_parameters()}
        whole_before_move = model.whole

        move_weights(model)

        torch.testing.assert_close(model(ids), expected_output, atol=0, rtol=0)
        for name, tensor in model.named_buffers():
            assert torch.equal(tensor, buffers[name])
        assert strides == {name: tensor.stride() for name, tensor in model.named_parameters()}
        assert model.whole is whole_before_move
        # Tensors that shared memory still share it: a change of one tensor changes the other one.
        model.embedding.weight[3] = 7.0
        model.whole[2] = 7.0
    assert (model.output.weight[3] == 7.0).all()
    assert (model.part[0] == 7.0).all()
    assert model.whole.is_inference()
    assert not model.embedding.weight.is_inference()


def test_a_tensor_outside_the_model_keeps_its_numbers():
    model = Model()
    outside_view = model.embedding.weight.detach()[2:]
    old_transposed = model.transposed.detach().clone()
    move_weights(model)
    assert torch.equal(outside_view, model.embedding.weight[2:])
    assert torch.equal(old_transposed, model.transposed)


def test_moved_weights_are_in_one_storage_and_aligned_to_64_bytes():
    model = Model()
    move_weights(model)
    moved = [model.embedding.weight, model.transposed, model.whole]
    assert len({tensor.untyped_storage().data_ptr() for tensor in moved}) == 1
    assert all(tensor.data_ptr() % 64 == 0 for tensor in moved)


@settings(deadline=None, max_examples=30)
@given(
    shape=st.lists(st.integers(1, 90), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
def test_zeros_are_aligned_and_zero_even_in_reused_memory(shape, dtype):
    for _ in range(2):
        tensor = zeros(shape, dtype)
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(1)


@pytest.mark.parametrize("lacks", ["the constant", "the kernel's support"])
def test_without_support_for_huge_pages_zeros_returns_ordinary_memory(monkeypatch, lacks):
    if lacks == "the constant":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 2**20, raising=False)
    assert not huge_pages.zeros((3 * 2**20,), torch.int8).any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="not Linux")
def test_large_memory_asks_the_system_for_huge_pages(monkeypatch):
    options = []

    class RecordingMmap(mmap.mmap):
        def madvise(self, option, *rest):
            options.append(option)
            return super().madvise(option, *rest)

    monkeypatch.setattr(mmap, "mmap", RecordingMmap)
    zeros((1000,), torch.int8)
    assert not options
    zeros((3 * 2**20,), torch.int8)
    assert options == [mmap.MADV_HUGEPAGE]
