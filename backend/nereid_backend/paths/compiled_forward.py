# SPDX-License-Identifier: Apache-2.0
"""Compilation of a model's forward pass into one function.

torch.export traces the model's code in transformers once, for any number of tokens. Attention and
linear layers are operators of this package in the trace. AOTInductor fuses the code between them
and compiles the trace into a library that runs without Python. The library is stored on disk, in a
folder whose name is a hash of everything that the library depends on. The library does not contain
the weights but reads those of the loaded model.

The code was made for CPUs and is tested there. On a GPU it has never run.
"""

import contextlib
import hashlib
import inspect
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from nereid_backend.attention.cpu.cpu_build import processor
from nereid_backend.attention.interface import AttentionHook, PagedForward
from nereid_backend.attention.torch_operator import TracedForward, serving
from nereid_backend.cache_folder import cache_folder
from nereid_backend.errors import first_line
from nereid_backend.linear import grouped_linear, native_linear
from nereid_backend.paths.model_call import ModelCall, UnfitError
from nereid_backend.paths.step_batch import StepBatch

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
Shims = dict[torch._ops.OpOverload, list[str]]

# The smallest size that the traced code supports. torch.export treats the size 1 as a constant, so
# a size that varies must be at least 2. Shorter inputs are extended to this size.
_MIN_ROWS = 2
# The numbers of tokens and logits of the example with which the model is traced. The two numbers
# must differ. Otherwise torch.export would assume that they are always equal.
_EXAMPLE_TOKENS = 7
_EXAMPLE_LOGITS = 3
# Tensors that a model's code creates from constants are small. A tensor with more elements probably
# depends on the checkpoint.
MAX_LITERAL_ELEMENTS = 65536
# torch's compiler writes the values of vectors with at most this number of elements into the
# library. Two checkpoints can therefore share a library only if these values are equal in both
# checkpoints.
_MAX_INLINED_ELEMENTS = 8
_LIBRARY_FILE = "model.pt2"
_LITERALS_FILE = "literals.safetensors"
# The file has one byte for each check of the library that did not succeed.
_CHECKS_FILE = "failed_checks"
_MAX_FAILED_CHECKS = 3
_TRACE_ERROR_FILE = "trace_error.txt"
_NO_PARAMETER = (
    "the model's code uses the tensor {name}, which is neither a parameter nor a buffer of the "
    "model"
)
# The files of this package that a library depends on.
_SOURCES = (
    "paths/compiled_forward.py",
    "linear/native_linear.py",
    "linear/grouped_linear.py",
    "attention/torch_operator.py",
    "attention/cpu/cpu_shim.cpp",
)


class TraceError(UnfitError):
    """torch cannot trace the model's code. Another attempt would fail for the same reason."""


class CompiledForward:
    """The compiled forward pass of a model, as returned by `compile_forward`."""

    def __init__(self, run: Callable[..., Tensor], folder: Path | None = None) -> None:
        """Wrap a compiled function.

        Args:
            run: computes logits from input_ids, position_ids and logits_index; shapes as in
                StepBatch.
            folder: the folder of the library that contains the function, if there is one.
        """
        self._run = run
        self._folder = folder

    def __call__(self, batch: StepBatch, attention: PagedForward) -> Tensor:
        """Compute a step and return its logits, [num_logits, vocab_size].

        Mutates: the KV cache of `attention`.
        """
        rows = (batch.input_ids, batch.position_ids, batch.logits_index)
        with serving(attention):
            logits = self._run(*(_at_least(tensor, _MIN_ROWS) for tensor in rows))
        return logits[: batch.num_logits]

    def confirm(self) -> None:
        """Record on disk that the logits of the library are correct; see `_count_check`."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / _CHECKS_FILE).unlink(missing_ok=True)


def compile_forward(
    model: PreTrainedModel, hook: AttentionHook, progress: Progress, *, is_native: bool = False
) -> CompiledForward:
    """Compile a model for its device, or load the library that an earlier process compiled.

    Args:
        model: the model, with `hook` as its attention. On a CPU, its linear layers must be packed
            by `prepack_linears`.
        hook: the engine's entry in transformers' attention interface.
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


def library_folder(model: PreTrainedModel, *, is_native: bool) -> Path:
    """Return the folder for the library of a model. The folder may not exist yet.

    The arguments are those of `compile_forward`.
    """
    return cache_folder() / "compiled" / _fingerprint(model, _shims(model.device, is_native))


def has_library(folder: Path) -> bool:
    """Return whether a folder contains a complete library."""
    return (folder / _LIBRARY_FILE).is_file()


