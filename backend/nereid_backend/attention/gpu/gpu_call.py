# SPDX-License-Identifier: Apache-2.0
"""The arguments of one attention call on a GPU, in the form that the kernels take."""

import enum
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nereid_backend.attention.layers import LayerSpec

_LOG2E = math.log2(math.e)
# The Triton language multiplies only matrices whose dimensions have at least this size.
_MIN_PRODUCT = 16
# Keys up to this size are padded to a power of two. Larger keys are divided into two parts, each
# with its own matrix product. For small keys, a second matrix product would take more time than the
# padding.
_MAX_PADDED_KEY = 32


class Float8(enum.IntEnum):
    """The ways in which the kernels can convert 8-bit floating point numbers.

    Triton compiles a separate kernel for each value.
    """

    NONE = 0
    """The cache contains other numbers: floating point numbers of the model, or integers."""
    DEVICE = 1
    """The kernels use instructions of the GPU; see `float8_of`."""
    BITS = 2
    """The kernels shift the bits of the numbers; see `triton_common.converted`."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one attention call that do not depend on the step's tokens.

    Attributes:
        spec: the properties of the layer.
        keys: the keys of the layer, [num_blocks + 1, num_kv_heads, block_size, key_dim].
        values: the values of the layer, [num_blocks + 1, num_kv_heads, block_size, value_dim].
        scale: the factor of the scores.
        sinks: the attention sinks, [num_heads]; None if the layer has none.
        scales: the factors of the 8-bit keys and of the 8-bit values, each [num_blocks + 1,
            num_kv_heads, block_size] float32; None if keys and values are not scaled.
        float8: how the kernels convert keys and values of the format e4m3, which are stored as
            bytes.
    """

    spec: LayerSpec
    keys: Tensor
    values: Tensor
    scale: float
    sinks: Tensor | None
    scales: tuple[Tensor, Tensor] | None = None
    float8: Float8 = Float8.NONE

    @property
    def group_size(self) -> int:
        """The number of query heads that share a key head."""
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def cache_tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The keys and the values, and the factors of the keys and of the values.

        If the cache has no factors, the keys and values take the place of the factors, because the
        kernels need pointers. The kernels do not read through these pointers.
        """
        return self.keys, self.values, *(self.scales or (self.keys, self.values))

    @property
    def score_factors(self) -> tuple[float, float]:
        """The arguments `scale` and `cap` of the kernels; see `triton_common.tile_scores`."""
        softcap = self.spec.softcap
        if softcap is None:
            return self.scale * _LOG2E, 0.0
        return self.scale / softcap, softcap * _LOG2E

    @property
    def window_limits(self) -> tuple[int, int]:
        """The arguments `window` and `chunk` of the kernels, in tokens; 0 means no limit."""
        return self.spec.window.size or 0, self.spec.window.chunk or 0

    def window_constants(self) -> dict[str, bool]:
        """Return the kernel constants that describe the attention window of the layer."""
        window = self.spec.window
        return {"HAS_WINDOW": window.size is not None, "HAS_CHUNK": window.chunk is not None}

    def value_constants(self) -> dict[str, int]:
        """Return the kernel constants that describe the size of a value."""
        dim = self.spec.value_dim
        return {"VALUE_DIM": dim, "VALUE_PADDED": padded_size(dim)}

    def cache_constants(self) -> dict[str, int]:
        """Return the kernel constants that describe the cache and the division of a key.

        A key is divided into MAIN numbers, padded to DIM, and REST numbers, padded to REST_PADDED,
        because the kernels pad to powers of two. Examples: 192 numbers are divided into 128 and 64.
        A key of 24 numbers is not divided but padded to 32, so MAIN is 24, DIM is 32 and REST is 0.
        """
        key_dim = self.spec.key_dim
        largest_power_of_two = 1 << (key_dim.bit_length() - 1)
        main = key_dim if key_dim <= _MAX_PADDED_KEY else largest_power_of_two
        rest = key_dim - main
        return {
            "NUM_KV_HEADS": self.spec.num_kv_heads,
            "BLOCK_SIZE": self.values.shape[2],
            "KEY_DIM": key_dim,
            "MAIN": main,
            "DIM": padded_size(main),
            "REST": rest,
            "REST_PADDED": padded_size(rest) if rest else 0,
            "HAS_SCALES": self.scales is not None,
            "FLOAT8": int(self.float8),
        }


@functools.cache
def float8_of(device: torch.device) -> Float8:
    """Return how the kernels convert 8-bit floating point numbers on a GPU.

    GPUs of compute capability 8.9 also have instructions for these numbers. However, Triton 3.6
    cannot compile the conversion to bfloat16 for GPUs of 8.9.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return Float8.DEVICE
    return Float8.BITS


def padded_size(size: int) -> int:
    """Return the size to which a kernel pads a dimension.

    The padded size is a power of two, and at least 16.

    Examples: 80 gives 128, and 10 gives 16.
    """
    return max(_MIN_PRODUCT, next_power_of_two(size))


def next_power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`. Example: 5 gives 8."""
    return 1 << (size - 1).bit_length()
