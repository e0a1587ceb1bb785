# SPDX-License-Identifier: Apache-2.0
"""Speeds up `packed` (a way to run a model) with a compiled forward pass and with CUDA graphs.

Before an acceleration is used, the accelerated path computes test sequences. If its logits differ
from the logits of the unmodified model, or if the acceleration fails, the path runs without this
acceleration.
"""

from dataclasses import replace

import torch

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.errors import ConfigError, first_line
from nereid_backend.load_checkpoint import Checkpoint, Progress
from nereid_backend.model.choose_path import ChosenPath
from nereid_backend.model.fused_norms import fuse_norms
from nereid_backend.model.self_check import check_path
from nereid_backend.paths.compiled_forward.load_library import CompiledForward, compile_forward
from nereid_backend.paths.cuda_graphs.cuda_capture import Capture, GraphCapture, capture_on, is_lost
from nereid_backend.paths.cuda_graphs.decode_graphs import DecodeGraphs
from nereid_backend.paths.cuda_graphs.piecewise_graphs import TOKEN_COUNTS
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.paths.packed import PackedPath
from nereid_backend.step_runner import ForwardPath


def use_compiled_forward(
    path: ForwardPath,
    checkpoint: Checkpoint,
    hook: AttentionHook,
    chosen: ChosenPath,
    progress: Progress,
) -> CompiledForward | None:
    """Compile the forward pass of a model. Use the compiled forward pass if its logits are correct.

    If the compilation fails or the logits are wrong, the path continues with the model's own code.
    On a GPU, torch's fused function then replaces the RMSNorm modules of the model.

    Args:
        path: the engine's forward path. Mutated.
        checkpoint: the model.
        hook: Nereid's attention function, which transformers calls in each layer.
        chosen: the chosen forward path, with the test sequences and the logits of the unmodified
            model for these sequences.
        progress: called with one line about the result.

    Returns:
        The compiled forward pass, or None if it cannot be used.

    Raises:
        ConfigError: if the GPU cannot be used any more after the attempt.
    """
    try:
        # If this call raises an error, `path` has not been changed.
        compiled = _compile_and_check(path, checkpoint, hook, chosen, progress)
    except Exception as error:  # noqa: BLE001 - torch's compiler can raise any exception
        _raise_if_device_is_lost(
            checkpoint.device, error, "compile_forward", "the compiled forward pass failed"
        )
        progress(f"the forward pass is not compiled: {first_line(error)}")
        # torch.compile also fuses the operations of an RMSNorm. Without the compiled forward pass,
        # each norm would need several GPU kernels.
        if checkpoint.device.type == "cuda":
            use_fused_norms(checkpoint, chosen, progress)
        return None
    progress("the forward pass is compiled")
    return compiled


def _compile_and_check(
    path: ForwardPath,
    checkpoint: Checkpoint,
    hook: AttentionHook,
    chosen: ChosenPath,
    progress: Progress,
) -> CompiledForward:
    """Compile a model's forward pass, check the logits, and make `path` call the compiled code.

    The check runs a separate path, which computes test sequences with the compiled code.

    Args:
        path: the engine's forward path. Mutated only after a successful check.
        checkpoint: the model.
        hook: Nereid's attention function, which transformers calls in each layer.
        chosen: the test sequences, and the logits of the unmodified model for these sequences.
        progress: called with one line for each slow operation.

    Raises:
        Exception: of any class, if the compilation fails or the logits are wrong.
    """
    if not isinstance(path, PackedPath):
        raise UnfitError(
            'torch.compile supports only the forward path "packed", but this model uses the '
            f'forward path "{chosen.spec.name}"'
        )
    # If CPU kernels compute the attention (`is_native`), the compiled code calls these kernels
    # directly, not through Python.
    compiled = compile_forward(checkpoint.model, hook, progress, is_native=path.is_native)
    test_path = path_for_check(chosen, compiled, chosen.trial.sizes)
    check_path(test_path, chosen.trial, checkpoint.model.dtype)
    compiled.confirm()  # records the successful check next to the library on disk
    path.use_compiled(compiled)
    return compiled


def path_for_check(chosen: ChosenPath, compiled: CompiledForward, sizes: Sizes) -> PackedPath:
    """Return a new forward path for the check of the compiled code `compiled`.

    `chosen` must describe the forward path `packed`. `sizes` are the sizes of the KV cache, and the
    limits of a step.
    """
    path = chosen.spec.build(sizes)
    assert isinstance(path, PackedPath)
    path.use_compiled(compiled)
    return path


def use_fused_norms(checkpoint: Checkpoint, chosen: ChosenPath, progress: Progress) -> None:
    """Replace the RMSNorm modules of a model by torch's fused function if the logits stay correct.

    torch's function computes an RMSNorm in one GPU kernel. Its speed has not been measured on a
    GPU.

    Args:
        checkpoint: the model. Mutated.
        chosen: the chosen forward path, with the test sequences and the logits of the unmodified
            model for these sequences.
        progress: called with one line about the result.
    """
    restore = fuse_norms(checkpoint.model)  # the function that undoes the replacement
    if restore is None:  # The model has no RMSNorm module that can be replaced.
        return
    try:
        check_path(chosen.spec.build(chosen.trial.sizes), chosen.trial, checkpoint.model.dtype)
    except Exception as error:  # noqa: BLE001 - a model can raise any exception
        restore()
        reason = first_line(error)
        progress(f"RMSNorm modules are not replaced by torch's fused function: {reason}")
        return
    progress("torch's fused function computes the RMSNorm modules")


