# SPDX-License-Identifier: Apache-2.0
"""Loads a model and prepares the engine for the first forward pass.

The stages are:

    weights -> forward path -> KV cache -> compiled forward pass and CUDA graphs -> runner
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from nereid_backend.attention.choose_backend import attention_name
from nereid_backend.attention.layers import LayerGroups
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.checkpoints.checkpoint_folder import checkpoint_folder
from nereid_backend.config import EngineConfig
from nereid_backend.core.adapter import Adapter
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.outputs import EngineInfo
from nereid_backend.cpu_threads import CpuThreads, set_cpu_threads
from nereid_backend.draft_model import DraftModel
from nereid_backend.errors import UnsupportedModelError
from nereid_backend.load_checkpoint import Checkpoint, Progress, choose_device
from nereid_backend.lora.adapter_store import AdapterStore
from nereid_backend.lora.peft_files import LayerSizes
from nereid_backend.model.accelerate_path import (
    CompileTarget,
    GraphSetup,
    compile_or_fuse_norms,
    use_decode_graphs,
    use_fastest_attention,
)
from nereid_backend.model.activation_memory import measure_activations
from nereid_backend.model.adaptable_layers import find_adaptable_layers
from nereid_backend.model.choose_image_path import ImageSupport, choose_image_path
from nereid_backend.model.choose_path import ChosenPath, choose_path
from nereid_backend.model.compiled_forward_swap import ForwardSwap, use_fast_forward
from nereid_backend.model.images_only import choose_images_only
from nereid_backend.model.layer_groups import block_shape, choose_layer_groups, describe_windows
from nereid_backend.model.load_draft import check_draft_folder, open_draft
from nereid_backend.model.load_mtp import open_mtp
from nereid_backend.model.load_weights import load_weights
from nereid_backend.model.memory_plan import (
    BlockShape,
    MemoryPlan,
    describe_memory,
    kv_cache_budget,
    plan_memory,
)
from nereid_backend.model.path_variants import PathSpec, cache_class
from nereid_backend.paths.compiled_forward.load_library import CompiledForward
from nereid_backend.paths.model_call import Sizes
from nereid_backend.sampling import gpu_sampling
from nereid_backend.step_runner import ForwardPath, Runner
from nereid_backend.vision.image_tensors import place_images

# The default limit on the number of tokens in one step. It is large enough for fast matrix
# products. Longer steps would only make running requests wait longer.
_CPU_TOKENS, _GPU_TOKENS = 512, 4096


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model, and the object that runs the model for requests.

    Attributes:
        runner: runs the steps.
        info: the description of the model and of its configuration.
        spec: the description of the forward path of the model.
        groups: the groups of the attention layers, each of which has its own block tables.
        num_states: the number of recurrent states that fit into the memory; 0 if the model has no
            snapshots of its states.
        path: the forward path of the model.
        make_adapter_store: creates the store of LoRA adapters. The argument is a function that
            returns the adapters of all unfinished requests.
        images: how the model processes prompts with images.
        place_images: moves the images of a prompt to the device of the model.
        swap: the compilation that runs in the background; None if there is none.
        draft: the draft model; None if there is none.
    """

    runner: Runner
    info: EngineInfo
    spec: PathSpec
    groups: LayerGroups
    num_states: int
    path: ForwardPath
    make_adapter_store: Callable[[Callable[[], set[Adapter]]], AdapterStore]
    images: ImageSupport
    place_images: Callable[[ImageInputs], ImageInputs]
    swap: ForwardSwap | None
    draft: DraftModel | None


class StageClock:
    """Measures how long each stage of loading takes.

    Attributes:
        seconds: the duration of each finished stage in seconds, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage_start = time.monotonic()

    def end(self, stage: str) -> None:
        """Record the duration of `stage`, and start to measure the next stage."""
        now = time.monotonic()
        self.seconds[stage] = now - self._stage_start
        self._stage_start = now


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose weights are loaded, and the way in which the engine runs the model.

    Attributes:
        checkpoint: the model.
        chosen: the forward path.
        adaptable_layers: the linear layers that LoRA adapters can change, by name.
        images: how the model processes prompts with images.
        cache_budget: returns the memory for the KV cache in bytes. The argument is the memory of
            one step in bytes.
    """

    checkpoint: Checkpoint
    chosen: ChosenPath
    adaptable_layers: dict[str, LayerSizes]
    images: ImageSupport
    cache_budget: Callable[[int], int]


OpenModel = Callable[[EngineConfig, AttentionHook, Progress, StageClock], OpenedModel]


def open_model(
    config: EngineConfig, hook: AttentionHook, progress: Progress, clock: StageClock
) -> OpenedModel:
    """Read the weights of a model, and choose how the model processes texts and images.

    Args:
        config: the settings.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line for each slow operation.
        clock: measures the duration of each stage of loading.
    """
    device = choose_device(config.device)
    checkpoint = load_weights(config, device, hook, progress)
    adaptable_layers = find_adaptable_layers(checkpoint) if config.lora_memory else {}
    clock.end("weights")
    progress("comparing the logits of the engine with those of the unmodified model")
    chosen, images = _choose_paths(config, checkpoint, hook, progress)
    clock.end("self-check")
    cache_budget = partial(kv_cache_budget, config, device)
    return OpenedModel(checkpoint, chosen, adaptable_layers, images, cache_budget)


