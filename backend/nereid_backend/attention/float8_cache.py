# SPDX-License-Identifier: Apache-2.0
"""A KV cache of 8-bit floating point: e4m3, a sign, 4 bits of exponent and 3 of mantissa.

A number is off by at most a 16th of itself, however much larger others of its vector are. The
factor is what makes that so: without one, numbers below 1/64 lose their bits and those above 448
everything (docs/kernels.md has the errors of each way).
"""

import torch
from torch import Tensor

from nereid_backend.attention.scaled_cache import ScaledKVCache, scaled_to

_LARGEST = 448


class Float8KVCache(ScaledKVCache):
    """Keys and values of all blocks as e4m3, the largest of each vector 448.

    They are kept as the bytes they are, because torch copies and clears those on every device.
    """

    kept = torch.uint8

    @staticmethod
    def rounded(numbers: Tensor) -> tuple[Tensor, Tensor]:
        """See `ScaledKVCache.rounded`."""
        scaled, scales = scaled_to(_LARGEST, numbers)
        scaled = scaled.clamp_(-_LARGEST, _LARGEST)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales

    @staticmethod
    def restored(found: Tensor, scales: Tensor) -> Tensor:
        """See `ScaledKVCache.restored`."""
        return found.view(torch.float8_e4m3fn).float() * scales.unsqueeze(-1)
