# SPDX-License-Identifier: Apache-2.0
"""Replaces the model's own code by a compiled forward pass while the engine is serving requests.

The stages are:

    compile   another process, at the lowest priority      the engine runs the model's own code
    check     one short step between two steps of the      the logits of test sequences are compared
              engine, until all test sequences are done    with those of the unmodified model
    swap      between two steps                            the engine runs the compiled forward pass

If a stage fails, the engine logs a warning and continues with the model's own code. The library is
stored on disk, and the next start of the engine loads it.
"""

import logging
import time
from collections.abc import Generator
from pathlib import Path

import torch

from nereid_backend.attention.cpu.compile_kernels import KernelBuildError, find_compiler
from nereid_backend.attention.interface import AttentionHook
from nereid_backend.checkpoint import Checkpoint, Progress
from nereid_backend.config import EngineConfig
from nereid_backend.errors import first_line
from nereid_backend.model.accelerate_path import path_for_check, use_compiled_forward
from nereid_backend.model.choose_path import ChosenPath
from nereid_backend.model.limits import available_memory, format_bytes
from nereid_backend.model.self_check import check_in_steps
from nereid_backend.paths.background_compilation import BackgroundCompilation
from nereid_backend.paths.compiled_forward import (
    has_library,
    library_folder,
    load_library,
    read_trace_error,
)
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.model_skeleton import Skeleton, pack_skeleton
from nereid_backend.paths.packed import PackedPath
from nereid_backend.runner import ForwardPath

log = logging.getLogger(__name__)

# Smaller models are demos and test models. Their servers often end before the compilation does.
MIN_WEIGHTS_BYTES = 64 * 2**20
# The memory that a compilation may need.
_MIN_FREE_BYTES = 3 * 2**30


class ForwardSwap:
    """The compilation, the check and the use of a compiled forward pass.

    `advance` is called between two steps of the engine.

    Attributes:
        is_done: whether the compiled forward pass is in use, or a failure was logged.
    """

    def __init__(
        self,
        path: PackedPath,
        checkpoint: Checkpoint,
        hook: AttentionHook,
        chosen: ChosenPath,
        folder: Path,
        progress: Progress,
    ) -> None:
        """Start the compilation in another process.

        Args:
            path: the forward path that gets the compiled forward pass.
            checkpoint: the model.
            hook: the engine's entry in transformers' attention interface.
            chosen: the choice of the path, with the test sequences.
            folder: the folder for the library.
            progress: called with one line when the compiled forward pass is used.

        Raises:
            UnfitError: if the model cannot be sent to another process.
            OSError: if the process cannot be started.
        """
        self._path = path
        self._checkpoint = checkpoint
        self._chosen = chosen
        self._progress = progress
        skeleton = Skeleton(checkpoint.model, hook.name, path.is_native, torch.get_num_threads())
        self._started = time.monotonic()
        self._compilation = BackgroundCompilation(pack_skeleton(skeleton), folder)
        self._steps = self._check()
        self.is_done = False

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has work to do."""
        return not self.is_done and self._compilation.outcome is not None

    def advance(self) -> None:
        """Do the next part of the work, if the compilation has ended. A part takes one short step.

        A failure is logged once. It never affects the requests.
        """
        if not self.is_ready:
            return
        try:
            next(self._steps)
        except StopIteration:
            self.is_done = True
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

    def _check(self) -> Generator[None, None, None]:
        """Load the library, check its logits, and use it. Yield after each step of the check.

        Raises:
            Exception: of any class, if the library does not exist or is not correct.
        """
        if reason := self._compilation.outcome:
            raise RuntimeError(reason)
        compiled = load_library(self._checkpoint.model, self._compilation.folder)
        yield
        path = path_for_check(self._chosen, compiled)
        yield from check_in_steps(path, self._chosen.trial, self._checkpoint.model.dtype)
        compiled.confirm()
        self._path.use(compiled)
        self._progress(
            "the forward pass is compiled and used from now on. The compilation took "
            f"{time.monotonic() - self._started:.0f} s"
        )


def _reason_against_compilation(folder: Path) -> str | None:
    """Return why the library in `folder` cannot be compiled in the background, or None."""
    if error := read_trace_error(folder):
        return f"an earlier attempt failed ({error}). To try again, delete {folder}"
    try:
        find_compiler()
    except KernelBuildError as error:
        return str(error)
    free = available_memory()
    if free < _MIN_FREE_BYTES:
        return (
            f"{format_bytes(free)} of memory are free, and a compilation may need "
            f"{format_bytes(_MIN_FREE_BYTES)}"
        )
    return None


def use_fast_forward(
    config: EngineConfig,
    path: ForwardPath,
    checkpoint: Checkpoint,
    hook: AttentionHook,
    chosen: ChosenPath,
    progress: Progress,
) -> ForwardSwap | None:
    """Use the compiled forward pass on disk, or start to compile the forward pass.

    Do nothing on GPUs, for small models, and for all forward paths except `packed`.

    Args:
        config: the settings.
        path: the forward path with the sizes of the engine. Mutated if the library is on disk.
        checkpoint: the model.
        hook: the engine's entry in transformers' attention interface.
        chosen: the choice of the path, with the test sequences.
        progress: called with one line about the result.

    Returns:
        The running compilation; None if there is none.
    """
    is_small = checkpoint.weights_bytes < MIN_WEIGHTS_BYTES
    if checkpoint.device.type != "cpu" or config.tensor_parallel_size > 1 or is_small:
        return None
    if not isinstance(path, PackedPath):
        return None
    folder = library_folder(checkpoint.model, is_native=path.is_native)
    if has_library(folder):
        use_compiled_forward(path, checkpoint, hook, chosen, progress)
        return None
    reason = _reason_against_compilation(folder)
    if reason is None:
        try:
            swap = ForwardSwap(path, checkpoint, hook, chosen, folder, progress)
        except (UnfitError, OSError) as error:
            reason = first_line(error)
        else:
            progress(
                "the model's own code computes the forward pass, until another process has "
                f"compiled it; the result will be stored in {folder}"
            )
            return swap
    progress(f"the forward pass is not compiled, because {reason}")
    return None
