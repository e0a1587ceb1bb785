# SPDX-License-Identifier: Apache-2.0
"""Speeds up `packed` (a way to run a model) with a compiled forward pass and with CUDA graphs.

Before an acceleration is used, the accelerated path computes test sequences. If its logits differ
from the logits of the unmodified model, or if the acceleration fails, the path runs without this
acceleration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.errors import ConfigError, first_line
from nereid_backend.load_checkpoint import Checkpoint, Progress
from nereid_backend.model.forward_path.choose_path import ChosenPath
from nereid_backend.model.forward_path.self_check import check_path
from nereid_backend.model.fused_norms import fuse_norms
from nereid_backend.paths.compiled_forward.load_library import CompiledForward, compile_forward
from nereid_backend.paths.cuda_graphs.cuda_capture import GraphCapture, capture_on, is_lost
from nereid_backend.paths.cuda_graphs.decode_graphs import DecodeGraphs
from nereid_backend.paths.cuda_graphs.piecewise_graphs import TOKEN_COUNTS, PiecewiseGraphs
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.paths.packed import PackedPath
from nereid_backend.step_runner import ForwardPath


@dataclass(frozen=True, slots=True)
class GraphSetup:
    """The model whose steps are captured as CUDA graphs, and the data for the check of the graphs.

    Attributes:
        checkpoint: the model.
        chosen: the chosen forward path, with the test sequences and the logits of the unmodified
            model for these sequences.
        compiled: the compiled forward pass; None if the path uses no compiled forward pass.
        sizes: the sizes of the engine's KV cache, and the limits of a step.
    """

    checkpoint: Checkpoint
    chosen: ChosenPath
    compiled: CompiledForward | None
    sizes: Sizes

    @property
    def test_sizes(self) -> Sizes:
        """The sizes of a forward path for tests.

        The KV cache is small, and has the data type of the engine's cache.
        """
        return replace(self.chosen.reference.sizes, kv_cache_dtype=self.sizes.kv_cache_dtype)

    def build_test_path(self) -> PackedPath:
        """Return a new forward path that runs the same code as the engine's path.

        Raises:
            UnfitError: if the steps of the path cannot be captured.
        """
        path = self.chosen.spec.build(self.test_sizes)
        if not isinstance(path, PackedPath) or not path.has_kernels:
            raise UnfitError(
                'CUDA graphs require the forward path "packed" and the GPU kernels for attention'
            )
        if self.compiled is not None:
            path.use_compiled(self.compiled)
        return path

    def check(self, test_path: PackedPath) -> None:
        """Let a test path compute the test sequences, and check its logits.

        Raises:
            UnfitError: if the logits differ from the logits of the unmodified model.
        """
        # With an 8-bit KV cache, rounding changes the logits, so the check accepts larger
        # differences.
        is_rounded = self.sizes.kv_cache_dtype != "auto"
        check_path(
            test_path, self.chosen.reference, self.checkpoint.model.dtype, is_rounded=is_rounded
        )


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """A model whose forward pass is compiled, and the path that uses the compiled forward pass.

    Attributes:
        path: the engine's forward path.
        checkpoint: the model.
        hook: Nereid's attention function, which transformers calls in each layer.
        chosen: the chosen forward path, with the test sequences and the logits of the unmodified
            model for these sequences.
    """

    path: ForwardPath
    checkpoint: Checkpoint
    hook: AttentionHook
    chosen: ChosenPath

    @property
    def packed_path(self) -> PackedPath:
        """The engine's forward path. An UnfitError is raised if the path cannot be compiled."""
        if not isinstance(self.path, PackedPath):
            raise UnfitError(
                'torch.compile supports only the forward path "packed", but this model uses the '
                f'forward path "{self.chosen.spec.name}"'
            )
        return self.path

    def build_test_path(self, compiled: CompiledForward) -> PackedPath:
        """Return a new forward path that runs `compiled`, for a check of this compiled code."""
        path = self.chosen.spec.build(self.chosen.reference.sizes)
        assert isinstance(path, PackedPath)
        path.use_compiled(compiled)
        return path


def compile_or_fuse_norms(target: CompileTarget, progress: Progress) -> CompiledForward | None:
    """Compile the forward pass of a model. On a GPU, use torch's fused norms if this fails.

    `target` is the model, and the path that uses the compiled forward pass. `progress` is called
    with one line about each result. Return None if the forward pass cannot be compiled.

    Raises:
        ConfigError: if the GPU cannot be used any more after the attempt.
    """
    compiled = use_compiled_forward(target, progress)
    # torch.compile also fuses the operations of an RMSNorm. Without the compiled forward pass, each
    # norm would need several GPU kernels.
    if compiled is None and target.checkpoint.device.type == "cuda":
        use_fused_norms(target.checkpoint, target.chosen, progress)
    return compiled


