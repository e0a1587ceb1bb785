# SPDX-License-Identifier: Apache-2.0
"""Two classes that store keys and values in blocks, for models with recurrent states.

The states of convolutions and recurrences are not in blocks. They stay in the cache of transformers
(recurrent_cache.py).

    HookedKeys     The engine's attention hook computes attention and reads the blocks.
    GatheredKeys   The model's own attention gets a copy of the keys and values
                   (gathered_cache.py).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.transformers_hook import AttentionHook, PagedForward
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.gathered_cache import (
    CacheLayout,
    GatheredLayer,
    GatheredStep,
    gathered_layer,
)
from nereid_backend.paths.model_call import BlockCacheLayer
from nereid_backend.paths.recurrent_cache import make_cache
from nereid_backend.paths.step_batch import BatchBuilder


class RowKeys(Protocol):
    """The interface of the classes that store keys and values for models with recurrent states."""

    @property
    def kv_cache(self) -> KVCache | None:
        """The KV cache; None if the model has no attention."""

    def make_cache(self) -> DynamicCache:
        """Return an empty transformers cache, which can be used for several forward passes."""

    def serving(
        self, chunks: list[Chunk], cache: DynamicCache
    ) -> AbstractContextManager[Tensor | None]:
        """Return a context manager that prepares the model for `chunks` and `cache`.

        The context yields the attention mask, [num_chunks, longest] int64, or None if the model
        needs no mask.
        """


class Blocks(NamedTuple):
    """The blocks in which the keys and values of all attention layers are stored.

    Attributes:
        kv_cache: the KV cache, which consists of blocks.
        builder: contains the block tables, and builds the metadata of each forward pass.
    """

    kv_cache: KVCache
    builder: BatchBuilder


class HookedKeys:
    """Stores keys and values in blocks. The engine's attention code reads these blocks."""

    def __init__(
        self, config: PretrainedConfig, hook: AttentionHook, blocks: Blocks | None
    ) -> None:
        """Create an object that stores keys and values for Nereid's own attention function.

        Args:
            config: the config of the model, from which the layers of a transformers cache are
                created.
            hook: Nereid's attention function, which transformers calls in each layer.
            blocks: the KV cache and the block tables; None if the model has no attention.
        """
        self._config = config
        self._hook = hook
        self._blocks = blocks

    @property
    def kv_cache(self) -> KVCache | None:
        """The KV cache; see `RowKeys`."""
        return None if self._blocks is None else self._blocks.kv_cache

    def make_cache(self) -> DynamicCache:
        """Return a transformers cache whose attention layers store nothing; see `RowKeys`."""
        return make_cache(self._config)

    @contextmanager
    def serving(self, chunks: list[Chunk], cache: DynamicCache) -> Iterator[None]:
        """Return a context manager in which Nereid's code computes the attention of `chunks`.

        The context yields None, because Nereid's code needs no attention mask.

        Args:
            chunks: the chunks of the next forward pass, one for each row of the batch.
            cache: the cache that is passed to the model. Mutated: the number of earlier tokens in
                its attention layers.
        """
        # The model's code builds a mask, although Nereid's attention ignores the mask. The code
        # derives the size of the mask from the number of earlier tokens in the cache. This number
        # must therefore be large enough for every sequence.
        num_past_tokens = max(chunk.start for chunk in chunks)
        for layer in cache.layers:
            if isinstance(layer, BlockCacheLayer):
                layer.num_past_tokens = num_past_tokens
        with self._serving_attention(chunks):
            yield

    def _serving_attention(self, chunks: list[Chunk]) -> AbstractContextManager[None]:
        """Return a context manager that makes the attention hook compute attention for `chunks`."""
        if self._blocks is None:  # The model has no attention.
            return nullcontext()
        kv_cache, builder = self._blocks
        # One step may need several forward passes, and `chunks` are the chunks of this forward
        # pass. The attention metadata must describe only these chunks.
        plan = StepPlan(chunks, sum(chunk.num_tokens for chunk in chunks))
        batch = builder.build(plan, kv_cache.device)
        attention = PagedForward(kv_cache, batch.attention)
        return self._hook.serving(RowsForward(attention))


class GatheredKeys:
    """Stores keys and values in blocks, and copies them for the model's own attention code."""

    def __init__(self, config: PretrainedConfig, layout: CacheLayout, kv_cache: KVCache) -> None:
        """Create an object that stores keys and values for models with their own attention code.

        Args:
            config: the config of the model.
            layout: the layout of the model's cache.
            kv_cache: the blocks.
        """
        self._config = config
        self._layout = layout
        self.kv_cache = kv_cache

    def make_cache(self) -> DynamicCache:
        """Return a transformers cache that stores keys and values in blocks; see `RowKeys`."""
        cache: Any = DynamicCache(config=self._config)
        for index, layer in enumerate(cache.layers):
            parts = self._layout.parts[index]
            if parts.keys_index is not None or parts.indexer_index is not None:
                cache.layers[index] = gathered_layer(layer, parts, self.kv_cache)
        return cache

    @contextmanager
    def serving(self, chunks: list[Chunk], cache: DynamicCache) -> Iterator[Tensor]:
        """Return a context manager that lets `cache` read the blocks of `chunks`; see `RowKeys`."""
        step = GatheredStep.from_chunks(chunks, self.kv_cache)
        for layer in cache.layers:
            if isinstance(layer, GatheredLayer):
                layer.begin(step)
        yield step.mask


class RowsForward:
    """Computes attention for a batch that has one token in each row.

    `PagedForward` expects all tokens in one row, so this function transposes the rows into one row.
    """

    def __init__(self, packed: PagedForward) -> None:
        self._packed = packed

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """Compute attention; see `AttentionForward`.

        The batch is either one row of several tokens or several rows of one token. `_packed`
        computes the attention of tokens in one row, so several rows are joined into one row.
        """
        if query.shape[0] == 1:
            return self._packed(module, query, key, value, **kwargs)
        # [num_rows, num_heads, 1, dim] becomes [1, num_heads, num_rows, dim].
        joined_query, joined_key, joined_value = (
            tensor.transpose(0, 2) for tensor in (query, key, value)
        )
        output = self._packed(module, joined_query, joined_key, joined_value, **kwargs)
        return output.transpose(0, 1)  # [1, num_rows, ...] becomes [num_rows, 1, ...]
