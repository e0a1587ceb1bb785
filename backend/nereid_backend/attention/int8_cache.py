# SPDX-License-Identifier: Apache-2.0
"""A KV cache that stores 8-bit integers.

The rounding error is at most 1/254 of the largest number in the vector. If the numbers of a vector
have similar sizes, this error is a quarter of the error of 8-bit floating point numbers. If a few
numbers are many times larger than the others, the error of integers is larger than the error of
8-bit floating point numbers.
"""

import torch
from torch import Tensor

from nereid_backend.attention.cpu.cpu_attention import CpuKVCache
from nereid_backend.attention.scaled_cache import ScaledKVCache, scaled_to

_LARGEST = 127


class Int8KVCache(ScaledKVCache):
    """A KV cache that stores keys and values as int8.

    In each vector, the number with the largest absolute value is stored as 127 or -127.
    """

    stored_dtype = torch.int8

    @staticmethod
    def rounded(numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Convert vectors to int8; see `ScaledKVCache.rounded`."""
        scaled, scales = scaled_to(_LARGEST, numbers)
        return scaled.round().to(torch.int8), scales

    @staticmethod
    def restored(stored: Tensor, scales: Tensor) -> Tensor:
        """Convert stored vectors back to float32; see `ScaledKVCache.restored`."""
        return stored.float() * scales.unsqueeze(-1)


class CpuInt8KVCache(Int8KVCache, CpuKVCache):
    """A KV cache of 8-bit integers for the CPU kernels. The keys are transposed in each block."""
