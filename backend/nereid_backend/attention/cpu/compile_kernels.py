# SPDX-License-Identifier: Apache-2.0
"""Compiles the C++ kernels for CPUs, and links them to a shared library.

The kernels are compiled either when a server starts (load_kernels.py) or when the wheel is built
(hatch_build.py). When the wheel is built, torch is not installed. Therefore, this module imports
only modules of the standard library.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
SOURCES = (
    Path(__file__).with_name("cpu_decode.cpp"),
    Path(__file__).with_name("cpu_prefill.cpp"),
    Path(__file__).with_name("cpu_shim.cpp"),
    _PACKAGE / "linear" / "cpu_linear.cpp",
    _PACKAGE / "linear" / "cpu_tile_linear.cpp",
    _PACKAGE / "linear" / "cpu_grouped.cpp",
    _PACKAGE / "linear" / "cpu_tile_grouped.cpp",
    _PACKAGE / "linear" / "cpu_adapters.cpp",
    _PACKAGE / "sampling" / "cpu_logits.cpp",
)
HEADERS = (
    Path(__file__).with_name("cpu_kernels.h"),
    Path(__file__).with_name("cpu_packing.h"),
    Path(__file__).with_name("cpu_products.h"),
    Path(__file__).with_name("cpu_vectors.h"),
    _PACKAGE / "linear" / "cpu_grouped.h",
    _PACKAGE / "linear" / "cpu_integers.h",
    _PACKAGE / "linear" / "cpu_tile_linear.h",
    _PACKAGE / "linear" / "cpu_tiles.h",
)
COMPILERS = ("g++", "c++")
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fPIC")
# The time limit for the compiler, in seconds. The compiler usually needs about 10 seconds. On a
# busy machine, it may need several minutes.
_TIMEOUT_S = 900
# If the compiler's output has more than this number of characters, the error message contains only
# the end of the output.
_MAX_OUTPUT = 500


class KernelBuildError(Exception):
    """Raised if the C++ kernels cannot be built on this machine.

    The message is the reason, as a clause without a final period.
    """


def find_compiler() -> str:
    """Return the path of a C++ compiler.

    Raises:
        KernelBuildError: if no compiler is installed.
    """
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise KernelBuildError(f"no C++ compiler was found; install one of {' and '.join(COMPILERS)}")


def compile_library(
    compiler: str, flags: Sequence[str], libraries: Sequence[str], path: Path
) -> None:
    """Compile and link the kernels into the file `path`.

    Args:
        compiler: the path of the compiler.
        flags: the flags for an instruction set and for OpenMP, in addition to FLAGS.
        libraries: the paths of the libraries to link. They are loaded together with the kernels.
            All other functions that the kernels call must already be global symbols of the process
            when the kernels are loaded.
        path: the file of the library.

    Raises:
        KernelBuildError: if the compiler fails, or if the folder of `path` cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Build the library in a temporary folder and then move it, because another process may
        # build the same library.
        temporary_folder = tempfile.TemporaryDirectory(dir=path.parent)
    except OSError as error:
        raise KernelBuildError(
            f"the kernels could not be stored in the folder {path.parent} ({error.strerror}); set "
            "the environment variable XDG_CACHE_HOME to a folder that can be written"
        ) from error
    try:
        with temporary_folder as folder:
            objects = _compile(compiler, [*FLAGS, *flags], Path(folder))
            built = Path(folder) / path.name
            # Do not link with the flag -fopenmp, because the kernels must use torch's OpenMP
            # library, and this flag selects the compiler's OpenMP library. With -Bsymbolic, a call
            # to a function of this library never reaches a function with the same name in another
            # library, such as the kernels for another instruction set.
            _run([compiler, "-shared", "-Wl,-Bsymbolic", *objects, *libraries, "-o", str(built)])
            built.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the kernels could not be built ({error})") from error


def _compile(compiler: str, flags: list[str], folder: Path) -> list[str]:
    """Compile all source files in parallel, and return the paths of the object files."""
    objects = [str(folder / f"{source.stem}.o") for source in SOURCES]
    commands = [
        [compiler, *flags, "-c", str(source), "-o", target]
        for source, target in zip(SOURCES, objects, strict=True)
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(_run, commands))
    return objects


def _run(command: list[str]) -> None:
    """Run a command. Raise a KernelBuildError if the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        end_of_output = done.stderr.strip()[-_MAX_OUTPUT:]
        raise KernelBuildError(f"the compiler {command[0]} failed: {end_of_output}")
