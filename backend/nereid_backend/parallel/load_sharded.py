# SPDX-License-Identifier: Apache-2.0
"""Loads a model that is divided over several processes.

The ranks load and check their parts of the model at the same time. After that, only rank 0 runs the
scheduler and the sampler. In each forward pass, all ranks compute their parts at the same time:

    rank 0   plan, send | forward pass | sampling     (ShardedPath)
    rank n     receive  | forward pass |              (rank_process.py)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.config import EngineConfig
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import StepPlan
from nereid_backend.cpu_threads import usable_cpus
from nereid_backend.errors import UnsupportedModelError, first_line
from nereid_backend.load_checkpoint import Progress, choose_device, load_checkpoint
from nereid_backend.model.forward_path.choose_image_path import refuse_images
from nereid_backend.model.forward_path.choose_path import ChosenPath, ReferenceCache, check_variant
from nereid_backend.model.forward_path.path_spec import PathSpec
from nereid_backend.model.memory.memory_plan import kv_cache_budget
from nereid_backend.model.memory.weight_memory import form_that_fits
from nereid_backend.model.open_model import OpenedModel, StageClock
from nereid_backend.model.startup import Loaded, load
from nereid_backend.parallel.check_support import (
    check_checkpoint,
    check_settings,
    number_of_heads,
)
from nereid_backend.parallel.plan_messages import PlanEncoder
from nereid_backend.parallel.ranks import Ranks
from nereid_backend.parallel.shard import Shard, load_shard
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.step_runner import ForwardPath


class ShardedPath:
    """Runs a model that is divided among processes (ranks). Only rank 0 uses this class.

    `forward` sends each step to the other ranks. All ranks then compute their parts of the step at
    the same time.
    """

    def __init__(self, path: ForwardPath, ranks: Ranks) -> None:
        """Create an object that runs each forward pass on all ranks at the same time.

        `path` computes the part of the model that rank 0 has loaded. All ranks except rank 0 build
        forward paths for their own parts.
        """
        self._path = path
        self._ranks = ranks
        self._encoder = PlanEncoder()

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Run a forward pass on all ranks, and return the logits; see `ForwardPath.forward`.

        Raises:
            LostRankError: if a rank has ended or failed.
        """
        with self._ranks.computing():
            self._ranks.send("step", self._encoder.encode(plan))
            return self._path.forward(plan, sampled)

    def clear(self, sequence: Sequence) -> None:
        """Set the blocks of a sequence to zero on all ranks; see `ForwardPath.clear`."""
        self._ranks.send("clear", sequence.block_table)
        self._path.clear(sequence)


def load_sharded(
    config: EngineConfig, hook: AttentionHook, progress: Progress
) -> tuple[Loaded, Ranks]:
    """Load a model with tensor parallelism: several processes (ranks) compute the model together.

    This process is rank 0. It starts the processes of the other ranks, and loads its own part of
    the model.

    Args:
        config: the settings. tensor_parallel_size is larger than 1.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line of text at the start of each slow operation.

    Returns:
        The loaded model, and the processes of the other ranks. The caller must close the processes.

    Raises:
        ConfigError: if the machine or the model does not support the settings.
        ModelError: if the checkpoint is missing or broken, or its architecture is not supported.
        EngineError: if another rank has failed.
    """
    device = choose_device(config.device)
    check_settings(config, device)
    check_checkpoint(config)
    rank_config = _settings_of_one_rank(config, device)  # each rank gets a share of the memory
    # This process also loads the undivided model, to compare its logits with the logits of the
    # divided model. Raise a ConfigError if the whole model does not fit into the main memory.
    form_that_fits(rank_config, device)
    num_other_ranks = config.tensor_parallel_size - 1
    progress(f"tensor parallelism: starting {num_other_ranks} more processes")
    ranks = Ranks(rank_config, device)
    try:
        loaded = load(rank_config, hook, progress, open_model=partial(_open_sharded, ranks))
    except BaseException:
        ranks.close()
        raise
    return loaded, ranks


