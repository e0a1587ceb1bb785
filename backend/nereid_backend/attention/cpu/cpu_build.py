# SPDX-License-Identifier: Apache-2.0
"""Builds the CPU kernels once for this machine and loads them.

A compiler is all it takes (some seconds); no torch headers, because the interfaces on both sides
are plain C. The library is kept in a cache folder under a name that says what it was built from.
It is loaded for all to see, so that models compiled by AOTInductor find its functions.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCES = (
    Path(__file__).with_name("cpu_decode.cpp"),
    Path(__file__).with_name("cpu_prefill.cpp"),
    Path(__file__).with_name("cpu_shim.cpp"),
    Path(__file__).parents[2] / "linear" / "cpu_linear.cpp",
    Path(__file__).parents[2] / "sampling" / "cpu_logits.cpp",
)
_HEADERS = (Path(__file__).with_name("cpu_kernels.h"), Path(__file__).with_name("cpu_vectors.h"))
# What cpu_shim.cpp calls.
_TORCH = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
_COMPILERS = ("g++", "c++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fPIC")
_TIMEOUT_S = 120


class KernelBuildError(Exception):
    """The kernels cannot be built here; the message says why."""


def load_library() -> ctypes.CDLL:
    """The kernels, built if this machine has not built them yet.

    Raises:
        KernelBuildError: there is no compiler, or it failed.
    """
    compiler = next((path for path in map(shutil.which, _COMPILERS) if path), None)
    if compiler is None:
        raise KernelBuildError(f"no C++ compiler is installed (looked for {', '.join(_COMPILERS)})")
    path = cache_folder() / f"cpu-kernels-{_fingerprint(compiler)}.so"
    if not path.is_file():
        _build(compiler, path)
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise KernelBuildError(f"{path} cannot be loaded: {error}") from error


def cache_folder() -> Path:
    """Where built kernels are kept: under XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "nereid"


def _build(compiler: str, path: Path) -> None:
    openmp = _openmp()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and moved there: another process may build at the same time.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            compiled, built = [str(Path(folder) / f"{s.stem}.o") for s in SOURCES], Path(folder)
            flags = [*_FLAGS, "-fopenmp"] if openmp else _FLAGS
            commands = [
                [compiler, *flags, "-c", str(source), "-o", target]
                for source, target in zip(SOURCES, compiled, strict=True)
            ]
            with ThreadPoolExecutor() as pool:
                list(pool.map(_run, commands))
            built /= path.name
            # Linked without -fopenmp, which would bring the compiler's own OpenMP library.
            libraries = [str(_TORCH), *openmp]
            _run([compiler, "-shared", *compiled, *libraries, "-o", str(built)])
            built.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the kernels could not be built: {error}") from error
    logger.info("built the CPU kernels: %s", path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise KernelBuildError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")


def _openmp() -> list[str]:
    """The OpenMP library that torch has loaded; none where it uses another kind.

    A second OpenMP library in the process would bring a second set of threads, which compete with
    torch's own for the same cores.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return []
    loaded = re.findall(r"\s(/\S*/libgomp[^/\s]*\.so\S*)", maps)
    # Other packages bring one of their own, too; torch's lies with torch, or is the system's.
    beside = Path(torch.__file__).parent.parent
    of_torch = [
        path for path in loaded if path.startswith((f"{beside}/torch/", f"{beside}/torch."))
    ]
    of_system = [path for path in loaded if not path.startswith(str(beside))]
    return (of_torch or of_system)[:1]


def _fingerprint(compiler: str) -> str:
    """Changes with the source, the flags, the compiler, the processor, torch and its OpenMP."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    sources = [source.read_text(encoding="utf-8") for source in (*_HEADERS, *SOURCES)]
    libraries = [torch.__version__, str(_TORCH), *_openmp()]
    parts = [*sources, *_FLAGS, *libraries, version.stdout, processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor() -> str:
    """What tells this processor from others: its name and abilities."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return "".join(sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.M))))