def use_decode_graphs(  # noqa: PLR0913 - the results of the earlier stages of loading
    path: ForwardPath,
    checkpoint: Checkpoint,
    chosen: ChosenPath,
    compiled: CompiledForward | None,
    sizes: Sizes,
    activation_bytes: int,
    progress: Progress,
) -> None:
    """Capture decode steps as CUDA graphs, and use the graphs if their logits are correct.

    Do nothing on a device that is not a GPU.

    Args:
        path: the engine's forward path. Mutated.
        checkpoint: the model.
        chosen: the chosen forward path, with the test sequences and the logits of the unmodified
            model for these sequences.
        compiled: the compiled forward pass that the path uses; None if it uses none.
        sizes: the sizes of the path.
        activation_bytes: the memory that the largest step needs. The graphs must leave this memory
            free.
        progress: called with one line about the result.

    Raises:
        ConfigError: if the GPU cannot be used any more after the attempt.
    """
    device = checkpoint.device
    capture = capture_on(device, activation_bytes)
    if capture is None:
        return
    try:
        test_capture = capture_on(device)
        _check_graphs(checkpoint, chosen, compiled, sizes, test_capture)
    except Exception as error:  # noqa: BLE001 - capturing a model's code can raise any exception
        _raise_if_device_is_lost(device, error, "cuda_graphs", "replaying a captured step failed")
        progress(f"decode steps are not replayed from captured graphs: {first_line(error)}")
        return
    assert isinstance(path, PackedPath)
    path.graphs = DecodeGraphs(path.run, capture, sizes, device)
    path.graphs.capture_all()
    if path.graphs.failure is not None:
        progress(f"decode steps are not replayed from captured graphs: {path.graphs.failure}")
        return
    progress("decode steps are replayed from captured graphs")
    if compiled is not None:
        use_piecewise_graphs(path, checkpoint, chosen, compiled, sizes, capture, progress)


def use_piecewise_graphs(  # noqa: PLR0913 - the results of the earlier stages of loading
    path: PackedPath,
    checkpoint: Checkpoint,
    chosen: ChosenPath,
    compiled: CompiledForward,
    sizes: Sizes,
    capture: GraphCapture,
    progress: Progress,
) -> None:
    """Capture steps with prefills as CUDA graphs, and use the graphs if their logits are correct.

    A step with prefills computes tokens of prompts. Its work between two attention calls is one
    graph, so a step is replayed from several graphs (pieces).

    Args:
        path: the engine's forward path. Mutated.
        checkpoint: the model.
        chosen: the test sequences, and the logits of the unmodified model for these sequences.
        compiled: the compiled forward pass that the path uses.
        sizes: the sizes of the engine's KV cache, and the limits of a step.
        capture: captures the graphs on the GPU.
        progress: called with one line about the result.
    """
    # The check captures and replays the graphs of a separate test path, not of `path`.
    try:
        _check_piecewise_graphs(checkpoint, chosen, compiled, sizes, capture)
    except Exception as error:  # noqa: BLE001 - capturing a model's code can raise any exception
        _raise_if_device_is_lost(
            checkpoint.device, error, "cuda_graphs", "replaying a captured part of a step failed"
        )
        progress(f"steps with prefills are not replayed from captured graphs: {first_line(error)}")
        return
    # `capture_pieces` captures one call of a function as several CUDA graphs.
    path.pieces = path.piecewise_graphs(capture.capture_pieces, sizes, progress)
    # If a capture fails, `capture_all` reports the reason and deletes all graphs. No step is then
    # replayed.
    path.pieces.capture_all()
    if path.pieces.failure is None:
        progress("the parts of steps with prefills are replayed from captured graphs")


def _raise_if_device_is_lost(
    device: torch.device, error: Exception, setting: str, problem: str
) -> None:
    """Raise a ConfigError if a failed attempt has made a device unusable.

    Example: an invalid memory access of a CUDA graph makes the GPU unusable for this process.

    Args:
        device: the device.
        error: the error of the attempt.
        setting: the name of the setting that turns the attempt on. The message recommends the value
            false for this setting.
        problem: a clause for the message, such as "replaying a captured step failed".
    """
    if is_lost(device):
        raise ConfigError(
            f"{setting}: {problem}, and {device} cannot be used any more ({first_line(error)}). "
            f"Set {setting}=false."
        ) from error


