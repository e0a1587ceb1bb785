# SPDX-License-Identifier: Apache-2.0
"""Which kind of KV cache, and with it which attention, serves a device."""

import logging
from importlib.util import find_spec

import torch

from nereid_backend.attention import cpu, gpu, int8_cache
from nereid_backend.attention.kv_cache import KVCache

logger = logging.getLogger(__name__)

_NAMES: dict[type[KVCache], str] = {
    KVCache: "reference",
    cpu.CpuKVCache: "native",
    gpu.GpuKVCache: "triton-language",
}
# The first GPUs with asynchronous copies and bfloat16 products, which the kernels count on.
_CAPABILITY = (8, 0)


def cache_type(block_size: int, dtype: torch.dtype, device: torch.device) -> type[KVCache]:
    """The kind of cache that is fastest here: the kernels' own where they can serve it."""
    if device.type != "cuda":
        return cpu.cache_type(block_size, dtype, device)
    reason = gpu_refusal(dtype, device)
    if reason is None:
        return gpu.GpuKVCache
    logger.warning("attention without GPU kernels, several times slower: %s", reason)
    return KVCache


def stored_type(kind: type[KVCache], kv_cache_dtype: str) -> type[KVCache]:
    """The kind of cache that stores what the setting says and is laid out as this kind is."""
    if kv_cache_dtype == "int8" and issubclass(kind, gpu.GpuKVCache):
        return gpu.GpuInt8KVCache
    return int8_cache.stored_type(kind, kv_cache_dtype)


def attention_name(kind: type[KVCache]) -> str:
    """What attention over a kind of cache, or over a variant of it, is called in reports."""
    return next(_NAMES[base] for base in kind.__mro__ if base in _NAMES)


def gpu_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the GPU kernels cannot serve a cache of this dtype there; None: they can."""
    if dtype not in gpu.DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"{name} keys and values; the kernels take float32, bfloat16 and float16"
    if find_spec("triton") is None:
        return "the package triton is not installed; torch's builds for CUDA bring it along"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        found = ".".join(map(str, capability))
        return f"compute capability {found}; the kernels need {'.'.join(map(str, _CAPABILITY))}"
    return None
