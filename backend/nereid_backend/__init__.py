# SPDX-License-Identifier: Apache-2.0
"""The engine of Nereid, which runs the models of the transformers library.

The engine adds continuous batching and a paged KV cache to the model code of transformers.

``Engine``, ``Embedder`` and ``Reranker`` are imported on first use, because they import torch. The
Triton server's stub processes import this package for its types and must not load torch.
``EngineConfig`` and ``SamplingParams`` are imported on first use, too, because they import
pydantic. The GPU kernels can be used without pydantic.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nereid_backend.core.outputs import CompletionOutput, EngineInfo, RequestOutput, RequestUpdate
from nereid_backend.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    ModelError,
    NereidError,
    RequestError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from nereid_backend.config import EngineConfig
    from nereid_backend.engine.engine import Engine
    from nereid_backend.pooling.embedder import Embedder, Reranker
    from nereid_backend.request_field_checks import CheckedSamplingParams as SamplingParams

__all__ = [
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "Embedder",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineInfo",
    "ModelError",
    "NereidError",
    "RequestError",
    "RequestOutput",
    "RequestUpdate",
    "Reranker",
    "SamplingParams",
    "UnsupportedModelError",
]

# A waiting thread of the OpenMP library repeats a loop for this number of iterations before it
# sleeps. The library reads the variable when torch is imported. With the library's default of
# 300,000, the engine nearly stops if another process uses one of its CPUs, because the loop
# occupies a CPU that another thread of the engine needs (docs/history/cpu-kernels.md).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# Maps each name that is imported on first use to its module and to its name in this module.
_LAZY_NAMES = {
    "Embedder": ("nereid_backend.pooling.embedder", "Embedder"),
    "Engine": ("nereid_backend.engine.engine", "Engine"),
    "EngineConfig": ("nereid_backend.config", "EngineConfig"),
    "Reranker": ("nereid_backend.pooling.embedder", "Reranker"),
    "SamplingParams": ("nereid_backend.request_field_checks", "CheckedSamplingParams"),
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, class_name = _LAZY_NAMES[name]
    if name in ("Embedder", "Engine", "Reranker"):
        # These classes import transformers, which imports torchvision if it is installed.
        import_module("nereid_backend.vision.torchvision_operators").declare_operators()
    return getattr(import_module(module), class_name)
