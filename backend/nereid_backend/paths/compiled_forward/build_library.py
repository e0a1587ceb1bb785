# SPDX-License-Identifier: Apache-2.0
"""Traces the code of a model, and compiles the trace into a library.

torch.export traces the model's code in transformers once, for any number of tokens. In the trace,
attention and linear layers are operators of this package. AOTInductor fuses the code between these
operators, and compiles the trace into a library that runs without Python. The library does not
contain the weights, but reads the weights of the loaded model.
"""

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nereid_backend.attention.torch_operator import TracedForward
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.errors import first_line
from nereid_backend.paths.compiled_forward.library_files import (
    LIBRARY_FILE,
    LITERALS_FILE,
    TraceError,
    has_library,
    save_literals,
    shims_of,
)
from nereid_backend.paths.model_call import ModelCall, UnfitError

# The smallest number of tokens, and of logits, that the traced code supports. Shorter inputs are
# padded to this size. torch.export treats a size of 1 as a constant, so the number must be at least
# 2.
MIN_ROWS = 2
# The example input for tracing has these numbers of tokens and logits. The two numbers must differ.
# Otherwise torch.export would assume that they are always equal.
_EXAMPLE_TOKENS = 7
_EXAMPLE_LOGITS = 3
# If a model's code creates a tensor from constants, the tensor is small. A tensor with more than
# this number of elements probably comes from the checkpoint.
MAX_LITERAL_ELEMENTS = 65536
UNKNOWN_TENSOR = (
    "the model's code uses the tensor {name}, which is neither a parameter nor a buffer of the "
    "model"
)


class TracedModel(nn.Module):
    """The torch module that torch.export traces. The module computes the logits of a step."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._selects_logits = ModelCall(model).takes("logits_to_keep")

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_index: Tensor) -> Tensor:
        """Return the logits of the selected tokens, [len(logits_index), vocab_size].

        Args:
            input_ids: [1, num_tokens] int64.
            position_ids: [1, num_tokens] int64, the position of each token in its sequence.
            logits_index: [n] int64, the indices of the tokens whose logits are needed.
        """
        selected = {"logits_to_keep": logits_index} if self._selects_logits else {}
        output = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **selected
        )
        logits: Tensor = output.logits[0]
        return logits if self._selects_logits else logits[logits_index]


def build_library(
    model: PreTrainedModel, hook: AttentionHook, folder: Path, *, is_native: bool
) -> None:
    """Compile the forward pass of a model into a library, and store the library in `folder`.

    The library contains the code of the forward pass, but not the weights of the model.

    Args:
        model: the model, with `hook` as its attention.
        hook: Nereid's attention function, which transformers calls in each layer.
        folder: the folder. An existing folder is replaced if it does not contain a library.
        is_native: whether attention uses the CPU kernels, which can be called without Python.

    Raises:
        TraceError: if torch cannot trace the model's code.
        Exception: of any class, if torch cannot compile the trace.
    """
    traced_model = TracedModel(model)
    program = _trace(traced_model, hook, model.device)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The library is compiled in a temporary folder and then moved, because another process may
    # compile the same model at the same time.
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as temporary,
        _without_warnings(),
        _with_variable_threads(),
    ):
        finished = Path(temporary) / "library"
        finished.mkdir()
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(finished / LIBRARY_FILE),
            inductor_configs={
                "aot_inductor.package_constants_in_so": False,  # leave out the weights
                # Compiled code calls these operators of Nereid as C functions, without Python.
                "aot_inductor.custom_ops_to_c_shims": shims_of(model.device, is_native),
                # Every compilation of a model saves a little time if a precompiled header exists.
                # If only a few models are compiled, building this header takes more time than the
                # compilations save together.
                "aot_inductor.precompile_headers": False,
                # Determine the supported instruction sets only from the features that the processor
                # reports. Otherwise, torch would also build a test program for each instruction
                # set.
                "cpp.vec_isa_ok": True,
                # With more than one thread, torch would start a pool of processes, which would
                # continue to run after the compilation.
                "compile_threads": 1,
            },
        )
        # The library does not contain the small tensors that the model's code creates. Store these
        # tensors in a separate file.
        literals = _constants_of_code(program.constants, tensors_of(traced_model))
        save_literals(literals, finished / LITERALS_FILE)
        if has_library(folder):
            return  # Another process has stored the same library, and may be loading it.
        if folder.is_dir():
            shutil.rmtree(folder)
        finished.rename(folder)


def _trace(
    traced_model: TracedModel, hook: AttentionHook, device: torch.device
) -> torch.export.ExportedProgram:
    """Trace a model's forward pass, so that torch can compile it.

    The traced code accepts any number of tokens and any number of logits from `MIN_ROWS` on. The
    inputs are the token ids, the positions, and the indices of the tokens whose logits are needed.

    Raises:
        TraceError: if torch cannot trace the model's code.
    """
    # For each input, a dict of the dimensions whose size can change from call to call.
    num_tokens = torch.export.Dim("num_tokens", min=MIN_ROWS)
    num_logits = torch.export.Dim("num_logits", min=MIN_ROWS)
    variable_sizes = ({1: num_tokens}, {1: num_tokens}, {0: num_logits})
    # torch.export requires example inputs. They must not share memory, because the inputs of the
    # compiled code do not share memory.
    input_ids = torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(_EXAMPLE_TOKENS, device=device)[None]
    logits_index = torch.arange(_EXAMPLE_LOGITS, device=device)
    try:
        # `TracedForward` records each attention call in the trace as a call of one torch operator.
        with torch.no_grad(), _without_warnings(), hook.serving(TracedForward()):
            return torch.export.export(
                traced_model,
                (input_ids, positions, logits_index),
                dynamic_shapes=variable_sizes,
                strict=False,
            )
    except (MemoryError, OSError):
        raise  # Another attempt can succeed, so the error must not be stored as a TraceError.
    except Exception as error:
        # The model's code and torch can raise any exception here.
        raise TraceError(first_line(error)) from error


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name.

    Shared tensors appear under each name.
    """
    named: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    named.update(module.named_parameters(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named.items()}


def _constants_of_code(
    constants: dict[str, Any], model_tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors that the traced code creates itself. Tensors of the model are excluded.

    Example: the code contains `torch.tensor([1.0, 0.5])`.

    Args:
        constants: all constants of the trace, by name. torch also lists objects of C++ classes
            here, which a library cannot contain.
        model_tensors: the model's parameters and buffers, by name.

    Raises:
        UnfitError: if a constant is not a tensor, or if a tensor is so large that it probably comes
            from the checkpoint.
    """
    literals = {}
    for name, constant in constants.items():
        if name in model_tensors:
            continue
        is_small_tensor = isinstance(constant, Tensor) and constant.numel() <= MAX_LITERAL_ELEMENTS
        if not is_small_tensor:  # a tensor of the checkpoint, or an object of a C++ class
            raise UnfitError(UNKNOWN_TENSOR.format(name=name))
        literals[name] = constant.detach().clone().contiguous()
    return literals


def _with_variable_threads() -> AbstractContextManager[object]:
    """Return a context manager in which code is compiled for a variable number of threads.

    torch's compiler writes the number of threads into the code, unless the number is that of all
    CPUs. Therefore the context manager replaces the number of CPUs by the number of threads. The
    compiled code then uses at most this number of threads; see `CpuThreads`.
    """
    return mock.patch("os.cpu_count", torch.get_num_threads)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Return a context manager that suppresses torch's warnings about torch's own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
