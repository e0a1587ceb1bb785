"""Make forward passes fail on demand, in processes that start with this folder on PYTHONPATH.

Python imports a module with this name when it starts. In engine and worker processes, and in the
fork server that creates these processes, the module wraps two functions: the embedding lookup, with
which every forward pass starts, and functions of the grammar library. The product contains no code
for this purpose. A file in the folder FAULT_FOLDER selects the failure:

    engine, worker     a file for the process with this role. It contains one line:
                       "oom N"      the next N forward passes run out of memory
                       "cuda N"     the next N forward passes, and all later ones of the process,
                                    raise an error like CUDA's for a lost device
                       "hang N"     the next N forward passes never end
                       "nan TOKEN"  the vector of this token is NaN while the file exists
                       "mask N"     the next N token masks of grammars raise an error
                       "grammar N"  the next N tokens are not accepted by their grammar
"""

import importlib.machinery
import os
import sys
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, NamedTuple

_ROLES = {
    "nereid_backend.serving.executor.engine_process": "engine",
    "nereid_backend.serving.pooling.pooling_worker": "worker",
}
_FORK_SERVER = "nereid_backend.serving.process.forking.fork_server"
_LOCK = threading.Lock()


class _Failure(NamedTuple):
    """A failure, such as "oom 2". The number is a count, or the token for the kind "nan"."""

    kind: str
    number: int


_NO_FAILURE = _Failure("", 0)


def _role() -> str | None:
    """Return the role of this process; None if the process is neither an engine nor a worker.

    The first argument is the file of the running module, also in a process that the fork server
    has forked.
    """
    program = Path(sys.argv[0]).stem
    return next((role for name, role in _ROLES.items() if name.endswith(f".{program}")), None)


def _next_failure(folder: Path, kinds: Container[str]) -> _Failure | None:
    """Return the failure for this process, and decrement the count in its file.

    Return None if there is no file for the role of this process, or if its kind is not in `kinds`.
    """
    role = _role()
    if role is None:
        return None
    path = folder / role
    with _LOCK:
        try:
            kind, text = path.read_text().split()
        except (OSError, ValueError):  # there is no file, or the file is being written
            return None
        if kind not in kinds:
            return None
        number = int(text)
        is_counted = kind != "nan"
        if is_counted and number > 1:
            path.write_text(f"{kind} {number - 1}")
        elif is_counted:
            path.unlink()
    return _Failure(kind, number)


def _patch_embedding(module: Any, folder: Path) -> None:  # noqa: ANN401 - torch's
    """Wrap the lookup of embeddings, so that the kinds "oom", "cuda", "hang" and "nan" happen."""
    import torch

    # The engine overrides `forward` of some embeddings, so all calls of embeddings are patched.
    original = module.Embedding.__call__
    is_device_lost = False

    def call(self: Any, ids: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - torch's
        nonlocal is_device_lost
        failure = _next_failure(folder, ("oom", "cuda", "hang", "nan")) or _NO_FAILURE
        is_device_lost |= failure.kind == "cuda"
        if is_device_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if failure.kind == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if failure.kind == "hang":
            time.sleep(3600)
        vectors: torch.Tensor = original(self, ids)
        if failure.kind == "nan":
            is_token = (ids == failure.number).unsqueeze(-1)
            vectors = vectors.masked_fill(is_token, float("nan"))
        return vectors

    module.Embedding.__call__ = call


def _patch_matcher(module: Any, folder: Path) -> None:  # noqa: ANN401 - xgrammar's
    """Wrap functions of the grammar library so that the faults "mask" and "grammar" can occur."""
    for kind, owner, name in (
        ("mask", module.BatchGrammarMatcher, "batch_fill_next_token_bitmask"),
        ("grammar", module.GrammarMatcher, "accept_token"),
    ):
        setattr(owner, name, _failing(getattr(owner, name), kind, folder))


def _failing(original: Callable[..., Any], kind: str, folder: Path) -> Callable[..., Any]:
    """Return a function that raises an error on demand, and otherwise calls `original`."""

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - xgrammar's
        if _next_failure(folder, (kind,)) is not None:
            raise RuntimeError("the matcher is in a state that it can't be in")
        return original(*args, **kwargs)

    return call


_PATCHES: dict[str, Callable[[Any, Path], None]] = {
    "torch.nn.modules.sparse": _patch_embedding,
    "xgrammar.matcher": _patch_matcher,
}


class _Patcher:
    """An import hook that changes modules right after their import."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self,
        name: str,
        path: Any = None,  # noqa: ANN401 - the import system's
        target: Any = None,  # noqa: ANN401, ARG002 - the import system's
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, extended so that the patch runs after the module's code."""
        patch = _PATCHES.get(name)
        spec = None if patch is None else importlib.machinery.PathFinder.find_spec(name, path)
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:  # noqa: ANN401 - a module
            execute(module)
            patch(module, self._folder)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    folder = os.environ.get("FAULT_FOLDER")
    if folder and any(name in sys.orig_argv for name in (*_ROLES, _FORK_SERVER)):
        sys.meta_path.insert(0, _Patcher(Path(folder)))  # type: ignore[arg-type]


_install()