def write_trace_error(folder: Path, error: TraceError) -> None:
    """Store the error in the folder of a library, so that later starts do not trace the model."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _TRACE_ERROR_FILE).write_text(str(error), encoding="utf-8")


def read_trace_error(folder: Path) -> str | None:
    """Return the error that `write_trace_error` has recorded, or None."""
    try:
        return (folder / _TRACE_ERROR_FILE).read_text(encoding="utf-8")
    except OSError:
        return None


def load_library(model: PreTrainedModel, folder: Path) -> CompiledForward:
    """Load the library in `folder`, and give the weights of the model to the library.

    The caller must check the logits of the library. If the logits are correct, the caller must call
    `CompiledForward.confirm`.

    Raises:
        UnfitError: if the last `_MAX_FAILED_CHECKS` checks of the library did not succeed.
        Exception: of any class, if the library is damaged or does not match the model.
    """
    _count_check(folder)
    device = model.device
    # By default, each call of the library takes locks, because several threads may call it. A call
    # that takes locks cannot be captured into a CUDA graph. The engine calls the library from one
    # thread, so the locks are turned off.
    #
    # The public function `aoti_load_package` is not used, because it takes 1.4 s longer: it checks
    # that this processor equals the processor of the compilation. This check is unnecessary here,
    # because the name of `folder` depends on the processor. Each call of a library that
    # `aoti_load_package` has loaded also takes longer.
    library = torch._C._aoti.AOTIModelPackageLoader(
        str(folder / _LIBRARY_FILE), "model", True, 1, -1 if device.index is None else device.index
    )
    tensors = _tensors(_TracedModel(model))
    _bind_tensors(library, _load_literals(folder / _LITERALS_FILE, device) | tensors)

    def run(*inputs: Tensor) -> Tensor:
        [logits] = library.boxed_run(list(inputs))
        return logits

    return CompiledForward(run, folder)


def _count_check(folder: Path) -> None:
    """Count a check of a library as failed. `CompiledForward.confirm` deletes the count.

    The check is counted before it begins, because a broken library could crash the process. The
    server would then start the engine again, and the engine would load the same library again.

    Raises:
        UnfitError: if the last `_MAX_FAILED_CHECKS` checks did not succeed.
    """
    file = folder / _CHECKS_FILE
    if file.is_file() and file.stat().st_size >= _MAX_FAILED_CHECKS:
        raise UnfitError(
            f"the last {_MAX_FAILED_CHECKS} checks of the library in {folder} did not succeed. "
            "Delete this folder to compile the model again"
        )
    # If the folder belongs to another user, this process cannot write the file.
    with contextlib.suppress(OSError), file.open("ab") as opened:
        opened.write(b".")


def _bind_tensors(library: Any, tensors: dict[str, Tensor]) -> None:  # noqa: ANN401 - untyped
    """Give a compiled library the tensors that its code reads, without copying them.

    Raises:
        UnfitError: if the code uses a tensor that is not among `tensors`.
    """
    names = library.get_constant_fqns()
    if unknown := [name for name in names if name not in tensors]:
        raise UnfitError(_NO_PARAMETER.format(name=unknown[0]))
    constants = {name: tensors[name] for name in names}
    # The arguments after the tensors are use_inactive=False, check_full_update=True (the code gets
    # all its tensors), and user_managed=True (the tensors are not copied).
    library.load_constants(constants, False, True, True)


class _TracedModel(nn.Module):
    """The module that torch.export traces. It computes the logits of a packed step."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._selects_logits = ModelCall(model).takes("logits_to_keep")

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_index: Tensor) -> Tensor:
        """Return the logits of the selected tokens, [len(logits_index), vocab_size].

        The class StepBatch describes the arguments.
        """
        selected = {"logits_to_keep": logits_index} if self._selects_logits else {}
        output = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **selected
        )
        logits: Tensor = output.logits[0]
        return logits if self._selects_logits else logits[logits_index]


def _shims(device: torch.device, is_native: bool) -> Shims:
    """Return the operators that compiled code calls in C instead of Python.

    Each operator is mapped to the C declaration of a function.

    cpu_shim.cpp defines the functions. The CPU kernels for attention read their own layout of the
    KV cache. Compiled code therefore calls them only if the cache has this layout (is_native);
    otherwise, it calls the Python implementation of the operator.
    """
    if device.type != "cpu":
        return {}
    operators = torch.ops.nereid
    handle = "AtenTensorHandle"
    shims: Shims = {}
    if native_linear.is_available():
        shims[operators.packed_linear.default] = [
            f"AOTITorchError aoti_torch_cpu_packed_linear({handle} x, {handle} packed, "
            f"{handle}* bias, int64_t out_features, {handle}* out)"
        ]
    if grouped_linear.is_available():
        shims[operators.grouped_linear.default] = [
            f"AOTITorchError aoti_torch_cpu_grouped_linear({handle} x, {handle} values, "
            f"{handle} scales, {handle}* zeros, {handle}* bias, int64_t bits, int64_t group_size, "
            f"int64_t out_features, {handle}* out)"
        ]
    if is_native:
        shims[operators.paged_attend.default] = [
            f"AOTITorchError aoti_torch_cpu_paged_attend({handle} query, {handle} key, "
            f"{handle} value, {handle}* sinks, int64_t layer, double scale, {handle}* out)"
        ]
    return shims


