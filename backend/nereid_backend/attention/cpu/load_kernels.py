# SPDX-License-Identifier: Apache-2.0
"""Loads the CPU kernels for the best instruction set that the processor supports.

A wheel contains libraries for the usual instruction sets (see hatch_build.py). If none of these
libraries is suitable, the kernels are built. The build takes up to a minute. It needs a C++
compiler, but no torch headers, because the kernels and torch exchange only plain C types. The built
library is stored in a cache folder. Its name contains the instruction set and a hash of all inputs
of the build. The functions of a library are loaded as global symbols, so that models that
AOTInductor has compiled can call these functions.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from nereid_backend.attention.cpu.compile_kernels import (
    FLAGS,
    HEADERS,
    SOURCES,
    KernelBuildError,
    compile_library,
    find_compiler,
)
from nereid_backend.attention.cpu.instruction_sets import InstructionSet, usable_instruction_sets
from nereid_backend.cache_folder import cache_folder

logger = logging.getLogger(__name__)

# If the package was installed from a wheel, this folder contains the wheel's precompiled libraries.
_PRECOMPILED = Path(__file__).with_name("precompiled")
# cpu_shim.cpp calls functions of this library.
_TORCH_LIBRARY = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
# In the file name of a library, the hash has this number of hexadecimal digits.
_FINGERPRINT_LENGTH = 16
# The header of a library, with only the fields e_ident (the first four bytes), e_shoff, e_shentsize
# and e_shnum.
_ELF_HEADER = struct.Struct("<4s36xQ10xHH2x")


def load_library() -> ctypes.CDLL:
    """Return the kernels for the best instruction set. Build the kernels if necessary.

    The kernels are built if neither this package nor the cache folder contains them. If the build
    for an instruction set fails, the next slower instruction set is tried.

    Raises:
        KernelBuildError: if there is no library for any instruction set and none can be built, or
            if NEREID_CPU_INSTRUCTIONS selects an instruction set that is not supported.
    """
    try:
        instruction_sets = usable_instruction_sets()
    except ValueError as error:
        raise KernelBuildError(str(error)) from error
    *faster_sets, slowest_set = instruction_sets
    for instruction_set in faster_sets:
        try:
            return _load(instruction_set)
        except KernelBuildError as error:
            logger.warning(
                "The CPU kernels for %s are not available: %s.", instruction_set.name, error
            )
    return _load(slowest_set)


def _load(instruction_set: InstructionSet) -> ctypes.CDLL:
    """Return the kernels for one instruction set. Build the kernels if necessary."""
    library = _load_precompiled(instruction_set) or _load_built(instruction_set)
    logger.info("The CPU kernels use the instruction set %s.", instruction_set.name)
    return library


def _load_built(instruction_set: InstructionSet) -> ctypes.CDLL:
    """Return the kernels from the cache folder. Build the kernels if they are not in the folder.

    Raises:
        KernelBuildError: if there is no compiler, or if the library cannot be built or loaded.
    """
    compiler = find_compiler()
    try:
        # The fingerprint is a hash of everything that the library depends on. If a source file
        # changes, the file name of the library changes, too.
        fingerprint = _fingerprint(compiler, instruction_set)
        path = cache_folder() / f"cpu-kernels-{instruction_set.name}-{fingerprint}.so"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        # The compiler cannot be started or does not answer, or the cache folder is unknown.
        raise KernelBuildError(f"the kernels could not be built ({error})") from error
    if not _is_complete(path):
        with _build_lock(path.with_suffix(".lock")):
            # Another process may have built the library while this process waited for the lock.
            if not _is_complete(path):
                _build(compiler, instruction_set, path)
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise KernelBuildError(
            f"the file {path} cannot be loaded ({error}); delete the file to build it again"
        ) from error


def _is_complete(path: Path) -> bool:
    """Return whether a file is a library and has its full length.

    A power failure, for example, can truncate a file. Loading a truncated library would kill this
    process with a bus error.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(_ELF_HEADER.size)
    except OSError:
        return False
    if len(header) < _ELF_HEADER.size:
        return False
    # The header contains the position of the table of sections, the size of an entry of this table,
    # and the number of entries. The table is at the end of the file.
    magic, table_start, entry_size, num_entries = _ELF_HEADER.unpack(header)
    return bool(magic == b"\x7fELF" and size >= table_start + entry_size * num_entries)


