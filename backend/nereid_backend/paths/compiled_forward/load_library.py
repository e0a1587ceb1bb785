# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled forward pass of a model. Compiles the forward pass if necessary.

The compiled code is a library (build_library.py). The library is stored on disk, so that later
starts of the engine load it. The code of this module is tested on CPUs, and has never run on a GPU.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nereid_backend.attention.torch_operator import serving
from nereid_backend.attention.transformers_hook import AttentionHook, PagedForward
from nereid_backend.paths.compiled_forward.build_library import (
    MIN_ROWS,
    UNKNOWN_TENSOR,
    TracedModel,
    build_library,
    tensors_of,
)
from nereid_backend.paths.compiled_forward.library_files import (
    LIBRARY_FILE,
    LITERALS_FILE,
    begin_check,
    confirm_check,
    has_library,
    library_folder,
    load_literals,
)
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.step_batch import StepBatch

Progress = Callable[[str], None]


class CompiledForward:
    """The compiled forward pass of a model, as returned by `compile_forward`."""

    def __init__(self, run: Callable[..., Tensor], folder: Path | None = None) -> None:
        """Wrap a compiled function.

        Args:
            run: computes logits from three tensors: the token ids and the positions, both
                [1, num_tokens], and the indices of the tokens whose logits are needed.
            folder: the folder of the library that contains the function; None if no library
                contains the function.
        """
        self._run = run
        self._folder = folder

    def __call__(self, batch: StepBatch, attention: PagedForward) -> Tensor:
        """Compute a step, and return the logits, [num_logits, vocab_size].

        Mutates: the KV cache of `attention`.
        """
        rows = (batch.input_ids, batch.position_ids, batch.logits_index)
        with serving(attention):
            logits = self._run(*(_extend_to(tensor, MIN_ROWS) for tensor in rows))
        return logits[: batch.num_logits]

    def confirm(self) -> None:
        """Record on disk that the library computed correct logits in a check; see `begin_check`."""
        if self._folder is not None:
            confirm_check(self._folder)


def compile_forward(
    model: PreTrainedModel, hook: AttentionHook, progress: Progress, *, is_native: bool = False
) -> CompiledForward:
    """Compile a model for its device, or load the library that an earlier process compiled.

    Args:
        model: the model, with `hook` as its attention. On a CPU, its linear layers must be packed
            by `prepack_linears`.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with a line of text before a compilation starts.
        is_native: whether attention uses the CPU kernels, which can be called without Python.

    Raises:
        Exception: of any class, if torch cannot trace or compile the model's code.
    """
    folder = library_folder(model, is_native=is_native)
    if not has_library(folder):
        progress(
            f"compiling the forward pass of {type(model).__name__}. This takes at least half a "
            f"minute, once for this machine and this model. The result is stored in {folder}"
        )
        build_library(model, hook, folder, is_native=is_native)
    return load_library(model, folder)


def load_library(model: PreTrainedModel, folder: Path) -> CompiledForward:
    """Load the library in `folder`, and pass the weights of the model to the library.

    The caller must check the logits of the library. If the logits are correct, the caller must call
    `CompiledForward.confirm`.

    Raises:
        UnfitError: if the last checks of the library did not succeed; see `begin_check`.
        Exception: of any class, if the library is damaged or does not match the model.
    """
    begin_check(folder)
    library = _open_library(folder / LIBRARY_FILE, model.device)
    # The library contains no tensors. It needs the weights of the model and the literals. Literals
    # are small tensors that the model's code creates, and that `build_library` has stored in a
    # file.
    literals = load_literals(folder / LITERALS_FILE, model.device)
    _bind_tensors(library, literals | tensors_of(TracedModel(model)))

    def run(*inputs: Tensor) -> Tensor:
        logits: Tensor
        (logits,) = library.boxed_run(list(inputs))
        return logits

    return CompiledForward(run, folder)


def _open_library(file: Path, device: torch.device) -> Any:  # noqa: ANN401 - torch's class is untyped
    """Open a compiled library for calls on `device` from a single thread.

    The public function `aoti_load_package` is not used, because it compares this processor with the
    processor on which the library was compiled. The comparison takes 1.4 s, and is unnecessary:
    libraries for different processors are in different folders. Also, each call of a library that
    `aoti_load_package` has loaded takes longer.
    """
    # Without this argument, each call of the library takes locks. A call that takes locks cannot be
    # captured into a CUDA graph.
    is_single_threaded = True
    num_runners = 1
    device_index = -1 if device.index is None else device.index
    return torch._C._aoti.AOTIModelPackageLoader(
        str(file), "model", is_single_threaded, num_runners, device_index
    )


def _bind_tensors(library: Any, tensors: dict[str, Tensor]) -> None:  # noqa: ANN401 - untyped
    """Pass the tensors of the model to a compiled library. The tensors are not copied.

    Raises:
        UnfitError: if the code uses a tensor that is not among `tensors`.
    """
    names = library.get_constant_fqns()
    if unknown := [name for name in names if name not in tensors]:
        raise UnfitError(UNKNOWN_TENSOR.format(name=unknown[0]))
    constants = {name: tensors[name] for name in names}
    use_inactive = False
    check_full_update = True  # The call passes all tensors that the compiled code needs.
    user_managed = True  # The tensors are not copied.
    library.load_constants(constants, use_inactive, check_full_update, user_managed)


def _extend_to(tensor: Tensor, num_rows: int) -> Tensor:
    """Extend the last dimension to `num_rows` elements by repeating the last element.

    Example: [5] with 2 rows gives [5, 5]. A longer tensor is returned unchanged.
    """
    num_missing = num_rows - tensor.shape[-1]
    if num_missing <= 0:
        return tensor
    last_value = tensor[..., -1:]
    copies = last_value.expand(*tensor.shape[:-1], num_missing)
    return torch.cat([tensor, copies], dim=-1)
