"""Fixtures for the tests of GPU code.

On a machine without a GPU, the interpreter of the Triton language runs the kernels on the CPU. The
environment variable TRITON_INTERPRET selects the interpreter when the package `triton` is imported.
Other tests may have imported `triton` before, for example with torch's compiler. This file
therefore imports the Python modules of `triton` again.
"""

import importlib
import os
import sys
from unittest import mock

import pytest
import torch
from backend.torch_threads import use_threads

HAS_GPU = torch.cuda.is_available()


def _load_interpreter():
    """Import `triton` again with TRITON_INTERPRET=1, so that the interpreter runs the kernels."""
    # A process can load the compiled module `triton._C` only once, so this module stays loaded.
    for name in [n for n in sys.modules if n == "triton" or n.startswith("triton.")]:
        if not name.startswith("triton._C"):
            del sys.modules[name]
    # Processes that other tests start must not inherit the variable.
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        knobs = importlib.import_module("triton").knobs
    knobs.propagate_env = False
    knobs.runtime.interpret = True
    importlib.import_module("loadtest.gpu.interpreter").correct_interpreter()


if not HAS_GPU:
    pytest.importorskip("triton")
    _load_interpreter()


@pytest.fixture(autouse=True)
def few_threads():
    """Compute with one thread, because other tests run at the same time."""
    with use_threads(1):
        yield


@pytest.fixture(scope="session")
def device():
    """The device on which kernels are tested: a GPU, or the CPU with the interpreter."""
    return torch.device("cuda:0" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """A function that returns the folder of the tiny checkpoint of a family.

    The argument of the function is the family or the name of the family.
    """
    from backend.tiny_models import BY_NAME

    folders = {}

    def saved_folder(family):
        if isinstance(family, str):
            family = BY_NAME[family]
        key = repr(family)
        if key not in folders:
            folders[key] = family.save(tmp_path_factory.mktemp("model"))
        return folders[key]

    return saved_folder


@pytest.fixture
def engine_of(folder_of, monkeypatch):
    """A function that opens an engine on the CPU with a given class of KV cache.

    If the argument `capture` is given, the engine replays decode steps from graphs that the
    function `capture` has captured.
    """
    from backend.exactness import open_engine
    from backend.gpu.engines import SkippingCache, sizes_of_engine
    from nereid_backend.attention.gpu.gpu_attention import GpuKVCache
    from nereid_backend.model.forward_path import choose_path, make_kv_cache
    from nereid_backend.paths.cuda_graphs.decode_graphs import DecodeGraphs

    engines = []

    def open_with_cache(name, capture=None, *, cache_class=SkippingCache, **settings):
        monkeypatch.setattr(make_kv_cache, "unrounded_cache_class", lambda *_: cache_class)
        # The check of the kernels takes long in the interpreter. test_gpu_check.py tests it.
        monkeypatch.setattr(make_kv_cache, "checked_cache_class", lambda checked, *_: checked)
        if cache_class is GpuKVCache:
            # The check of the forward path takes long. test_engine_on_kernels.py tests it.
            monkeypatch.setattr(choose_path, "check_path", lambda *_, **__: 0.0)
        # On a GPU, the engine has no draft tokens by default.
        defaults = {"device": "cpu", "max_model_len": 128, "num_speculative_tokens": 0}
        # With prepack=True, a `Recorder` could not record the matrix products.
        engine = open_engine(folder_of(name), prepack=False, **{**defaults, **settings})
        engines.append(engine)
        if capture is not None:
            path = engine._parts.runner._path
            path.graphs = DecodeGraphs(
                path.run_without_graphs, capture, sizes_of_engine(engine), torch.device("cpu")
            )
        return engine

    yield open_with_cache
    for engine in engines:
        engine.close()