def _settings_of_one_rank(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Return the settings of a rank. Ranks are processes that together compute one model.

    Each rank gets an equal share of the setting kv_cache_memory. If num_threads is set, each rank
    has this number of threads. Otherwise, each rank gets an equal share of the CPUs. Rearranged
    weights and LoRA adapters are turned off, because they require undivided layers. CUDA graphs are
    turned off, because all ranks would have to replay a graph at the same time.
    """
    num_ranks = config.tensor_parallel_size
    kv_cache_bytes = config.kv_cache_bytes  # kv_cache_memory as a number; None if it is not set
    if kv_cache_bytes is not None:
        kv_cache_bytes = max(1, kv_cache_bytes // num_ranks)
    return replace(
        config,
        device=device.type,  # without a number, because each rank uses another GPU
        num_threads=config.num_threads or max(1, usable_cpus() // num_ranks),
        kv_cache_memory=kv_cache_bytes,
        prepack=False,
        cuda_graphs=False,
        lora_memory=0,
    )


def _open_sharded(
    ranks: Ranks, config: EngineConfig, hook: AttentionHook, progress: Progress, clock: StageClock
) -> OpenedModel:
    """Load rank 0's part of the model, and check the logits that the ranks compute together.

    Args:
        ranks: the processes of the other ranks. These processes load their parts at the same time.
        config: the settings of a rank, with its share of the CPUs and of the memory.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line of text at the start of each slow operation.
        clock: measures the stages of the start.

    Returns:
        Rank 0's part of the model and its forward path.
    """
    with ranks.loading():
        shard = load_shard(config, hook, ranks.rank, progress)
    clock.end("weights")
    checked_path = _check_logits(ranks, shard, config, hook, progress)
    clock.end("self-check")
    progress(_describe_heads(shard, ranks.rank.size))
    return OpenedModel(
        checkpoint=shard.checkpoint,
        chosen=checked_path,
        adaptable_layers={},  # LoRA adapters require undivided layers.
        images=refuse_images(
            shard.checkpoint.model.config,
            f"images cannot be combined with tensor_parallel_size={ranks.rank.size}.",
        ),
        # The engine calls this function with the memory of one step.
        cache_budget=partial(_agree_on_budget, ranks, config),
    )


def _check_logits(
    ranks: Ranks, shard: Shard, config: EngineConfig, hook: AttentionHook, progress: Progress
) -> ChosenPath:
    """Check that the divided model computes the same logits as the undivided model.

    Only one way to run a divided model exists: the forward path `packed` on every rank. Return this
    path with the results of the check.

    Args:
        ranks: the other processes that compute the divided model.
        shard: the part of the model that this process computes.
        config: the settings of a rank.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line about the check and about its result.

    Raises:
        UnsupportedModelError: if the logits differ.
    """
    checkpoint = shard.checkpoint
    spec = _sharded_spec(shard, ranks)
    progress("comparing the logits of the divided model with those of the undivided model")
    try:
        references = _references_of_undivided_model(config, hook, shard)
        chosen = check_variant(checkpoint, spec, references)
    except UnfitError as error:
        raise UnsupportedModelError(
            f"{checkpoint.architecture} cannot be combined with tensor_parallel_size="
            f'{ranks.rank.size}. The divided model requires the forward path "packed", but '
            f"{first_line(error)}. Set tensor_parallel_size=1."
        ) from error
    progress(f"path: {spec.name}, divided over {ranks.rank.size} processes.")
    return chosen


def _sharded_spec(shard: Shard, ranks: Ranks) -> PathSpec:
    """Return a description of the forward path that all ranks build and run at the same time."""

    def build_on_all_ranks(sizes: Sizes) -> ForwardPath:
        ranks.send("build", sizes)
        return ShardedPath(shard.spec.build(sizes), ranks)

    return replace(shard.spec, build=build_on_all_ranks)


def _references_of_undivided_model(
    config: EngineConfig, hook: AttentionHook, shard: Shard
) -> ReferenceCache:
    """Load the undivided model on the CPU, and compute its logits for test sequences.

    The logits of the divided model are later compared with these logits. `shard` is the part of the
    divided model that this process computes.

    Returns:
        The test sequences and their logits, which are cached for later calls of
        `ReferenceCache.get_for`.

    Raises:
        UnfitError: if the logits of the undivided model are not usable.
    """
    undivided = load_checkpoint(
        config.model,
        dtype=str(shard.checkpoint.model.dtype).removeprefix("torch."),  # such as "float32"
        device=torch.device("cpu"),
        attention=hook.name,
        progress=lambda _line: None,
        trust_remote_code=config.trust_remote_code,
    )
    references = ReferenceCache(undivided, config)
    # Compute the logits now and not when they are first needed, because all threads can be used
    # while the other ranks are idle. `get_for` caches the logits. `shard.spec` selects the test
    # sequences that the check of the divided model needs.
    with _more_threads():
        references.get_for(shard.spec)
    return references


@contextmanager
def _more_threads() -> Iterator[None]:
    """Until the context ends, let torch use all CPUs except one. The server needs this CPU.

    The other ranks must be idle meanwhile.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(num_threads, usable_cpus() - 1))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _agree_on_budget(ranks: Ranks, config: EngineConfig, step_bytes: int) -> int:
    """Let each rank compute the size of its KV cache. Return the size that all ranks can use.

    A rank is one of the processes that compute the model together. All ranks need the same number
    of blocks, so the rank with the least free memory determines the size. All sizes are in bytes.

    Args:
        ranks: the other ranks, which receive the message "budget".
        config: the settings of a rank.
        step_bytes: the memory that one step needs.
    """
    own_rank = ranks.rank
    # After this message, the other ranks compute their budgets and call `smallest`, too. The method
    # `smallest` exchanges the budgets of all ranks.
    ranks.send("budget", step_bytes)
    smallest = own_rank.smallest(kv_cache_budget(config, own_rank.device, step_bytes))
    if own_rank.device.type == "cpu" and config.kv_cache_bytes is None:
        # The budget is a share of the free main memory, which all ranks use together.
        return smallest // own_rank.size
    return smallest


def _describe_heads(shard: Shard, size: int) -> str:
    """Return a log line that reports how many attention heads each process computes.

    Example: "tensor parallelism: each of the 2 processes computes 1 KV head and 4 query heads in a
    layer. The following sizes are those of one process." If the attention layers have different
    numbers of heads, the numbers are separated by "or".
    """
    head_counts = {(layer.num_kv_heads, layer.num_heads) for layer in shard.spec.layers}
    descriptions = [
        f"{_count(num_kv_heads, 'KV head')} and {_count(num_query_heads, 'query head')}"
        for num_kv_heads, num_query_heads in sorted(head_counts)
    ]
    sentences = [
        f"tensor parallelism: each of the {size} processes computes {' or '.join(descriptions)} in "
        "a layer."
    ]
    if _has_undivided_layer(shard):
        sentences.append(
            "The plan of transformers does not divide all attention layers of this model."
        )
    sentences.append("The following sizes are those of one process.")
    return " ".join(sentences)


def _has_undivided_layer(shard: Shard) -> bool:
    """Return whether this process computes all query heads of an attention layer."""
    num_all_heads = number_of_heads(shard.checkpoint.text_config, "num_attention_heads")
    return any(layer.num_heads == num_all_heads for layer in shard.spec.layers)


def _count(number: int, noun: str) -> str:
    """Return a number with a noun. Example: "1 KV head" or "4 KV heads"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
