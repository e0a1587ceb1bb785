# SPDX-License-Identifier: Apache-2.0
"""Replaces the engine's attention temporarily by a model's own attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.nn import Module
from transformers import PreTrainedModel


class _ConfigAttention(NamedTuple):
    """A config object, and the attention implementation of the modules that use this object.

    Attributes:
        config: the config object, whose attribute _attn_implementation_internal is switched.
        attention: the name of the attention implementation: "sdpa" or "eager".
    """

    config: Any
    attention: str


class OwnAttention:
    """Temporarily switches a model to its own attention by changing the configs of its modules.

    transformers' `set_attn_implementation` visits all modules, which is slow. This class only sets
    one attribute of each config, so it is fast enough to be used in every step.
    """

    def __init__(self, model: Module) -> None:
        """Store the configs of all modules. Choose the attention implementation for each config.

        Several modules can share a config. If all models of transformers that use a config support
        "sdpa", "sdpa" is chosen, otherwise "eager". "sdpa" is preferred, because an image encoder
        attends over thousands of patches, and "eager" writes all attention weights to memory. For
        5,000 patches, "eager" takes six times as long as "sdpa".
        """
        # Maps the `id` of each config object to the modules that use this object. The keys are `id`
        # values, because two equal config objects must both be changed.
        modules_of_configs: dict[int, list[Module]] = {}
        for module in model.modules():
            if _names_attention(getattr(module, "config", None)):
                modules_of_configs.setdefault(id(module.config), []).append(module)
        self._attention_of_configs = [
            _ConfigAttention(modules[0].config, "sdpa" if _support_sdpa(modules) else "eager")
            for modules in modules_of_configs.values()
        ]

    @contextmanager
    def activated(self) -> Iterator[None]:
        """In a `with` block, let the model use its own attention instead of the engine's.

        transformers reads the name of the attention implementation from a private attribute of each
        config. At the end of the block, the previous names are restored.
        """
        own_names = self._attention_of_configs
        engine_names = [config._attn_implementation_internal for config, _ in own_names]
        for config, own_name in own_names:
            config._attn_implementation_internal = own_name
        try:
            yield
        finally:
            for (config, _), engine_name in zip(own_names, engine_names, strict=True):
                config._attn_implementation_internal = engine_name


def _names_attention(config: object) -> bool:
    """Return whether `config` is a config object that names the attention implementation."""
    return hasattr(config, "_attn_implementation_internal")


def _support_sdpa(modules: list[Module]) -> bool:
    """Return whether all models in `modules` support torch's `scaled_dot_product_attention`.

    `modules` are the modules that use one config. The result is False if they contain no model.
    Only a PreTrainedModel declares whether its code supports this function.
    """
    models = [module for module in modules if isinstance(module, PreTrainedModel)]
    return bool(models) and all(model._supports_sdpa for model in models)
