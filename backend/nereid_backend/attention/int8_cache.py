# SPDX-License-Identifier: Apache-2.0
"""A KV cache of 8-bit integers: about half the memory of bfloat16, a quarter of float32.

Each key and each value of a head of a token has a scale of its own, so what is stored does not
depend on what else is in the block, and is off by at most half a 127th of its largest number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nereid_backend.attention.cpu import CpuKVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec

_LARGEST = 127


class Int8KVCache(KVCache):
    """Keys and values of all blocks as integers, each vector with the factor that restores it.

    Attributes:
        dtype: what is read from it.
        key_scales: per layer [num_blocks + 1, num_kv_heads, block_size] float32.
        value_scales: the same for values.
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
        super().__init__(
            layers, num_blocks=num_blocks, block_size=block_size, dtype=torch.int8, device=device
        )
        self.dtype = dtype
        shapes = [(num_blocks + 1, layer.num_kv_heads, block_size) for layer in layers]
        self.key_scales = [torch.zeros(shape, device=device) for shape in shapes]
        self.value_scales = [torch.zeros(shape, device=device) for shape in shapes]

    def store(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """See `KVCache.store`."""
        keys, key_scales = quantise(key)
        values, value_scales = quantise(value)
        super().store(layer, keys, values, rows)
        self.key_scales[layer].view(-1).index_copy_(0, rows, key_scales.flatten())
        self.value_scales[layer].view(-1).index_copy_(0, rows, value_scales.flatten())

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVCache.gather`; in the model's dtype."""
        keys, values = super().gather(layer, rows)
        return (
            self._restored(keys, self.key_scales[layer], rows),
            self._restored(values, self.value_scales[layer], rows),
        )

    def tensors(self) -> list[Tensor]:
        """See `KVCache.tensors`."""
        return [*super().tensors(), *self.key_scales, *self.value_scales]

    def _restored(self, found: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
        taken = scales.view(-1, scales.shape[2]).index_select(0, rows.reshape(-1))
        return (found.float() * taken.view(*found.shape[:3], 1)).to(self.dtype)


class CpuInt8KVCache(Int8KVCache, CpuKVCache):
    """The same in the layout of the native kernels: keys transposed within their block."""


def quantise(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors as integers and a factor for each.

    Shapes: numbers [..., dim]; returns [..., dim] int8 and [...] float32. Where a number is not
    finite the factor is NaN, so that it shows.
    """
    wide = numbers.float()
    largest = wide.abs().amax(-1)
    largest = torch.where(largest.isfinite(), largest, float("nan"))
    scales = largest / _LARGEST
    factors = torch.where(largest > 0, _LARGEST / largest, 0.0)
    integers = (wide * factors.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0).round()
    return integers.to(torch.int8), scales


def stored_type(kind: type[KVCache], kv_cache_dtype: str) -> type[KVCache]:
    """The kind of cache that stores what the setting says and is laid out as this kind is."""
    if kv_cache_dtype == "auto":
        return kind
    return CpuInt8KVCache if issubclass(kind, CpuKVCache) else Int8KVCache
