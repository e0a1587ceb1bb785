# SPDX-License-Identifier: Apache-2.0
"""Loads a model and prepares it for its first step.

weights -> path (the first one with the same logits as the model alone) -> KV cache -> runner
"""

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
from nereid_backend.attention.cpu.cpu_library import has_kernels
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
from nereid_backend.model.choose_path import ChosenPath, choose_path, set_attention
from nereid_backend.model.limits import (
    MemoryPlan,
    attention_window_of,
    describe_memory,
    kv_cache_budget,
    plan_memory,
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

# The default number of tokens in one step. It is large enough for fast matrix products. Longer
# steps would only make running requests wait longer.
_CPU_TOKENS, _GPU_TOKENS = 512, 4096
# The largest accepted difference, relative to the standard deviation of the logits. A different
# order of summation causes 1e-6 in float32 and 0.05 in bfloat16.
_PREPACK_TOLERANCE = 0.3

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model that is ready to run steps.

    Attributes:
        runner: runs the steps.
        info: the description of the model and of how it runs.
        shares_blocks: whether the whole state of a sequence is in its blocks. Then sequences with
            the same tokens can share blocks, and tokens can be removed again. If False, there is no
            prefix cache and no speculative decoding.
        whole_prefill: whether a prompt must be computed in one forward pass.
        attention_window: the windows of the attention layers; None if a layer attends to all
            earlier tokens.
    """

    runner: Runner
    info: EngineInfo
    shares_blocks: bool = True
    whole_prefill: bool = False
    attention_window: AttentionWindow | None = None


class _StageClock:
    """Measures the durations of the stages of loading.

    Attributes:
        seconds: the duration of each finished stage in seconds, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage_start = time.monotonic()

    def end(self, stage: str) -> None:
        """Record the end of `stage`. The next stage begins."""
        now = time.monotonic()
        self.seconds[stage] = now - self._stage_start
        self._stage_start = now


def load(config: EngineConfig, hook: AttentionHook, progress: Progress) -> Loaded:
    """Load a checkpoint, choose an exact path for it, and allocate the KV cache.

    Args:
        config: the settings.
        hook: the engine's entry in transformers' attention interface.
        progress: called with one line for each slow operation.

    Raises:
        ConfigError: the settings do not fit the machine or the model.
        ModelError: the checkpoint is missing or broken, or its architecture is not supported.
    """
    clock = _StageClock()
    torch.set_num_threads(config.num_threads or max(1, usable_cpus() - 1))
    device = choose_device(config.device)
    _check_cpu_only(config, device)
    if config.kv_cache_dtype != "auto" and device.type != "cpu":
        progress(
            f"kv_cache_dtype {config.kv_cache_dtype} is experimental on GPUs. It uses only kernels "
            "whose results equal those of the reference implementation."
        )
    checkpoint = _load_weights(config, device, hook, progress)
    move_weights(checkpoint.model)
    clock.end("weights")
    progress("comparing the engine's steps with the model alone")
    chosen = choose_path(checkpoint, hook, config, progress)
    spec = chosen.spec
    clock.end("self-check")
    num_tokens = _tokens_per_step(config, device)
    activations = measure_activations(
        checkpoint,
        spec,
        num_tokens=min(num_tokens, chosen.limit.num_tokens),
        num_seqs=config.max_num_seqs,
        block_size=config.block_size,
    )
    memory = _plan_memory(config, checkpoint, chosen, num_tokens, activations or 0)
    weights_bytes = checkpoint.weights_bytes
    progress(describe_memory(config, memory, weights_bytes, activations, num_tokens, spec.layers))
    sizes = Sizes(
        memory.num_blocks,
        config.block_size,
        memory.max_num_seqs,
        memory.max_model_len,
        config.kv_cache_dtype,
    )
    path = spec.build(sizes)
    clock.end("cache")
    compiled = None
    if config.compile_forward:
        compiled = _compile(checkpoint, hook, chosen, path, progress)
    clock.end("compile")
    capture = capture_on(device, activations or 0) if config.cuda_graphs else None
    if capture is not None and _graphs_are_exact(checkpoint, chosen, compiled, sizes, progress):
        assert isinstance(path, PackedPath)
        path.graphs = DecodeGraphs(path.run, capture, sizes, device)
    clock.end("graphs")
    return Loaded(
        _runner(config, device, path, progress),
        _describe(config, checkpoint, memory, chosen, clock.seconds, num_tokens),
        spec.shares_blocks,
        spec.whole_prefill,
        attention_window_of(spec.layers),
    )


def _tokens_per_step(config: EngineConfig, device: torch.device) -> int:
    """Return the largest number of tokens in one step."""
    default = _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS
    return config.max_num_batched_tokens or max(config.max_num_seqs, default)


def _plan_memory(
    config: EngineConfig,
    checkpoint: Checkpoint,
    chosen: ChosenPath,
    num_tokens: int,
    activations: int,
) -> MemoryPlan:
    """Determine the size of the KV cache.

    Args:
        config: the settings.
        checkpoint: the loaded model.
        chosen: the path of the model.
        num_tokens: the largest number of tokens in one step.
        activations: the memory of one step in bytes.

    Raises:
        ConfigError: the settings do not fit the memory or the model.
    """
    spec = chosen.spec
    # The size of one stored number in bytes, and the size of the scale that 8-bit numbers have.
    number_sizes = (checkpoint.model.dtype.itemsize, 0)
    if config.kv_cache_dtype != "auto":
        number_sizes = (1, torch.float32.itemsize)
    layer_bytes = sum(layer.bytes_per_token(*number_sizes) for layer in spec.layers)
    attention_window = attention_window_of(spec.layers)
    max_sequence_blocks = None
    # A prompt that is computed in one pass needs all its blocks at the same time.
    if attention_window is not None and not spec.whole_prefill:
        max_sequence_blocks = attention_window.max_blocks(num_tokens, config.block_size)
    return plan_memory(
        config,
        spec.bytes_per_token + layer_bytes,
        spec.bytes_per_sequence,
        chosen.limit,
        kv_cache_budget(config, checkpoint.device, activations),
        max_sequence_blocks,
    )


def _runner(
    config: EngineConfig, device: torch.device, path: ForwardPath, progress: Progress
) -> Runner:
    """Return the runner of the path, with the GPU sampling kernel if it is enabled and works."""
    if config.sampling_kernel and device.type == "cuda":
        reason = gpu_sampling.why_not(device)
        if reason is None:
            return Runner(path, sampling_kernel=True)
        progress(f"sampling_kernel: off, because {reason}")
    return Runner(path)


def _check_cpu_only(config: EngineConfig, device: torch.device) -> None:
    """Raise a ConfigError if a setting that requires a CPU is set for another device."""
    if config.weight_dtype != "auto" and device.type != "cpu":
        raise ConfigError(
            f"weight_dtype: the value {config.weight_dtype} requires device=cpu, but the device is "
            f"{device}. Set weight_dtype=auto."
        )


def _load_weights(
    config: EngineConfig, device: torch.device, hook: AttentionHook, progress: Progress
) -> Checkpoint:
    """Load the model, and rearrange its linear layers for the device if that changes no logits."""

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
        if not _are_equal(before, _short_logits(checkpoint)):
            progress(
                "prepack: the weights of linear layers are not rearranged, because the model's "
                "code reads them directly"
            )
            return read()
    merge_linears(checkpoint.model, lambda: _short_logits(checkpoint))
    if not _are_equal(before, _short_logits(checkpoint)):
        separate_linears(checkpoint.model)
    return checkpoint


def _are_equal(before: Tensor, after: Tensor | None) -> bool:
    if after is None:
        return False
    return bool((after - before).abs().max() <= _PREPACK_TOLERANCE * before.std())


def _quantised(checkpoint: Checkpoint, progress: Progress) -> Checkpoint:
    """Return the checkpoint with 8-bit weights in its linear layers.

    Raises:
        ConfigError: the model does not work with 8-bit weights.
    """
    before = _short_logits(checkpoint)
    num_layers = quantise_linears(checkpoint.model)
    after = _short_logits(checkpoint)
    if not num_layers or after is None or before is None:
        raise ConfigError(
            "weight_dtype: the value int8 requires a model with standard linear layers, which "
            f"{checkpoint.architecture} does not have. Set weight_dtype=auto."
        )
    difference = ((after - before).square().mean().sqrt() / before.std()).item()
    warning = "" if has_kernels() else ". This is slow, because the native kernels cannot be built"
    progress(
        f"the weights of {num_layers} linear layers are stored as 8-bit integers, which changes "
        f"the logits by {difference:.2g} of their standard deviation{warning}"
    )
    return replace(checkpoint, weights_bytes=model_bytes(checkpoint.model))


@torch.inference_mode()
def _short_logits(checkpoint: Checkpoint) -> Tensor | None:
    """Return the logits of a few tokens by the model alone; None if the model cannot be called."""
    ids = torch.tensor([plain_token_ids(checkpoint)[:4]], device=checkpoint.device)
    positions = torch.arange(ids.shape[1], device=checkpoint.device)[None]
    try:
        set_attention(checkpoint, None)
        logits = ModelCall(checkpoint.model)(ids, num_logits=1, position_ids=positions).float()
    except Exception:  # noqa: BLE001 - a model can raise any exception; choose_path reports it
        return None
    return logits if logits.isfinite().all() else None


def _compile(
    checkpoint: Checkpoint,
    hook: AttentionHook,
    chosen: ChosenPath,
    path: ForwardPath,
    progress: Progress,
) -> CompiledForward | None:
    """Compile the forward pass for `path`, and use it if its logits are the same.

    Returns:
        The compiled forward pass, or None if it cannot be used.

    Raises:
        ConfigError: the attempt made the GPU unusable.
    """
    try:
        if not isinstance(path, PackedPath):
            raise UnfitError(
                f"compiling requires the packed path, but the model uses the {chosen.spec.name} "
                "path"
            )
        compiled = compile_forward(checkpoint.model, hook, progress, is_native=path.is_native)
        test_path = chosen.spec.build(chosen.trial.sizes)
        assert isinstance(test_path, PackedPath)
        test_path.use(compiled)
        check_path(test_path, chosen.trial, checkpoint.model.dtype)
    except Exception as error:
        reason = _reason(error)
        if is_lost(checkpoint.device):
            raise ConfigError(
                f"compile_forward: the attempt to run a compiled forward pass made "
                f"{checkpoint.device} unusable ({reason}). Set compile_forward=false."
            ) from error
        progress(f"the forward pass is not compiled: {reason}")
        return None
    path.use(compiled)
    progress("the forward pass is compiled")
    return compiled


def _graphs_are_exact(
    checkpoint: Checkpoint,
    chosen: ChosenPath,
    compiled: CompiledForward | None,
    sizes: Sizes,
    progress: Progress,
) -> bool:
    """Return whether decode steps that are replayed from CUDA graphs have the same logits.

    Raises:
        ConfigError: the attempt made the GPU unusable.
    """
    device = checkpoint.device
    lines: list[str] = []
    try:
        test_sizes = replace(chosen.trial.sizes, stored=sizes.stored)
        test_path = chosen.spec.build(test_sizes)
        capture = capture_on(device)
        if not isinstance(test_path, PackedPath) or not test_path.has_kernels or capture is None:
            raise UnfitError("CUDA graphs require the packed path with attention kernels")
        if compiled is not None:
            test_path.use(compiled)
        graphs = DecodeGraphs(test_path.run, capture, test_sizes, device, lines.append, patience=0)
        test_path.graphs = graphs
        # In the second round every decode step is replayed, and reads keys and values that the
        # replays of the first round have stored.
        for _ in range(2):
            test_path.empty()
            is_rounded = sizes.stored != "auto"
            check_path(test_path, chosen.trial, checkpoint.model.dtype, is_rounded=is_rounded)
        if lines or graphs.num_replays <= graphs.num_captures:
            first_line = next(iter(lines), "the check had no decode step")
            raise UnfitError(graphs.failure or first_line)
    except Exception as error:
        reason = _reason(error)
        if is_lost(device):
            raise ConfigError(
                f"cuda_graphs: the attempt to replay captured steps made {device} unusable "
                f"({reason}). Set cuda_graphs=false."
            ) from error
        progress(f"decode steps are not replayed from captured graphs: {reason}")
        return False
    progress("decode steps are replayed from captured graphs")
    return True


def _reason(error: Exception) -> str:
    """Return the first line of an error message, or the name of its class if it is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _describe(
    config: EngineConfig,
    checkpoint: Checkpoint,
    memory: MemoryPlan,
    chosen: ChosenPath,
    seconds: dict[str, float],
    num_tokens: int,
) -> EngineInfo:
    """Return the description of the loaded model."""
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
    """Return the name of the attention implementation that the path uses."""
    if chosen.spec.name not in ("packed", "rows"):
        return "eager"
    kind = cache_type(config.block_size, checkpoint.model.dtype, checkpoint.device)
    kind = stored_type(kind, config.kv_cache_dtype)
    kind = proven_type(
        kind, chosen.spec.layers, config.block_size, checkpoint.model.dtype, checkpoint.device
    )
    return attention_name(kind)
