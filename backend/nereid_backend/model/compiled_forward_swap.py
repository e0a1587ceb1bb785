# SPDX-License-Identifier: Apache-2.0
"""Replaces the model's own code with a compiled forward pass while the engine serves requests.

There are three stages:

1. Another process compiles the forward pass into a library, at the lowest priority.
2. The engine checks the library: the engine computes test sequences with the library, and
   compares the logits with the logits of the unmodified model. Between two steps with requests, the
   engine computes one short step of this check.
3. Between two steps, the engine replaces the model's own code by the library.

The engine runs the model's own code until the third stage. If a stage fails, the engine logs a
warning and continues with the model's own code. The library is stored on disk, and the next start
of the engine loads the library.
"""

import logging
import time
from pathlib import Path
from typing import NamedTuple

import torch

from nereid_backend.attention.cpu.compile_kernels import KernelBuildError, find_compiler
from nereid_backend.config import EngineConfig
from nereid_backend.errors import first_line
from nereid_backend.load_checkpoint import Checkpoint, Progress
from nereid_backend.main_memory import available_memory, format_bytes
from nereid_backend.model.accelerate_path import CompileTarget, use_compiled_forward
from nereid_backend.model.forward_path.self_check import PathCheck
from nereid_backend.paths.compiled_forward.background_compilation import BackgroundCompilation
from nereid_backend.paths.compiled_forward.library_files import (
    has_library,
    library_folder,
    read_trace_error,
)
from nereid_backend.paths.compiled_forward.load_library import CompiledForward, load_library
from nereid_backend.paths.compiled_forward.model_skeleton import Skeleton, pack_skeleton
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.packed import PackedPath

log = logging.getLogger(__name__)

# Smaller models are not compiled in the background. They are used in demos and tests, where the
# server often ends before the compilation would end.
MIN_WEIGHTS_BYTES = 64 * 2**20
# A compilation may need this amount of memory in bytes. If less memory is free, no compilation is
# started.
_MIN_FREE_BYTES = 3 * 2**30


class _Candidate(NamedTuple):
    """A compiled forward pass that is loaded, but not used yet.

    Attributes:
        compiled: the compiled forward pass.
        check: computes test sequences with the compiled forward pass, and checks the logits.
    """

    compiled: CompiledForward
    check: PathCheck


