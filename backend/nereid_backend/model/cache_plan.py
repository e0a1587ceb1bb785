# SPDX-License-Identifier: Apache-2.0
"""Determines the number and the sizes of the KV cache blocks before the cache is allocated."""

from dataclasses import dataclass

from nereid_backend.attention.layers import LayerGroups
from nereid_backend.config import EngineConfig
from nereid_backend.load_checkpoint import Progress
from nereid_backend.model.memory.activation_memory import measure_activations
from nereid_backend.model.memory.layer_groups import (
    block_shape,
    choose_layer_groups,
    describe_windows,
)
from nereid_backend.model.memory.memory_plan import (
    BlockShape,
    MemoryPlan,
    describe_memory,
    plan_memory,
)
from nereid_backend.model.open_model import OpenedModel


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The sizes that are determined before the KV cache is allocated.

    Attributes:
        memory: the size of the KV cache, and the limits that follow from this size.
        groups: the groups of the attention layers.
        block: the memory of a block, and the blocks that a sequence needs.
        windows_sentence: a sentence about the attention windows for the log; "" if there are none.
        step_bytes: the memory of the largest step in bytes; 0 if it is unknown.
    """

    memory: MemoryPlan
    groups: LayerGroups
    block: BlockShape
    windows_sentence: str
    step_bytes: int


def plan_cache(
    config: EngineConfig, opened: OpenedModel, num_tokens: int, draft_bytes: int, progress: Progress
) -> CachePlan:
    """Measure the memory of a forward pass, and divide the remaining memory into blocks.

    Args:
        config: the settings.
        opened: the model and its forward path.
        num_tokens: the largest number of tokens in one step.
        draft_bytes: the memory of one token in the cache of the draft model.
        progress: called with one line about the memory.
    """
    measured_bytes = _measure_step(config, opened, num_tokens)  # None if it cannot be measured
    plan = _divide_memory(config, opened, num_tokens, draft_bytes, step_bytes=measured_bytes or 0)
    report = describe_memory(
        plan.memory,
        plan.block,
        weights_bytes=opened.checkpoint.weights_bytes,
        step_bytes=measured_bytes,
        max_step_tokens=num_tokens,
        windows_sentence=plan.windows_sentence,
    )
    progress(report)
    return plan


def _divide_memory(
    config: EngineConfig, opened: OpenedModel, num_tokens: int, draft_bytes: int, *, step_bytes: int
) -> CachePlan:
    """Determine the number of KV cache blocks that fit into the memory.

    The KV cache gets the memory that remains after the weights and one forward pass. The result is
    computed in three stages: the attention layers are divided into groups, the groups determine the
    memory of one block, and the available memory is divided into blocks of this size.

    Args:
        config: the settings.
        opened: the model and its forward path.
        num_tokens: the largest number of tokens in one step.
        draft_bytes: the memory of one token in the cache of the draft model.
        step_bytes: the memory of the largest step; 0 if it is unknown.
    """
    checkpoint, spec, limit = opened.checkpoint, opened.chosen.spec, opened.chosen.limit
    # The KV cache also limits the length of a request, but its size is not known yet. Here, the
    # limit is that of the settings or of the model.
    max_model_len = config.max_model_len or limit.num_tokens
    groups, reason_for_one_group = choose_layer_groups(
        config, spec, checkpoint.device, max_model_len, num_tokens
    )
    block = block_shape(config, spec, groups, checkpoint.model.dtype, num_tokens, draft_bytes)
    cache_bytes = opened.cache_budget(step_bytes)
    memory = plan_memory(
        config,
        block,
        bytes_per_sequence=spec.bytes_per_sequence,
        limit=limit,
        num_bytes=cache_bytes,
        has_snapshots=spec.has_snapshots and config.enable_prefix_caching,
    )
    windows_sentence = describe_windows(spec.layers, groups, reason_for_one_group)
    return CachePlan(memory, groups, block, windows_sentence, step_bytes)


def _measure_step(config: EngineConfig, opened: OpenedModel, num_tokens: int) -> int | None:
    """Return how many bytes a forward pass over `num_tokens` tokens needs; None if unknown.

    The measured step computes a text, so the memory of a model that needs images is unknown.
    """
    if opened.images.needs_images:
        return None
    return measure_activations(
        opened.checkpoint,
        opened.chosen.spec,
        num_tokens=min(num_tokens, opened.chosen.limit.num_tokens),
        num_seqs=config.max_num_seqs,
        block_size=config.block_size,
    )