def use_compiled_forward(target: CompileTarget, progress: Progress) -> CompiledForward | None:
    """Compile the forward pass of a model. Use the compiled forward pass if its logits are correct.

    If the compilation fails or the logits are wrong, the path continues with the model's own code.

    Args:
        target: the model, the test sequences, and the path that uses the compiled forward pass. The
            path is mutated only if the logits are correct.
        progress: called with one line about the result.

    Returns:
        The compiled forward pass, or None if it cannot be used.

    Raises:
        ConfigError: if the GPU cannot be used any more after the attempt.
    """
    try:
        compiled = _compile_and_check(target, progress)
    except Exception as error:  # noqa: BLE001 - torch's compiler can raise any exception
        _raise_if_device_is_lost(
            target.checkpoint.device,
            error,
            "compile_forward",
            "the compiled forward pass failed",
        )
        progress(f"the forward pass is not compiled: {first_line(error)}")
        return None
    progress("the forward pass is compiled")
    return compiled


def _compile_and_check(target: CompileTarget, progress: Progress) -> CompiledForward:
    """Compile a model's forward pass, check the logits, and let the engine's path use the result.

    The check runs a separate path, which computes test sequences with the compiled code.

    Args:
        target: the model, the test sequences, and the engine's path. The path is mutated only after
            a successful check.
        progress: called with one line for each slow operation.

    Raises:
        Exception: of any class, if the compilation fails or the logits are wrong.
    """
    path, model, reference = target.packed_path, target.checkpoint.model, target.chosen.reference
    # If CPU kernels compute the attention (`is_native`), the compiled code calls these kernels
    # directly, not through Python.
    compiled = compile_forward(model, target.hook, progress, is_native=path.is_native)
    check_path(target.build_test_path(compiled), reference, model.dtype)
    compiled.confirm()  # records the successful check next to the library on disk
    path.use_compiled(compiled)
    return compiled


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
        check_path(
            chosen.spec.build(chosen.reference.sizes), chosen.reference, checkpoint.model.dtype
        )
    except Exception as error:  # noqa: BLE001 - a model can raise any exception
        restore()
        reason = first_line(error)
        progress(f"RMSNorm modules are not replaced by torch's fused function: {reason}")
        return
    progress("torch's fused function computes the RMSNorm modules")


def use_decode_graphs(
    path: ForwardPath, setup: GraphSetup, activation_bytes: int, progress: Progress
) -> None:
    """Capture decode steps as CUDA graphs, and use the graphs if their logits are correct.

    Do nothing on a device that is not a GPU.

    Args:
        path: the engine's forward path. Mutated.
        setup: the model, the test sequences, and the sizes of the engine's path.
        activation_bytes: the memory that the largest step needs. The graphs must leave this memory
            free.
        progress: called with one line about the result.

    Raises:
        ConfigError: if the GPU cannot be used any more after the attempt.
    """
    device = setup.checkpoint.device
    capture = capture_on(device, activation_bytes)
    if capture is None:
        return
    try:
        _check_graphs(setup)
    except Exception as error:  # noqa: BLE001 - capturing a model's code can raise any exception
        _raise_if_device_is_lost(device, error, "cuda_graphs", "replaying a captured step failed")
        progress(f"decode steps are not replayed from captured graphs: {first_line(error)}")
        return
    assert isinstance(path, PackedPath), "`_check_graphs` accepts only packed paths"
    path.graphs = DecodeGraphs(path.run_without_graphs, capture, setup.sizes, device)
    path.graphs.capture_all()
    if path.graphs.failure is not None:
        progress(f"decode steps are not replayed from captured graphs: {path.graphs.failure}")
        return
    progress("decode steps are replayed from captured graphs")
    # Only a compiled forward pass can be divided into the pieces between two attention calls.
    if setup.compiled is not None:
        use_piecewise_graphs(path, setup, capture, progress)


def use_piecewise_graphs(
    path: PackedPath, setup: GraphSetup, capture: GraphCapture, progress: Progress
) -> None:
    """Capture steps with prefills as CUDA graphs, and use the graphs if their logits are correct.

    A step with prefills computes tokens of prompts.

    Args:
        path: the engine's forward path, which uses a compiled forward pass. Mutated.
        setup: the model, the test sequences, and the sizes of the engine's path.
        capture: captures the graphs on the GPU.
        progress: called with one line about the result.
    """
    try:
        _check_piecewise_graphs(setup, capture)
    except Exception as error:  # noqa: BLE001 - capturing a model's code can raise any exception
        _raise_if_device_is_lost(
            setup.checkpoint.device,
            error,
            "cuda_graphs",
            "replaying a captured part of a step failed",
        )
        progress(f"steps with prefills are not replayed from captured graphs: {first_line(error)}")
        return
    # If the capture fails, `_capture_pieces` passes the reason to `progress`, and `path` computes
    # its steps without graphs.
    graphs = _capture_pieces(path, capture, setup.sizes, progress)
    if graphs.failure is None:
        progress("the parts of steps with prefills are replayed from captured graphs")


