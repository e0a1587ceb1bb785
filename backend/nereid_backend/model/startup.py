# SPDX-License-Identifier: Apache-2.0
"""Loads a model and prepares the engine for the first forward pass.

The stages are:

    weights -> forward path -> KV cache -> compiled forward pass and CUDA graphs -> runner
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from nereid_backend.attention.choose_backend import attention_name
from nereid_backend.attention.layers import LayerGroups
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.config import EngineConfig
from nereid_backend.core.adapter import Adapter
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.outputs import EngineInfo
from nereid_backend.cpu_threads import CpuThreads, set_cpu_threads
from nereid_backend.draft_model import DraftModel
from nereid_backend.load_checkpoint import Checkpoint, Progress, choose_device
from nereid_backend.lora.adapter_store import AdapterStore
from nereid_backend.model.accelerate_path import (
    CompileTarget,
    GraphSetup,
    compile_or_fuse_norms,
    use_decode_graphs,
    use_fastest_attention,
)
from nereid_backend.model.cache_plan import plan_cache
from nereid_backend.model.compiled_forward_swap import ForwardSwap, use_or_compile_forward
from nereid_backend.model.forward_path.choose_image_path import ImageSupport
from nereid_backend.model.forward_path.choose_path import ChosenPath
from nereid_backend.model.forward_path.make_kv_cache import cache_class
from nereid_backend.model.forward_path.path_spec import PathSpec
from nereid_backend.model.load_draft import check_draft_folder, open_draft
from nereid_backend.model.load_mtp import open_mtp
from nereid_backend.model.memory.memory_plan import (
    MemoryPlan,
)
from nereid_backend.model.open_model import OpenedModel, OpenModel, StageClock, open_model
from nereid_backend.paths.compiled_forward.load_library import CompiledForward
from nereid_backend.paths.model_call import Sizes
from nereid_backend.sampling import gpu_sampling
from nereid_backend.step_runner import ForwardPath, Runner
from nereid_backend.vision.forward.image_tensors import place_images

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
    plan = plan_cache(config, opened, num_tokens, draft_bytes, progress)
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
        drafts = opened_mtp.build(config, memory, num_tokens, steps)
        draft, steps = drafts.source, drafts.recording_path
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
        return _Compilation(swap=use_or_compile_forward(config, target, progress))
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
