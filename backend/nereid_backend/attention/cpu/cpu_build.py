# SPDX-License-Identifier: Apache-2.0
"""Builds the CPU kernels once for an instruction set, and loads them.

The build needs a C++ compiler but no torch headers, because the kernels and torch exchange plain C
types. It takes some seconds. The library is stored in a cache folder; its name contains
the instruction set and a hash of everything that it was built from. Its functions are loaded as
global symbols, so that models that AOTInductor has compiled can call them.
"""

import ctypes
import hashlib
import logging
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nereid_backend.attention.cpu.instruction_sets import InstructionSet, usable_instruction_sets
from nereid_backend.cache_folder import cache_folder

logger = logging.getLogger(__name__)

SOURCES = (
    Path(__file__).with_name("cpu_decode.cpp"),
    Path(__file__).with_name("cpu_prefill.cpp"),
    Path(__file__).with_name("cpu_shim.cpp"),
    Path(__file__).parents[2] / "linear" / "cpu_linear.cpp",
    Path(__file__).parents[2] / "linear" / "cpu_grouped.cpp",
    Path(__file__).parents[2] / "sampling" / "cpu_logits.cpp",
)
_HEADERS = (Path(__file__).with_name("cpu_kernels.h"), Path(__file__).with_name("cpu_vectors.h"))
# The library of the functions that cpu_shim.cpp calls.
_TORCH = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
_COMPILERS = ("g++", "c++")
_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fPIC")
# The compiler needs about 10 seconds, but a busy machine can take several minutes.
_TIMEOUT_S = 900
# The largest number of characters of the compiler's output in an error message.
_MAX_OUTPUT = 500


class KernelBuildError(Exception):
    """The kernels cannot be built on this machine.

    The message is the reason, as a clause without a final period.
    """


def load_library() -> ctypes.CDLL:
    """Return the library of kernels for the best instruction set of the processor.

    Build the library if this machine has not built it yet. If the compiler is too old for an
    instruction set, use the next lower one.

    Raises:
        KernelBuildError: if there is no compiler, or if the compiler fails.
    """
    compiler = next((path for path in map(shutil.which, _COMPILERS) if path), None)
    if compiler is None:
        raise KernelBuildError(
            f"no C++ compiler was found; install one of {' and '.join(_COMPILERS)}"
        )
    try:
        instruction_sets = usable_instruction_sets()
    except ValueError as error:
        raise KernelBuildError(str(error)) from error
    for instruction_set in instruction_sets[:-1]:
        try:
            return _load(compiler, instruction_set)
        except KernelBuildError as error:
            logger.warning(
                "The CPU kernels for %s are not available: %s.", instruction_set.name, error
            )
    return _load(compiler, instruction_sets[-1])


def _load(compiler: str, instruction_set: InstructionSet) -> ctypes.CDLL:
    """Return the library of kernels for an instruction set. Build it if necessary."""
    fingerprint = _fingerprint(compiler, instruction_set)
    path = cache_folder() / f"cpu-kernels-{instruction_set.name}-{fingerprint}.so"
    if not path.is_file():
        _build(compiler, instruction_set, path)
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise KernelBuildError(
            f"the file {path} cannot be loaded ({error}); delete the file to build it again"
        ) from error
    logger.info("The CPU kernels use the instruction set %s.", instruction_set.name)
    return library


def _build(compiler: str, instruction_set: InstructionSet, path: Path) -> None:
    """Compile and link the kernels for an instruction set into the file `path`."""
    openmp = _openmp()
    flags = [*_FLAGS, *instruction_set.flags, *(["-fopenmp"] if openmp else [])]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The library is built in a temporary folder and then moved, because another process may
        # build it at the same time.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            objects = _compile(compiler, flags, Path(folder))
            built = Path(folder) / path.name
            # The library is linked without -fopenmp, because this flag would add the compiler's
            # own OpenMP library. With -Bsymbolic, its functions call each other even if the
            # process has also loaded the library for another instruction set.
            libraries = [str(_TORCH), *([openmp] if openmp else [])]
            _run([compiler, "-shared", "-Wl,-Bsymbolic", *objects, *libraries, "-o", str(built)])
            built.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the kernels could not be built ({error})") from error
    logger.info("The CPU kernels were built: %s.", path)


def _compile(compiler: str, flags: list[str], folder: Path) -> list[str]:
    """Compile the sources in parallel, and return the paths of the object files in `folder`."""
    objects = [str(folder / f"{source.stem}.o") for source in SOURCES]
    commands = [
        [compiler, *flags, "-c", str(source), "-o", target]
        for source, target in zip(SOURCES, objects, strict=True)
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(_run, commands))
    return objects


def _run(command: list[str]) -> None:
    """Run a command and raise KernelBuildError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise KernelBuildError(
            f"the compiler {command[0]} failed: {done.stderr.strip()[-_MAX_OUTPUT:]}"
        )


def _openmp() -> str | None:
    """Return the path of the OpenMP library that torch has loaded, or None if it is not libgomp.

    The kernels use the same library. A second OpenMP library in the process would start a second
    set of threads, which would compete with torch's threads for the same cores.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    loaded = re.findall(r"\s(/\S*/libgomp[^/\s]*\.so\S*)", maps)
    # Other Python packages may also have loaded a libgomp. torch uses the libgomp in its own
    # folders (torch/ and torch.libs/), or the libgomp of the system if there is none.
    packages = Path(torch.__file__).parent.parent
    of_torch = [
        path for path in loaded if path.startswith((f"{packages}/torch/", f"{packages}/torch."))
    ]
    of_system = [path for path in loaded if not path.startswith(str(packages))]
    return next(iter(of_torch or of_system), None)


def _fingerprint(compiler: str, instruction_set: InstructionSet) -> str:
    """Return a hash of the sources, flags, compiler, torch and its OpenMP library.

    The instruction set `native` has no list of features. Its library depends on the processor, so
    the hash then includes the processor, too.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    sources = [source.read_text(encoding="utf-8") for source in (*_HEADERS, *SOURCES)]
    libraries = [torch.__version__, str(_TORCH), _openmp() or ""]
    flags = [*_FLAGS, *instruction_set.flags]
    target = "" if instruction_set.features else processor()
    parts = [*sources, *flags, *libraries, version.stdout, target]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor() -> str:
    """Return the processor's name and features, as the operating system reports them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return "".join(sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.M))))
