# SPDX-License-Identifier: Apache-2.0
"""The path of models with attention of their own, which read keys and values from a cache.

The cache that they are given writes what is new into blocks, and answers with all there is, copied
out of the blocks and padded on the left to one length, layer by layer:

    a   . . . 0 1 2 3 | 4
    b   0 1 2 3 4 5 6 | 7      the model's own attention, masks of its own for the padding
    c   . 0 1 2 3 4 5 | 6
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from nereid_backend.attention.kv_cache import KVCache, gather_rows, store_rows
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.checkpoint import Checkpoint
from nereid_backend.core.request import Request
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.model_call import (
    ModelCall,
    UnfitError,
    ids_of,
    joined,
    positions_of,
)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a model's cache holds for one token.

    Attributes:
        layers: what is stored in blocks.
        keys: by the cache's layer, its number in layers; None: it stores nothing.
        indexers: likewise for the keys of a sparse indexer, which are stored as half key, half
            value.
    """

    layers: list[LayerSpec]
    keys: list[int | None]
    indexers: list[int | None]


@torch.inference_mode()
def probe_cache(checkpoint: Checkpoint, token_id: int) -> CacheLayout:
    """Run one token and see what the model's own cache holds then.

    Raises:
        UnfitError: it does not use transformers' cache, or keeps more than blocks can.
    """
    call = ModelCall(checkpoint.model)
    if call.cache_name is None:
        raise UnfitError("it takes no cache")
    ids = torch.tensor([[token_id]], device=checkpoint.device)
    cache: Any = DynamicCache(config=checkpoint.model.config)
    call(
        ids,
        num_logits=1,
        position_ids=torch.zeros_like(ids),
        attention_mask=torch.ones_like(ids),
        cache=cache,
    )
    layout = CacheLayout([], [], [])
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer):
            raise UnfitError(f"its cache has layers of the kind {type(layer).__name__}")
        keys: Any = layer.keys
        values: Any = layer.values
        indexer = getattr(layer, "indexer_keys", None)
        layout.keys.append(None if keys is None else len(layout.layers))
        if keys is not None:
            if keys.shape[0] != 1 or keys.shape[2] != 1 or values.shape[:3] != keys.shape[:3]:
                raise UnfitError(f"its cache holds keys of shape {tuple(keys.shape)} for one token")
            num_heads = keys.shape[1]
            layout.layers.append(LayerSpec(num_heads, num_heads, keys.shape[3], values.shape[3]))
        layout.indexers.append(None if indexer is None else len(layout.layers))
        if indexer is not None:
            if indexer.shape[:2] != (1, 1) or indexer.shape[2] % 2:
                raise UnfitError(f"its indexer has keys of shape {tuple(indexer.shape)}")
            half = indexer.shape[2] // 2
            layout.layers.append(LayerSpec(1, 1, half, half))
    if not layout.layers:
        raise UnfitError("it stores nothing in transformers' cache")
    return layout


class PaddedPath:
    """Runs plans on models that bring their own attention. Owns the KV cache."""

    def __init__(
        self, checkpoint: Checkpoint, layout: CacheLayout, cache: KVCache, *, together: bool
    ) -> None:
        """Make a path.

        Args:
            checkpoint: the model, with attention of its own.
            layout: what its cache holds.
            cache: the blocks.
            together: whether several requests may share a forward pass.
        """
        self._call = ModelCall(checkpoint.model)
        self._device = checkpoint.device
        self._vocab_size = checkpoint.vocab_size
        self._layout = layout
        self._cache = cache
        self._together = together

    def forward(self, plan: StepPlan) -> Tensor:
        """See `ForwardPath.forward`."""
        self._cache.copy_blocks(plan.copies)
        parts: list[Tensor | None] = [None] * len(plan.chunks)
        logits: Tensor | None = None
        for group in self._groups(plan.chunks):
            chunks = [plan.chunks[index] for index in group]
            logits = self._run(chunks)
            for index, chunk, rows in zip(group, chunks, logits, strict=True):
                parts[index] = rows[len(rows) - chunk.num_logits :]
        return joined(parts, logits, self._vocab_size)

    def clear(self, request: Request) -> None:
        """See `ForwardPath.clear`."""
        self._cache.clear(request.block_table)

    def _groups(self, chunks: list[Chunk]) -> list[list[int]]:
        """Which chunks go together: single tokens of sequences whose lengths differ little."""
        groups: dict[int, list[int]] = {}
        for index, chunk in enumerate(chunks):
            alone = not self._together or chunk.num_tokens > 1 or chunk.start == 0
            groups.setdefault(-1 - index if alone else chunk.start.bit_length(), []).append(index)
        return list(groups.values())

    def _run(self, chunks: list[Chunk]) -> Tensor:
        """Logits [num_chunks, n, vocab_size], n the most that a chunk wants, but at least 1."""
        if len(chunks) == 1:
            ids, positions = ids_of(chunks[0], self._device), positions_of(chunks[0], self._device)
        else:
            tokens = [[c.request.token_ids[c.start]] for c in chunks]
            ids = torch.tensor(tokens, device=self._device)
            positions = torch.tensor([[chunk.start] for chunk in chunks], device=self._device)
        step = _Step.of(chunks, self._cache)
        cache: Any = DynamicCache()
        # Without this, layers would be added as they are asked for.
        cache.layer_class_to_replicate = None
        cache.layers = [
            _PagedLayer(self._cache, step, keys, indexer)
            for keys, indexer in zip(self._layout.keys, self._layout.indexers, strict=True)
        ]
        num_logits = max(1, *(chunk.num_logits for chunk in chunks))
        return self._call(
            ids,
            num_logits=num_logits,
            position_ids=positions,
            attention_mask=step.mask,
            cache=cache,
        )


