# SPDX-License-Identifier: Apache-2.0
"""From settings to a runner that is ready for its first step.

weights -> tier (the first path that computes what the model computes alone) -> KV cache
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nereid_backend.attention.choose_backend import (
    attention_name,
    cache_type,
    proven_type,
    stored_type,
)
from nereid_backend.attention.cpu.cpu_attention import has_kernels
from nereid_backend.attention.interface import AttentionHook
from nereid_backend.checkpoint import Checkpoint, choose_device, load_checkpoint
from nereid_backend.config import EngineConfig
from nereid_backend.core.outputs import EngineInfo
from nereid_backend.core.window import AttentionWindow
from nereid_backend.errors import ConfigError
from nereid_backend.huge_pages import move_weights
from nereid_backend.linear.int8_linear import model_bytes, quantise_linears
from nereid_backend.linear.merged_linear import merge_linears, separate_linears
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.model.activation_memory import measure_activations
from nereid_backend.model.choose_path import Choice, choose_tier, with_own_attention
from nereid_backend.model.limits import (
    MemoryPlan,
    describe_memory,
    kv_cache_budget,
    plan_memory,
    attention_window_of,
    usable_cpus,
)
from nereid_backend.model.probe_layers import plain_token_ids
from nereid_backend.model.self_check import check_path
from nereid_backend.paths.compiled_forward import CompiledForward, compile_forward
from nereid_backend.paths.cuda_capture import capture_on, is_lost
from nereid_backend.paths.cuda_graphs import DecodeGraphs
from nereid_backend.paths.model_call import ModelCall, Sizes, UnfitError
from nereid_backend.paths.packed import PackedPath
from nereid_backend.runner import ForwardPath, Runner
from nereid_backend.sampling import gpu_sampling

# Enough rows to keep the matrix products busy; more only makes running requests wait longer.
_CPU_TOKENS, _GPU_TOKENS = 512, 4096
# Of the logits' spread. Another order of summation gives 1e-6 in float32 and 0.05 in bfloat16.
_PREPACK_TOLERANCE = 0.3

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can run steps, and the facts about it.

    Attributes:
        runner: runs them.
        info: what was loaded and how it runs.
        shares_blocks: whether all that is remembered of a sequence is in its blocks, so that blocks
            with the same tokens may serve several sequences, and tokens may be taken back. False
            where there is state besides: then no prefix cache, no blocks shared between sequences.
        whole_prefill: whether a prompt must go through the model in one forward pass.
        attention_window: how far back the model looks; None: to the beginning.
    """

    runner: Runner
    info: EngineInfo
    shares_blocks: bool = True
    whole_prefill: bool = False
    attention_window: AttentionWindow | None = None


def load(config: EngineConfig, hook: AttentionHook, progress: Progress) -> Loaded:
    """Load a checkpoint, check that it runs exactly, and allocate the KV cache.

    Args:
        config: the settings.
        hook: the engine's entry in transformers' attention interface.
        progress: gets a line for every slow step.

    Raises:
        ConfigError: the settings do not fit the machine or the model.
        ModelError: the checkpoint is missing or broken, or its architecture is not supported.
    """
    marks = [time.monotonic()]
    torch.set_num_threads(config.num_threads or max(1, usable_cpus() - 1))
    device = choose_device(config.device)
    _check_cpu_only(config, device)
    if config.kv_cache_dtype != "auto" and device.type != "cpu":
        progress(
            f"kv_cache_dtype {config.kv_cache_dtype}: new on GPUs, and used as far as its kernels "
            "compute here what their twin does"
        )
    checkpoint = _load_weights(config, device, hook, progress)
    move_weights(checkpoint.model)
    marks.append(time.monotonic())
    progress("comparing the engine's steps with the model alone")
    choice = choose_tier(checkpoint, hook, config, progress)
    tier = choice.tier
    marks.append(time.monotonic())
    sizes = (checkpoint.model.dtype.itemsize, 0)
    if config.kv_cache_dtype != "auto":
        sizes = (1, torch.float32.itemsize)
    bytes_per_token = tier.bytes_per_token + sum(
        layer.bytes_per_token(*sizes) for layer in tier.layers
    )
    default = _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS
    num_tokens = config.max_num_batched_tokens or max(config.max_num_seqs, default)
    activations = measure_activations(
        checkpoint,
        tier,
        num_tokens=min(num_tokens, choice.limit.num_tokens),
        num_seqs=config.max_num_seqs,
        block_size=config.block_size,
    )
    attention_window = attention_window_of(tier.layers)
    # A prompt that goes whole needs all its blocks at once.
    most_blocks = None
    if attention_window is not None and not tier.whole_prefill:
        most_blocks = attention_window.max_blocks(num_tokens, config.block_size)
    memory = plan_memory(
        config,
        bytes_per_token,
        tier.bytes_per_sequence,
        choice.limit,
        kv_cache_budget(config, device, activations or 0),
        most_blocks,
    )
    weights_bytes = checkpoint.weights_bytes
    progress(describe_memory(config, memory, weights_bytes, activations, num_tokens, tier.layers))
    room = Sizes(
        memory.num_blocks,
        config.block_size,
        memory.max_num_seqs,
        memory.max_model_len,
        config.kv_cache_dtype,
    )
    path = tier.build(room)
    marks.append(time.monotonic())
    is_wanted = config.compile_forward
    compiled = _compile(checkpoint, hook, choice, path, progress) if is_wanted else None
    marks.append(time.monotonic())
    capture = capture_on(device, activations or 0) if config.cuda_graphs else None
    if capture is not None and _graphs_are_exact(checkpoint, choice, compiled, room, progress):
        assert isinstance(path, PackedPath)
        path.graphs = DecodeGraphs(path.run, capture, room, device)
    marks.append(time.monotonic())
    info = _describe(config, checkpoint, memory, choice, marks, num_tokens)
    return Loaded(
        _runner(config, device, path, progress),
        info,
        tier.shares_blocks,
        tier.whole_prefill,
        attention_window,
    )


