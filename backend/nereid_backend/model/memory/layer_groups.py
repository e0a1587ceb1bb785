# SPDX-License-Identifier: Apache-2.0
"""Divides the attention layers of a model into groups, so that unneeded blocks can be freed.

A block belongs to one group of layers. A block before an attention window is freed only if every
layer of its group has a window. Layers with full attention and layers with windows therefore belong
to different groups. All blocks come from one pool, so every block has the same number of places for
layers. Example of a model with 4 layers with full attention (F) and 22 layers with a window (W):

    4 places in a block   F F F F | W W W W | ... | W W . .     1 group F, 6 groups W
    2 places in a block   F F | F F | W W | ... | W W           2 groups F, 11 groups W
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from nereid_backend.attention.layers import (
    LayerGroups,
    LayerSpec,
    LayerWindow,
    attention_window_of,
    single_group,
)
from nereid_backend.config import EngineConfig
from nereid_backend.core.blocks.window import max_sequence_blocks
from nereid_backend.model.forward_path.path_spec import PathSpec
from nereid_backend.model.memory.memory_plan import BlockShape

# Each group of layers has its own block table for every sequence. Each block table costs time in
# every forward pass.
_MAX_GROUPS = 16
# Fewer groups of layers are preferred. More groups are used only if they save at least the fraction
# `_MIN_SAVED_SHARE` of the memory.
_MIN_SAVED_SHARE = 0.05


def choose_layer_groups(
    config: EngineConfig,
    spec: PathSpec,
    device: torch.device,
    max_model_len: int,
    max_step_tokens: int,
) -> tuple[LayerGroups, str]:
    """Divide the attention layers into groups if this saves memory.

    A block of the KV cache belongs to one group of layers. If all layers of a group have a sliding
    window, blocks before the window can be freed.

    Args:
        config: the settings.
        spec: the forward path of the model.
        device: the device of the KV cache.
        max_model_len: the largest number of tokens in a request.
        max_step_tokens: the largest number of tokens in a step.

    Returns:
        The groups, and a clause that says why all layers form a single group; "" if there are
        several groups.
    """
    reason = _reason_for_one_group(config, spec, device)
    if reason is not None:
        return single_group(spec.layers), reason
    groups = divide_layers(spec.layers, max_model_len, max_step_tokens, config.block_size)
    if len(groups.windows) > 1:  # `windows` contains one attention window for each group
        return groups, ""
    return groups, f"groups would save little memory for requests of {max_model_len} tokens"


def describe_windows(layers: Sequence[LayerSpec], groups: LayerGroups, reason: str) -> str:
    """Return a sentence about the attention windows of the layers; "" if no layer has a window.

    Args:
        layers: the attention layers.
        groups: the groups of the layers. Only a group in which all layers have a window can free
            blocks before the windows.
        reason: a clause that says why there is only one group; "" if there are several groups.
    """
    num_windows = sum(not layer.window.is_full for layer in layers)
    if num_windows == 0:
        return ""
    if num_windows == len(layers):
        return "All layers have sliding windows, so blocks are freed when they leave the windows."
    count = f"{num_windows} of {len(layers)} attention layers have sliding windows"
    if reason:
        return f"{count}, but no block is freed early, because {reason}."
    return (
        f"{count}. The layers form {len(groups.windows)} groups with {groups.num_places} layers "
        "each, and the blocks of the layers with windows are freed when they leave the windows."
    )


def block_shape(
    config: EngineConfig,
    spec: PathSpec,
    groups: LayerGroups,
    dtype: torch.dtype,
    max_step_tokens: int,
    draft_bytes: int,
) -> BlockShape:
    """Return the properties of KV cache blocks that determine how much memory a sequence needs.

    A block stores the keys and values of `block_size` tokens for one group of layers.

    Args:
        config: the settings.
        spec: the forward path of the model.
        groups: the groups of the attention layers.
        dtype: the data type of the model.
        max_step_tokens: the largest number of tokens in a step.
        draft_bytes: the memory of one token in the cache of the draft model, which shares the
            memory of the KV cache.
    """
    if config.kv_cache_dtype == "auto":
        itemsize = dtype.itemsize
        scale_bytes = 0
    else:
        # The cache stores 8-bit numbers. Each key vector and each value vector also has one float32
        # scale.
        itemsize = torch.int8.itemsize
        scale_bytes = torch.float32.itemsize
    # A block has one memory area for each layer of its group. The size of a block is the sum of the
    # sizes of these areas.
    area_bytes = [
        layer.bytes_per_token(itemsize, scale_bytes)
        for layer in _one_layer_per_memory_area(spec.layers, groups)
    ]
    return BlockShape(
        bytes_per_token=spec.bytes_per_token + sum(area_bytes) + draft_bytes,
        block_size=config.block_size,
        windows=groups.windows,
        # If a prompt is computed in one pass, all its blocks are needed at the same time.
        max_step_tokens=None if spec.whole_prefill else max_step_tokens,
    )


def _one_layer_per_memory_area(layers: Sequence[LayerSpec], groups: LayerGroups) -> list[LayerSpec]:
    """For each memory area of a KV cache block, return one of the layers that use this area.

    A block belongs to one group of layers. In its blocks, each group stores its first layer in the
    first area, its second layer in the second area, and so on. Example: the groups are [a, b] and
    [c, d]. a and c use the first area of a block, and b and d use the second area. The result has
    one layer for each area: [c, d].
    """
    layer_at_place: dict[int, LayerSpec] = {}
    for layer, (_group, place) in zip(layers, groups.places, strict=True):
        layer_at_place[place] = layer
    return list(layer_at_place.values())


def _reason_for_one_group(config: EngineConfig, spec: PathSpec, device: torch.device) -> str | None:
    """Return why all attention layers must form one group, or None if they can be divided.

    Each group of attention layers has its own block table for every sequence. Not every part of the
    engine supports several block tables.
    """
    if len({layer.window for layer in spec.layers}) < 2:
        return "all layers attend to the same tokens"
    if spec.name not in ("packed", "rows"):
        return f"the forward path {spec.name} reads one block table for each sequence"
    if spec.whole_prefill:
        return "a prompt that is computed in one pass needs all its blocks at the same time"
    if spec.bytes_per_token:
        return "the model also stores data for each token outside of blocks"
    if device.type != "cpu":
        return "the kernels for GPUs and CUDA graphs read one block table for each sequence"
    if config.tensor_parallel_size > 1:
        return "the messages of tensor parallelism contain one block table for each sequence"
    if config.prefix_cache_disk is not None:
        return "the prefix cache on disk reads one block table for each sequence"
    if config.draft_model is not None or config.speculative_method == "mtp":
        return "the memory of the draft model is planned for one block table for each sequence"
    cache_sizes = {(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in spec.layers}
    if len(cache_sizes) > 1:
        return "the layers have keys or values of different sizes"
    return None


def divide_layers(
    layers: Sequence[LayerSpec], max_model_len: int, max_step_tokens: int, block_size: int
) -> LayerGroups:
    """Divide the attention layers into groups, so that the longest request needs little memory.

    A group has a block table for each sequence. A block has places for the keys and values of one
    group's layers, and all blocks have the same number of places. Few groups are preferred, because
    each block table costs time.

    Example: 10 layers have full attention, 52 layers have a window of 1024 tokens, and the longest
    request has 131072 tokens. With 10 places in a block, there are one group with full attention
    and 6 groups with a window. Divisions into more groups would save less than 5 %.

    Args:
        layers: the attention layers, whose keys and values have the same sizes.
        max_model_len: the largest number of tokens in a request.
        max_step_tokens: the largest number of tokens in a step.
        block_size: tokens in one block.
    """
    # The first candidate is a single group of all layers. If the layers have different windows, the
    # group keeps a block until no layer needs the block any more.
    candidates = [single_group(layers)]
    # Larger groups mean fewer groups. Begin with the largest groups, so that `candidates` is sorted
    # by the number of groups.
    for max_group_len in range(len(layers), 0, -1):
        groups = _group_by_window(layers, max_group_len)
        if len(groups.windows) <= _MAX_GROUPS:
            candidates.append(groups)
    # A candidate is a division of the layers into groups. For each candidate, the cost is the
    # memory that the longest request needs. The unit is the memory of one layer in one block.
    costs = [
        groups.num_places
        * max_sequence_blocks(groups.windows, max_model_len, max_step_tokens, block_size)
        for groups in candidates
    ]
    max_cost = (1 + _MIN_SAVED_SHARE) * min(costs)
    # Return the first division whose cost is low enough. No later division has fewer groups.
    return next(groups for groups, cost in zip(candidates, costs, strict=True) if cost <= max_cost)


def _group_by_window(layers: Sequence[LayerSpec], max_group_len: int) -> LayerGroups:
    """Divide attention layers into groups. All layers of one group have the same attention window.

    The layers with one window are divided into groups of nearly equal size. A group has at most
    `max_group_len` layers, because a block has places for only this number of layers. The groups
    with full attention come first. Example: max_group_len is 2, 2 layers have full attention, and 5
    layers have a window. The first group contains the 2 layers with full attention. The other
    groups contain 1, 2 and 2 layers with the window.
    """
    layers_by_window: dict[LayerWindow, list[int]] = {}
    for layer_index, layer in enumerate(layers):
        layers_by_window.setdefault(layer.window, []).append(layer_index)
    full_first = sorted(layers_by_window, key=lambda window: not window.is_full)
    groups = [
        group
        for window in full_first
        for group in _equal_parts(layers_by_window[window], max_group_len)
    ]
    # Each item is the pair of the layer's group and the layer's position in this group.
    places = [(0, 0)] * len(layers)
    for group_index, group in enumerate(groups):
        for position, layer_index in enumerate(group):
            places[layer_index] = (group_index, position)
    return LayerGroups(
        # All layers of a group have the same window. Convert this window to the type that the block
        # tables use.
        windows=tuple(attention_window_of([layers[index] for index in group]) for group in groups),
        places=tuple(places),
    )


def _equal_parts(items: list[int], max_len: int) -> list[list[int]]:
    """Divide a list into the fewest nearly equal parts that have at most `max_len` items each.

    Example: the items [1, 2, 3, 4, 5] and max_len 2 give [[1], [2, 3], [4, 5]].
    """
    num_parts = math.ceil(len(items) / max_len)
    bounds = [len(items) * part // num_parts for part in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