@dataclass(slots=True)
class _Step:
    """Where the sequences of one forward pass are.

    Attributes:
        blocks: [num_seqs, n] int64 block tables, padded with the null block.
        slots: [num_seqs * num_tokens] int64, where the new tokens go.
        mask: [num_seqs, longest] int64, 1 where there is a token, 0 for padding.
        order: [num_seqs, longest] int64, which token of its sequence stands there.
        past: tokens before the new ones in the longest sequence.
        block_size: tokens in one block.
    """

    blocks: Tensor
    slots: Tensor
    mask: Tensor
    order: Tensor
    past: int
    block_size: int

    @classmethod
    def of(cls, chunks: list[Chunk], cache: KVCache) -> "_Step":
        size = block_size_of(cache)
        num_tokens = chunks[0].num_tokens
        starts = torch.tensor([chunk.start for chunk in chunks])
        longest = int(starts.max()) + num_tokens
        width = -(-longest // size)
        tables = [
            (c.request.block_table[:width] + [cache.null_block] * width)[:width] for c in chunks
        ]
        blocks = torch.tensor(tables)
        new = starts[:, None] + torch.arange(num_tokens)
        slots = blocks.gather(1, new // size) * size + new % size
        lens = starts[:, None] + num_tokens
        order = torch.arange(longest)[None] - (longest - lens)
        mask = (order >= 0).long()
        device = cache.device
        return cls(
            blocks.to(device),
            slots.flatten().to(device),
            mask.to(device),
            order.clamp_(min=0).to(device),
            longest - num_tokens,
            size,
        )

    @property
    def is_padded(self) -> bool:
        """Whether sequences differ in length."""
        return self.blocks.shape[0] > 1


def block_size_of(cache: KVCache) -> int:
    """Tokens in one block of a cache."""
    return cache.values[0].shape[2]


class _PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' is untyped
    """A layer of a model's cache whose tokens are in blocks. Made for one forward pass."""

    is_sliding = False
    is_croppable = False

    def __init__(
        self, cache: KVCache, step: _Step, number: int | None, indexer: int | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._step = step
        self._number = number
        self._indexer = indexer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,  # noqa: ARG002 - transformers' signature
        **kwargs: object,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values and answer with all.

        Shapes: [num_seqs, num_heads, num_tokens, dim]; returns [num_seqs, num_heads, longest, dim].
        """
        if self._number is None:
            raise UnfitError("a layer stores keys and values that stored none when it was probed")
        return self._exchange(self._number, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The same for the keys of a sparse indexer, [num_seqs, num_tokens, dim]."""
        if self._indexer is None:
            raise UnfitError("a layer has an indexer that it had not when it was probed")
        key, value = indexer_key_states[:, None].chunk(2, dim=-1)
        return torch.cat(self._exchange(self._indexer, key, value), dim=-1)[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what masks cover."""
        return self._step.past + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before this step, padding included."""
        return self._step.past

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def _exchange(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        step, num_heads = self._step, key.shape[1]
        rows = store_rows(step.slots, num_heads, step.block_size)
        flat = [part.transpose(1, 2).flatten(0, 1) for part in (key, value)]
        self._cache.store(number, flat[0], flat[1], rows)
        found = self._cache.gather(number, gather_rows(step.blocks, num_heads))
        longest = step.mask.shape[1]
        if not step.is_padded:
            return found[0][:, :, :longest], found[1][:, :, :longest]
        order = step.order[:, None, :, None]
        keys, values = (torch.take_along_dim(part, order, dim=2) for part in found)
        return keys, values
