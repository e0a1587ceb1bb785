# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache: one pair of tensors for each attention layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nereid_backend import huge_pages
from nereid_backend.attention.layers import LayerSpec


class KVCache:
    """Keys and values of all blocks.

    Token ``t`` of a request lies in block ``block_table[t // block_size]`` at ``t % block_size``;
    its slot is ``block * block_size + t % block_size``. Within a block each head's tokens lie
    together, so that a gathered sequence is contiguous per head, as batched matrix products want
    it (with heads innermost, bfloat16 decoding took up to nine times as long on a CPU).

    Attributes:
        keys: per layer [num_blocks + 1, num_kv_heads, block_size, key_dim].
        values: per layer [num_blocks + 1, num_kv_heads, block_size, value_dim].
        null_block: the last one; it stays zero and pads block tables.
        dtype: what is read from it.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.null_block = num_blocks
        self.dtype = dtype
        self.device = device

        def allocate(num_heads: int, dim: int) -> Tensor:
            return _zeros((num_blocks + 1, num_heads, block_size, dim), dtype, device)

        self.keys = [allocate(layer.num_kv_heads, layer.key_dim) for layer in layers]
        self.values = [allocate(layer.num_kv_heads, layer.value_dim) for layer in layers]

    def store(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """Write one step's keys and values.

        Shapes: key [num_tokens, num_kv_heads, key_dim], value [num_tokens, num_kv_heads,
        value_dim], rows [num_tokens * num_kv_heads] int64 from store_rows.
        Mutates: this cache.
        """
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            dim = cache.shape[-1]
            cache.view(-1, dim).index_copy_(0, rows, new.reshape(-1, dim))

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copy sequences out of their blocks.

        Shapes: rows [num_seqs, num_kv_heads, n] int64 from gather_rows; returns keys [num_seqs,
        num_kv_heads, n * block_size, key_dim] and values likewise, contiguous.
        """
        return _gather(self.keys[layer], rows), _gather(self.values[layer], rows)

    def tensors(self) -> list[Tensor]:
        """All that is kept, each tensor [num_blocks + 1, ...]."""
        return [*self.keys, *self.values]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, given as pairs (from, to); all are read before any is written.

        Mutates: this cache.
        """
        if not copies:
            return
        pairs = torch.tensor(copies, dtype=torch.int64, device=self.device)
        for tensor in self.tensors():
            tensor.index_copy_(0, pairs[:, 1], tensor.index_select(0, pairs[:, 0]))

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero some blocks. Mutates: this cache."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for tensor in self.tensors():
            tensor.index_fill_(0, index, 0)


def store_rows(slots: Tensor, num_heads: int, block_size: int) -> Tensor:
    """Where each head of each token goes, as rows of the cache seen as [..., dim].

    Shapes: slots [num_tokens] int64; returns [num_tokens * num_heads] int64.
    """
    heads = torch.arange(num_heads, device=slots.device) * block_size
    first = (slots // block_size) * (num_heads * block_size) + slots % block_size
    return (first[:, None] + heads).flatten()


def gather_rows(blocks: Tensor, num_heads: int) -> Tensor:
    """Each head's part of each block, as rows of the cache seen as [..., block_size * dim].

    Shapes: blocks [num_seqs, n] int64; returns [num_seqs, num_heads, n] int64.
    """
    heads = torch.arange(num_heads, device=blocks.device)
    return blocks[:, None, :] * num_heads + heads[:, None]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Zeros and not whatever is there: masked values are multiplied by 0, and 0 * NaN is NaN.
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return huge_pages.zeros(shape, dtype)


def _gather(cache: Tensor, rows: Tensor) -> Tensor:
    num_seqs, num_heads, count = rows.shape
    _, _, block_size, dim = cache.shape
    taken = cache.view(-1, block_size * dim).index_select(0, rows.reshape(-1))
    return taken.view(num_seqs, num_heads, count * block_size, dim)
