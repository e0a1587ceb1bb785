# SPDX-License-Identifier: Apache-2.0
"""Replaces the engine's attention temporarily by a model's own attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel


class OwnAttention:
    """Temporarily switches a model to its own attention by changing the configs of its modules.

    transformers' `set_attn_implementation` visits all modules, which is slow. This class only sets
    one attribute of each config, so it is fast enough to be used in every step.
    """

    def __init__(self, model: Module) -> None:
        """Store the configs of a model and of its modules."""
        configs: dict[int, Any] = {}
        has_sdpa: dict[int, bool] = {}
        for module in model.modules():
            config = getattr(module, "config", None)
            if not hasattr(config, "_attn_implementation_internal"):
                continue
            key = id(config)
            configs[key] = config
            if isinstance(module, PreTrainedModel):
                has_sdpa[key] = has_sdpa.get(key, True) and bool(module._supports_sdpa)
        # The image encoder attends over thousands of patches. With "eager", which writes all
        # attention weights to memory, 5,000 patches take six times as long as with "sdpa".
        self._choices = [
            (config, "sdpa" if has_sdpa.get(key, False) else "eager")
            for key, config in configs.items()
        ]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Return a context in which the model uses its own attention."""
        before = [config._attn_implementation_internal for config, _ in self._choices]
        for config, name in self._choices:
            config._attn_implementation_internal = name
        try:
            yield
        finally:
            for (config, _), name in zip(self._choices, before, strict=True):
                config._attn_implementation_internal = name
