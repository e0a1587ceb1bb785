# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the files in the folder of a compiled library.

The name of the folder is a hash of everything that the library depends on.
"""

import contextlib
import fcntl
import hashlib
import inspect
import json
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from nereid_backend.attention.cpu.load_kernels import processor
from nereid_backend.cache_folder import cache_folder
from nereid_backend.linear import grouped_linear, native_linear
from nereid_backend.paths.model_call import UnfitError

Shims = dict[torch._ops.OpOverload, list[str]]

LIBRARY_FILE = "model.pt2"
LITERALS_FILE = "literals.safetensors"
_TRACE_ERROR_FILE = "trace_error.txt"
# The name of a file that counts the unsuccessful checks of the library. The size of the file in
# bytes is the number of these checks.
_CHECKS_FILE = "failed_checks"
_MAX_FAILED_CHECKS = 3
# Maps the folder of each library that this process is checking to an open file. The process keeps a
# lock on this file, which records the check.
_running_checks: dict[Path, BinaryIO] = {}
# The C declarations of the functions in cpu_shim.cpp that compiled code calls.
_PACKED_LINEAR_SHIM = (
    "AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle x, AtenTensorHandle packed, "
    "AtenTensorHandle* bias, int64_t out_features, AtenTensorHandle* out)"
)
_GROUPED_LINEAR_SHIM = (
    "AOTITorchError aoti_torch_cpu_grouped_linear(AtenTensorHandle x, AtenTensorHandle values, "
    "AtenTensorHandle scales, AtenTensorHandle* zeros, AtenTensorHandle* bias, int64_t bits, "
    "int64_t group_size, int64_t out_features, AtenTensorHandle* out)"
)
_PAGED_ATTEND_SHIM = (
    "AOTITorchError aoti_torch_cpu_paged_attend(AtenTensorHandle query, AtenTensorHandle key, "
    "AtenTensorHandle value, AtenTensorHandle* sinks, int64_t layer, double scale, "
    "AtenTensorHandle* out)"
)
# torch's compiler writes the values of vectors with at most `_MAX_INLINED_ELEMENTS` elements into
# the library. Two checkpoints can therefore share a library only if these values are equal in both
# checkpoints.
_MAX_INLINED_ELEMENTS = 8
# The source files of this package that affect a compiled library.
_SOURCES_OF_LIBRARY = (
    "paths/compiled_forward/build_library.py",
    "paths/compiled_forward/library_files.py",
    "linear/native_linear.py",
    "linear/grouped_linear.py",
    "attention/torch_operator.py",
    "attention/cpu/cpu_shim.cpp",
)


class TraceError(UnfitError):
    """Raised if torch cannot trace the model's code. Another attempt would fail, too."""


def library_folder(model: PreTrainedModel, *, is_native: bool) -> Path:
    """Return the folder for the library of a model. The folder may not exist yet.

    Args:
        model: the model.
        is_native: whether attention uses the CPU kernels, which can be called without Python.
    """
    return cache_folder() / "compiled" / _hash_of_library(model, shims_of(model.device, is_native))


def has_library(folder: Path) -> bool:
    """Return whether a folder contains a complete library.

    A power failure, for example, can truncate the file of a library, which is a zip archive.
    """
    # The function looks for the end of the archive, which a truncated file does not have.
    return zipfile.is_zipfile(folder / LIBRARY_FILE)


