# SPDX-License-Identifier: Apache-2.0
"""How long a request may be: what the model is exact for, and what the memory holds."""

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

_DEFAULT_CPU_SHARE = 0.25
_DEFAULT_CPU_BYTES = 4 * 2**30
# Without max_position_embeddings (position-free models), requests get at most this length.
_NO_MODEL_LIMIT = 2**17
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
_MOST_EMPTY_BLOCKS = 2**16


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """A longest sequence in tokens, and where it comes from."""

    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The KV cache's size, and what follows from it: the longest request, and how many run."""

    num_blocks: int
    max_model_len: int
    num_bytes: int
    max_num_seqs: int


def model_limit(config: PretrainedConfig, *, is_batched: bool = True) -> LengthLimit:
    """The longest sequence that is computed exactly.

    Besides the model's own length, some models change what they do for every token of a batch
    when the longest one passes a threshold, or count positions along the row; batches of those are
    exact below that threshold only.

    Args:
        config: the decoder's.
        is_batched: whether sequences share forward passes.
    """
    limits = [LengthLimit(_NO_MODEL_LIMIT, "the default for models without a limit")]
    for name in _LENGTHS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            limits = [LengthLimit(value, name)]
            break
    if not is_batched:
        return limits[0]
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic"):
            original = rope.get("original_max_position_embeddings")
            num_tokens = original if isinstance(original, int) else limits[0].num_tokens
            reason = f"original_max_position_embeddings of {kind} position embeddings, beyond which"
            limits.append(
                LengthLimit(num_tokens, f"{reason} one long request would change the others")
            )
    if getattr(config, "attn_temperature_tuning", None):
        scale = int(getattr(config, "floor_scale", None) or limits[0].num_tokens)
        limits.append(
            LengthLimit(scale, "floor_scale, beyond which the model counts positions in the batch")
        )
    return min(limits, key=lambda limit: limit.num_tokens)


def sparse_limit(config: PretrainedConfig) -> LengthLimit | None:
    """Up to which length a sparse attention looks at every token; None: there is none."""
    for name, factor in (("index_topk", None), ("index_topk_blocks", "index_block_size")):
        count = getattr(config, name, None)
        size = getattr(config, factor, None) if factor else 1
        if isinstance(count, int) and isinstance(size, int):
            return LengthLimit(count * size, f"{name} {count}" + (f" of {size}" if factor else ""))
    return None


def attention_window_of(layers: Sequence[LayerSpec]) -> AttentionWindow | None:
    """How far back a model with these attention layers looks; None: some see the beginning."""
    if not layers or any(layer.span.is_full for layer in layers):
        return None
    spans = dict.fromkeys(layer.span for layer in layers)
    return AttentionWindow(tuple((span.window, span.chunk) for span in spans))


