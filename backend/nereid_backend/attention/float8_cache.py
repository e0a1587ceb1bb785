# SPDX-License-Identifier: Apache-2.0
"""A KV cache that stores 8-bit floating point numbers in the format e4m3.

Each stored number has 1 sign bit, 4 exponent bits and 3 mantissa bits. The rounding error is at
most 1/16 of the number itself, even if other numbers of its vector are much larger. Each vector is
scaled by a factor before it is rounded. Without the factor, numbers below 1/64 would lose bits, and
numbers above 448 could not be stored. docs/history/gpu-kernels.md lists the errors with and without
the factor.
"""

import torch
from torch import Tensor

from nereid_backend.attention.scaled_cache import ScaledKVCache, scaled_to

# The largest finite number of e4m3.
_LARGEST = 448


class Float8KVCache(ScaledKVCache):
    """A KV cache that stores keys and values as e4m3.

    In each vector, the number with the largest absolute value is stored as 448 or -448. The tensors
    have the dtype uint8, because torch can copy and clear uint8 tensors on every device.
    """

    stored_dtype = torch.uint8

    @staticmethod
    def rounded(numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Convert vectors to e4m3; see `ScaledKVCache.rounded`."""
        scaled, scales = scaled_to(_LARGEST, numbers)
        scaled = scaled.clamp_(-_LARGEST, _LARGEST)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales

    @staticmethod
    def restored(stored: Tensor, scales: Tensor) -> Tensor:
        """Convert stored vectors back to float32; see `ScaledKVCache.restored`."""
        return stored.view(torch.float8_e4m3fn).float() * scales.unsqueeze(-1)
