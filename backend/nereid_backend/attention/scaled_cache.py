# SPDX-License-Identifier: Apache-2.0
"""A KV cache of 8-bit numbers, with a separate scaling factor for each key or value vector.

The cache needs about half of the memory of a bfloat16 cache. Each key vector and each value vector
has its own factor, so a stored vector does not depend on the other vectors of its block.
int8_cache.py and float8_cache.py define the formats of the 8-bit numbers.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from nereid_backend.attention.kv_cache import KVCache


class ScaledKVCache(KVCache):
    """A KV cache that stores each key or value as 8-bit numbers with one scaling factor.

    The restored vector is the product of the stored vector and its factor.

    Attributes:
        stored_dtype: the data type of the stored tensors. All bits of the number 0 must be 0.
        dtype: the data type of the restored keys and values.
        key_scales: the factors of the keys. There is one tensor for each layer,
            [num_blocks + 1, num_kv_heads, block_size] float32.
        value_scales: the factors of the values. The tensors have the same shapes as in key_scales.
    """

    stored_dtype: ClassVar[torch.dtype]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the arguments of KVCache
        """Allocate the blocks and the scaling factors, filled with zeros; see `KVCache.__init__`.

        There is one factor for each key vector, and one for each value vector.
        """
        super().__init__(*args, **kwargs)
        # The tensors of values are [num_blocks + 1, num_kv_heads, block_size, value_dim]. The
        # tensors of factors have the first three of these dimensions. This shape is right for the
        # factors of keys, too, because there are as many key vectors as value vectors. Layers that
        # share a tensor of values also share the tensors of factors.
        shapes = [values.shape[:3] for values in self._distinct_tensors(self.values)]
        key_scales = [torch.zeros(shape, device=self.device) for shape in shapes]
        value_scales = [torch.zeros(shape, device=self.device) for shape in shapes]
        self.key_scales = self._assign_to_layers(key_scales)
        self.value_scales = self._assign_to_layers(value_scales)

    @staticmethod
    def rounded(numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Round vectors to 8-bit numbers. Return the rounded vectors, and one factor per vector.

        The subclasses define the format of the 8-bit numbers. Example for int8: [1.0, -2.0] gives
        [64, -127] and the factor 2 / 127.

        Args:
            numbers: [..., dim]. If a number is not finite, the factor of its vector is NaN.
                Attention then gives NaN, so the error is noticed.

        Returns:
            The stored vectors [..., dim], and the factors [...] float32.
        """
        raise NotImplementedError

    @staticmethod
    def restored(stored: Tensor, scales: Tensor) -> Tensor:
        """Convert stored vectors back to float32. This method is the inverse of `rounded`.

        Args:
            stored: the stored vectors, [..., dim].
            scales: the factors of the vectors, [...] float32.
        """
        raise NotImplementedError

    def store(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """Round the keys and values of one step, and write them into the cache of one layer.

        `KVCache.store` documents the arguments.
        """
        keys, key_scales = self.rounded(key)
        values, value_scales = self.rounded(value)
        super().store(layer, keys, values, rows)
        self.key_scales[layer].view(-1).index_copy_(0, rows, key_scales.flatten())
        self.value_scales[layer].view(-1).index_copy_(0, rows, value_scales.flatten())

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Read keys and values, and convert them to the model's dtype; see `KVCache.gather`."""
        keys, values = super().gather(layer, rows)
        return (
            self._restore_gathered(keys, self.key_scales[layer], rows),
            self._restore_gathered(values, self.value_scales[layer], rows),
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the cache; see `KVCache.tensors`."""
        key_scales = self._distinct_tensors(self.key_scales)
        value_scales = self._distinct_tensors(self.value_scales)
        return [*super().tensors(), *key_scales, *value_scales]

    def _restore_gathered(self, stored: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
        """Convert keys or values that were read from the cache to the model's dtype.

        The vectors were gathered from the cache rows `rows`. `scales` contains the factors of all
        vectors of the layer.
        """
        row_scales = scales.view(-1, scales.shape[2]).index_select(0, rows.reshape(-1))
        return self.restored(stored, row_scales.view(stored.shape[:3])).to(self.dtype)


def scaled_to(top: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Scale vectors so that the largest absolute number of each vector becomes `top`.

    The scaled numbers can then be rounded to 8-bit numbers. Example: with top=127, the vector
    [1.0, -2.0] gives [63.5, -127.0] and the factor 2 / 127.

    Args:
        top: the largest absolute number after scaling.
        numbers: [..., dim].

    Returns:
        The scaled vectors, [..., dim] float32, and the factors by which they must be multiplied to
        restore the original vectors, [...] float32. If a number is not finite, the factor of its
        vector is NaN.
    """
    wide = numbers.float()
    largest = wide.abs().amax(-1)
    largest = torch.where(largest.isfinite(), largest, float("nan"))
    restoring_factors = largest / top
    # For a vector of zeros, use the scaling factor 0, because `top / 0` is infinite.
    scaling_factors = torch.where(largest > 0, top / largest, 0.0)
    # Integers cannot represent NaN and infinity, so 0 is stored instead. The factor that restores
    # the vector is NaN, so the restored vector is NaN, too.
    scaled = (wide * scaling_factors.unsqueeze(-1)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return scaled, restoring_factors
