# SPDX-License-Identifier: Apache-2.0
"""A transformers cache that stores keys and values in the blocks of the engine's KV cache.

The model's own attention code gets a copy of all keys and values of the batch. Shorter sequences
are padded on the left. Example of a step with three sequences (the new tokens are to the right of
the bar):

    a   . . . 0 1 2 3 | 4
    b   0 1 2 3 4 5 6 | 7      the attention mask excludes the padding
    c   . 0 1 2 3 4 5 | 6
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from nereid_backend.attention.kv_cache import KVCache, gather_rows, row_indices
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.core.step import Chunk
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.model_call import BlockCacheLayer, ModelCall, UnfitError


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Describes which tensors of a model's cache are stored in blocks of the KV cache.

    Attributes:
        layers: the shapes of the stored tensors. One item describes either the keys and values of
            a cache layer, or the keys of a sparse indexer.
        parts: for each layer of the cache, the tensors of this layer that are stored in blocks.
        has_states: whether any layer of the cache stores states of convolutions or recurrences.
    """

    layers: list[LayerSpec]
    parts: list["LayerParts"]
    has_states: bool


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Describes which tensors of one cache layer are stored in blocks of the KV cache.

    Attributes:
        keys_index: the index in `CacheLayout.layers` of the layer's keys and values; None if the
            layer stores no keys and values.
        indexer_index: the index in `CacheLayout.layers` of the keys of the layer's sparse indexer;
            None if the layer has no indexer. The first half of an indexer's key is stored as a key,
            and the second half is stored as a value.
        num_positions: the number of positions that the model stores in this layer for one token.
            Sparse indexers read these positions. 0 if the layer stores no positions.
    """

    keys_index: int | None
    indexer_index: int | None
    num_positions: int


@torch.inference_mode()
def probe_cache(
    checkpoint: Checkpoint, token_id: int, *, accepts_states: bool = False
) -> CacheLayout:
    """Run the model with one token, and return the layout of the model's cache.

    The layout describes which tensors of transformers' cache can be stored in blocks. A block
    contains the keys and values of a fixed number of tokens.

    Args:
        checkpoint: the model.
        token_id: any valid token id.
        accepts_states: whether layers may have convolutions and recurrences. The layout does not
            contain the states of these layers, because blocks cannot contain states.

    Raises:
        UnfitError: if the model does not use transformers' cache, or if the cache stores data that
            blocks cannot contain.
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
    specs: list[LayerSpec] = []  # the shapes of all tensors that are stored in blocks
    parts: list[LayerParts] = []  # for each layer, the indices of its shapes in `specs`
    for layer in cache.layers:
        _check_class(layer, accepts_states=accepts_states)
        layer_parts, layer_specs = _describe_layer(layer, first_index=len(specs))
        parts.append(layer_parts)
        specs += layer_specs
    if not specs:
        raise UnfitError("the model stores nothing in transformers' cache")
    has_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    return CacheLayout(specs, parts, has_states)


def _describe_layer(
    layer: Any,  # noqa: ANN401 - transformers' layers are untyped
    first_index: int,
) -> tuple[LayerParts, list[LayerSpec]]:
    """Return which tensors of a cache layer are stored in blocks, and the shapes of these tensors.

    The layer contains one token. It can store keys and values, the keys of a sparse indexer (which
    selects the tokens for sparse attention), all of these, or nothing. Example: a layer stores all
    of these, and `first_index` is 4. `keys_index` is 4, and `indexer_index` is 5.

    `first_index` is the index that the first of the shapes will have in `CacheLayout.layers`.
    """
    keys_spec = _keys_spec(layer)
    indexer_spec = _indexer_spec(layer)
    specs: list[LayerSpec] = []
    keys_index = indexer_index = None
    if keys_spec is not None:
        keys_index = first_index
        specs.append(keys_spec)
    if indexer_spec is not None:
        indexer_index = first_index + len(specs)
        specs.append(indexer_spec)
    positions = getattr(layer, "indexer_position_ids", None)  # [num_positions, 1, 1]
    parts = LayerParts(
        keys_index=keys_index,
        indexer_index=indexer_index,
        num_positions=0 if positions is None else positions.shape[0],
    )
    return parts, specs