def _runner(
    config: EngineConfig, device: torch.device, path: ForwardPath, progress: Progress
) -> Runner:
    if config.sampling_kernel and device.type == "cuda":
        reason = gpu_sampling.why_not(device)
        if reason is None:
            return Runner(path, sampling_kernel=True)
        progress(f"sampling_kernel: off, because {reason}")
    return Runner(path)


def _check_cpu_only(config: EngineConfig, device: torch.device) -> None:
    if config.weight_dtype != "auto" and device.type != "cpu":
        raise ConfigError(
            f"weight_dtype: {config.weight_dtype} is only made for CPUs so far, and the device is "
            f"{device}; use auto"
        )


def _load_weights(
    config: EngineConfig, device: torch.device, hook: AttentionHook, progress: Progress
) -> Checkpoint:
    """The model, its linear layers laid out for the device where that changes nothing."""

    def read() -> Checkpoint:
        return load_checkpoint(
            config.model,
            dtype=config.dtype,
            device=device,
            attention=hook.name,
            progress=progress,
            trust_remote_code=config.trust_remote_code,
        )

    checkpoint = read()
    if config.weight_dtype == "int8":
        return _quantised(checkpoint, progress)
    if not config.prepack:
        return checkpoint
    before = _short_logits(checkpoint)
    if before is None:
        return checkpoint
    if device.type == "cpu":
        if not prepack_linears(checkpoint.model, copy_shared=True):
            return checkpoint
        if not _same(before, _short_logits(checkpoint)):
            progress("its code reads weights of linear layers itself, so they stay as loaded")
            return read()
    merge_linears(checkpoint.model, lambda: _short_logits(checkpoint))
    if not _same(before, _short_logits(checkpoint)):
        separate_linears(checkpoint.model)
    return checkpoint


def _same(before: Tensor, after: Tensor | None) -> bool:
    if after is None:
        return False
    return bool((after - before).abs().max() <= _PREPACK_TOLERANCE * before.std())


def _quantised(checkpoint: Checkpoint, progress: Progress) -> Checkpoint:
    """The same with weights of 8 bits.

    Raises:
        ConfigError: the model does not work so.
    """
    before = _short_logits(checkpoint)
    num_layers = quantise_linears(checkpoint.model)
    after = _short_logits(checkpoint)
    if not num_layers or after is None or before is None:
        raise ConfigError(
            "weight_dtype: int8 needs a model that calls its linear layers plainly, which "
            f"{checkpoint.architecture} does not; use auto"
        )
    difference = ((after - before).square().mean().sqrt() / before.std()).item()
    slow = "" if has_kernels() else "; slow, because the native kernels cannot be built here"
    progress(
        f"weights of {num_layers} linear layers are 8-bit integers: logits differ by "
        f"{difference:.2g} of their spread{slow}"
    )
    return replace(checkpoint, weights_bytes=model_bytes(checkpoint.model))


