# SPDX-License-Identifier: Apache-2.0
"""The forward path `padded`, for models whose own attention code reads keys from a cache.

The path passes a cache object to the model. The object writes new keys and values into the blocks
of the KV cache, and returns a copy of all keys and values of the batch. Shorter sequences are
padded on the left. Example of a step with three sequences, whose new tokens are to the right of the
bar:

    a   . . . 0 1 2 3 | 4
    b   0 1 2 3 4 5 6 | 7      the attention mask excludes the padding
    c   . 0 1 2 3 4 5 | 6
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from nereid_backend.attention.kv_cache import KVCache, gather_rows, store_rows
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.checkpoint import Checkpoint
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.model_call import (
    BlockCacheLayer,
    ModelCall,
    UnfitError,
    join_logits,
    token_inputs,
)
from nereid_backend.paths.position_embeddings import PositionEmbeddings


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Describes the tensors of a model's cache that are stored in blocks of the KV cache.

    Attributes:
        layers: the shapes of what is stored, one for each part.
        keys: for each layer of the cache, the index in `layers` of its keys and values; None if the
            layer stores none.
        indexers: for each layer of the cache, the index in `layers` of its sparse indexer's keys;
            None if the layer has no indexer. One half of these keys is stored as keys, the other
            half as values.
    """

    layers: list[LayerSpec]
    keys: list[int | None]
    indexers: list[int | None]


@torch.inference_mode()
def probe_cache(checkpoint: Checkpoint, token_id: int) -> CacheLayout:
    """Run the model with one token, and return the layout of its cache.

    Args:
        checkpoint: the model.
        token_id: the token.

    Raises:
        UnfitError: if the model does not use transformers' cache, or stores something that blocks
            cannot contain.
    """
    call = ModelCall(checkpoint.model)
    if call.cache_name is None:
        raise UnfitError("the model's forward method has no cache argument")
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
            raise UnfitError(
                f"the model's cache has layers of the class {type(layer).__name__}, which this "
                "forward path does not support"
            )
        has_keys = layer.keys is not None
        layout.keys.append(len(layout.layers) if has_keys else None)
        if has_keys:
            layout.layers.append(_keys_spec(layer))
        has_indexer = getattr(layer, "indexer_keys", None) is not None
        layout.indexers.append(len(layout.layers) if has_indexer else None)
        if has_indexer:
            layout.layers.append(_indexer_spec(layer))
    if not layout.layers:
        raise UnfitError("the model stores nothing in transformers' cache")
    return layout


def _keys_spec(layer: Any) -> LayerSpec:  # noqa: ANN401 - transformers' layers are untyped
    """Return the shapes of the keys and values of a cache layer that contains one token."""
    keys = layer.keys
    values = layer.values
    if keys.shape[0] != 1 or keys.shape[2] != 1 or values.shape[:3] != keys.shape[:3]:
        raise UnfitError(
            f"the model's cache stores keys of the unsupported shape {tuple(keys.shape)} for one "
            "token"
        )
    num_heads = keys.shape[1]
    return LayerSpec(num_heads, num_heads, keys.shape[3], values.shape[3])


def _indexer_spec(layer: Any) -> LayerSpec:  # noqa: ANN401 - transformers' layers are untyped
    """Return the shapes in which a sparse indexer's keys are stored; see `CacheLayout.indexers`."""
    shape = tuple(layer.indexer_keys.shape)
    if shape[:2] != (1, 1) or shape[2] % 2:
        raise UnfitError(
            f"the model's sparse indexer has keys of the unsupported shape {shape} for one token"
        )
    half = shape[2] // 2
    return LayerSpec(1, 1, half, half)


