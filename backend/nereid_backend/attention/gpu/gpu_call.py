# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of an attention call to the arguments of the GPU kernels."""

import enum
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nereid_backend.attention.layers import LayerSpec

_LOG2E = math.log2(math.e)
# The smallest dimension of the matrices that the Triton language can multiply.
_MIN_PRODUCT = 16
# The largest key size, in numbers per key, that is always padded to a power of two. A larger key
# may be divided into two slices, and each slice has its own matrix product. For a small key, a
# second matrix product would take more time than the padding.
_MAX_PADDED_KEY = 32


class Float8(enum.IntEnum):
    """The methods by which the kernels convert 8-bit floating point numbers.

    Triton compiles a separate kernel for each value.
    """

    NONE = 0
    """The cache contains no 8-bit floating point numbers, so no conversion is needed."""
    DEVICE = 1
    """The kernels use conversion instructions of the GPU; see `float8_of`."""
    BITS = 2
    """The kernels shift the bits of the numbers; see `triton_common.convert_tile`."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one attention call that do not depend on the tokens of the step.

    Attributes:
        spec: the properties of the layer.
        keys: the keys of the layer, [num_blocks + 1, num_kv_heads, block_size, key_dim].
        values: the values of the layer, [num_blocks + 1, num_kv_heads, block_size, value_dim].
        scale: the factor by which the scores are multiplied.
        sinks: the attention sinks, [num_heads]; None if the layer has no sinks.
        scales: the factors of the 8-bit keys, and the factors of the 8-bit values. Each tensor is
            [num_blocks + 1, num_kv_heads, block_size] float32. None if the cache is not an 8-bit
            cache.
        float8: the method by which the kernels convert keys and values in the format e4m3.
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
        """The keys, the values, the scales of 8-bit keys, and the scales of 8-bit values.

        If the cache has no factors, the keys and values are used instead of the factors, because
        the kernels require a valid pointer for each argument. The kernels do not read these
        pointers.
        """
        key_scales, value_scales = self.scales or (self.keys, self.values)
        return self.keys, self.values, key_scales, value_scales

    @property
    def score_factors(self) -> tuple[float, float]:
        """The arguments `scale` and `cap` of the kernels.

        The kernels compute powers of 2 instead of powers of e, so the scores must be multiplied by
        log2(e). Without a softcap, `scale` contains this factor, and `cap` is not used. With a
        softcap, the score is cap * tanh(scale * product), and `cap` contains the factor.
        """
        softcap = self.spec.softcap
        if softcap is None:
            return self.scale * _LOG2E, 0.0
        return self.scale / softcap, softcap * _LOG2E

    @property
    def window_limits(self) -> tuple[int, int]:
        """The arguments `window` and `chunk` of the kernels, in tokens. 0 means no limit."""
        return self.spec.window.size or 0, self.spec.window.chunk or 0

    def window_constants(self) -> dict[str, bool]:
        """Return the kernel constants that describe the attention window of the layer."""
        window = self.spec.window
        return {"HAS_WINDOW": window.size is not None, "HAS_CHUNK": window.chunk is not None}

    def value_constants(self) -> dict[str, int]:
        """Return the kernel constants that describe the size of a value vector."""
        dim = self.spec.value_dim
        return {"VALUE_DIM": dim, "VALUE_PADDED": padded_size(dim)}

    def cache_constants(self) -> dict[str, int]:
        """Return the constants with which the kernels are compiled for this cache.

        The kernels pad keys to powers of two. To avoid much padding, a long key is divided into
        MAIN numbers, which are padded to MAIN_PADDED, and REST numbers, which are padded to
        REST_PADDED. If a key is not divided, REST is 0.
        """
        key_dim = self.spec.key_dim
        main = _main_size(key_dim)
        rest = key_dim - main
        return {
            "NUM_KV_HEADS": self.spec.num_kv_heads,
            "BLOCK_SIZE": self.values.shape[2],
            "KEY_DIM": key_dim,
            "MAIN": main,
            "MAIN_PADDED": padded_size(main),
            "REST": rest,
            "REST_PADDED": padded_size(rest) if rest else 0,
            "HAS_SCALES": self.scales is not None,
            "FLOAT8": int(self.float8),  # selects the conversion of 8-bit floating point numbers
        }


def _main_size(key_dim: int) -> int:
    """Return the size of the first part of a key. A long key is divided into two parts.

    The kernels compute a separate matrix product for each part. Examples: a key of 192 numbers is
    divided into 128 and 64 numbers, so the result is 128. A key of 24 numbers is not divided, so
    the result is 24.
    """
    if key_dim <= _MAX_PADDED_KEY:
        return key_dim
    return 1 << (key_dim.bit_length() - 1)  # the largest power of two up to `key_dim`


@functools.cache
def float8_of(device: torch.device) -> Float8:
    """Return the method by which the kernels convert 8-bit floating point numbers on a GPU.

    GPUs with the compute capability 8.9 also have conversion instructions. However, Triton 3.6
    cannot compile the conversion to bfloat16 for these GPUs.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return Float8.DEVICE
    return Float8.BITS


def padded_size(size: int) -> int:
    """Return the size to which a kernel pads a dimension.

    The padded size is a power of two that is at least 16. Examples: 80 gives 128, and 10 gives 16.
    """
    return max(_MIN_PRODUCT, next_power_of_two(size))


def divide_up(number: int, divisor: int) -> int:
    """Return the quotient, rounded up. Example: `divide_up(7, 3)` returns 3."""
    return -(-number // divisor)


def next_power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`. Example: 5 gives 8."""
    return 1 << (size - 1).bit_length()
