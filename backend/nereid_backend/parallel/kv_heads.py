# SPDX-License-Identifier: Apache-2.0
"""Divides the KV heads of a model among the ranks, even if there are fewer KV heads than ranks.

transformers divides the rows of the layers k_proj and v_proj into equal parts. If there are fewer
KV heads than ranks, each part would be smaller than a head. In this case, each rank loads the whole
layers and keeps only the rows of one KV head. Several ranks then compute the same KV head.

Example with 8 query heads, 2 KV heads and 4 ranks:

    rank            0      1      2      3
    query heads     0, 1   2, 3   4, 5   6, 7
    KV head         0      0      1      1
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from nereid_backend.parallel.process_group import Rank

# The value in the tensor parallel plan for a layer that is not divided. Every rank has all weights
# of such a layer.
_REPLICATE = "replicate"


def numbers_of_kv_heads(model: PreTrainedModel, plan: Mapping[str, str]) -> list[int]:
    """Return the distinct numbers of KV heads of the attention layers, in ascending order.

    Example: if some layers have 8 KV heads and all others have 2, the result is [2, 8]. Attention
    layers whose layer k_proj is not divided by `plan` are ignored.
    """
    layers = _attention_layers_with_style(model, plan, "colwise")
    return sorted({_num_kv_heads(attention) for _, attention in layers})


def replication_rules(model: PreTrainedModel, plan: Mapping[str, str], size: int) -> dict[str, str]:
    """Return the changes to the plan of a model that has fewer KV heads than there are ranks.

    A plan tells transformers how to divide each layer among the ranks (processes). With these
    changes, each rank loads the whole layers k_proj and v_proj, which compute the KV heads.
    `keep_own_heads` then deletes the heads of other ranks. Each number of KV heads must be a
    multiple or a divisor of the number of ranks.

    Args:
        model: the model without weights (on the device "meta").
        plan: maps the names of layers to styles of division.
        size: the number of ranks.

    Returns:
        The entries of `plan` to replace; empty if each number of KV heads is a multiple of `size`.
        Example for 2 KV heads and 4 ranks: {"model.layers.*.self_attn.k_proj": "replicate",
        "model.layers.*.self_attn.v_proj": "replicate"}.
    """
    has_enough_heads = all(count % size == 0 for count in numbers_of_kv_heads(model, plan))
    if has_enough_heads:
        return {}
    rules = {}
    for attention_name, attention in _attention_layers_with_style(model, plan, "colwise"):
        for projection_name in _projections(attention):
            rule = replace_layer_number_by_wildcard(f"{attention_name}.{projection_name}")
            rules[rule] = _REPLICATE
    return rules


def keep_own_heads(model: PreTrainedModel, rules: Mapping[str, str], rank: Rank) -> None:
    """In the layers k_proj and v_proj, delete the rows of KV heads that belong to other ranks.

    Example: a layer k_proj has 256 rows for 2 KV heads. Of 4 ranks, the ranks 0 and 1 keep the rows
    0 to 127, and the ranks 2 and 3 keep the rows 128 to 255.

    Args:
        model: the loaded model.
        rules: the result of `replication_rules`. If it is empty, nothing is deleted.
        rank: this process.

    Mutates: the layers k_proj and v_proj of `model`.
    """
    # If `rules` contains the style "replicate" for a layer, every rank has loaded the whole layer.
    for _, attention in _attention_layers_with_style(model, rules, _REPLICATE):
        num_heads = _num_kv_heads(attention)
        # Examples: with 2 heads and 4 ranks, the ranks 0 and 1 have head 0, and the ranks 2 and 3
        # have head 1. With 4 heads and 2 ranks, rank 0 has the heads 0 and 1, and rank 1 has the
        # heads 2 and 3.
        first_own_head = rank.number * num_heads // rank.size
        num_own_heads = max(1, num_heads // rank.size)
        for layer in _projections(attention).values():
            head_rows = layer.out_features // num_heads
            _keep_rows(layer, first_own_head * head_rows, num_own_heads * head_rows)


def _keep_rows(layer: nn.Linear, start: int, num_rows: int) -> None:
    """Delete all rows of a layer's weight and bias, except `num_rows` rows from `start` on.

    Mutates: `layer`.
    """
    for name, parameter in list(layer.named_parameters(recurse=False)):
        # Without `clone`, the deleted rows would stay in memory.
        kept_rows = parameter.detach()[start : start + num_rows].clone()
        setattr(layer, name, nn.Parameter(kept_rows, requires_grad=False))
    layer.out_features = num_rows


def _attention_layers_with_style(
    model: PreTrainedModel, plan: Mapping[str, str], style: str
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the attention layers (name, module) whose k_proj has the value `style` in `plan`.

    The style determines how k_proj, which computes the KV heads, is divided among the ranks:
    "colwise" divides its outputs, and "replicate" does not divide the layer.
    """
    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "k_proj", None), nn.Linear):
            rule = replace_layer_number_by_wildcard(f"{name}.k_proj")
            if plan.get(rule) == style:
                yield name, layer


def _projections(attention: nn.Module) -> dict[str, nn.Linear]:
    """Return a dict with the layers k_proj and v_proj of an attention layer. The keys are names.

    Some models have no layer v_proj, because their values are equal to their keys.
    """
    layers = {name: getattr(attention, name, None) for name in ("k_proj", "v_proj")}
    return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}


def _num_kv_heads(attention: nn.Module) -> int:
    """Return the number of KV heads of an attention layer that is not divided."""
    key_layer: Any = attention.k_proj
    head_dim: Any = attention.head_dim
    return int(key_layer.out_features // head_dim)