def _choose_paths(
    config: EngineConfig, checkpoint: Checkpoint, hook: AttentionHook, progress: Progress
) -> tuple[ChosenPath, ImageSupport]:
    """Choose how the model processes texts and how it processes prompts with images.

    The arguments are those of `open_model`, and `checkpoint` is the loaded model.

    Raises:
        UnsupportedModelError: if the model can process neither texts nor prompts with images.
    """
    folder = Path(checkpoint_folder(config.model))
    try:
        chosen = choose_path(checkpoint, hook, config, progress)
    except UnsupportedModelError as text_error:
        return choose_images_only(checkpoint, folder, config.block_size, progress, text_error)
    images = choose_image_path(checkpoint, folder, chosen.spec, config.block_size, progress)
    return chosen, images


def load(
    config: EngineConfig,
    hook: AttentionHook,
    progress: Progress,
    open_model: OpenModel = open_model,
) -> Loaded:
    """Load a checkpoint, choose its forward path, and allocate the KV cache.

    Args:
        config: the settings.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line for each slow operation.
        open_model: reads the weights and chooses the path. By default, this process computes the
            whole model.

    Raises:
        ConfigError: if the machine or the model does not support the settings.
        ModelError: if the checkpoint is missing or broken, or its architecture is not supported.
    """
    clock = StageClock()
    cpu_threads = set_cpu_threads(config.num_threads)
    device = choose_device(config.device)
    _warn_about_experiments(config, device, progress)
    check_draft_folder(config)
    opened = open_model(config, hook, progress, clock)
    checkpoint, spec = opened.checkpoint, opened.chosen.spec
    opened_draft = open_draft(config, checkpoint, spec, progress)
    opened_mtp = open_mtp(config, checkpoint, spec, hook, progress)
    num_tokens = _tokens_per_step(config, device)
    draft_bytes = sum(each.bytes_per_token for each in (opened_draft, opened_mtp) if each)
    plan = _plan_cache(config, opened, num_tokens, draft_bytes, progress)
    memory = plan.memory
    sizes = Sizes(
        memory.num_blocks,
        config.block_size,
        memory.max_num_seqs,
        memory.max_model_len,
        config.kv_cache_dtype,
        plan.groups,
    )
    path = spec.build(sizes)
    steps = opened.images.add_images(path)
    draft = None
    if opened_draft is not None:
        draft = opened_draft.build(config, memory, num_tokens, progress)
    elif opened_mtp is not None:
        draft, steps = opened_mtp.build(config, memory, num_tokens, steps)
        progress(
            "compile_forward and cuda_graphs: off, because they do not give the hidden states that "
            "the MTP layers need"
        )
        config = replace(config, compile_forward=False, cuda_graphs=False)
    clock.end("cache")
    if config.measure_attention:
        use_fastest_attention(path, checkpoint, opened.chosen, progress)
    target = CompileTarget(path, checkpoint, hook, opened.chosen)
    compilation = _compile_forward(config, target, progress)
    clock.end("compile")
    if config.cuda_graphs:
        setup = GraphSetup(checkpoint, opened.chosen, compilation.compiled, sizes)
        use_decode_graphs(path, setup, plan.step_bytes, progress)
    clock.end("graphs")
    dtype = checkpoint.model.dtype
    make_adapter_store = partial(
        AdapterStore,
        checkpoint.adapters,
        opened.adaptable_layers,
        torch.empty(0, dtype=dtype, device=device),
        config.lora_memory,
    )
    return Loaded(
        runner=_make_runner(config, checkpoint, steps, cpu_threads, progress),
        info=_engine_info(config, opened, memory, clock.seconds, num_tokens),
        spec=spec,
        groups=plan.groups,
        num_states=memory.num_states if spec.has_snapshots else 0,
        path=path,
        make_adapter_store=make_adapter_store,
        images=opened.images,
        place_images=partial(place_images, device=device, dtype=dtype),
        swap=compilation.swap,
        draft=draft,
    )


@dataclass(frozen=True, slots=True)
class _CachePlan:
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


