# SPDX-License-Identifier: Apache-2.0
"""Determines the length limit of requests and the size of the KV cache."""

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from nereid_backend.attention.layers import LayerSpec
from nereid_backend.config import EngineConfig
from nereid_backend.core.window import AttentionWindow
from nereid_backend.errors import ConfigError

# By default, the KV cache on a CPU gets a quarter of the free memory, but at most 4 GiB.
_DEFAULT_CPU_SHARE = 0.25
_DEFAULT_CPU_BYTES = 4 * 2**30
# The share of the memory for blocks that snapshots of recurrent states get.
_SNAPSHOT_SHARE = 0.25
# On a GPU, a process also needs memory for the CUDA context and for the workspaces of libraries.
# torch's allocator does not report this memory, so its size is estimated.
_CONTEXT_BYTES = 512 * 2**20
# The length limit for models without position embeddings, whose config has no limit.
_NO_MODEL_LIMIT = 2**17
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
# The largest number of blocks for a model without a KV cache. The blocks of such a model contain no
# keys and values, but each block still needs an entry in the block pool.
_MAX_EMPTY_BLOCKS = 2**16


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The length limit of a sequence in tokens, and a clause that names its source."""

    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The size of the KV cache and the limits that follow from it.

    Attributes:
        num_blocks: the number of blocks.
        max_model_len: the length limit of a request in tokens.
        num_bytes: the memory of all blocks and of one padding block.
        max_num_seqs: the largest number of sequences that run at the same time.
        num_states: the number of recurrent states that fit into the memory; 0 if a sequence needs
            no memory outside of blocks.
    """

    num_blocks: int
    max_model_len: int
    num_bytes: int
    max_num_seqs: int
    num_states: int = 0


def model_limit(config: PretrainedConfig, *, is_batched: bool = True) -> LengthLimit:
    """Return the length up to which the logits of sequences are correct.

    The limit is usually the model's own limit, such as max_position_embeddings. Some models compute
    all tokens of a batch differently if the longest sequence exceeds a threshold. Other models
    count positions in the batch instead of the sequence. The logits of such batches are correct
    only below the threshold.

    Args:
        config: the config of the decoder.
        is_batched: whether several sequences share a forward pass.
    """
    own_limit = _own_limit(config)
    if not is_batched:
        return own_limit
    limits = [own_limit, *_rope_limits(config, own_limit)]
    if getattr(config, "attn_temperature_tuning", None):
        num_tokens = int(getattr(config, "floor_scale", None) or own_limit.num_tokens)
        reason = "floor_scale, because the model counts longer positions in the batch"
        limits.append(LengthLimit(num_tokens, reason))
    return min(limits, key=lambda limit: limit.num_tokens)


def _rope_limits(config: PretrainedConfig, own_limit: LengthLimit) -> list[LengthLimit]:
    """Return the length limits that follow from the rotary embeddings of a model.

    Some rotary embeddings depend on the longest sequence in a batch: if this sequence exceeds a
    threshold, the embeddings of all sequences change. The threshold is then a limit.
    """
    limits = []
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic"):
            original = rope.get("original_max_position_embeddings")
            num_tokens = original if isinstance(original, int) else own_limit.num_tokens
            reason = (
                f"original_max_position_embeddings of {kind} position embeddings, because a longer "
                "request would change the output of the other requests in its batch"
            )
            limits.append(LengthLimit(num_tokens, reason))
    return limits


def _own_limit(config: PretrainedConfig) -> LengthLimit:
    """Return the length limit in a model's config, or the default if the config has no limit."""
    for name in _LENGTH_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return LengthLimit(value, name)
    return LengthLimit(_NO_MODEL_LIMIT, "the default for models without a limit")


def sparse_limit(config: PretrainedConfig) -> LengthLimit | None:
    """Return the length up to which sparse attention attends to every token.

    Return None for a model without sparse attention. Examples: a model that selects 2048 tokens
    (index_topk 2048) attends to every token of a sequence of up to 2048 tokens. A model that
    selects 16 blocks of 64 tokens (index_topk_blocks 16, index_block_size 64) attends to every
    token of a sequence of up to 1024 tokens.
    """
    num_tokens = getattr(config, "index_topk", None)
    if isinstance(num_tokens, int):
        return LengthLimit(num_tokens, f"index_topk {num_tokens}")
    num_blocks = getattr(config, "index_topk_blocks", None)
    size = getattr(config, "index_block_size", None)
    if isinstance(num_blocks, int) and isinstance(size, int):
        return LengthLimit(num_blocks * size, f"index_topk_blocks {num_blocks} of {size}")
    return None


def attention_window_of(layers: Sequence[LayerSpec]) -> AttentionWindow | None:
    """Return the windows of the attention layers; None if a layer attends to all earlier tokens."""
    if not layers or any(layer.window.is_full for layer in layers):
        return None
    windows = dict.fromkeys(layer.window for layer in layers)
    return AttentionWindow(tuple((window.size, window.chunk) for window in windows))