def _capture_pieces(
    path: PackedPath,
    capture: GraphCapture,
    sizes: Sizes,
    report: Callable[[str], None],
    token_counts: Sequence[int] = TOKEN_COUNTS,
) -> PiecewiseGraphs:
    """Capture steps with prefills as CUDA graphs, and store the graphs in `path`. Return them.

    The work of a step between two attention calls is one graph (a piece). If a capture fails, all
    graphs are deleted, and the path computes its steps without graphs.

    Args:
        path: the path. Mutated.
        capture: captures the graphs on the GPU.
        sizes: the sizes of the path's KV cache, and the limits of a step.
        report: called with a line of text if the capture fails.
        token_counts: the step sizes in tokens for which graphs are captured.
    """
    graphs = path.piecewise_graphs(capture.capture_pieces, sizes, report)
    path.pieces = graphs
    graphs.capture_all(token_counts)
    return graphs


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
    """Use an external library for each layer whose attention is faster with this library.

    Do nothing if no GPU kernel is used, or if no library is faster. The libraries are used only if
    a separate test path, which uses the same libraries, computes correct logits. If the engine's KV
    cache stores 8-bit numbers, the engine's path uses no library, because the libraries do not
    support 8-bit numbers.

    Args:
        path: the engine's forward path. Mutated.
        checkpoint: the model.
        chosen: the chosen forward path, with the test sequences and the expected logits.
        progress: called with one line about the result.
    """
    if not isinstance(path, PackedPath):
        return
    test_path = chosen.spec.build(chosen.reference.sizes)
    assert isinstance(test_path, PackedPath)
    # `choose_attention` chooses a library for each pair of a layer kind and a step kind, such as
    # layers with a sliding window in decode steps. It returns the number of pairs for which a
    # library is faster. The first call measures the libraries, and later calls use these
    # measurements.
    num_pairs_of_test_path = test_path.choose_attention()
    if num_pairs_of_test_path == 0:
        return
    try:
        check_path(test_path, chosen.reference, checkpoint.model.dtype)
    except Exception as error:  # noqa: BLE001 - a library can raise any exception
        progress(f"attention libraries are not used: {first_line(error)}")
        return
    num_pairs = path.choose_attention()
    progress(f"attention libraries are used for {num_pairs} pairs of a layer kind and a step kind")


def _check_piecewise_graphs(setup: GraphSetup, capture: GraphCapture) -> None:
    """Check that prefill steps in CUDA graphs give the same logits as the unmodified model.

    A prefill step computes tokens of prompts. A separate test path captures and replays the graphs.

    Args:
        setup: the model, the test sequences, and the sizes of the engine's path.
        capture: captures the graphs on the GPU.

    Raises:
        UnfitError: if the logits differ, or if no step with prefills was replayed.
    """
    test_path = setup.build_test_path()
    # The steps of the check have so few tokens that the smallest step size is enough.
    smallest_count = TOKEN_COUNTS[:1]
    capture_problems: list[str] = []
    graphs = _capture_pieces(
        test_path, capture, setup.test_sizes, capture_problems.append, token_counts=smallest_count
    )
    setup.check(test_path)
    if graphs.num_replays == 0:
        has_failed_capture = bool(capture_problems)
        reason = (
            capture_problems[0] if has_failed_capture else "the check had no step with prefills"
        )
        raise UnfitError(reason)


def _check_graphs(setup: GraphSetup) -> None:
    """Check that decode steps in CUDA graphs give the same logits as the unmodified model.

    A separate test path captures and replays the graphs. `setup` contains the model, the test
    sequences, and the sizes of the engine's path.

    Raises:
        UnfitError: if the logits differ, or if no decode step was replayed.
    """
    device = setup.checkpoint.device
    capture = capture_on(device)
    assert capture is not None, "the caller has checked that the device is a GPU"
    test_path = setup.build_test_path()
    capture_problems: list[str] = []
    graphs = DecodeGraphs(
        test_path.run_without_graphs, capture, setup.test_sizes, device, capture_problems.append
    )
    test_path.graphs = graphs
    # In the first round, each step is captured as a graph, and also computed without the graph. The
    # keys and values that are computed without the graph are correct, so they could hide an error
    # of the graph. Therefore, the second round starts with an empty cache, and only replays the
    # graphs.
    for _ in range(2):
        test_path.empty()
        setup.check(test_path)
    if capture_problems:
        raise UnfitError(graphs.failure or capture_problems[0])
    # Right after its capture, each graph is replayed once, for the captured step. More replays than
    # captures therefore mean that graphs have also computed later steps.
    has_replayed_later_steps = graphs.num_replays > graphs.num_captures
    if not has_replayed_later_steps:
        raise UnfitError(graphs.failure or "the check had no decode step")