def _check_class(layer: object, *, accepts_states: bool) -> None:
    """Raise an UnfitError if KV cache blocks cannot store the data of a cache layer."""
    has_states = isinstance(layer, LinearAttentionCacheLayerMixin)
    is_supported = isinstance(layer, DynamicLayer) and not has_states
    if accepts_states:
        is_supported = is_supported or has_states or isinstance(layer, DummyLayer)
    if not is_supported:
        raise UnfitError(
            f"the model's cache has layers of the class {type(layer).__name__}, which this "
            "forward path does not support"
        )


def gathered_layer(layer: object, parts: LayerParts, kv_cache: KVCache) -> "GatheredLayer":
    """Return a cache layer that replaces `layer`, and that stores keys and values in blocks.

    Args:
        layer: a layer of a cache of transformers.
        parts: the tensors of `layer` that are stored in blocks.
        kv_cache: the blocks.
    """
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return StateAndGatheredLayer(kv_cache, parts, layer.number_of_states)
    return GatheredLayer(kv_cache, parts)


def _keys_spec(layer: Any) -> LayerSpec | None:  # noqa: ANN401 - transformers' layers are untyped
    """Return the shapes of the keys and values of a cache layer; None if it stores no keys.

    The layer contains the keys and values of one token, each [1, num_heads, 1, head_dim].

    Raises:
        UnfitError: if the keys or values have another shape.
    """
    keys = getattr(layer, "keys", None)
    if keys is None:
        return None
    values = layer.values
    if keys.shape[0] != 1 or keys.shape[2] != 1 or values.shape[:3] != keys.shape[:3]:
        raise UnfitError(
            f"the model's cache stores keys of the unsupported shape {tuple(keys.shape)} for one "
            "token"
        )
    num_heads = keys.shape[1]
    return LayerSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
    )


def _indexer_spec(layer: Any) -> LayerSpec | None:  # noqa: ANN401 - untyped, see `_keys_spec`
    """Return the shape in which the KV cache stores the keys of a layer's sparse indexer.

    A sparse indexer selects the tokens to which a query attends. It has one key for each token, and
    no values. The KV cache always stores keys and values, so the first half of the indexer's key is
    stored as a key, and the second half as a value; see `LayerParts`. Return None if the layer has
    no sparse indexer.
    """
    keys = getattr(layer, "indexer_keys", None)
    if keys is None:
        return None
    shape = tuple(keys.shape)
    if shape[:2] != (1, 1) or shape[2] % 2:
        raise UnfitError(
            f"the model's sparse indexer has keys of the unsupported shape {shape} for one token"
        )
    half = shape[2] // 2
    return LayerSpec(num_heads=1, num_kv_heads=1, key_dim=half, value_dim=half)