class PaddedPath:
    """A forward path for models with their own attention code. The object owns the KV cache."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: CacheLayout,
        cache: KVCache,
        *,
        batches_sequences: bool,
    ) -> None:
        """Create a path.

        Args:
            checkpoint: the model.
            layout: the layout of the model's cache.
            cache: the KV cache.
            batches_sequences: whether several sequences may share a forward pass.
        """
        self._call = ModelCall(checkpoint.model)
        self._positions = PositionEmbeddings(checkpoint.model)
        self._device = checkpoint.device
        self._vocab_size = checkpoint.vocab_size
        self._adapters = checkpoint.adapters
        self._layout = layout
        self._cache = cache
        self._batches_sequences = batches_sequences

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Compute the logits of a step without pending chunks; see `ForwardPath.forward`."""
        assert sampled is None
        self._cache.copy_blocks(plan.copies)
        parts: list[Tensor | None] = [None] * len(plan.chunks)
        for group in self._groups(plan.chunks):
            chunks = [plan.chunks[index] for index in group]
            for index, chunk, rows in zip(group, chunks, self._run(chunks), strict=True):
                parts[index] = rows[len(rows) - chunk.num_logits :]
        return join_logits(parts, self._vocab_size)

    @property
    def kv_cache(self) -> KVCache:
        """The blocks of the path."""
        return self._cache

    def clear(self, sequence: Sequence) -> None:
        """Set the blocks of a sequence to zero; see `ForwardPath.clear`."""
        self._cache.clear(sequence.block_table)

    def _groups(self, chunks: list[Chunk]) -> list[list[int]]:
        """Divide chunks into groups that can share a forward pass.

        Each group is a list of indices of chunks.

        Decodes share a pass if their positions have the same number of bits, so that padding at
        most doubles the work. Every other chunk is a group of its own. Example: chunks of 1, 1, 1
        and 4 tokens that start at 5, 9, 7 and 0 give the groups [[0, 2], [1], [3]], because 5 and 7
        have 3 bits, and 9 has 4 bits.
        """
        groups: dict[int, list[int]] = {}
        for index, chunk in enumerate(chunks):
            is_alone = not self._batches_sequences or chunk.num_tokens > 1 or chunk.start == 0
            # A chunk that forms a group of its own gets a unique key. The key is negative, so that
            # it differs from every bit length.
            key = -1 - index if is_alone else chunk.start.bit_length()
            groups.setdefault(key, []).append(index)
        return list(groups.values())

    def _run(self, chunks: list[Chunk]) -> Tensor:
        """Compute one group of chunks in one forward pass.

        Returns:
            Logits, [num_chunks, n, vocab_size]. n is the largest num_logits of the chunks, at least
            1.
        """
        ids, positions = token_inputs(chunks, self._device)
        step = _Step.of(chunks, self._cache)
        num_logits = max(1, *(chunk.num_logits for chunk in chunks))
        with self._adapters.serving(chunks), self._positions.serving(positions):
            return self._call(
                ids,
                num_logits=num_logits,
                position_ids=positions,
                attention_mask=step.mask,
                cache=self._paged_cache(step),
            )

    def _paged_cache(self, step: "_Step") -> DynamicCache:
        """Return a transformers cache for one forward pass.

        The layers of this cache store keys and values in the blocks of the KV cache.
        """
        cache: Any = DynamicCache()
        # Without this line, DynamicCache would add further layers during the forward pass.
        cache.layer_class_to_replicate = None
        cache.layers = [
            _PagedLayer(self._cache, step, keys, indexer)
            for keys, indexer in zip(self._layout.keys, self._layout.indexers, strict=True)
        ]
        return cache  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Step:
    """The tensors that describe the sequences of one forward pass.

    Attributes:
        blocks: [num_seqs, n] int64, the block tables, padded with the null block.
        slots: [num_seqs * num_tokens] int64, the slots of the new tokens.
        mask: [num_seqs, longest] int64, 1 for a token and 0 for padding.
        positions: [num_seqs, longest] int64, the position of the token at each place; 0 for
            padding.
        num_past_tokens: the number of tokens of the longest sequence before the new tokens.
        block_size: tokens in one block.
    """

    blocks: Tensor
    slots: Tensor
    mask: Tensor
    positions: Tensor
    num_past_tokens: int
    block_size: int

    @classmethod
    def of(cls, chunks: list[Chunk], cache: KVCache) -> "_Step":
        """Build the tensors of a group of chunks. All chunks must have the same number of tokens.

        Example: block_size is 4, and two decodes start at the positions 5 and 2, with the block
        tables [7, 3] and [8]. The longest sequence has 6 tokens with the new one. The slots are
        3 * 4 + 1 = 13 and 8 * 4 + 2 = 34. The positions are [0, 1, 2, 3, 4, 5] and
        [0, 0, 0, 0, 1, 2], and the mask of the second sequence is [0, 0, 0, 1, 1, 1].
        """
        # values[0] is [num_blocks + 1, num_kv_heads, block_size, value_dim].
        size = cache.values[0].shape[2]
        num_tokens = chunks[0].num_tokens
        starts = torch.tensor([chunk.start for chunk in chunks])
        longest = int(starts.max()) + num_tokens
        width = -(-longest // size)
        padding = [cache.null_block] * width
        tables = [(chunk.sequence.block_table[:width] + padding)[:width] for chunk in chunks]
        blocks = torch.tensor(tables)
        new_positions = starts[:, None] + torch.arange(num_tokens)
        slots = blocks.gather(1, new_positions // size) * size + new_positions % size
        lens = starts[:, None] + num_tokens
        # Sequences are padded on the left, so a negative position means padding.
        positions = torch.arange(longest)[None] - (longest - lens)
        mask = (positions >= 0).long()
        device = cache.device
        return cls(
            blocks=blocks.to(device),
            slots=slots.flatten().to(device),
            mask=mask.to(device),
            positions=positions.clamp_(min=0).to(device),
            num_past_tokens=longest - num_tokens,
            block_size=size,
        )


class _PagedLayer(BlockCacheLayer):  # type: ignore[no-untyped-call]  # transformers' is untyped
    """A layer of a transformers cache that stores keys and values in blocks of the KV cache.

    Each forward pass uses new layers.
    """

    is_croppable = False

    def __init__(
        self, cache: KVCache, step: _Step, number: int | None, indexer: int | None
    ) -> None:
        """Create a layer.

        Args:
            cache: the KV cache.
            step: the sequences of the forward pass.
            number: the index of the layer's keys and values in the KV cache; None if it stores
                none.
            indexer: the index of the sparse indexer's keys in the KV cache; None if there are none.
        """
        super().__init__()
        self.num_past_tokens = step.num_past_tokens
        self._cache = cache
        self._step = step
        self._number = number
        self._indexer = indexer

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,  # noqa: ARG002 - transformers' signature
        **kwargs: object,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens. Return the keys and values of all tokens.

        The new keys and values are [num_seqs, num_heads, num_tokens, dim]. The returned keys and
        values are [num_seqs, num_heads, longest, dim].
        """
        if self._number is None:
            raise UnfitError(
                "a layer of the model stores keys and values, but it stored none when it was "
                "examined at load"
            )
        return self._exchange(self._number, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the new keys of a sparse indexer, and return the keys of all tokens.

        Args:
            indexer_key_states: [num_seqs, num_tokens, dim].

        Returns:
            Keys, [num_seqs, longest, dim].
        """
        if self._indexer is None:
            raise UnfitError(
                "a layer of the model uses a sparse indexer, but it used none when it was examined "
                "at load"
            )
        # A layer of the KV cache stores a key and a value for each token. An indexer has only a key
        # for each token, so the first half of this key is stored as a key, and the second half as a
        # value.
        key, value = indexer_key_states[:, None].chunk(2, dim=-1)
        return torch.cat(self._exchange(self._indexer, key, value), dim=-1)[:, 0]

    def _exchange(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values in blocks, and return the keys and values of all tokens.

        Args:
            number: the index of the layer in the KV cache.
            key: [num_seqs, num_heads, num_tokens, dim], the new keys.
            value: [num_seqs, num_heads, num_tokens, dim], the new values.

        Returns:
            Keys and values, [num_seqs, num_heads, longest, dim]. Padding contains the key and the
            value of the first token, which the mask hides.
        """
        step = self._step
        num_heads = key.shape[1]
        rows = store_rows(step.slots, num_heads, step.block_size)
        new_keys = key.transpose(1, 2).flatten(0, 1)
        new_values = value.transpose(1, 2).flatten(0, 1)
        self._cache.store(number, new_keys, new_values, rows)
        keys, values = self._cache.gather(number, gather_rows(step.blocks, num_heads))
        num_seqs, longest = step.mask.shape
        if num_seqs == 1:
            return keys[:, :, :longest], values[:, :, :longest]
        # In the gathered tensors, each sequence starts at index 0. The model expects padding on the
        # left, so shorter sequences are moved to the right.
        index = step.positions[:, None, :, None]
        return (
            torch.take_along_dim(keys, index, dim=2),
            torch.take_along_dim(values, index, dim=2),
        )
