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

    _build_folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels for the usual instruction sets, and add the libraries to the wheel.

        Do nothing if the package is editable, or if the machine is not a Linux machine on x86-64.

        Args:
            version: the kind of the build. "editable" installs the source folder itself.
            build_data: the description of the wheel. The member `force_include` maps each
                additional file to its path in the wheel. Mutated.
        """
        if version == "editable" or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            return
        compile_kernels = _load(Path(self.root) / _FOLDER / "compile_kernels.py")
        self._build_folder = tempfile.TemporaryDirectory()
        try:
            libraries = self._compile_libraries(compile_kernels, Path(self._build_folder.name))
        except compile_kernels.KernelBuildError as error:
            self.app.display_warning(f"The wheel contains no CPU kernels, because {error}.")
            return
        for library in libraries:
            path_in_wheel = _FOLDER / "precompiled" / library.name
            build_data["force_include"][str(library)] = str(path_in_wheel)
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Delete the compiled libraries after hatchling has copied them into the wheel."""
        if self._build_folder is not None:
            self._build_folder.cleanup()

    def _compile_libraries(self, compile_kernels: ModuleType, target: Path) -> list[Path]:
        """Compile a library for each of the usual instruction sets into the folder `target`."""
        instruction_sets = _load(Path(self.root) / _FOLDER / "instruction_sets.py").INSTRUCTION_SETS
        compiler = compile_kernels.find_compiler()
        libraries = []
        for instruction_set in instruction_sets:
            if instruction_set.name in _INSTRUCTION_SETS:
                library = target / f"{instruction_set.name}.so"
                flags = [*instruction_set.flags, *_FLAGS]
                compile_kernels.compile_library(compiler, flags, libraries=[], path=library)
                libraries.append(library)
        return libraries


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
