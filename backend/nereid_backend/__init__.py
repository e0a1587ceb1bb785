# SPDX-License-Identifier: Apache-2.0
"""The engine of Nereid: continuous batching and a paged KV cache under transformers' model code.

``Engine`` is imported on first use, because it brings torch, and the Triton server's stub
processes, which import this package for its types, must not load that.
"""

from typing import TYPE_CHECKING, Any

from nereid_backend.config import EngineConfig
from nereid_backend.core.outputs import CompletionOutput, EngineInfo, RequestOutput, RequestUpdate
from nereid_backend.core.params import SamplingParams
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
    from nereid_backend.engine import Engine

__all__ = [
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineInfo",
    "ModelError",
    "NereidError",
    "RequestError",
    "RequestOutput",
    "RequestUpdate",
    "SamplingParams",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name == "Engine":
        from nereid_backend.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
