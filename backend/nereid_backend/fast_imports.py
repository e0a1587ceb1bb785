# SPDX-License-Identifier: Apache-2.0
"""Makes the import of torch and transformers faster.

During its import, transformers reads the source files of all its models, to find the names that
each file defines. This takes about a second of CPU time in each process. The result is an index
that depends only on the version of transformers. One process therefore stores the index in a file,
and later processes load this file.

If scipy is installed, transformers also imports scipy.optimize with 300 other modules, which takes
about half a second. Transformers needs only one function of scipy.optimize, and only to train
object detectors. A placeholder therefore replaces scipy.optimize during the import of transformers.
The placeholder imports the real module when the function is called.
"""

import contextlib
import gc
import hashlib
import importlib
import marshal
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from nereid_backend.cache_folder import cache_folder

# The module of transformers that contains the function `_FUNCTION`. This function builds the index
# of all models from the source files of the models.
_MODULE = "transformers.utils.import_utils"
_FUNCTION = "create_import_structure_from_path"
_SCIPY_MODULE = "scipy.optimize"
_SCIPY_FUNCTION = "linear_sum_assignment"


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Make the imports of torch and transformers in the `with` block faster.

    transformers reads the index of its models from a file, and does not import scipy. Garbage is
    not collected.
    """
    use_cached_index()
    with _without_garbage_collection(), _without_scipy():
        yield


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn off garbage collection while the `with` block runs.

    The import of torch creates about a hundred thousand permanent objects and no garbage.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # later collections skip the permanent objects
        gc.enable()


@contextlib.contextmanager
def _without_scipy() -> Iterator[None]:
    """While the `with` block runs, replace the module scipy.optimize with a placeholder.

    If the module has already been imported, it is not replaced.
    """
    placeholder = _Placeholder(_SCIPY_MODULE)
    sys.modules.setdefault(_SCIPY_MODULE, placeholder)
    try:
        yield
    finally:
        placeholder.remove()


def use_cached_index() -> None:
    """Let transformers read the index of its models from a file in Nereid's cache folder.

    If the file does not exist, transformers computes the index during its import. Do nothing if
    transformers has already been imported.
    """
    has_finder = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if _MODULE not in sys.modules and not has_finder:
        sys.meta_path.insert(0, _Finder())


class _Placeholder(ModuleType):
    """Replaces the module scipy.optimize in `sys.modules` while transformers is imported."""

    def remove(self) -> None:
        """Remove the placeholder, so that the next import loads the real module."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the module
        """Return an attribute of the real module.

        For `_SCIPY_FUNCTION`, return a function that imports the real module when it is called. For
        any other name, import the real module immediately.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        if name == _SCIPY_FUNCTION:
            return lambda *args, **kwargs: getattr(self._import(), name)(*args, **kwargs)
        return getattr(self._import(), name)

    def _import(self) -> ModuleType:
        """Import the real module that the placeholder replaces."""
        self.remove()
        return importlib.import_module(self.__name__)


class _Finder(MetaPathFinder):
    """Makes Python load `_MODULE` with `_Loader`, which replaces the function `_FUNCTION`.

    transformers calls the function during its import, so the function must be replaced as soon as
    its module is loaded.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002 - the base class requires this parameter
    ) -> ModuleSpec | None:
        """If the module is `_MODULE`, return a specification with `_Loader` as the module's loader.

        Python calls this method for each module that is imported. Return None for any other module,
        so that Python imports that module as usual.
        """
        if fullname != _MODULE:
            return None
        # `_Loader` reads a source file. Keep any other loader, such as the loader for zip files.
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Loads the module `_MODULE`, and replaces its function `_FUNCTION`."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and replace its function `_FUNCTION` if there is one."""
        super().exec_module(module)
        compute = getattr(module, _FUNCTION, None)
        if compute is not None:
            setattr(module, _FUNCTION, _with_cache(compute, Path(self.path).parents[1]))


def _with_cache(compute_index: Callable[[Any], Any], package: Path) -> Callable[[Any], Any]:
    """Return a replacement for `compute_index` that stores the computed index in a file.

    The index maps each model file of transformers to the names that the file defines. Example: it
    contains the class `LlamaModel` for the file `llama/modeling_llama.py`. Computing the index
    takes about a second, and reading the file is much faster. Only the index of the folder
    `models` is stored. For any other folder, the returned function calls `compute_index`.

    Args:
        compute_index: returns the index of a folder of transformers. The argument is the path of
            the folder or of a file in the folder.
        package: the folder of the package transformers.
    """
    models_folder = str(package / "models")
    models_paths = {models_folder, f"{models_folder}{os.sep}__init__.py"}

    def read_or_compute_index(module_path: Any) -> Any:  # noqa: ANN401 - transformers' types
        if str(module_path) not in models_paths:
            return compute_index(module_path)
        try:
            cache_file = cache_folder() / f"transformers-models-{_fingerprint(package)}.marshal"
        except RuntimeError:  # The home folder is unknown.
            return compute_index(module_path)
        index = _read(cache_file)
        if index is None:
            index = compute_index(module_path)
            _write(cache_file, index)
        return index

    return read_or_compute_index


def _fingerprint(package: Path) -> str:
    """Return a hash that changes whenever the stored index is no longer valid.

    The hash depends on the folder and the version of transformers, the time at which the folder of
    the models was changed, and the version of Python. If one of them changes, the stored index is
    not used.
    """
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    changed = (package / "models").stat().st_mtime_ns
    parts = (str(package), version, str(changed), sys.version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    """Read the index from a file. Return None if the file is missing or damaged."""
    try:
        index = marshal.loads(path.read_bytes())
    except (OSError, EOFError, ValueError, TypeError):
        return None
    return index if isinstance(index, dict) and index else None


def _write(path: Path, index: dict[str, Any]) -> None:
    """Write the index to a file. Ignore errors, because later processes can compute the index."""
    with contextlib.suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may be reading the file. The index is therefore written to a temporary
        # file, which is renamed when it is complete.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            written.write_bytes(marshal.dumps(index))
            written.replace(path)