def write_trace_error(folder: Path, error: TraceError) -> None:
    """Store an error in the folder of a library, so that the next start skips the tracing."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _TRACE_ERROR_FILE).write_text(str(error), encoding="utf-8")


def read_trace_error(folder: Path) -> str | None:
    """Return the error that `write_trace_error` has recorded, or None."""
    try:
        return (folder / _TRACE_ERROR_FILE).read_text(encoding="utf-8")
    except OSError:
        return None


def begin_check(folder: Path) -> None:
    """Record on disk that a check of a library begins. A successful check deletes the records.

    A library could crash the process during the check. The server would then start the engine
    again, which would check the same library again, and so on. Too many records without a
    successful check therefore raise an error.

    Several engines may check a library at the same time. Only one of them records its check,
    because the records of running checks would be counted as failed checks.

    Raises:
        UnfitError: if the last `_MAX_FAILED_CHECKS` checks did not succeed.
    """
    _end_check(folder)  # An earlier check of this process has failed if its records are still open.
    path = folder / _CHECKS_FILE
    _raise_if_checks_failed(path)
    records = _open_and_lock(path)  # None if another engine is checking the library
    if records is not None:
        _running_checks[folder] = records
        with contextlib.suppress(OSError):  # The disk may be full.
            records.write(b".")  # one byte for each check


def _raise_if_checks_failed(path: Path) -> None:
    """Raise an UnfitError if the file `path` has `_MAX_FAILED_CHECKS` bytes or more.

    The program writes one byte before each check, and a successful check deletes the file. Each
    byte in the file therefore belongs to a check that has failed.
    """
    num_failed_checks = path.stat().st_size if path.is_file() else 0
    if num_failed_checks >= _MAX_FAILED_CHECKS:
        raise UnfitError(
            f"the last {_MAX_FAILED_CHECKS} checks of the library in {path.parent} did not "
            "succeed. Delete this folder to compile the model again"
        )


def _open_and_lock(path: Path) -> BinaryIO | None:
    """Open and lock the file `path`, in which this process records a check; see `begin_check`.

    Return None if another process has locked the file, or if this process cannot write the file.
    """
    try:
        # The file has no buffer, so that the record is in the file before the check begins.
        records = path.open("ab", buffering=0)
    except OSError:
        return None  # The folder may belong to another user.
    if not _try_lock(records):
        records.close()
        return None
    return records


def _try_lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed. Return False if another process has locked the file.

    If the file system does not support locks, return True without a lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # The file system does not support locks.
    return True


def confirm_check(folder: Path) -> None:
    """Record that a check has found the logits of the library correct; see `begin_check`."""
    with contextlib.suppress(OSError):
        (folder / _CHECKS_FILE).unlink(missing_ok=True)
    _end_check(folder)


def _end_check(folder: Path) -> None:
    """Close and unlock the file in which this process has recorded its check of a library.

    Another process can then lock the file, and record another check of the library.
    """
    if (records := _running_checks.pop(folder, None)) is not None:
        records.close()


def save_literals(literals: dict[str, Tensor], file: Path) -> None:
    """Store the constant tensors of the traced code, and the device of each tensor, in `file`."""
    # Some code creates small tensors on the CPU even if the model is on a GPU.
    device_types = {name: tensor.device.type for name, tensor in literals.items()}
    save_file(literals, file, metadata={"devices": json.dumps(device_types)})


def load_literals(file: Path, device: torch.device) -> dict[str, Tensor]:
    """Load the tensors that `save_literals` stored.

    Tensors that were on the CPU stay on the CPU. All other tensors are moved to `device`.
    """
    with safe_open(file, framework="pt") as opened:
        device_types = json.loads(opened.metadata()["devices"])
        return {
            name: opened.get_tensor(name).to("cpu" if device_type == "cpu" else device)
            for name, device_type in device_types.items()
        }


def shims_of(device: torch.device, is_native: bool) -> Shims:
    """Return the C functions (shims) that compiled code calls for some of Nereid's operators.

    Without a shim, compiled code would call the Python code of the operator. cpu_shim.cpp defines
    the shims. The result maps each operator to the C declaration of its shim, which torch's
    compiler copies into the compiled code.

    Args:
        device: the device of the model. Only models on a CPU use shims.
        is_native: whether the KV cache has the layout that the CPU kernels for attention need. If
            False, compiled code calls the Python code of the attention operator.
    """
    if device.type != "cpu":
        return {}
    operators = torch.ops.nereid
    shims: Shims = {}
    if native_linear.is_available():
        shims[operators.packed_linear.default] = [_PACKED_LINEAR_SHIM]
    if grouped_linear.is_available():
        shims[operators.grouped_linear.default] = [_GROUPED_LINEAR_SHIM]
    if is_native:
        shims[operators.paged_attend.default] = [_PAGED_ATTEND_SHIM]
    return shims


def _hash_of_library(model: PreTrainedModel, shims: Shims) -> str:
    """Return a hash that changes whenever a model must be compiled again.

    A library is the compiled code of a model. The hash depends on everything that affects this
    code: the versions of torch and transformers, the source code, the model, and the hardware.

    Args:
        model: the model.
        shims: maps each of Nereid's operators that compiled code calls as a C function to the C
            declaration of this function, a list of strings.
    """
    package = Path(__file__).parents[2]  # the folder nereid_backend
    model_source = Path(inspect.getfile(type(model)))
    parts = [
        version("torch"),
        version("transformers"),
        *((package / source).read_text(encoding="utf-8") for source in _SOURCES_OF_LIBRARY),
        model_source.read_text(encoding="utf-8"),
        *_describe_model(model),
        repr(sorted(map(str, shims.values()))),
        str(torch.get_num_threads()),
        *_hardware_and_its_libraries(model.device),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _describe_model(model: PreTrainedModel) -> list[str]:
    """Return texts that change if the config, the modules or the weights' shapes change.

    The values of weights are left out, except very short vectors; see `_inlined_values`.
    """
    # The names of private attributes begin with "_". `attn_implementation` contains the name of
    # Nereid's attention function, which can differ between processes.
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and "attn_implementation" not in name
    }
    modules = [(name, type(module).__name__) for name, module in model.named_modules()]
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), _inlined_values(tensor))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    return [json.dumps(config, sort_keys=True, default=str), repr(modules), repr(tensors)]


def _inlined_values(tensor: Tensor) -> object:
    """Return a tensor's values if torch's compiler writes them into the library, otherwise None."""
    is_inlined = tensor.ndim <= 1 and tensor.numel() <= _MAX_INLINED_ELEMENTS
    return tensor.tolist() if is_inlined else None


def _hardware_and_its_libraries(device: torch.device) -> list[str]:
    """Describe the processor. For a GPU, add its name and the versions of Triton and CUDA."""
    if device.type != "cuda":
        return [processor()]
    capability = torch.cuda.get_device_capability(device)
    return [
        *(processor(), version("triton"), str(torch.version.cuda)),
        *(torch.cuda.get_device_name(device), str(capability)),
    ]