class ForwardSwap:
    """Compiles the forward pass of a model in another process, and then uses the compiled code.

    The engine calls `advance` between two steps.

    Attributes:
        is_done: whether no work remains. Either the compiled forward pass is used, or a failure was
            logged.
    """

    def __init__(self, target: CompileTarget, folder: Path, progress: Progress) -> None:
        """Start the compilation in another process.

        Args:
            target: the model, the test sequences, and the forward path that will use the compiled
                forward pass.
            folder: the folder in which the library will be stored.
            progress: called with one line when the compiled forward pass is used.

        Raises:
            UnfitError: if the model cannot be sent to another process.
            OSError: if the process cannot be started.
        """
        self._target = target
        self._progress = progress
        # The model without the values of its weights. The other process needs only the shapes.
        skeleton = Skeleton(
            target.checkpoint.model,
            target.hook.name,
            target.packed_path.is_native,
            torch.get_num_threads(),
        )
        self._start_s = time.monotonic()
        self._compilation = BackgroundCompilation(pack_skeleton(skeleton), folder)
        self._candidate: _Candidate | None = None  # None until the library is loaded
        self.is_done = False

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has work to do."""
        return not self.is_done and self._compilation.outcome is not None

    def advance(self) -> None:
        """Load the compiled forward pass, or run the next forward pass of the check.

        The engine calls this method between two steps. Do nothing while the compilation runs. The
        last call compares the logits, and makes the engine's path use the compiled forward pass. A
        failure is logged once and never affects the requests.
        """
        if not self.is_ready:
            return
        try:
            if self._candidate is None:
                self._candidate = self._load()
            elif not self._candidate.check.has_all_logits:
                self._candidate.check.run_pass()
            else:
                self._candidate.check.compare()  # raises an UnfitError if the logits are wrong
                self._use(self._candidate.compiled)
        except Exception as error:  # noqa: BLE001 - torch's compiler can raise any exception
            self.is_done = True
            log.warning(
                "The forward pass is not compiled: %s. The engine continues with the model's own "
                "code.",
                first_line(error),
            )

    def close(self) -> None:
        """End the compilation if it is running."""
        self._compilation.close()

    def _load(self) -> _Candidate:
        """Load the compiled forward pass, and prepare the check of its logits.

        Raises:
            RuntimeError: if the compilation failed.
        """
        failure_reason = self._compilation.outcome  # "" if the compilation was successful
        if failure_reason:
            raise RuntimeError(failure_reason)
        model = self._target.checkpoint.model
        compiled = load_library(model, self._compilation.folder)
        test_path = self._target.build_test_path(compiled)
        check = PathCheck(test_path, self._target.chosen.reference, model.dtype)
        return _Candidate(compiled, check)

    def _use(self, compiled: CompiledForward) -> None:
        """Use the compiled forward pass in all later steps of the engine.

        The caller must have checked the logits of the compiled forward pass.
        """
        compiled.confirm()  # records the successful check next to the library on disk
        self._target.packed_path.use_compiled(compiled)
        self.is_done = True
        seconds = time.monotonic() - self._start_s
        self._progress(
            "the forward pass is compiled and used from now on. The compilation took "
            f"{seconds:.0f} s"
        )


def _is_worth_compiling(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Return True if one process computes the whole model on a CPU and the model is not small."""
    is_one_cpu_process = checkpoint.device.type == "cpu" and config.tensor_parallel_size == 1
    return is_one_cpu_process and checkpoint.weights_bytes >= MIN_WEIGHTS_BYTES


def _check_can_compile(folder: Path) -> None:
    """Check that this machine can compile the forward pass in the background.

    `folder` is the folder for the compiled library. It can contain the error of an earlier attempt.

    Raises:
        UnfitError: if an earlier attempt failed, or if too little memory is free.
        KernelBuildError: if the machine has no C++ compiler.
    """
    if error := read_trace_error(folder):
        raise UnfitError(f"an earlier attempt failed ({error}). To try again, delete {folder}")
    find_compiler()
    free_bytes = available_memory()
    if free_bytes < _MIN_FREE_BYTES:
        raise UnfitError(
            f"only {format_bytes(free_bytes)} of memory are free, but a compilation may need "
            f"{format_bytes(_MIN_FREE_BYTES)}"
        )


def use_or_compile_forward(
    config: EngineConfig, target: CompileTarget, progress: Progress
) -> ForwardSwap | None:
    """Use the compiled forward pass if it is stored on disk. Otherwise, start to compile it.

    The compilation runs in another process, and the engine uses the model's own code until it ends.
    Nothing is compiled if the forward path is not `packed` (one row with the tokens of all
    sequences), if a GPU or several processes compute the model, or if the model is small.

    Args:
        config: the settings.
        target: the model, the test sequences, and the engine's forward path. The path is mutated if
            the compiled library is on disk.
        progress: called with one line about the result.

    Returns:
        The compilation that was started; None if the compiled forward pass is used already, or if
        nothing is compiled.
    """
    path, checkpoint = target.path, target.checkpoint
    if not isinstance(path, PackedPath) or not _is_worth_compiling(config, checkpoint):
        return None
    folder = library_folder(checkpoint.model, is_native=path.is_native)
    if has_library(folder):
        use_compiled_forward(target, progress)
        return None
    try:
        _check_can_compile(folder)
        swap = ForwardSwap(target, folder, progress)
    except (UnfitError, KernelBuildError, OSError) as error:
        progress(f"the forward pass is not compiled, because {first_line(error)}")
        return None
    progress(
        "the model's own code computes the forward pass, until another process has compiled it; "
        f"the result will be stored in {folder}"
    )
    return swap
