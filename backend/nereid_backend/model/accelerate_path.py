# SPDX-License-Identifier: Apache-2.0
"""Accelerates the packed path with a compiled forward pass and with CUDA graphs.

Each acceleration is compared with the model alone before it is used. If its logits differ, or if it
fails, the path runs without it.
"""

from dataclasses import replace

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.checkpoint import Checkpoint, Progress
from nereid_backend.errors import ConfigError, first_line
from nereid_backend.model.choose_path import ChosenPath
from nereid_backend.model.fused_norms import fuse_norms
from nereid_backend.model.self_check import check_path
from nereid_backend.paths.compiled_forward import CompiledForward, compile_forward
from nereid_backend.paths.cuda_capture import Capture, GraphCapture, capture_on, is_lost
from nereid_backend.paths.cuda_graphs import DecodeGraphs
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.paths.packed import PackedPath
from nereid_backend.paths.piecewise_graphs import TOKEN_COUNTS
from nereid_backend.runner import ForwardPath


def use_compiled_forward(
    path: ForwardPath,
    checkpoint: Checkpoint,
    hook: AttentionHook,
    chosen: ChosenPath,
    progress: Progress,
) -> CompiledForward | None:
    """Compile the forward pass of a path, and use it if its logits are those of the model alone.

    Args:
        path: the path with the sizes of the engine. Mutated.
        checkpoint: the model.
        hook: the engine's entry in transformers' attention interface.
        chosen: the choice of the path, with the test sequences and the expected logits.
        progress: called with one line about the result.

    Returns:
        The compiled forward pass, or None if it cannot be used.

    Raises:
        ConfigError: if the attempt made the GPU unusable.
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
        # torch's compiler can raise any exception. The path then runs without compiling.
        reason = first_line(error)
        if is_lost(checkpoint.device):
            raise ConfigError(
                f"compile_forward: the attempt to run a compiled forward pass made "
                f"{checkpoint.device} unusable ({reason}). Set compile_forward=false."
            ) from error
        progress(f"the forward pass is not compiled: {reason}")
        if checkpoint.device.type == "cuda":
            use_fused_norms(checkpoint, chosen, progress)
        return None
    path.use(compiled)
    progress("the forward pass is compiled")
    return compiled


def use_fused_norms(checkpoint: Checkpoint, chosen: ChosenPath, progress: Progress) -> None:
    """Compute the RMSNorm modules of a model with torch's fused function if its logits stay right.

    The speed of this replacement has not been measured on a GPU.

    Args:
        checkpoint: the model. Mutated.
        chosen: the choice of the path, with the test sequences and the expected logits.
        progress: called with one line about the result.
    """
    restore = fuse_norms(checkpoint.model)
    if restore is None:
        return
    try:
        check_path(chosen.spec.build(chosen.trial.sizes), chosen.trial, checkpoint.model.dtype)
    except Exception as error:  # noqa: BLE001 - a model can raise any exception
        restore()
        progress(f"RMSNorm modules are not replaced by torch's fused function: {first_line(error)}")
        return
    progress("RMSNorm modules are computed by torch's fused function")


def use_decode_graphs(  # noqa: PLR0913 - the results of the earlier stages of loading
    path: ForwardPath,
    checkpoint: Checkpoint,
    chosen: ChosenPath,
    compiled: CompiledForward | None,
    sizes: Sizes,
    activation_bytes: int,
    progress: Progress,
) -> None:
    """Replay decode steps from CUDA graphs if their logits are those of the model alone.

    Do nothing on a device that is not a GPU.

    Args:
        path: the path with the sizes of the engine. Mutated.
        checkpoint: the model.
        chosen: the choice of the path, with the test sequences and the expected logits.
        compiled: the compiled forward pass that the path uses; None if it uses none.
        sizes: the sizes of the path.
        activation_bytes: the memory of the largest step, which the graphs must leave free.
        progress: called with one line about the result.

    Raises:
        ConfigError: if the attempt made the GPU unusable.
    """
    device = checkpoint.device
    capture = capture_on(device, activation_bytes)
    if capture is None:
        return
    try:
        test_capture = capture_on(device)
        _check_graphs(checkpoint, chosen, compiled, sizes, test_capture)
    except Exception as error:
        # Capturing a model's code can raise any exception. The path then runs without graphs.
        reason = first_line(error)
        if is_lost(device):
            raise ConfigError(
                f"cuda_graphs: the attempt to replay captured steps made {device} unusable "
                f"({reason}). Set cuda_graphs=false."
            ) from error
        progress(f"decode steps are not replayed from captured graphs: {reason}")
        return
    assert isinstance(path, PackedPath)
    path.graphs = DecodeGraphs(path.run, capture, sizes, device)
    path.graphs.capture_all()
    progress("decode steps are replayed from captured graphs")
    if compiled is not None:
        use_piecewise_graphs(path, checkpoint, chosen, compiled, sizes, capture, progress)


def use_piecewise_graphs(  # noqa: PLR0913 - as above
    path: PackedPath,
    checkpoint: Checkpoint,
    chosen: ChosenPath,
    compiled: CompiledForward,
    sizes: Sizes,
    capture: GraphCapture,
    progress: Progress,
) -> None:
    """Replay the parts of steps with prefills from graphs if their logits stay right.

    The arguments are those of `use_decode_graphs`.
    """
    try:
        test_sizes = replace(chosen.trial.sizes, stored=sizes.stored)
        test_path = chosen.spec.build(test_sizes)
        assert isinstance(test_path, PackedPath)
        test_path.use(compiled)
        failures: list[str] = []
        test_path.pieces = test_path.piecewise_graphs(capture.pieces, test_sizes, failures.append)
        # The steps of the check are smaller than the smallest number of tokens.
        test_path.pieces.capture_all(TOKEN_COUNTS[:1])
        is_rounded = sizes.stored != "auto"
        check_path(test_path, chosen.trial, checkpoint.model.dtype, is_rounded=is_rounded)
        if test_path.pieces.num_replays == 0:
            raise UnfitError(next(iter(failures), "the check had no step with prefills"))
    except Exception as error:
        # Capturing a model's code can raise any exception. The steps then run without graphs.
        reason = first_line(error)
        if is_lost(checkpoint.device):
            raise ConfigError(
                f"cuda_graphs: the attempt to replay captured parts of steps made "
                f"{checkpoint.device} unusable ({reason}). Set cuda_graphs=false."
            ) from error
        progress(f"steps with prefills are not replayed from captured graphs: {reason}")
        return
    path.pieces = path.piecewise_graphs(capture.pieces, sizes, progress)
    path.pieces.capture_all()
    progress("the parts of steps with prefills are replayed from captured graphs")


def use_fastest_attention(
    path: ForwardPath, checkpoint: Checkpoint, chosen: ChosenPath, progress: Progress
) -> None:
    """Use attention libraries where they are faster than the project's kernels.

    Do nothing if no GPU kernel is used. The arguments are those of `use_compiled_forward`.
    """
    test_path = chosen.spec.build(chosen.trial.sizes)
    if not isinstance(path, PackedPath) or not isinstance(test_path, PackedPath):
        return
    if not test_path.choose_attention():
        return
    try:
        check_path(test_path, chosen.trial, checkpoint.model.dtype)
    except Exception as error:  # noqa: BLE001 - a library can raise any exception
        progress(f"attention libraries are not used: {first_line(error)}")
        return
    progress(f"attention libraries are used in {path.choose_attention()} situations")


def _check_graphs(
    checkpoint: Checkpoint,
    chosen: ChosenPath,
    compiled: CompiledForward | None,
    sizes: Sizes,
    capture: Capture | None,
) -> None:
    """Compare the logits of replayed decode steps with those of the model alone.

    Raises:
        UnfitError: if the logits differ, or if no decode step was replayed.
    """
    test_sizes = replace(chosen.trial.sizes, stored=sizes.stored)
    path = chosen.spec.build(test_sizes)
    if not isinstance(path, PackedPath) or not path.has_kernels or capture is None:
        raise UnfitError("CUDA graphs require the packed path with attention kernels")
    if compiled is not None:
        path.use(compiled)
    failures: list[str] = []
    graphs = DecodeGraphs(path.run, capture, test_sizes, checkpoint.device, failures.append)
    path.graphs = graphs
    # In the second round, every decode step is replayed. The replays read keys and values that the
    # replays of the first round have stored.
    for _ in range(2):
        path.empty()
        is_rounded = sizes.stored != "auto"
        check_path(path, chosen.trial, checkpoint.model.dtype, is_rounded=is_rounded)
    if failures or graphs.num_replays <= graphs.num_captures:
        raise UnfitError(graphs.failure or next(iter(failures), "the check had no decode step"))