def build_library(
    model: PreTrainedModel, hook: AttentionHook, folder: Path, *, is_native: bool
) -> None:
    """Compile a model and store the library in `folder`.

    The other arguments are those of `compile_forward`.

    Raises:
        TraceError: if torch cannot trace the model's code.
        Exception: of any class, if torch cannot compile the trace.
    """
    traced = _TracedModel(model)
    num_tokens = torch.export.Dim("num_tokens", min=_MIN_ROWS)
    num_logits = torch.export.Dim("num_logits", min=_MIN_ROWS)
    tokens = torch.arange(_EXAMPLE_TOKENS, device=model.device)
    example = (torch.zeros_like(tokens)[None], tokens[None], tokens[:_EXAMPLE_LOGITS].clone())
    try:
        with torch.no_grad(), _without_warnings(), hook.serving(TracedForward()):
            program = torch.export.export(
                traced,
                example,
                dynamic_shapes=({1: num_tokens}, {1: num_tokens}, {0: num_logits}),
                strict=False,
            )
    except Exception as error:
        # The model's code and torch can raise any exception here.
        raise TraceError(first_line(error)) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The library is compiled in a temporary folder and then moved, because another process may
    # compile the same model at the same time.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary, _without_warnings():
        finished = Path(temporary) / "library"
        finished.mkdir()
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(finished / _LIBRARY_FILE),
            inductor_configs={
                "aot_inductor.package_constants_in_so": False,
                "aot_inductor.custom_ops_to_c_shims": _shims(model.device, is_native),
                # With more threads, torch would start a pool of processes, which would keep running
                # after the compilation.
                "compile_threads": 1,
            },
        )
        literals = _literals(program.constants, _tensors(traced))
        _save_literals(literals, finished / _LITERALS_FILE)
        if folder.is_dir():
            shutil.rmtree(folder)
        finished.rename(folder)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name.

    Shared tensors appear under each name.
    """
    named: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    named.update(module.named_parameters(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named.items()}


def _literals(constants: dict[str, Any], model_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the traced code creates from constants.

    Args:
        constants: all constants of the trace, by name.
        model_tensors: the model's parameters and buffers, by name.

    Raises:
        UnfitError: if a tensor is so large that it probably comes from the checkpoint.
    """
    literals = {}
    for name, tensor in constants.items():
        if name in model_tensors:
            continue
        if not isinstance(tensor, Tensor) or tensor.numel() > MAX_LITERAL_ELEMENTS:
            raise UnfitError(_NO_PARAMETER.format(name=name))
        literals[name] = tensor.detach().clone().contiguous()
    return literals


def _save_literals(literals: dict[str, Tensor], file: Path) -> None:
    """Store the tensors of the traced code in a file, with their devices."""
    # Some code creates small tensors on the CPU even if the model is on a GPU.
    kinds = {name: tensor.device.type for name, tensor in literals.items()}
    save_file(literals, file, metadata={"devices": json.dumps(kinds)})


def _load_literals(file: Path, device: torch.device) -> dict[str, Tensor]:
    """Load the tensors that `_save_literals` stored.

    Tensors that were on the CPU stay on the CPU. All other tensors are moved to `device`.
    """
    with safe_open(file, framework="pt") as opened:
        kinds = json.loads(opened.metadata()["devices"])
        return {
            name: opened.get_tensor(name).to("cpu" if kind == "cpu" else device)
            for name, kind in kinds.items()
        }


def _at_least(tensor: Tensor, num_rows: int) -> Tensor:
    """Extend the last dimension of a tensor to `num_rows` by repeating the last value.

    Example: [5] with 2 rows gives [5, 5]. A longer tensor is returned unchanged.
    """
    missing = num_rows - tensor.shape[-1]
    if missing <= 0:
        return tensor
    return torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], missing)], dim=-1)


def _fingerprint(model: PreTrainedModel, shims: Shims) -> str:
    """Return a hash that changes whenever the library must be compiled again.

    For example, the hash depends on the version of torch, the config of the model, and the CPU. It
    includes the values of very short vectors, but not the values of other weights.
    """
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and "attn_implementation" not in name
    }
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), _inlined_values(tensor))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    root = Path(__file__).parents[1]
    parts = [
        *(version(name) for name in ("torch", "transformers")),
        *((root / source).read_text(encoding="utf-8") for source in _SOURCES),
        Path(inspect.getfile(type(model))).read_text(encoding="utf-8"),
        json.dumps(config, sort_keys=True, default=str),
        repr([(name, type(module).__name__) for name, module in model.named_modules()]),
        repr(tensors),
        repr(sorted(map(str, shims.values()))),
        str(torch.get_num_threads()),
        *_target_hardware(model.device),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _inlined_values(tensor: Tensor) -> object:
    """Return a tensor's values if torch's compiler writes them into the library; otherwise None."""
    is_inlined = tensor.ndim <= 1 and tensor.numel() <= _MAX_INLINED_ELEMENTS
    return tensor.tolist() if is_inlined else None


def _target_hardware(device: torch.device) -> list[str]:
    """Return the hardware and the libraries that compiled code depends on."""
    if device.type != "cuda":
        return [processor()]
    capability = torch.cuda.get_device_capability(device)
    return [
        *(processor(), version("triton"), str(torch.version.cuda)),
        *(torch.cuda.get_device_name(device), str(capability)),
    ]


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress the warnings that torch gives about its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