def plan_memory(
    config: EngineConfig,
    bytes_per_token: int,
    bytes_per_sequence: int,
    limit: LengthLimit,
    num_bytes: int,
    most_blocks: int | None = None,
) -> MemoryPlan:
    """Divide memory into blocks.

    Args:
        config: the settings.
        bytes_per_token: what each token stores.
        bytes_per_sequence: what each running sequence keeps besides.
        limit: the model's longest sequence.
        num_bytes: memory for both.
        most_blocks: a sequence holds at most so many at once, however long; None: no such bound.

    Raises:
        ConfigError: the asked max_model_len is beyond the model or the memory, or nothing fits.
    """
    max_num_seqs = config.max_num_seqs
    if bytes_per_sequence:
        # States get at most half, or all of it where there is nothing else.
        share = num_bytes // 2 if bytes_per_token else num_bytes
        max_num_seqs = min(max_num_seqs, share // bytes_per_sequence)
        if max_num_seqs < 1:
            raise ConfigError(
                f"kv_cache_memory: {format_bytes(num_bytes)} do not hold one sequence's state of "
                f"{format_bytes(bytes_per_sequence)} beside its keys and values; raise it"
            )
        num_bytes -= max_num_seqs * bytes_per_sequence
    bytes_per_block = config.block_size * bytes_per_token
    if not bytes_per_block:
        # Blocks that hold nothing are only counted.
        max_model_len = _asked_len(config, limit) or limit.num_tokens
        num_blocks = min(max_num_seqs * -(-max_model_len // config.block_size), _MOST_EMPTY_BLOCKS)
        num_blocks = max(num_blocks, -(-max_model_len // config.block_size))
        return MemoryPlan(num_blocks, max_model_len, 0, max_num_seqs)
    # One block is kept aside as padding.
    num_blocks = num_bytes // bytes_per_block - 1
    fitting = max(0, num_blocks) * config.block_size
    if most_blocks is not None and num_blocks >= most_blocks:
        fitting = max(fitting, limit.num_tokens)
    asked = _asked_len(config, limit)
    if fitting < (asked or min(config.block_size, limit.num_tokens)):
        needed = -(-(asked or 1) // config.block_size)
        needed = (min(needed, most_blocks or needed) + 1) * bytes_per_block
        raise ConfigError(
            f"kv_cache_memory: {format_bytes(num_bytes)} holds {fitting} tokens; a max_model_len "
            f"of {asked or config.block_size} needs {format_bytes(needed)}; raise kv_cache_memory"
            + (" or lower max_model_len" if asked else "")
        )
    max_model_len = asked or min(limit.num_tokens, fitting)
    most = max_num_seqs * -(-max_model_len // config.block_size)
    num_blocks = min(num_blocks, most)
    return MemoryPlan(num_blocks, max_model_len, (num_blocks + 1) * bytes_per_block, max_num_seqs)


def _asked_len(config: EngineConfig, limit: LengthLimit) -> int | None:
    asked = config.max_model_len
    if asked is not None and asked > limit.num_tokens:
        raise ConfigError(
            f"max_model_len: must be at most {limit.num_tokens} ({limit.reason}), got {asked}"
        )
    return asked


def describe_memory(
    config: EngineConfig,
    memory: MemoryPlan,
    weights_bytes: int,
    activations: int | None,
    num_tokens: int,
    layers: Sequence[LayerSpec],
) -> str:
    """One line: where the memory goes, how much fits, and whether blocks come back early."""
    step = "an unknown size" if activations is None else format_bytes(activations)
    return (
        f"memory: weights {format_bytes(weights_bytes)}, a step of {num_tokens} tokens {step}, "
        f"KV cache {format_bytes(memory.num_bytes)} for {memory.num_blocks * config.block_size} "
        f"tokens; a request may have {memory.max_model_len}, {memory.max_num_seqs} run at once"
        + _describe_windows(layers)
    )


def _describe_windows(layers: Sequence[LayerSpec]) -> str:
    num_full = sum(layer.span.is_full for layer in layers)
    if num_full == len(layers):
        return ""
    if num_full:
        return (
            f"; {len(layers) - num_full} of {len(layers)} attention layers have windows, but "
            "blocks are kept to the end, because the others see everything"
        )
    return "; no layer sees everything, so blocks are given back as they leave the windows"


def kv_cache_budget(config: EngineConfig, device: torch.device, activations: int = 0) -> int:
    """Memory for the KV cache in bytes: what was asked for, else a share of what is free.

    Args:
        config: the settings.
        device: where the cache will be.
        activations: bytes that a step needs besides.

    Raises:
        ConfigError: more was asked for than there is.
    """
    if device.type == "cuda":
        # What loading left in torch's own store of freed memory is free as well.
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        usable = int(total * config.gpu_memory_utilization) - (total - free) - activations
    else:
        free = available_memory()
        usable = min(int(free * _DEFAULT_CPU_SHARE), _DEFAULT_CPU_BYTES)
    asked = config.kv_cache_bytes
    if asked is None:
        return max(0, usable)
    if asked > free:
        raise ConfigError(
            f"kv_cache_memory: {format_bytes(asked)} was asked for, but {format_bytes(free)} are "
            f"free on {device}; lower it"
        )
    return asked


def available_memory() -> int:
    """Main memory in bytes that this process could still take, its container's limit included."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = _read_number("memory.max"), _read_number("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def usable_cpus() -> int:
    """CPUs that this process may use, its container's quota included."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no such file, or "max": no quota
    return count


def format_bytes(count: int) -> str:
    """A size for people, as in "1.5 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _read_number(name: str) -> int | None:
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):
        return None


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, object]]:
    """The config's rope settings: one dict, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]
