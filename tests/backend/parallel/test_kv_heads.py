"""Tests that several ranks compute the same KV head if a model has fewer KV heads than ranks."""

from copy import deepcopy

import pytest
import torch
from nereid_backend.parallel.kv_heads import keep_own_heads, numbers_of_kv_heads, replication_rules
from nereid_backend.parallel.process_group import Rank
from transformers import AutoConfig, AutoModelForCausalLM

HEAD_DIM = 8


def make_model(num_kv_heads):
    """Return a Qwen 2 model, whose layers `k_proj` and `v_proj` have biases."""
    config = AutoConfig.for_model(
        "qwen2",
        hidden_size=8 * HEAD_DIM,
        intermediate_size=16,
        num_attention_heads=8,
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=2,
        vocab_size=32,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("num_kv_heads", "size"), [(2, 2), (4, 2), (8, 4)])
def test_a_plan_that_divides_the_kv_heads_is_not_changed(num_kv_heads, size):
    model = make_model(num_kv_heads)
    assert numbers_of_kv_heads(model, model.tp_plan) == [num_kv_heads]
    assert replication_rules(model, model.tp_plan, size) == {}


@pytest.mark.parametrize(("num_kv_heads", "size"), [(1, 2), (1, 8), (2, 4), (2, 8), (4, 8)])
def test_each_rank_keeps_the_kv_head_of_its_query_heads(num_kv_heads, size):
    model = make_model(num_kv_heads)
    rules = replication_rules(model, model.tp_plan, size)
    assert set(rules) == {f"model.layers.*.self_attn.{name}_proj" for name in "kv"}
    num_queries_per_kv = 8 // num_kv_heads
    for number in range(size):
        part = deepcopy(model)
        keep_own_heads(part, rules, Rank(number, size, "cpu", "/store"))
        head = (number * 8 // size) // num_queries_per_kv
        own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        for layer, whole in zip(part.model.layers, model.model.layers, strict=True):
            for name in ("k_proj", "v_proj"):
                kept, all_heads = getattr(layer.self_attn, name), getattr(whole.self_attn, name)
                assert torch.equal(kept.weight, all_heads.weight[own])
                assert torch.equal(kept.bias, all_heads.bias[own])
                assert kept.out_features == HEAD_DIM


def test_layers_with_more_kv_heads_than_ranks_keep_several_heads():
    """The layers of a model can differ in their KV heads, but a rule applies to all layers."""
    model = make_model(2)
    model.model.layers[1] = make_model(8).model.layers[1]
    rules = replication_rules(model, model.tp_plan, 4)
    whole = model.model.layers[1].self_attn.k_proj.weight.clone()
    keep_own_heads(model, rules, Rank(3, 4, "cpu", "/store"))
    assert torch.equal(model.model.layers[1].self_attn.k_proj.weight, whole[6 * HEAD_DIM :])
    assert model.model.layers[0].self_attn.k_proj.out_features == HEAD_DIM