def _load_precompiled(instruction_set: InstructionSet) -> ctypes.CDLL | None:
    """Return the precompiled library for an instruction set, from the wheel of this package.

    Return None if the wheel contains no such library, or if the library does not work with the
    installed version of torch.
    """
    path = _PRECOMPILED / f"{instruction_set.name}.so"
    openmp = _openmp_path()
    if openmp is None or not path.is_file():
        return None
    try:
        # A precompiled library is not linked with torch and OpenMP, because the file names of these
        # two libraries depend on torch's version. The kernels call functions of torch and OpenMP as
        # global symbols, so torch and OpenMP are loaded first.
        for needed_path in (str(_TORCH_LIBRARY), openmp):
            ctypes.CDLL(needed_path, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        logger.warning("The precompiled CPU kernels cannot be used (%s).", error)
        return None


@contextlib.contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Return a context manager that keeps other processes from building the same library.

    The context manager locks the file `path` when the context begins, and deletes the file when the
    context ends. If the process crashes, the operating system releases the lock. If the file cannot
    be created or locked, the library is built without a lock.

    The lock only saves work. Two processes can safely build the library at the same time, because
    `_build` writes a temporary file and then renames the temporary file.
    """
    with contextlib.ExitStack() as end_of_context:
        with contextlib.suppress(OSError):  # for example, the file system does not support locks
            path.parent.mkdir(parents=True, exist_ok=True)
            file = end_of_context.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            end_of_context.callback(path.unlink, missing_ok=True)
        yield


def _build(compiler: str, instruction_set: InstructionSet, path: Path) -> None:
    """Compile and link the kernels for an instruction set into the file `path`."""
    flags = [*instruction_set.flags, "-mtune=native"]
    libraries = [str(_TORCH_LIBRARY)]
    openmp = _openmp_path()
    if openmp is not None:
        flags.append("-fopenmp")
        libraries.append(openmp)
    # Compiling can take a minute. Without this log line, the first start would seem to hang.
    line = f"nereid: compiling the CPU kernels with {compiler}; later starts use the result"
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the operator's terminal
    compile_library(compiler, flags, libraries, path)
    logger.info("The CPU kernels were built: %s.", path)


def _openmp_path() -> str | None:
    """Return the path of the OpenMP library that torch uses.

    Return None if torch uses no libgomp, or if the libraries of the process cannot be read. The
    kernels must use the same OpenMP library as torch, because the threads of a second library would
    compete with torch's threads for the same cores.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    loaded_paths: list[str] = re.findall(r"\s(/.*/libgomp[^/\s]*\.so\S*)", maps)
    # torch uses the libgomp in its own folders (torch/ and torch.libs/). If there is none, torch
    # uses the libgomp of the system. A libgomp in the folder of another Python package is ignored.
    packages = Path(torch.__file__).parent.parent
    for folder in (packages / "torch", packages / "torch.libs"):
        for path in loaded_paths:
            if Path(path).is_relative_to(folder):
                return path
    system_paths = (path for path in loaded_paths if not Path(path).is_relative_to(packages))
    return next(system_paths, None)


def _fingerprint(compiler: str, instruction_set: InstructionSet) -> str:
    """Return one hash of all inputs of a build. The hash becomes part of the library's file name.

    If any input changes, the library is therefore built again under another name.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    sources = [source.read_text(encoding="utf-8") for source in (*HEADERS, *SOURCES)]
    openmp_path = _openmp_path() or ""  # empty if torch does not use the OpenMP library libgomp
    libraries = [torch.__version__, str(_TORCH_LIBRARY), openmp_path]
    flags = [*FLAGS, *instruction_set.flags]
    # The instruction set `native` has no list of features. Its kernels are optimised for the
    # processor of this machine, so the hash must depend on the processor.
    target = "" if instruction_set.features else processor()
    inputs = [*sources, *flags, *libraries, version.stdout, target]
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()
    return digest[:_FINGERPRINT_LENGTH]


def processor() -> str:
    """Return the lines of /proc/cpuinfo that contain the processor's name and features."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return "".join(sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.M))))
