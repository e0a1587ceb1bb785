# SPDX-License-Identifier: Apache-2.0
"""Registers the attention function of an engine in transformers' attention interface.

In every attention call, transformers looks up the attention function by its name. Each engine
registers its function under a name of its own, so that two engines in one process are independent.
The metadata of a step is stored before each forward pass. It is not passed as an argument of the
model, because some architectures ignore additional arguments.
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from nereid_backend.attention import choose_backend
from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.cpu import cpu_attention
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.errors import EngineError

_hook_numbers = itertools.count()


class AttentionForward(Protocol):
    """The interface of an object that computes the attention of one forward pass."""

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """Compute one attention call.

        Shapes: query [1, num_heads, num_tokens, key_dim], key and value [1, num_kv_heads,
        num_tokens, dim]. The result is [1, num_tokens, num_heads, value_dim].
        """
        ...


class AttentionHook:
    """The attention function of one engine, registered in transformers.

    Attributes:
        name: the name of the function. A model uses the function if its `attn_implementation` is
            this name. No mask function has this name, so models build no attention mask.
    """

    def __init__(self, name: str | None = None) -> None:
        """Register the function under `name`. If `name` is None, generate a unique name."""
        self.name = name or f"nereid_paged_{next(_hook_numbers)}"
        self._forward: AttentionForward | None = None
        AttentionInterface.register(self.name, self._call)

    @contextmanager
    def serving(self, forward: AttentionForward) -> Iterator[None]:
        """Return a context manager that makes `forward` compute all of the model's attention."""
        self._forward = forward
        try:
            yield
        finally:
            self._forward = None

    def remove(self) -> None:
        """Unregister the attention function from transformers.

        Without this call, the registered function would keep the engine in memory.
        """
        AttentionInterface._global_mapping.pop(self.name, None)

    def _call(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 - always None
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Compute one attention call of the model with the function that the engine has set.

        The library transformers calls this method in place of its own attention, and defines the
        arguments. The second item of the result would be the attention weights, which the engine
        does not compute.
        """
        if self._forward is None:
            raise EngineError("The model was called outside of a step of the engine.")
        return self._forward(module, query, key, value, **kwargs), None


class PagedForward:
    """Computes the attention of one step. The keys and values are in a paged KV cache.

    An instance is used for one forward pass. The n-th call of the instance belongs to the n-th
    attention layer.
    """

    def __init__(self, cache: KVCache, batch: AttentionBatch) -> None:
        """Create an object that computes the attention calls of one forward pass.

        Args:
            cache: the KV cache. Its layers have the order of their calls in a forward pass.
            batch: the metadata of the step for the first group of layers. `batch.other_groups`
                contains the metadata for the other groups.
        """
        self._num_calls = 0  # the number of attention calls in this forward pass so far
        self._cache = cache
        self._batches = (batch, *batch.other_groups)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the step."""
        return self._batches[0].slots.numel()

    def native(self) -> AbstractContextManager[None]:
        """Return a context manager that lets compiled models call the CPU kernels without Python.

        If the cache is not a CpuKVCache, the context manager does nothing.
        """
        if isinstance(self._cache, cpu_attention.CpuKVCache):
            return cpu_attention.serving(self._cache, self._batches)
        return nullcontext()

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """Store one layer's keys and values in the KV cache, and compute the layer's attention.

        `AttentionForward` documents the arguments and the result. The n-th call in a forward pass
        belongs to the n-th layer.
        """
        layer = self._num_calls
        num_layers = len(self._cache.layers)
        if layer == num_layers:
            raise EngineError(
                f"The model made more than {num_layers} attention calls in one forward pass. When "
                f"it was loaded, a forward pass made {num_layers} calls."
            )
        self._num_calls += 1
        scale = scale_of(module, query, kwargs)
        return self.attend(layer, query, key, value, scale, sinks_of(kwargs))

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store the keys and values of one layer in the cache, and compute the layer's attention.

        Args:
            layer: the index of the layer in the cache.
            query: [1, num_heads, num_tokens, key_dim].
            key: [1, num_kv_heads, num_tokens, key_dim].
            value: [1, num_kv_heads, num_tokens, value_dim].
            scale: the factor by which the scores are multiplied.
            sinks: the attention sinks, [num_heads]; None if the layer has no sinks.

        Returns:
            [1, num_tokens, num_heads, value_dim].
        """
        # Each group of layers has its own blocks, and therefore its own metadata.
        batch = self._batches[self._cache.group_of[layer]]
        # `attend` expects tensors without a batch dimension. The size of the batch dimension is
        # always 1, because all sequences of a step are packed into one row.
        inputs = (query.squeeze(0), key.squeeze(0), value.squeeze(0))
        out = choose_backend.attend(inputs, layer, self._cache, batch, scale=scale, sinks=sinks)
        return out.unsqueeze(0)


def scale_of(module: torch.nn.Module, query: Tensor, kwargs: dict[str, object]) -> float:
    """Return the factor by which the scores of an attention call are multiplied.

    The factor is the argument `scaling` of the call. If the call has no such argument, the factor
    is the attribute `scaling` of the module. If both are missing, the factor is 1 / sqrt(key_dim).

    Args:
        module: the attention layer.
        query: [..., key_dim].
        kwargs: the keyword arguments of the call.
    """
    scale = kwargs.get("scaling")
    if scale is None:
        scale = getattr(module, "scaling", None)
    if isinstance(scale, int | float):
        return float(scale)
    key_dim: int = query.shape[-1]
    return float(key_dim**-0.5)


def sinks_of(kwargs: dict[str, object]) -> Tensor | None:
    """Return the attention sinks of a call, [num_heads]; None if the call has no sinks."""
    sinks = kwargs.get("s_aux")
    return sinks.reshape(-1) if isinstance(sinks, Tensor) else None
