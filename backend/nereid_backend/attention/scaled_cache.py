# SPDX-License-Identifier: Apache-2.0
"""A KV cache of 8 bits a number: about half the memory of bfloat16, a quarter of float32.

Each key and each value of a head of a token has a factor of its own, so what is stored does not
depend on what else is in the block. How the 8 bits are meant is up to the kinds of cache:
`int8_cache.py` and `float8_cache.py`.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec


class ScaledKVCache(KVCache):
    """Keys and values of all blocks in 8 bits, each vector with the factor that restores it.

    Attributes:
        kept: dtype of keys and values as tensors; zero must be all bits zero.
        dtype: what is read from it.
        key_scales: per layer [num_blocks + 1, num_kv_heads, block_size] float32.
        value_scales: the same for values.
    """

    kept: ClassVar[torch.dtype]

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
            layers, num_blocks=num_blocks, block_size=block_size, dtype=self.kept, device=device
        )
        self.dtype = dtype
        shapes = [(num_blocks + 1, layer.num_kv_heads, block_size) for layer in layers]
        self.key_scales = [torch.zeros(shape, device=device) for shape in shapes]
        self.value_scales = [torch.zeros(shape, device=device) for shape in shapes]

    @staticmethod
    def rounded(numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors in 8 bits and a factor for each.

        Shapes: numbers [..., dim]; returns [..., dim] as kept and [...] float32. Where a number is
        not finite the factor is NaN, so that it shows.
        """
        raise NotImplementedError

    @staticmethod
    def restored(found: Tensor, scales: Tensor) -> Tensor:
        """The vectors again, float32; the inverse of `rounded` but for the rounding."""
        raise NotImplementedError

    def store(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """See `KVCache.store`."""
        keys, key_scales = self.rounded(key)
        values, value_scales = self.rounded(value)
        super().store(layer, keys, values, rows)
        self.key_scales[layer].view(-1).index_copy_(0, rows, key_scales.flatten())
        self.value_scales[layer].view(-1).index_copy_(0, rows, value_scales.flatten())

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVCache.gather`; in the model's dtype."""
        keys, values = super().gather(layer, rows)
        return (
            self._taken(keys, self.key_scales[layer], rows),
            self._taken(values, self.value_scales[layer], rows),
        )

    def tensors(self) -> list[Tensor]:
        """See `KVCache.tensors`."""
        return [*super().tensors(), *self.key_scales, *self.value_scales]

    def _taken(self, found: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
        taken = scales.view(-1, scales.shape[2]).index_select(0, rows.reshape(-1))
        return self.restored(found, taken.view(found.shape[:3])).to(self.dtype)


def scaled_to(top: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors with their largest number brought to a size, and the factors that restore them.

    Shapes: numbers [..., dim]; returns [..., dim] and [...], both float32. Where a number is not
    finite the factor is NaN, so that it shows.
    """
    wide = numbers.float()
    largest = wide.abs().amax(-1)
    largest = torch.where(largest.isfinite(), largest, float("nan"))
    factors = torch.where(largest > 0, top / largest, 0.0)
    return (wide * factors.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0), largest / top
