# SPDX-License-Identifier: Apache-2.0
"""Determines the size of the KV cache, and derives the limits of requests from this size."""

import gc
import math
from bisect import bisect_right
from dataclasses import dataclass

import torch

from nereid_backend.config import EngineConfig
from nereid_backend.core.blocks.window import AttentionWindow, max_sequence_blocks
from nereid_backend.errors import ConfigError
from nereid_backend.main_memory import available_memory, format_bytes
from nereid_backend.model.forward_path.length_limits import LengthLimit

# By default, the KV cache on a CPU gets a quarter of the free memory, but at most 4 GiB.
_DEFAULT_CPU_SHARE = 0.25
_DEFAULT_CPU_BYTES = 4 * 2**30
# The fraction of the KV cache's memory that is reserved for snapshots. A snapshot is a copy of the
# recurrent state of a sequence.
_SNAPSHOT_SHARE = 0.25
# On a GPU, a process also needs memory for the CUDA context and for the workspaces of libraries.
# torch's allocator does not report this memory, so its size is estimated.
_CONTEXT_BYTES = 512 * 2**20
# The largest number of blocks for a model without a KV cache. The blocks of such a model contain no
# keys and values, but each block still needs an entry in the block pool.
_MAX_EMPTY_BLOCKS = 2**16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The size of the KV cache, and the limits that follow from this size.

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


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The properties of KV cache blocks that determine how much memory a sequence needs.

    Attributes:
        bytes_per_token: the number of bytes that one token needs in a block. A block stores the
            keys and values of one group of layers; see core/blocks/window.py.
        block_size: tokens in one block.
        windows: the attention window of each group; None for full attention.
        max_step_tokens: the largest number of tokens of one sequence that a single step computes;
            None if a single step may compute all tokens of a sequence.
    """

    bytes_per_token: int
    block_size: int
    windows: tuple[AttentionWindow | None, ...] = (None,)
    max_step_tokens: int | None = None

    @property
    def num_bytes(self) -> int:
        """The memory of one block in bytes."""
        return self.bytes_per_token * self.block_size

    def num_sequence_blocks(self, num_tokens: int) -> int:
        """Return the peak number of blocks that a sequence of `num_tokens` tokens uses."""
        return max_sequence_blocks(self.windows, num_tokens, self.max_step_tokens, self.block_size)

    def longest_sequence(self, num_blocks: int, max_tokens: int) -> int:
        """Return the length of the longest sequence that fits into `num_blocks` blocks, in tokens.

        If a sequence of `max_tokens` tokens fits, the result is `max_tokens`. Otherwise, the result
        is a multiple of the block size. Example: 20 blocks of 16 tokens in a single group with full
        attention give 320 tokens.
        """
        # If every group has an attention window, the number of blocks of a sequence stops growing
        # at some length, so a sequence can have more than `num_blocks * block_size` tokens.
        if self.num_sequence_blocks(max_tokens) <= num_blocks:
            return max_tokens
        # A binary search is possible, because a longer sequence never needs fewer blocks.
        max_len = max(0, num_blocks) * self.block_size
        lengths = range(0, max_len + 1, self.block_size)  # in tokens, such as 0, 16, 32, ...
        num_fitting = bisect_right(lengths, num_blocks, key=self.num_sequence_blocks)
        return lengths[max(0, num_fitting - 1)]


def plan_memory(
    config: EngineConfig,
    block: BlockShape,
    bytes_per_sequence: int,
    limit: LengthLimit,
    num_bytes: int,
    *,
    has_snapshots: bool = False,
) -> MemoryPlan:
    """Divide the memory of the KV cache into blocks, and derive the limits of requests.

    Example: num_bytes is 10 MiB, and each token needs 32 KiB. The memory is enough for 320 tokens,
    or 20 blocks of 16 tokens. One block is used for padding, so num_blocks is 19. If the model's
    own limit is larger, max_model_len is 19 * 16 = 304.

    Args:
        config: the settings.
        block: the memory of a block, and the blocks that a sequence needs.
        bytes_per_sequence: the memory of one running sequence outside of blocks, such as recurrent
            state.
        limit: the length limit of the model.
        num_bytes: the memory for blocks and sequences together.
        has_snapshots: whether the prefix cache stores snapshots of recurrent states. Snapshots and
            running sequences share the memory for states.

    Raises:
        ConfigError: if max_model_len exceeds the model's limit or the memory, or if the memory is
            too small for one sequence.
    """
    has_blocks = block.num_bytes > 0
    max_num_seqs = config.max_num_seqs
    if bytes_per_sequence:
        max_num_seqs = _limit_by_states(
            max_num_seqs, bytes_per_sequence, num_bytes, has_blocks=has_blocks
        )
    if not has_blocks:
        num_states = num_bytes // bytes_per_sequence if bytes_per_sequence else 0
        return _plan_without_blocks(config, limit, max_num_seqs, num_states)
    bytes_for_blocks = num_bytes - max_num_seqs * bytes_per_sequence
    max_model_len = _longest_request(config, limit, bytes_for_blocks, block)
    num_blocks = _num_fitting_blocks(bytes_for_blocks, block)
    if has_snapshots:
        # A snapshot is a copy of the recurrent state of a sequence. The fraction `_SNAPSHOT_SHARE`
        # of the memory for blocks is reserved for snapshots. However, the remaining blocks must be
        # enough for one sequence of the largest length.
        spare_blocks = max(0, num_blocks - block.num_sequence_blocks(max_model_len))
        num_blocks -= min(int(num_blocks * _SNAPSHOT_SHARE), spare_blocks)
    # Limit the blocks to the number that all running sequences together can use. More blocks would
    # waste memory.
    blocks_per_sequence = _num_blocks(max_model_len, config.block_size) * len(block.windows)
    num_blocks = min(num_blocks, max_num_seqs * blocks_per_sequence)
    block_bytes = (num_blocks + 1) * block.num_bytes
    num_states = 0
    if bytes_per_sequence:
        # The blocks are allocated first. The remaining memory stores snapshots, which are copies of
        # the recurrent states of sequences.
        num_states = max_num_seqs + (bytes_for_blocks - block_bytes) // bytes_per_sequence
    return MemoryPlan(num_blocks, max_model_len, block_bytes, max_num_seqs, num_states)


def _limit_by_states(
    max_num_seqs: int, bytes_per_sequence: int, num_bytes: int, *, has_blocks: bool
) -> int:
    """Return the number of recurrent states that fit into the memory, at most `max_num_seqs`.

    A recurrent model stores one state for each sequence. The states may use half of the memory,
    because blocks need the other half. If the model stores nothing in blocks, the states may use
    all memory. Example: the memory is 10 MiB, a state needs 1 MiB, and the model also needs blocks.
    The result is at most 5.

    Raises:
        ConfigError: if the memory is too small for one state.
    """
    states_bytes = num_bytes // 2 if has_blocks else num_bytes
    num_states = states_bytes // bytes_per_sequence
    if num_states < 1:
        raise ConfigError(
            f"kv_cache_memory: {format_bytes(num_bytes)} is too little for one sequence, whose "
            f"state needs {format_bytes(bytes_per_sequence)} in addition to keys and values. "
            "Raise kv_cache_memory."
        )
    return min(max_num_seqs, num_states)


def _longest_request(
    config: EngineConfig, limit: LengthLimit, num_bytes: int, block: BlockShape
) -> int:
    """Return the largest number of tokens in a request.

    This is the setting max_model_len. If it is not set, it is the largest length that the model and
    the memory for blocks allow.

    Args:
        config: the settings.
        limit: the length limit of the model.
        num_bytes: the memory for blocks.
        block: the memory of a block, and the blocks that a sequence needs.

    Raises:
        ConfigError: if max_model_len exceeds the model's limit or the memory, or if the memory is
            too small for one block.
    """
    configured_len = _checked_max_model_len(config, limit)
    num_blocks = _num_fitting_blocks(num_bytes, block)
    fitting_len = block.longest_sequence(num_blocks, limit.num_tokens)
    if configured_len is not None:
        if fitting_len < configured_len:
            problem = _describe_shortage(num_bytes, fitting_len, configured_len, block)
            raise ConfigError(f"{problem} Raise kv_cache_memory or lower max_model_len.")
        return configured_len
    # If max_model_len is not set, any length is accepted. However, the memory must be enough for
    # one block of tokens, or for the model's limit if the limit is shorter than a block.
    smallest_len = min(config.block_size, limit.num_tokens)
    if fitting_len < smallest_len:
        problem = _describe_shortage(num_bytes, fitting_len, smallest_len, block)
        raise ConfigError(f"{problem} Raise kv_cache_memory.")
    return min(limit.num_tokens, fitting_len)


def _describe_shortage(
    num_bytes: int, fitting_len: int, required_len: int, block: BlockShape
) -> str:
    """Return a sentence that states how much memory requests of `required_len` tokens need.

    The available memory, `num_bytes`, is enough for `fitting_len` tokens.
    """
    # One additional block is allocated for the padding tokens in the inputs of a step.
    needed_bytes = (block.num_sequence_blocks(required_len) + 1) * block.num_bytes
    return (
        f"kv_cache_memory: {format_bytes(num_bytes)} is enough for {fitting_len} tokens, but a "
        f"max_model_len of {required_len} needs {format_bytes(needed_bytes)}."
    )


def _num_fitting_blocks(num_bytes: int, block: BlockShape) -> int:
    """Return how many blocks fit into `num_bytes` bytes in addition to one block for padding.

    The result is -1 if not even the block for padding fits.
    """
    return num_bytes // block.num_bytes - 1


def _plan_without_blocks(
    config: EngineConfig, limit: LengthLimit, max_num_seqs: int, num_states: int
) -> MemoryPlan:
    """Return the `MemoryPlan` of a model that stores no keys and values in blocks.

    The blocks of such a model need no memory, but the scheduler still assigns blocks to sequences.
    The number of blocks is enough for `max_num_seqs` sequences of the largest length, but at most
    `_MAX_EMPTY_BLOCKS`. If one sequence needs more blocks, the number is enough for one sequence.

    Args:
        config: the settings.
        limit: the length limit of the model.
        max_num_seqs: the largest number of running sequences.
        num_states: the number of recurrent states that fit into the memory.
    """
    max_model_len = _checked_max_model_len(config, limit) or limit.num_tokens
    blocks_per_sequence = _num_blocks(max_model_len, config.block_size)
    max_num_blocks = max(blocks_per_sequence, _MAX_EMPTY_BLOCKS)
    return MemoryPlan(
        num_blocks=min(max_num_seqs * blocks_per_sequence, max_num_blocks),
        max_model_len=max_model_len,
        num_bytes=0,
        max_num_seqs=max_num_seqs,
        num_states=num_states,
    )


def _num_blocks(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks of a sequence. Example: 35 tokens need 3 blocks of 16 tokens."""
    return math.ceil(num_tokens / block_size)


