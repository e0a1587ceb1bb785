# SPDX-License-Identifier: Apache-2.0
"""Which kind of KV cache, and with it which attention, serves a device."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from nereid_backend.attention.cpu import cpu_attention
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.gpu import gpu_attention, gpu_check
from nereid_backend.attention.int8_cache import CpuInt8KVCache, Int8KVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec

logger = logging.getLogger(__name__)

_NAMES: dict[type[KVCache], str] = {
    KVCache: "reference",
    cpu_attention.CpuKVCache: "native",
    gpu_attention.GpuKVCache: "triton-language",
}
# What the torch reference reads.
_PLAIN = (Int8KVCache, Float8KVCache, KVCache)
# The first GPUs with asynchronous copies and bfloat16 products, which the kernels count on.
_CAPABILITY = (8, 0)


def cache_type(block_size: int, dtype: torch.dtype, device: torch.device) -> type[KVCache]:
    """The kind of cache that is fastest here: the kernels' own where they can serve it."""
    if device.type != "cuda":
        return cpu_attention.cache_type(block_size, dtype, device)
    reason = gpu_refusal(dtype, device)
    if reason is None:
        return gpu_attention.GpuKVCache
    logger.warning("attention without GPU kernels, several times slower: %s", reason)
    return KVCache


def stored_type(kind: type[KVCache], kv_cache_dtype: str) -> type[KVCache]:
    """The kind of cache that stores what the setting says, for where this kind would be."""
    if kv_cache_dtype == "auto":
        return kind
    if issubclass(kind, gpu_attention.GpuKVCache):
        return (
            gpu_attention.GpuInt8KVCache
            if kv_cache_dtype == "int8"
            else gpu_attention.GpuFloat8KVCache
        )
    if kv_cache_dtype == "fp8":
        if issubclass(kind, cpu_attention.CpuKVCache):
            logger.warning("attention without native kernels, several times slower: fp8 has none")
        return Float8KVCache
    return CpuInt8KVCache if issubclass(kind, cpu_attention.CpuKVCache) else Int8KVCache


def proven_type(
    kind: type[KVCache],
    layers: Sequence[LayerSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> type[KVCache]:
    """The kind, or the plain one of its content where GPU kernels fail at one of these layers.

    Each kind of layer is tried once in a process, on the device.
    """
    if not issubclass(kind, gpu_attention.GpuKVCache) or device.type != "cuda":
        return kind
    for spec in dict.fromkeys(layers):
        # mypy does not take a type for hashable.
        reason = gpu_check.why_not(kind, spec, block_size, dtype, device)  # type: ignore[arg-type]
        if reason is not None:
            logger.warning("attention without GPU kernels, several times slower: %s", reason)
            return next(base for base in _PLAIN if issubclass(kind, base))
    return kind


def attention_name(kind: type[KVCache]) -> str:
    """What attention over a kind of cache, or over a variant of it, is called in reports."""
    return next(_NAMES[base] for base in kind.__mro__ if base in _NAMES)


def gpu_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the GPU kernels cannot serve a cache of this dtype there; None: they can."""
    if dtype not in gpu_attention.DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"{name} keys and values; the kernels take float32, bfloat16 and float16"
    if find_spec("triton") is None:
        return "the package triton is not installed; torch's builds for CUDA bring it along"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        found = ".".join(map(str, capability))
        return f"compute capability {found}; the kernels need {'.'.join(map(str, _CAPABILITY))}"
    return None