def _plan_cache(
    config: EngineConfig, opened: OpenedModel, num_tokens: int, draft_bytes: int, progress: Progress
) -> _CachePlan:
    """Measure the memory of a forward pass, divide the remaining memory into blocks, and report.

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
) -> _CachePlan:
    """Determine the number of KV cache blocks that fit into the memory.

    The KV cache gets the memory that remains after the weights and one forward pass.

    Args:
        config: the settings.
        opened: the model and its forward path.
        num_tokens: the largest number of tokens in one step.
        draft_bytes: the memory of one token in the cache of the draft model.
        step_bytes: the memory of the largest step; 0 if it is unknown.
    """
    checkpoint, spec, limit = opened.checkpoint, opened.chosen.spec, opened.chosen.limit
    # The size of the KV cache is not known yet, so only the settings and the model limit requests.
    max_model_len = config.max_model_len or limit.num_tokens
    groups, reason_for_one_group = choose_layer_groups(
        config, spec, checkpoint.device, max_model_len, num_tokens
    )
    block = block_shape(config, spec, groups, checkpoint.model.dtype, num_tokens, draft_bytes)
    memory = plan_memory(
        config,
        block,
        bytes_per_sequence=spec.bytes_per_sequence,
        limit=limit,
        num_bytes=opened.cache_budget(step_bytes),
        has_snapshots=spec.has_snapshots and config.enable_prefix_caching,
    )
    windows_sentence = describe_windows(spec.layers, groups, reason_for_one_group)
    return _CachePlan(memory, groups, block, windows_sentence, step_bytes)


class _Compilation(NamedTuple):
    """The result of the setting compile_forward.

    Attributes:
        compiled: the compiled forward pass that CUDA graphs can capture; None if there is none.
        swap: the compilation that runs in the background; None if there is none.
    """

    compiled: CompiledForward | None = None
    swap: ForwardSwap | None = None


def _compile_forward(
    config: EngineConfig, target: CompileTarget, progress: Progress
) -> _Compilation:
    """Compile the forward pass of a model as the setting compile_forward requires.

    If the setting is true, compile the forward pass now. If it is "auto", start to compile the
    forward pass in the background, or use the result of an earlier compilation on disk.

    Args:
        config: the settings.
        target: the model and the engine's forward path. The path is mutated if it can use a
            compiled forward pass now.
        progress: called with one line about the result.
    """
    if config.compile_forward == "auto":
        return _Compilation(swap=use_fast_forward(config, target, progress))
    if config.compile_forward:
        return _Compilation(compiled=compile_or_fuse_norms(target, progress))
    return _Compilation()


def _warn_about_experiments(config: EngineConfig, device: torch.device, progress: Progress) -> None:
    """Log a warning if the settings select an 8-bit KV cache on a GPU. This is experimental."""
    if config.kv_cache_dtype != "auto" and device.type != "cpu":
        progress(
            f"kv_cache_dtype {config.kv_cache_dtype} is experimental on GPUs. It uses only kernels "
            "whose results equal those of the reference implementation."
        )


def _tokens_per_step(config: EngineConfig, device: torch.device) -> int:
    """Return the largest number of tokens in a forward pass: max_num_batched_tokens or a default.

    Example: with the default settings on a CPU, max_num_seqs is 256, and the result is 512.
    """
    default = _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS
    return config.max_num_batched_tokens or max(config.max_num_seqs, default)


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


def _make_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    path: ForwardPath,
    cpu_threads: CpuThreads,
    progress: Progress,
) -> Runner:
    """Return a `Runner` object, which runs the forward passes of a model and samples tokens.

    The runner uses the GPU sampling kernel if the setting sampling_kernel is true and the kernel
    works on the device. The number of CPU threads is adjusted only if the model runs on the CPU.
    """
    device = checkpoint.device
    make_runner = partial(Runner, path, num_token_ids=checkpoint.vocab_size)
    if device.type == "cpu":
        return make_runner(cpu_threads=cpu_threads)
    if config.sampling_kernel and device.type == "cuda":
        reason = gpu_sampling.why_unusable(device)
        if reason is None:
            return make_runner(sampling_kernel=True)
        progress(f"sampling_kernel: off, because {reason}")
    return make_runner()


def _engine_info(
    config: EngineConfig,
    opened: OpenedModel,
    memory: MemoryPlan,
    seconds: dict[str, float],
    num_tokens: int,
) -> EngineInfo:
    """Return the description of the loaded model, which the server logs and reports to clients.

    Args:
        config: the settings.
        opened: the model and its forward path.
        memory: the size of the KV cache, and the limits that follow from this size.
        seconds: the duration of each stage of loading, by name.
        num_tokens: the largest number of tokens in one step.
    """
    checkpoint = opened.checkpoint
    chosen = opened.chosen
    return EngineInfo(
        model=config.model,
        architecture=checkpoint.architecture,
        path=chosen.spec.name,
        attention=_attention_name(config, checkpoint, chosen),
        dtype=str(checkpoint.model.dtype).removeprefix("torch."),
        device=str(checkpoint.device),
        max_model_len=memory.max_model_len,
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=num_tokens,
        block_size=config.block_size,
        num_blocks=memory.num_blocks,
        kv_cache_bytes=memory.num_bytes,
        weights_bytes=checkpoint.weights_bytes,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        num_threads=torch.get_num_threads(),
        self_check_difference=chosen.difference,
        load_seconds=sum(seconds.values()),
        seconds=seconds,
    )


def _attention_name(config: EngineConfig, checkpoint: Checkpoint, chosen: ChosenPath) -> str:
    """Return the name of the attention implementation that the engine uses for a model."""
    if chosen.spec.hook is None:
        return "eager"
    kind = cache_class(checkpoint, chosen.spec.layers, config.block_size, config.kv_cache_dtype)
    return attention_name(kind)
