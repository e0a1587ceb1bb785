# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache. Each attention layer has one tensor of keys and one tensor of values."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nereid_backend import huge_pages
from nereid_backend.attention.layers import LayerGroups, LayerSpec, single_group


class KVCache:
    """The tensors that contain the keys and values of all blocks.

    A sequence has its own blocks for each group of layers (`LayerGroups`). The place of a layer is
    its number in its group. Layers of different groups never use the same block, so layers with the
    same place share one tensor. Example: layers 0 and 2 form group 0, and layers 1 and 3 form group
    1. Layers 0 and 1 have place 0, and layers 2 and 3 have place 1.

    Token `t` of a sequence is stored in the block `block_table[t // block_size]`. The slot of the
    token is `block * block_size + t % block_size`.

    In a block, the tokens of each head are contiguous. Therefore, a gathered sequence is contiguous
    for each head, which makes batched matrix products fast. A layout in which the heads of each
    token are contiguous made bfloat16 decoding on a CPU up to nine times slower.

    Attributes:
        stored_dtype: the data type of the stored numbers; None if it is `dtype`.
        layers: the properties of the attention layers.
        block_size: the number of tokens in one block.
        keys: one tensor for each layer, [num_blocks + 1, num_kv_heads, block_size, key_dim].
        values: one tensor for each layer, [num_blocks + 1, num_kv_heads, block_size, value_dim].
        null_block: the index of the last block, which always contains zeros. Block tables are
            padded with this index.
        dtype: the data type of the keys and values that `gather` returns.
        group_of: for each layer, the index of its group.
    """

    stored_dtype: ClassVar[torch.dtype | None] = None

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: LayerGroups | None = None,
    ) -> None:
        """Allocate the blocks, filled with zeros.

        Args:
            layers: the attention layers of the model.
            num_blocks: the number of blocks, without the null block.
            block_size: the number of tokens in one block.
            dtype: the data type of keys and values.
            device: the device of the cache.
            groups: for each layer, the number of its group, and its place (its number in the
                group). None if all layers form one group. Layers with the same place share their
                tensors, so they must have the same number of heads and the same head sizes.
        """
        groups = groups or single_group(layers)
        self.layers = tuple(layers)
        self.block_size = block_size
        self.group_of = [group for group, _ in groups.places]
        self._places = [place for _, place in groups.places]
        # The null block is one additional block at the end, which always contains zeros.
        self.null_block = num_blocks
        self.dtype = dtype
        self.device = device
        self.keys = self._zeros_of_layers([layer.key_dim for layer in layers])
        self.values = self._zeros_of_layers([layer.value_dim for layer in layers])

    def _zeros_of_layers(self, dims: list[int]) -> list[Tensor]:
        """Return a tensor of zeros for each layer, [num_blocks + 1, num_kv_heads, block_size, dim].

        `dims` contains the last dimension for each layer. Layers with the same place (their number
        in their group) share one tensor.
        """
        tensor_of_place: list[Tensor] = []
        for index in self._first_layer_of_each_place():
            num_kv_heads = self.layers[index].num_kv_heads
            shape = (self.null_block + 1, num_kv_heads, self.block_size, dims[index])
            tensor_of_place.append(_zeros(shape, self.stored_dtype or self.dtype, self.device))
        return self._assign_to_layers(tensor_of_place)

    @property
    def num_groups(self) -> int:
        """The number of groups of layers."""
        return 1 + max(self.group_of, default=0)

    def _first_layer_of_each_place(self) -> list[int]:
        """For each set of layers that share tensors, return the index of the first layer.

        The place of a layer is its number in its group of layers. Layers of different groups with
        the same place share a tensor of keys and a tensor of values. Example: the layers have the
        places [0, 0, 1, 1]. The result is [0, 2].
        """
        return [self._places.index(place) for place in range(len(set(self._places)))]

    def _assign_to_layers(self, tensor_of_place: list[Tensor]) -> list[Tensor]:
        """Return the tensor of each layer, in the order of the layers. Layers can share a tensor.

        `tensor_of_place` contains one tensor for each place. The place of a layer is its number in
        its group of layers. Example: if the layers have the places [0, 0, 1, 1], the tensors [a, b]
        give [a, a, b, b].
        """
        return [tensor_of_place[place] for place in self._places]

    def _distinct_tensors(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return each distinct tensor once. `tensors` contains one tensor for each layer.

        Layers of different groups can share a tensor. Example: [a, a, b, b] gives [a, b].
        """
        return [tensors[index] for index in self._first_layer_of_each_place()]

    def store(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """Write the keys and values of one step into the cache of one layer.

        Args:
            layer: the index of the layer.
            key: [num_tokens, num_kv_heads, key_dim].
            value: [num_tokens, num_kv_heads, value_dim].
            rows: [num_tokens * num_kv_heads] int64, the row of each vector in a cache tensor that
                is viewed as [num_blocks * num_kv_heads * block_size, dim]. The row is (block *
                num_kv_heads + head) * block_size + token_in_block.

        Mutates: this cache.
        """
        _store(self.keys[layer], key, rows)
        _store(self.values[layer], value, rows)

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of sequences from cache blocks into contiguous tensors.

        Args:
            layer: the index of the layer.
            rows: [num_seqs, num_kv_heads, n] int64, the result of `gather_rows`.

        Returns:
            The keys, [num_seqs, num_kv_heads, n * block_size, key_dim], and the values,
            [num_seqs, num_kv_heads, n * block_size, value_dim].
        """
        return _gather(self.keys[layer], rows), _gather(self.values[layer], rows)

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the cache. The first index of each tensor selects a block."""
        return [*self._distinct_tensors(self.keys), *self._distinct_tensors(self.values)]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the keys and values of whole blocks to other blocks, in all layers.

        All sources are read before any block is written.

        Args:
            copies: pairs (source block, target block).

        Mutates: this cache.
        """
        if not copies:
            return
        sources, targets = torch.tensor(copies, dtype=torch.int64, device=self.device).unbind(1)
        for tensor in self.tensors():
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def read_block(self, block: int) -> bytes:
        """Return the content of a block as bytes: the keys and values of all layers.

        The order of the bytes is the order of `tensors`.
        """
        parts = [tensor[block].reshape(-1).view(torch.uint8) for tensor in self.tensors()]
        return torch.cat(parts).cpu().numpy().tobytes()

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Restore the keys and values of blocks from the bytes that `read_block` returned.

        Args:
            blocks: the n blocks to write.
            contents: for each block, the bytes of all layers' keys and values.

        Mutates: this cache.
        """
        # A bytearray is used, because torch warns if the memory of a tensor is read-only.
        joined = bytearray().join(contents)
        all_bytes = torch.frombuffer(joined, dtype=torch.uint8).to(self.device)
        content_rows = all_bytes.view(len(blocks), -1)
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        # Each row of `content_rows` contains the bytes of one block: first the bytes of the first
        # tensor, then the bytes of the second tensor, and so on.
        tensors = self.tensors()
        block_bytes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        parts = torch.split(content_rows, block_bytes, dim=1)
        for tensor, part in zip(tensors, parts, strict=True):
            numbers = part.contiguous().view(tensor.dtype)  # the bytes as numbers of the tensor
            tensor.index_copy_(0, index, numbers.view(len(blocks), *tensor.shape[1:]))

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill the blocks `blocks` of this cache with zeros.

        Mutates: this cache.
        """
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for tensor in self.tensors():
            tensor.index_fill_(0, index, 0)


def row_indices(slots: Tensor, num_heads: int, block_size: int) -> Tensor:
    """Return the indices of the cache rows in which the keys or values of some tokens are stored.

    If a tensor of the cache is viewed as [..., dim], a row is one vector. Each token has one row
    for each head.

    Args:
        slots: [num_tokens] int64, the place of each token in the cache: the number of the block
            times `block_size`, plus the place of the token in the block.
        num_heads: the number of key heads.
        block_size: the number of tokens in one block.

    Returns:
        [num_tokens * num_heads] int64. Example: there are 2 heads, and a block has 4 tokens. Slot 5
        is token 1 of block 1. Its rows are [9, 13].
    """
    blocks = slots // block_size
    places_in_block = slots % block_size
    # A block contains all vectors of the first head, then all vectors of the second head, and so
    # on.
    rows_per_block = num_heads * block_size
    first_head_rows = blocks * rows_per_block + places_in_block
    head_offsets = torch.arange(num_heads, device=slots.device) * block_size
    return (first_head_rows[:, None] + head_offsets).flatten()


def gather_rows(blocks: Tensor, num_heads: int) -> Tensor:
    """Return the indices of the cache rows that belong to the given blocks.

    A row contains the keys or values of one head in one block. A tensor of the cache can be viewed
    as a matrix of such rows, [num_blocks * num_heads, block_size * dim].

    Args:
        blocks: [num_seqs, n] int64.
        num_heads: the number of key heads.

    Returns:
        [num_seqs, num_heads, n] int64. Example: with 2 heads, block 3 has the rows 6 and 7.
    """
    heads = torch.arange(num_heads, device=blocks.device)
    return blocks[:, None, :] * num_heads + heads[:, None]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU, the memory of the tensor has huge pages if possible."""
    # The memory must be initialised, because uninitialised memory may contain NaN. Masked values
    # are multiplied by 0, but 0 * NaN is NaN.
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return huge_pages.zeros(shape, dtype)


def _store(cache: Tensor, vectors: Tensor, rows: Tensor) -> None:
    """Write the vectors [..., dim] into the rows `rows` of the cache tensor `cache`.

    Mutates: cache.
    """
    dim = cache.shape[-1]
    cache.view(-1, dim).index_copy_(0, rows, vectors.reshape(-1, dim))


def _gather(cache: Tensor, rows: Tensor) -> Tensor:
    """Copy the rows `rows` of one cache tensor into a contiguous tensor."""
    num_seqs, num_heads, count = rows.shape
    _, _, block_size, dim = cache.shape
    gathered = cache.view(-1, block_size * dim).index_select(0, rows.reshape(-1))
    return gathered.view(num_seqs, num_heads, count * block_size, dim)