@dataclass(slots=True)
class GatheredStep:
    """The block tables, cache slots, mask and positions of the sequences in one forward pass.

    Attributes:
        blocks: [num_seqs, n] int64, the block tables, padded with the null block.
        slots: [num_seqs * num_tokens] int64, the slots of the new tokens.
        mask: [num_seqs, longest] int64, 1 for a token and 0 for padding.
        positions: [num_seqs, longest] int64, the position of the token at each place; 0 for
            padding.
        num_past_tokens: the number of earlier tokens of the longest sequence.
        block_size: tokens in one block.
    """

    blocks: Tensor
    slots: Tensor
    mask: Tensor
    positions: Tensor
    num_past_tokens: int
    block_size: int

    @classmethod
    def from_chunks(cls, chunks: list[Chunk], cache: KVCache) -> "GatheredStep":
        """Build the tensors for a forward pass. All chunks must have the same number of tokens.

        Example: a block has 4 tokens. Two sequences have 5 and 2 earlier tokens, and get one new
        token each. Shorter sequences are padded on the left.

            blocks         [7, 3]                [8, null]
            slot           3 * 4 + 1 = 13        8 * 4 + 2 = 34
            positions      [0, 1, 2, 3, 4, 5]    [0, 0, 0, 0, 1, 2]
            mask           [1, 1, 1, 1, 1, 1]    [0, 0, 0, 1, 1, 1]
        """
        # The shape of a layer's values is [blocks, num_kv_heads, block_size, value_dim].
        block_size = cache.values[0].shape[2]
        num_tokens = chunks[0].num_tokens
        starts = torch.tensor([chunk.start for chunk in chunks])
        longest = int(starts.max()) + num_tokens
        num_blocks = math.ceil(longest / block_size)
        blocks = _padded_block_tables(chunks, num_blocks, cache.null_block)
        new_positions = starts[:, None] + torch.arange(num_tokens)  # in the example: [[5], [2]]
        slots = _slots(blocks, new_positions, block_size)
        positions = _left_padded_positions(starts + num_tokens, longest)
        mask = (positions >= 0).long()
        device = cache.device
        return cls(
            blocks=blocks.to(device),
            slots=slots.flatten().to(device),
            mask=mask.to(device),
            positions=positions.clamp_(min=0).to(device),
            num_past_tokens=longest - num_tokens,
            block_size=block_size,
        )


def _left_padded_positions(lens: Tensor, longest: int) -> Tensor:
    """Return the position of each token of left-padded sequences, [num_seqs, longest].

    Shorter sequences are padded on the left. The positions of padding are negative. Example: the
    lengths [4, 2] give [[0, 1, 2, 3], [-2, -1, 0, 1]].
    """
    num_padding = longest - lens
    return torch.arange(longest) - num_padding[:, None]


