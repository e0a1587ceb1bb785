"""Tests of embeddings that read packed weights, and of models that need the unpacked weight."""

import pytest
import torch
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.packed_embedding import (
    GroupedEmbedding,
    NativeEmbedding,
    pack_embedding,
)
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.linear.quantise_weights import quantise_linears
from nereid_backend.paths.compiled_forward.model_skeleton import (
    Skeleton,
    pack_skeleton,
    unpack_skeleton,
)
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 75,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
IDS = torch.tensor([[0, 74, 16, 15], [31, 32, 5, 5]])


def llama(dtype=torch.float32, *, tied=True):
    """Return a tiny model. If `tied` is true, the output layer and the embedding share a weight."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_embedding_reads_the_same_rows_from_the_packed_output_layer(dtype):
    model = llama(dtype)
    embedding = model.get_input_embeddings()
    expected_rows = embedding(IDS)
    prepack_linears(model, copy_shared=True)
    if not hasattr(model.lm_head, "packed"):
        pytest.skip("this machine has no kernel for packed weights")
    expected_logits = model(IDS).logits

    assert pack_embedding(model, lambda: True, can_round=False)

    assert isinstance(embedding, NativeEmbedding)
    assert torch.equal(embedding(IDS), expected_rows)
    assert torch.equal(model(IDS).logits, expected_logits)
    assert embedding.packed is model.lm_head.packed
    # The memory of the unpacked weight is freed.
    assert embedding.weight.untyped_storage().nbytes() < 8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_an_embedding_is_rounded_like_the_output_layer(tied, bits):
    model = llama(tied=tied)
    embedding = model.get_input_embeddings()
    original_rows = embedding(IDS)
    quantise_linears(model, bits)

    assert pack_embedding(model, lambda: True, can_round=True)

    assert isinstance(embedding, GroupedEmbedding)
    rows = embedding(IDS)
    assert rows.dtype == torch.float32
    # If the other layers have 4 bits, a tied embedding shares the 6-bit weight of the output layer.
    largest_integer = 31 if tied and bits == 4 else 127
    assert (rows - original_rows).abs().max() <= original_rows.abs().max() / largest_integer
    if tied:
        assert torch.equal(rows, model.lm_head.dequantised()[IDS])
    # The unpacked weight is a placeholder of NaN, so code that reads it gets a wrong result.
    assert embedding.weight.isnan().all()


def test_rows_of_four_bits_with_zeros_equal_the_dequantised_layer():
    torch.manual_seed(0)
    layer = torch.nn.Linear(37, 21, bias=False)
    quantise_linears(torch.nn.Sequential(layer), 4)
    assert isinstance(layer, GroupedLinear)
    embedding = GroupedEmbedding(21, 37)
    embedding.take_weight(layer)
    assert layer.zeros is not None
    assert torch.equal(embedding(torch.arange(21)), layer.dequantised())


def test_an_embedding_with_its_own_weight_stays_unchanged_unless_it_may_be_rounded():
    model = llama(tied=False)
    prepack_linears(model, copy_shared=True)
    assert not pack_embedding(model, lambda: True, can_round=False)
    assert type(model.get_input_embeddings()) is torch.nn.Embedding


def test_a_model_that_reads_the_weight_of_its_embedding_directly_stays_unchanged():
    model = llama()
    embedding = model.get_input_embeddings()
    weight = embedding.weight
    quantise_linears(model, 8)

    def gives_finite_numbers():
        """Use the embedding's weight directly, and return whether the result is finite.

        The weight of a packed embedding is NaN, so such a model cannot have a packed embedding.
        """
        return bool((embedding(IDS) + embedding.weight[IDS]).isfinite().all())

    assert not pack_embedding(model, gives_finite_numbers, can_round=True)
    assert type(embedding) is torch.nn.Embedding
    assert embedding.weight is weight
    assert not dict(embedding.named_buffers())
    assert model.lm_head.weight is weight


def test_a_class_that_scales_its_rows_keeps_the_scale_also_in_another_process():
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, head_dim=20, tie_word_embeddings=True)
    model = Gemma2ForCausalLM(config).eval()
    embedding = model.get_input_embeddings()
    original_rows = embedding(IDS)
    quantise_linears(model, 8)

    assert pack_embedding(model, lambda: True, can_round=True)

    # Gemma 2 multiplies the rows by the root of the hidden size.
    scale = SIZES["hidden_size"] ** 0.5
    expected_rows = model.lm_head.dequantised()[IDS] * scale
    torch.testing.assert_close(embedding(IDS), expected_rows)
    torch.testing.assert_close(embedding(IDS), original_rows, atol=scale / 100, rtol=0)

    # The skeleton of a model is the model without its weights. In another process, the embedding of
    # the skeleton has the same class and shape.
    copied_model = unpack_skeleton(pack_skeleton(Skeleton(model, "eager", False, 1))).model
    copied_embedding = copied_model.get_input_embeddings()
    class_name = "GroupedEmbeddingOfGemma2TextScaledWordEmbedding"
    assert type(copied_embedding).__name__ == type(embedding).__name__ == class_name
    assert copied_embedding(IDS).shape == expected_rows.shape