def _checked_max_model_len(config: EngineConfig, limit: LengthLimit) -> int | None:
    """Check the setting max_model_len, and return it; None if it is not set.

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
    memory: MemoryPlan,
    block: BlockShape,
    *,
    weights_bytes: int,
    step_bytes: int | None,
    max_step_tokens: int,
    windows_sentence: str,
) -> str:
    """Return a log line that says how much memory the weights, a step and the KV cache need.

    The line also contains the largest length of a request and the largest number of sequences.

    Args:
        memory: the size of the KV cache.
        block: the memory of a block, and the blocks that a sequence needs.
        weights_bytes: the memory of the weights.
        step_bytes: the memory of the largest step; None if this memory is unknown.
        max_step_tokens: the largest number of tokens in one step.
        windows_sentence: a sentence about the attention windows; "" if there are none.
    """
    step_size = "an unknown size" if step_bytes is None else format_bytes(step_bytes)
    # Every token is stored once for each group of attention layers, each time in a different block.
    # Therefore, the number of blocks is divided by the number of groups.
    num_cached_tokens = memory.num_blocks // len(block.windows) * block.block_size
    line = (
        f"memory: the weights need {format_bytes(weights_bytes)}, a step of {max_step_tokens} "
        f"tokens needs {step_size}, and the KV cache of {format_bytes(memory.num_bytes)} has space "
        f"for {num_cached_tokens} tokens. A request can have {memory.max_model_len} tokens, and "
        f"{memory.max_num_seqs} sequences can run at the same time."
    )
    return f"{line} {windows_sentence}" if windows_sentence else line


def kv_cache_budget(config: EngineConfig, device: torch.device, step_bytes: int = 0) -> int:
    """Return the number of bytes for the KV cache: the setting kv_cache_memory or a default.

    On a CPU, the default is a share of the free memory. On a GPU, it depends on
    gpu_memory_utilization. Example for a GPU: the share 0.9 of 80 GiB is 72 GiB. The weights take
    16 GiB, the CUDA context takes 0.5 GiB, and a step takes 2 GiB. The KV cache gets the remaining
    53.5 GiB.

    gpu_memory_utilization limits only the memory of this process. The processes of the embedding
    model and of the reranker have their own limits, and may start before or after this process.

    Args:
        config: the settings.
        device: the device of the cache.
        step_bytes: the memory of one step.

    Raises:
        ConfigError: if kv_cache_memory is larger than the free memory.
    """
    is_gpu = device.type == "cuda"
    free_bytes = _free_gpu_memory(device) if is_gpu else available_memory()
    configured_bytes = config.kv_cache_bytes
    if configured_bytes is not None:
        if configured_bytes > free_bytes:
            raise ConfigError(
                f"kv_cache_memory: the value is {format_bytes(configured_bytes)}, but only "
                f"{format_bytes(free_bytes)} are free on {device}. Lower kv_cache_memory."
            )
        return configured_bytes
    if is_gpu:
        return max(0, _default_gpu_bytes(config, device, free_bytes, step_bytes))
    shared_bytes = min(int(free_bytes * _DEFAULT_CPU_SHARE), _DEFAULT_CPU_BYTES)
    # With data parallelism, several engine processes share the memory equally.
    return shared_bytes // config.data_parallel_size


def _free_gpu_memory(device: torch.device) -> int:
    """Release memory that torch has cached on a GPU, and return the free memory in bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, _total_bytes = torch.cuda.mem_get_info(device)
    return free_bytes


def _default_gpu_bytes(
    config: EngineConfig, device: torch.device, free_bytes: int, step_bytes: int
) -> int:
    """Return the number of bytes that the KV cache gets on a GPU by default. It can be negative.

    gpu_memory_utilization limits the memory of this process. The KV cache gets what remains after
    the weights, one step (`step_bytes`) and the LoRA adapters. `free_bytes` is the memory
    that no process uses.
    """
    _, total_bytes = torch.cuda.mem_get_info(device)  # the caller has already read the free memory
    # torch reports only the memory of its own allocator. `_CONTEXT_BYTES` is an estimate of all
    # other GPU memory that this process uses: the CUDA context and the libraries.
    process_bytes = torch.cuda.memory_reserved(device) + _CONTEXT_BYTES
    process_limit = int(total_bytes * config.gpu_memory_utilization)
    available_bytes = min(process_limit - process_bytes, free_bytes)
    # If the settings contain no adapters, adapters are rarely loaded later, so no memory is
    # reserved for adapters.
    adapter_bytes = config.lora_memory if config.lora_adapters else 0
    return available_bytes - step_bytes - adapter_bytes