def _slots(blocks: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return the slots (indices in the KV cache) of the tokens at `positions` of each sequence.

    Example: with block_size 4, the block table [7, 3] and the position 5 give the slot
    3 * 4 + 1 = 13.
    """
    blocks_of_tokens = blocks.gather(1, positions // block_size)
    return blocks_of_tokens * block_size + positions % block_size


def _padded_block_tables(chunks: list[Chunk], num_blocks: int, null_block: int) -> Tensor:
    """Return the ids of each sequence's first `num_blocks` blocks, [num_chunks, num_blocks].

    If a sequence has fewer blocks, the null block fills the rest. Example: for 3 blocks, the block
    tables [7, 3, 9, 4] and [8] give [[7, 3, 9], [8, null, null]].
    """
    padding = [null_block] * num_blocks
    tables = [(chunk.sequence.block_table + padding)[:num_blocks] for chunk in chunks]
    return torch.tensor(tables)


class GatheredLayer(BlockCacheLayer):
    """A cache layer for transformers. It stores keys and values in blocks of the KV cache.

    `begin` must be called before each forward pass.
    """

    is_croppable = False
    # The names of the attributes that the engine sets. These attributes are not part of a
    # sequence's state.
    engine_names = frozenset({"num_past_tokens", "_cache", "_step", "_parts"})

    def __init__(self, cache: KVCache, parts: LayerParts) -> None:
        """Create a layer that stores the tensors described by `parts` in the blocks of `cache`."""
        super().__init__()
        self._cache = cache
        self._parts = parts
        self._step: GatheredStep | None = None

    def begin(self, step: GatheredStep) -> None:
        """Prepare the layer for the next forward pass, which computes the sequences in `step`."""
        self._step = step
        self.num_past_tokens = step.num_past_tokens

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions of the tokens that were computed before the current step.

        The shape is [num_positions, num_seqs, num_past_tokens], and the data type is int64. None if
        there are no earlier tokens.
        """
        if self._step is None or self.num_past_tokens == 0:
            return None
        past = self._step.positions[:, : self.num_past_tokens]
        return past.expand(self._parts.num_positions, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: Tensor | None) -> None:
        """Do nothing, because the attribute `_step` already contains all positions."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,  # noqa: ARG002 - transformers' signature
        **kwargs: object,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens. Return the keys and values of all tokens.

        The model calls this method in each forward pass. The new keys and values are [num_seqs,
        num_heads, num_tokens, dim]. The returned keys and values are [num_seqs, num_heads, longest,
        dim], where `longest` is the length of the longest sequence.
        """
        # The index under which the KV cache stores the keys and values of this layer.
        layer_index = self._parts.keys_index
        if layer_index is None:
            raise UnfitError(
                "a layer of the model stores keys and values, but it stored none when it was "
                "examined at load"
            )
        return self._store_and_read(layer_index, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the new keys of a sparse indexer, and return the keys of all tokens.

        An indexer selects the tokens to which sparse attention attends.

        Args:
            indexer_key_states: [num_seqs, num_tokens, dim].

        Returns:
            Keys, [num_seqs, longest, dim].
        """
        layer_index = self._parts.indexer_index
        if layer_index is None:
            raise UnfitError(
                "a layer of the model uses a sparse indexer, but it used none when it was examined "
                "at load"
            )
        # The KV cache stores a key and a value for each token of a layer. For each token, an
        # indexer has a key, but no value. The first half of this key is therefore stored as the
        # key, and the second half is stored as the value.
        keys_of_one_head = indexer_key_states[:, None]  # [num_seqs, 1, num_tokens, dim]
        first_half, second_half = keys_of_one_head.chunk(2, dim=-1)
        all_halves = self._store_and_read(layer_index, first_half, second_half)
        all_keys_of_one_head = torch.cat(all_halves, dim=-1)
        return all_keys_of_one_head[:, 0]

    def _store_and_read(
        self, layer_index: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values in blocks, and return the keys and values of all tokens.

        Args:
            layer_index: the index of the layer in the KV cache.
            key: [num_seqs, num_heads, num_tokens, dim], the new keys.
            value: [num_seqs, num_heads, num_tokens, dim], the new values.

        Returns:
            Keys and values, [num_seqs, num_heads, longest, dim]. Padding contains a copy of the
            first token's key and value. The attention mask hides the padding.
        """
        step = self._step
        assert step is not None, "begin is called before each forward pass"
        num_heads = key.shape[1]
        # `store` expects the shape [num_seqs * num_tokens, num_heads, dim].
        new_keys = key.transpose(1, 2).flatten(0, 1)
        new_values = value.transpose(1, 2).flatten(0, 1)
        stored_rows = row_indices(step.slots, num_heads, step.block_size)
        self._cache.store(layer_index, new_keys, new_values, stored_rows)
        read_rows = gather_rows(step.blocks, num_heads)
        keys, values = self._cache.gather(layer_index, read_rows)
        num_seqs, longest = step.mask.shape
        if num_seqs == 1:
            # A single sequence has no padding. Only the unused end of its last block is left out.
            return keys[:, :, :longest], values[:, :, :longest]
        # `keys` and `values` begin with the first token of each sequence. Move the unused places
        # of shorter sequences from the end to the start.
        return _pad_left(keys, step.positions), _pad_left(values, step.positions)


def _pad_left(rows: Tensor, positions: Tensor) -> Tensor:
    """Move the padding of shorter sequences from the end of each row to its start.

    `rows` are keys or values, [num_seqs, num_heads, n, dim]. `positions`, [num_seqs, longest], is
    the index of the token at each place. Example: for the positions [0, 0, 0, 1], the row
    [e, f, -, -] becomes [e, e, e, f]. The mask hides the first two tokens.
    """
    return torch.take_along_dim(rows, positions[:, None, :, None], dim=2)


class StateAndGatheredLayer(LinearAttentionLayer, GatheredLayer):
    """A cache layer that stores recurrent states in tensors, and keys and values in blocks."""

    def __init__(self, cache: KVCache, parts: LayerParts, number_of_states: int) -> None:
        """Create a layer for `number_of_states` recurrent states; see `GatheredLayer`."""
        GatheredLayer.__init__(self, cache, parts)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
