# SPDX-License-Identifier: Apache-2.0
"""Where transformers' model code meets our attention.

Transformers looks attention up by name for every call, so each engine registers a function of its
own under a name of its own: two engines in one process share nothing. What the function does is set
around each forward pass, because the batch's metadata cannot travel through the model (some
architectures swallow extra arguments).
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from nereid_backend.attention import reference
from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.cpu import cpu_attention
from nereid_backend.attention.gpu import gpu_attention
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.errors import EngineError

_numbers = itertools.count()


class AttentionForward(Protocol):
    """What serves the attention calls of one forward pass."""

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """One attention call.

        Shapes: query [1, num_heads, num_tokens, key_dim], key and value [1, num_kv_heads,
        num_tokens, dim]; returns [1, num_tokens, num_heads, value_dim].
        """
        ...


class AttentionHook:
    """One engine's entry in transformers' attention interface.

    Attributes:
        name: what a model's ``attn_implementation`` must be to come here. No attention mask is
            registered under it, so models build none.
    """

    def __init__(self) -> None:
        self.name = f"nereid_paged_{next(_numbers)}"
        self._forward: AttentionForward | None = None
        AttentionInterface.register(self.name, self._call)

    @contextmanager
    def serving(self, forward: AttentionForward) -> Iterator[None]:
        """Let a function serve the attention calls made meanwhile."""
        self._forward = forward
        try:
            yield
        finally:
            self._forward = None

    def remove(self) -> None:
        """Take the entry out of transformers' interface, so that the engine can be freed."""
        AttentionInterface._global_mapping.pop(self.name, None)

    def _call(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 - never built under our name
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        if self._forward is None:
            raise EngineError("the model was called outside a step of the engine")
        return self._forward(module, query, key, value, **kwargs), None


class PagedForward:
    """Attention of one packed step over the paged cache. Made for one forward pass.

    The n-th call is the n-th layer.
    """

    def __init__(self, layers: list[LayerSpec], cache: KVCache, batch: AttentionBatch) -> None:
        self._layers = layers
        self._numbers = iter(range(len(layers)))
        self._cache = cache
        self._batch = batch

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self._batch.slots.numel()

    def native(self) -> AbstractContextManager[None]:
        """Let native code that knows of no Python ask for this step's attention meanwhile."""
        if isinstance(self._cache, cpu_attention.CpuKVCache):
            return cpu_attention.serving(self._cache, self._layers, self._batch)
        return nullcontext()

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """Store the step's keys and values, then attend over all there are."""
        number = next(self._numbers, None)
        if number is None:
            raise EngineError("the model called attention more often than when it was probed")
        scale = scale_of(module, query, kwargs)
        return self.attend(number, query, key, value, scale, sinks_of(kwargs))

    def attend(
        self,
        number: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one layer, by its number; the rest as in `AttentionForward`."""
        layer = (number, self._layers[number])
        key, value = key.squeeze(0), value.squeeze(0)
        inputs = (query.squeeze(0), key, value)
        if isinstance(self._cache, cpu_attention.CpuKVCache):
            out = cpu_attention.attend(
                inputs, layer, self._cache, self._batch, scale=scale, sinks=sinks
            )
            return out.unsqueeze(0)
        if isinstance(self._cache, gpu_attention.GpuKVCache):
            out = gpu_attention.attend(
                inputs, layer, self._cache, self._batch, scale=scale, sinks=sinks
            )
            return out.unsqueeze(0)
        rows = self._batch.store_rows(layer[1].num_kv_heads)
        self._cache.store(number, key.transpose(0, 1), value.transpose(0, 1), rows)
        out = reference.attend(inputs, layer, self._cache, self._batch, scale=scale, sinks=sinks)
        return out.unsqueeze(0)


def scale_of(module: torch.nn.Module, query: Tensor, kwargs: dict[str, object]) -> float:
    """The factor on the scores: an argument of the call, else 1 / sqrt(key_dim)."""
    scale = kwargs.get("scaling")
    if scale is None:
        scale = getattr(module, "scaling", None)
    return float(scale) if isinstance(scale, int | float) else query.shape[-1] ** -0.5


def sinks_of(kwargs: dict[str, object]) -> Tensor | None:
    """Attention sinks of the call, [num_heads]."""
    sinks = kwargs.get("s_aux")
    return sinks.reshape(-1) if isinstance(sinks, Tensor) else None