@torch.inference_mode()
def _short_logits(checkpoint: Checkpoint) -> Tensor | None:
    """Logits of a few tokens by the model alone; None where it cannot be called so plainly."""
    ids = torch.tensor([plain_token_ids(checkpoint)[:4]], device=checkpoint.device)
    positions = torch.arange(ids.shape[1], device=checkpoint.device)[None]
    try:
        with_own_attention(checkpoint, None)
        logits = ModelCall(checkpoint.model)(ids, num_logits=1, position_ids=positions).float()
    except Exception:  # noqa: BLE001 - models fail in any way; the tiers say how
        return None
    return logits if logits.isfinite().all() else None


def _compile(
    checkpoint: Checkpoint,
    hook: AttentionHook,
    choice: Choice,
    path: ForwardPath,
    progress: Progress,
) -> CompiledForward | None:
    """Let a path run a compiled forward pass, if there can be one that computes the same.

    Raises:
        ConfigError: trying it broke the device.
    """
    try:
        if not isinstance(path, PackedPath):
            raise UnfitError(f"only the packed path can be, and this is the {choice.tier.name} one")
        compiled = compile_forward(checkpoint.model, hook, progress, is_native=path.is_native)
        tried = choice.tier.build(choice.trial.sizes)
        assert isinstance(tried, PackedPath)
        tried.use(compiled)
        check_path(tried, choice.trial, checkpoint.model.dtype)
    except Exception as error:
        reason = _reason(error)
        if is_lost(checkpoint.device):
            raise ConfigError(
                f"compile_forward: {checkpoint.device} is lost after the compiled forward pass was "
                f"tried ({reason}); use false"
            ) from error
        progress(f"the forward pass is not compiled: {reason}")
        return None
    path.use(compiled)
    progress("the forward pass is compiled")
    return compiled


def _graphs_are_exact(
    checkpoint: Checkpoint,
    choice: Choice,
    compiled: CompiledForward | None,
    room: Sizes,
    progress: Progress,
) -> bool:
    """Whether steps that are replayed from captured graphs compute what the model computes alone.

    Raises:
        ConfigError: trying it broke the device.
    """
    device = checkpoint.device
    said: list[str] = []
    try:
        sizes = replace(choice.trial.sizes, stored=room.stored)
        tried = choice.tier.build(sizes)
        capture = capture_on(device)
        if not isinstance(tried, PackedPath) or not tried.has_kernels or capture is None:
            raise UnfitError("only the packed path with attention's kernels can be")
        if compiled is not None:
            tried.use(compiled)
        graphs = DecodeGraphs(tried.run, capture, sizes, device, said.append, patience=0)
        tried.graphs = graphs
        # The second time every step of decodes is a replay, which reads what replays have stored.
        for _ in range(2):
            tried.empty()
            is_rounded = room.stored != "auto"
            check_path(tried, choice.trial, checkpoint.model.dtype, is_rounded=is_rounded)
        if said or graphs.num_replays <= graphs.num_captures:
            found = graphs.failure or next(iter(said), "no step of the check was one of decodes")
            raise UnfitError(found)
    except Exception as error:
        reason = _reason(error)
        if is_lost(device):
            raise ConfigError(
                f"cuda_graphs: {device} is lost after captured steps were tried ({reason}); use "
                "false"
            ) from error
        progress(f"steps are not replayed from captured graphs: {reason}")
        return False
    progress("steps of decodes are replayed from captured graphs")
    return True


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _describe(
    config: EngineConfig,
    checkpoint: Checkpoint,
    memory: MemoryPlan,
    choice: Choice,
    marks: list[float],
    num_tokens: int,
) -> EngineInfo:
    spent = [end - start for start, end in itertools.pairwise(marks)]
    return EngineInfo(
        model=config.model,
        architecture=checkpoint.architecture,
        path=choice.tier.name,
        attention=_attention_name(config, checkpoint, choice),
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
        self_check_difference=choice.difference,
        load_seconds=sum(spent),
        seconds=dict(
            zip(("weights", "self-check", "cache", "compile", "graphs"), spent, strict=True)
        ),
    )


def _attention_name(config: EngineConfig, checkpoint: Checkpoint, choice: Choice) -> str:
    if choice.tier.name not in ("packed", "rows"):
        return "eager"
    kind = cache_type(config.block_size, checkpoint.model.dtype, checkpoint.device)
    kind = stored_type(kind, config.kv_cache_dtype)
    where = (config.block_size, checkpoint.model.dtype, checkpoint.device)
    return attention_name(proven_type(kind, choice.tier.layers, *where))
