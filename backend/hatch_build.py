"""A hook of hatchling that compiles the CPU kernels, so that a server needs no compiler.

The wheel contains one library for each of the usual instruction sets, and is then a wheel for Linux
on x86-64. For another instruction set, the server compiles the kernels when it starts, or uses
those for a lower instruction set if there is no compiler. A wheel that is built without a compiler
or on another processor contains no library.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from types import ModuleType

_FOLDER = Path("nereid_backend", "attention", "cpu")
# Compiling the kernels for one instruction set takes 20 seconds of CPU time.
_INSTRUCTION_SETS = ("avx2", "avx512_vnni", "avx512_bf16", "amx")
# The kernels use OpenMP, but the library does not name a file of OpenMP; see load_kernels.py. The
# wheel must be the same on every machine that builds it.
_FLAGS = ("-mtune=generic", "-fopenmp")


class PrecompiledKernels(BuildHookInterface):
    """Adds the folder `precompiled` with the libraries to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels for the usual instruction sets, unless the package is editable."""
        if version == "editable" or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            return
        folder = Path(self.root) / _FOLDER
        kernels = _load(folder / "compile_kernels.py")
        instruction_sets = _load(folder / "instruction_sets.py").INSTRUCTION_SETS
        target = Path(tempfile.mkdtemp())
        try:
            compiler = kernels.find_compiler()
            for one in instruction_sets:
                if one.name in _INSTRUCTION_SETS:
                    path = target / f"{one.name}.so"
                    kernels.compile_library(compiler, [*one.flags, *_FLAGS], [], path)
                    wanted = _FOLDER / "precompiled" / path.name
                    build_data["force_include"][str(path)] = str(wanted)
        except kernels.KernelBuildError as error:
            self.app.display_warning(f"The wheel contains no CPU kernels, because {error}.")
            build_data["force_include"].clear()
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"


def _load(path: Path) -> ModuleType:
    """Return a module of the package, without the other packages that the package imports."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Dataclasses need the entry.
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module
