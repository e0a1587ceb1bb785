# SPDX-License-Identifier: Apache-2.0
"""A KV cache of 8-bit integers.

A number is off by at most half a 127th of its vector's largest: four times as near as 8-bit
floating point where the numbers of a vector are about alike, and worse where a few are many times
the rest.
"""

import torch
from torch import Tensor

from nereid_backend.attention.cpu.cpu_attention import CpuKVCache
from nereid_backend.attention.scaled_cache import ScaledKVCache, scaled_to

_LARGEST = 127


class Int8KVCache(ScaledKVCache):
    """Keys and values of all blocks as integers, the largest of each vector 127."""

    kept = torch.int8

    @staticmethod
    def rounded(numbers: Tensor) -> tuple[Tensor, Tensor]:
        """See `ScaledKVCache.rounded`."""
        scaled, scales = scaled_to(_LARGEST, numbers)
        return scaled.round().to(torch.int8), scales

    @staticmethod
    def restored(found: Tensor, scales: Tensor) -> Tensor:
        """See `ScaledKVCache.restored`."""
        return found.float() * scales.unsqueeze(-1)


class CpuInt8KVCache(Int8KVCache, CpuKVCache):
    """The same in the layout of the native kernels: keys transposed within their block."""