def use_fastest_attention(
    path: ForwardPath, checkpoint: Checkpoint, chosen: ChosenPath, progress: Progress
) -> None:
    """For each layer, use an external attention library if it is faster than Nereid's attention.

    Do nothing if no GPU kernel is used. First, a test path measures and chooses the libraries, and
    computes the test sequences. If the logits are correct, the engine's path uses the libraries
    that the test path has chosen. If the engine's KV cache stores 8-bit numbers, the engine's path
    uses no library, because the libraries do not support 8-bit numbers.

    Args:
        path: the engine's forward path. Mutated.
        checkpoint: the model.
        chosen: the chosen forward path, with the test sequences and the expected logits.
        progress: called with one line about the result.
    """
    test_path = chosen.spec.build(chosen.trial.sizes)
    if not isinstance(path, PackedPath) or not isinstance(test_path, PackedPath):
        return
    # `choose_attention` measures the libraries for each pair of a layer kind and a step kind, such
    # as layers with a sliding window in decode steps. It returns the number of pairs for which a
    # library is faster.
    if test_path.choose_attention() == 0:
        return
    try:
        check_path(test_path, chosen.trial, checkpoint.model.dtype)
    except Exception as error:  # noqa: BLE001 - a library can raise any exception
        progress(f"attention libraries are not used: {first_line(error)}")
        return
    # This call is fast, because the measurements of the first call are cached.
    num_uses = path.choose_attention()
    progress(f"attention libraries compute {num_uses} pairs of a layer kind and a kind of step")


def _check_piecewise_graphs(
    checkpoint: Checkpoint,
    chosen: ChosenPath,
    compiled: CompiledForward,
    sizes: Sizes,
    capture: GraphCapture,
) -> None:
    """Check that prefill steps in CUDA graphs give the same logits as the unmodified model.

    A prefill step computes tokens of prompts. The step is replayed from several graphs (pieces).

    Args:
        checkpoint: the model.
        chosen: the test sequences, and the logits of the unmodified model for these sequences.
        compiled: the compiled forward pass that the engine's path uses.
        sizes: the sizes of the engine's path. The check uses the same data type of the KV cache.
        capture: captures the graphs on the GPU.

    Raises:
        UnfitError: if the logits differ, or if no step with prefills was replayed.
    """
    # The test path has small caches and block tables, but stores keys and values in the engine's
    # data type.
    test_sizes = replace(chosen.trial.sizes, kv_cache_dtype=sizes.kv_cache_dtype)
    test_path = path_for_check(chosen, compiled, test_sizes)
    problems: list[str] = []  # the messages about failed captures
    graphs = test_path.piecewise_graphs(capture.capture_pieces, test_sizes, problems.append)
    test_path.pieces = graphs  # The test path now replays its steps with prefills.
    # The steps of the check have so few tokens that the smallest step size is enough.
    smallest_count = TOKEN_COUNTS[:1]
    graphs.capture_all(smallest_count)
    # With an 8-bit KV cache, rounding changes the logits, so the check accepts larger differences.
    is_rounded = sizes.kv_cache_dtype != "auto"
    check_path(test_path, chosen.trial, checkpoint.model.dtype, is_rounded=is_rounded)
    if graphs.num_replays == 0:
        raise UnfitError(problems[0] if problems else "the check had no step with prefills")


def _check_graphs(
    checkpoint: Checkpoint,
    chosen: ChosenPath,
    compiled: CompiledForward | None,
    sizes: Sizes,
    capture: Capture | None,
) -> None:
    """Check that decode steps in CUDA graphs give the same logits as the unmodified model.

    The check builds a separate path for the test sequences, and captures and replays its steps.

    Args:
        checkpoint: the model.
        chosen: the chosen forward path, with the test sequences and the expected logits.
        compiled: the compiled forward pass that the path uses; None if it uses none.
        sizes: the sizes of the engine's path. The check uses the same data type of the KV cache.
        capture: captures graphs on the device; None if the device is not a GPU.

    Raises:
        UnfitError: if the logits differ, or if no decode step was replayed.
    """
    test_sizes = replace(chosen.trial.sizes, kv_cache_dtype=sizes.kv_cache_dtype)
    path = chosen.spec.build(test_sizes)
    if not isinstance(path, PackedPath) or not path.has_kernels or capture is None:
        raise UnfitError(
            'CUDA graphs require the forward path "packed" and the GPU kernels for attention'
        )
    if compiled is not None:
        path.use_compiled(compiled)
    messages: list[str] = []  # the messages about failed captures
    graphs = DecodeGraphs(path.run, capture, test_sizes, checkpoint.device, messages.append)
    path.graphs = graphs
    # In the first round, each step is captured as a graph, and also computed without the graph. The
    # keys and values that are computed without the graph are correct, so they could hide an error
    # of the graph. Therefore, the second round starts with an empty cache, and only replays the
    # graphs.
    is_rounded = sizes.kv_cache_dtype != "auto"
    for _ in range(2):
        path.empty()
        check_path(path, chosen.trial, checkpoint.model.dtype, is_rounded=is_rounded)
    if messages:
        raise UnfitError(graphs.failure or messages[0])
    # Right after its capture, each graph is replayed once, for the captured step. More replays than
    # captures therefore mean that graphs have also computed later steps.
    has_replayed_later_steps = graphs.num_replays > graphs.num_captures
    if not has_replayed_later_steps:
        raise UnfitError(graphs.failure or "the check had no decode step")