def plan_memory(  # noqa: PLR0913 - the properties of the model, each given by name
    config: EngineConfig,
    bytes_per_token: int,
    bytes_per_sequence: int,
    limit: LengthLimit,
    num_bytes: int,
    max_sequence_blocks: int | None = None,
    *,
    has_snapshots: bool = False,
) -> MemoryPlan:
    """Divide the memory of the KV cache into blocks, and derive the limits of requests.

    Example: 10 MiB for a model that needs 32 KiB for each token are enough for 320 tokens, which
    are 20 blocks of 16 tokens. One block is used for padding, so num_blocks is 19. If the model's
    own limit is larger, max_model_len is 19 * 16 = 304.

    Args:
        config: the settings.
        bytes_per_token: the memory of one token in blocks.
        bytes_per_sequence: the memory of one running sequence outside of blocks, such as recurrent
            state.
        limit: the length limit of the model.
        num_bytes: the memory for blocks and sequences together.
        max_sequence_blocks: the largest number of blocks that one sequence uses at the same time,
            if an attention window limits that number. None means that the number grows with the
            sequence.
        has_snapshots: whether the prefix cache stores snapshots of recurrent states, which share
            the memory for states with the running sequences.

    Raises:
        ConfigError: if max_model_len exceeds the model's limit or the memory, or if the memory is
            too small for one sequence.
    """
    max_num_seqs = config.max_num_seqs
    if bytes_per_sequence:
        # The states of the sequences may use half of the memory, because blocks need the other
        # half. If the model stores nothing in blocks, the states may use all memory.
        share = num_bytes // 2 if bytes_per_token else num_bytes
        max_num_seqs = min(max_num_seqs, share // bytes_per_sequence)
        if max_num_seqs < 1:
            raise ConfigError(
                f"kv_cache_memory: {format_bytes(num_bytes)} is too little for one sequence, whose "
                f"state needs {format_bytes(bytes_per_sequence)} in addition to keys and values. "
                "Raise kv_cache_memory."
            )
        if not bytes_per_token:
            num_states = num_bytes // bytes_per_sequence
            return _plan_without_blocks(config, limit, max_num_seqs, num_states)
        num_bytes -= max_num_seqs * bytes_per_sequence
    if not bytes_per_token:
        return _plan_without_blocks(config, limit, max_num_seqs, 0)
    block_size = config.block_size
    bytes_per_block = block_size * bytes_per_token
    # One of the blocks is used for padding.
    num_blocks = num_bytes // bytes_per_block - 1
    # A sequence of this length fills all blocks.
    fitting_len = max(0, num_blocks) * block_size
    if max_sequence_blocks is not None and num_blocks >= max_sequence_blocks:
        fitting_len = max(fitting_len, limit.num_tokens)
    configured = _configured_len(config, limit)
    if fitting_len < (configured or min(block_size, limit.num_tokens)):
        num_needed = _num_blocks(configured or 1, block_size)
        if max_sequence_blocks is not None:
            num_needed = min(num_needed, max_sequence_blocks)
        raise ConfigError(
            f"kv_cache_memory: {format_bytes(num_bytes)} is enough for {fitting_len} tokens, but a "
            f"max_model_len of {configured or block_size} needs "
            f"{format_bytes((num_needed + 1) * bytes_per_block)}. Raise kv_cache_memory"
            + (" or lower max_model_len." if configured else ".")
        )
    max_model_len = configured or min(limit.num_tokens, fitting_len)
    blocks_per_sequence = _num_blocks(max_model_len, block_size)
    if has_snapshots:
        # Snapshots also need memory. They get a share of the memory for blocks. However, the
        # remaining blocks must be enough for one sequence of the largest length.
        spare_blocks = max(0, num_blocks - blocks_per_sequence)
        num_blocks -= min(int(num_blocks * _SNAPSHOT_SHARE), spare_blocks)
    # The cache gets no more blocks than all running sequences together can use.
    num_blocks = min(num_blocks, max_num_seqs * blocks_per_sequence)
    block_bytes = (num_blocks + 1) * bytes_per_block
    num_states = 0
    if bytes_per_sequence:
        num_states = max_num_seqs + (num_bytes - block_bytes) // bytes_per_sequence
    return MemoryPlan(num_blocks, max_model_len, block_bytes, max_num_seqs, num_states)


def _plan_without_blocks(
    config: EngineConfig, limit: LengthLimit, max_num_seqs: int, num_states: int
) -> MemoryPlan:
    """Return the memory plan for a model that stores no keys and values in blocks.

    The blocks of such a model only limit the number of running sequences. `num_states` states fit
    into the memory.
    """
    max_model_len = _configured_len(config, limit) or limit.num_tokens
    blocks_per_sequence = _num_blocks(max_model_len, config.block_size)
    num_blocks = min(max_num_seqs * blocks_per_sequence, _MAX_EMPTY_BLOCKS)
    num_blocks = max(num_blocks, blocks_per_sequence)
    return MemoryPlan(num_blocks, max_model_len, 0, max_num_seqs, num_states)


def _num_blocks(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks of a sequence. Example: 35 tokens need 3 blocks of 16 tokens."""
    return -(-num_tokens // block_size)


def _configured_len(config: EngineConfig, limit: LengthLimit) -> int | None:
    """Return the setting max_model_len; None if it is not set.

    Raises:
        ConfigError: if the setting exceeds the model's limit.
    """
    configured = config.max_model_len
    if configured is not None and configured > limit.num_tokens:
        raise ConfigError(
            f"max_model_len: the value must be at most {limit.num_tokens} ({limit.reason}), but it "
            f"is {configured}."
        )
    return configured


def describe_memory(
    config: EngineConfig,
    memory: MemoryPlan,
    weights_bytes: int,
    activations: int | None,
    num_tokens: int,
    layers: Sequence[LayerSpec],
) -> str:
    """Return a log line with the memory of the weights, of a step and of the KV cache.

    The line also contains the largest length of a request and the largest number of sequences.

    Args:
        config: the settings.
        memory: the size of the KV cache.
        weights_bytes: the memory of the weights in bytes.
        activations: the memory of the largest step in bytes; None if it is unknown.
        num_tokens: the largest number of tokens in one step.
        layers: the attention layers of the model.
    """
    step = "an unknown size" if activations is None else format_bytes(activations)
    return (
        f"memory: the weights need {format_bytes(weights_bytes)}, a step of {num_tokens} tokens "
        f"needs {step}, and the KV cache of {format_bytes(memory.num_bytes)} has space for "
        f"{memory.num_blocks * config.block_size} tokens. A request can have "
        f"{memory.max_model_len} tokens, and {memory.max_num_seqs} sequences can run at the same "
        "time." + _describe_windows(layers)
    )


def _describe_windows(layers: Sequence[LayerSpec]) -> str:
    """Return a sentence about the sliding windows of the layers; "" if there are none."""
    num_full = sum(layer.window.is_full for layer in layers)
    if num_full == len(layers):
        return ""
    if num_full:
        return (
            f" {len(layers) - num_full} of {len(layers)} attention layers have sliding windows, "
            "but no block is freed early, because the other layers attend to all tokens."
        )
    return " All layers have sliding windows, so blocks are freed when they leave the windows."


def kv_cache_budget(config: EngineConfig, device: torch.device, activations: int = 0) -> int:
    """Return the number of bytes for the KV cache.

    The number is the setting kv_cache_memory. Without this setting, it is a share of the memory.

    On a GPU, gpu_memory_utilization limits only the memory of this process. The processes of the
    embedding model and of the reranker have their own limits, and may be started before or after
    this process.

    Example: the share 0.9 of 80 GiB is 72 GiB. If the weights take 16 GiB, the context 0.5 GiB and
    a step 2 GiB, then 53.5 GiB remain for the KV cache.

    Args:
        config: the settings.
        device: the device of the cache.
        activations: the memory of one step in bytes.

    Raises:
        ConfigError: if kv_cache_memory is larger than the free memory.
    """
    if device.type == "cuda":
        free, usable = _gpu_memory(config, device, activations)
    else:
        free = available_memory()
        # The engine processes of data parallelism share the memory.
        usable = min(int(free * _DEFAULT_CPU_SHARE), _DEFAULT_CPU_BYTES)
        usable //= config.data_parallel_size
    configured = config.kv_cache_bytes
    if configured is None:
        return max(0, usable)
    if configured > free:
        raise ConfigError(
            f"kv_cache_memory: the value is {format_bytes(configured)}, but only "
            f"{format_bytes(free)} are free on {device}. Lower kv_cache_memory."
        )
    return configured


def _gpu_memory(config: EngineConfig, device: torch.device, activations: int) -> tuple[int, int]:
    """Return the free memory of a GPU, and the part that the KV cache may use, in bytes.

    Memory that torch cached during loading is released first, so that the GPU reports it as free.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_reserved(device) + _CONTEXT_BYTES
    share = int(total * config.gpu_memory_utilization)
    # A server without configured adapters rarely loads any, so nothing is reserved for them.
    reserved_for_adapters = config.lora_memory if config.lora_adapters else 0
    return free, min(share - used, free) - activations - reserved_for_adapters


def available_memory() -> int:
    """Return the free main memory in bytes, within the limit of the container."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit = _read_number("memory.max")
    used = _read_number("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, within the quota of the container."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # Without the file, or with the text "max", there is no quota.
    return count


def format_bytes(count: int) -> str:
    """Return a readable size. Example: `format_bytes(3 * 2**29)` returns "1.5 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _read_number(name: str) -> int | None:
    """Return the number in a file of /sys/fs/cgroup; None if the file contains no number."""
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):
        return None


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, object]]:
    """Return the dicts that describe the rotary embeddings in a config.

    A config contains one dict for all layers, or one dict for each type of layer.

    Example: {"full": {"rope_type": "default"}, "local": {"rope_type": "yarn"}} gives the two inner
    dicts, and {"rope_type": "yarn"} gives itself.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
