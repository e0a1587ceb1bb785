# SPDX-License-Identifier: Apache-2.0
"""Switches a model temporarily from the engine's attention to the model's own attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module


class OwnAttention:
    """Selects the attention of a model through the configs of its modules.

    A call of transformers' `set_attn_implementation` visits all modules. This class only exchanges
    one attribute of each config, so that it can be used in every step.
    """

    def __init__(self, model: Module) -> None:
        """Store the configs of a model and of its parts."""
        configs: dict[int, Any] = {}
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation_internal"):
                configs[id(config)] = config
        self._configs = list(configs.values())

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the model's own attention until the context ends."""
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = "eager"
        try:
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name
