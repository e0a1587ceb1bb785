# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache: one pair of tensors for each attention layer."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nereid_backend.attention.layers import LayerSpec


class KVCache:
    """Keys and values of all blocks.

    Token ``t`` of a request lies in block ``block_table[t // block_size]`` at ``t % block_size``;
    its slot is ``block * block_size + t % block_size``. One block is contiguous, so that gathering
    a sequence copies whole blocks.

    Attributes:
        keys: per layer [num_blocks + 1, block_size, num_kv_heads, key_dim].
        values: per layer [num_blocks + 1, block_size, num_kv_heads, value_dim].
        null_block: the last one; it stays zero and pads block tables.
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
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        self.device = device

        def allocate(num_heads: int, dim: int) -> Tensor:
            return _zeros((num_blocks + 1, block_size, num_heads, dim), dtype, device)

        self.keys = [allocate(layer.num_kv_heads, layer.key_dim) for layer in layers]
        self.values = [allocate(layer.num_kv_heads, layer.value_dim) for layer in layers]

    @property
    def num_bytes(self) -> int:
        """Memory of all layers together."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def store(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write one step's keys and values.

        Shapes: key [num_tokens, num_kv_heads, key_dim], value [num_tokens, num_kv_heads,
        value_dim], slots [num_tokens] int64.
        Mutates: this cache.
        """
        keys, values = self.keys[layer], self.values[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, slots, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, slots, value)

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copy sequences out of their blocks.

        Shapes: blocks [num_seqs, n] int64; returns keys [num_seqs, num_kv_heads, n * block_size,
        key_dim] and values likewise, as transposed views of [num_seqs, n * block_size, ...].
        """
        return _gather(self.keys[layer], blocks), _gather(self.values[layer], blocks)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero some blocks. Mutates: this cache."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Zeros and not whatever is there: masked values are multiplied by 0, and 0 * NaN is NaN.
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zero pages, which take memory only once they are written to.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    num_seqs, count = blocks.shape
    _, block_size, num_heads, dim = cache.shape
    taken = cache.index_select(0, blocks.reshape(-1))
    return taken.view(num_seqs, count * block_size, num_heads, dim).transpose(1, 2)
