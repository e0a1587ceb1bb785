# SPDX-License-Identifier: Apache-2.0
"""Chooses the class of the KV cache for a device. The class selects the attention implementation.

No other module outside the folder attention/gpu refers to the GPU kernels for attention. The GPU
kernels are used only if `unrounded_cache_class` returns `GpuKVCache`.
"""

import functools
import logging
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from nereid_backend.attention import reference
from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.cpu import cpu_attention
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.gpu import gpu_attention, gpu_check
from nereid_backend.attention.gpu.backends.attention_backend import ChosenBackends
from nereid_backend.attention.gpu.fastest_backend import fastest_backends, supported_backends
from nereid_backend.attention.gpu.gpu_batch import StepLayout
from nereid_backend.attention.gpu.gpu_check import TrialLayer
from nereid_backend.attention.int8_cache import CpuInt8KVCache, Int8KVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.scaled_cache import ScaledKVCache

logger = logging.getLogger(__name__)

_NAMES: dict[type[KVCache], str] = {
    KVCache: "reference",
    cpu_attention.CpuKVCache: "native",
    gpu_attention.GpuKVCache: "triton-language",
}
_NO_GPU_KERNELS = "Attention runs without GPU kernels and is several times slower, because %s."
# The KV cache classes whose tensors the reference implementation can read.
_REFERENCE_TYPES = (Int8KVCache, Float8KVCache, KVCache)
# If the setting kv_cache_dtype is not "auto", a cache class that stores 8-bit numbers replaces the
# class that stores unrounded numbers. Example: for "int8", GpuInt8KVCache replaces GpuKVCache. The
# CPU kernels do not support fp8, so on a CPU, the reference implementation reads fp8 caches.
_STORED_TYPES: dict[type[KVCache], dict[str, type[KVCache]]] = {
    gpu_attention.GpuKVCache: {
        "int8": gpu_attention.GpuInt8KVCache,
        "fp8": gpu_attention.GpuFloat8KVCache,
    },
    cpu_attention.CpuKVCache: {"int8": CpuInt8KVCache, "fp8": Float8KVCache},
    KVCache: {"int8": Int8KVCache, "fp8": Float8KVCache},
}
# The lowest compute capability of the supported GPUs. The kernels need asynchronous copies and
# bfloat16 matrix products, which older GPUs do not have.
_MIN_CAPABILITY = (8, 0)


def unrounded_cache_class(
    block_size: int, dtype: torch.dtype, device: torch.device
) -> type[KVCache]:
    """Return the fastest class of KV cache that this device supports.

    The class determines the implementation of attention. If the device's kernels cannot be used,
    log a warning and return the class for the reference implementation (plain torch).

    Args:
        block_size: the number of tokens in one block.
        dtype: the data type of keys and values.
        device: the device of the cache.
    """
    if device.type != "cuda":
        return cpu_attention.cache_type(block_size, dtype, device)
    reason = gpu_refusal(dtype, device)
    if reason is None:
        return gpu_attention.GpuKVCache
    logger.warning(_NO_GPU_KERNELS, reason)
    return KVCache


def rounded_cache_class(cache_class: type[KVCache], kv_cache_dtype: str) -> type[KVCache]:
    """Return the class of the KV cache that the setting kv_cache_dtype selects.

    Log a warning if the CPU kernels do not support the class, because attention is then several
    times slower.

    Examples: GpuKVCache and "int8" give GpuInt8KVCache, which stores 8-bit integers. CpuKVCache and
    "fp8" give Float8KVCache, whose attention the reference implementation computes in plain torch.

    Args:
        cache_class: the class of a KV cache that stores unrounded keys and values.
        kv_cache_dtype: the value of the setting: "auto", "int8" or "fp8".
    """
    if kv_cache_dtype == "auto":
        return cache_class
    if kv_cache_dtype == "fp8" and issubclass(cache_class, cpu_attention.CpuKVCache):
        logger.warning(
            "Attention runs without CPU kernels and is several times slower, because the CPU "
            "kernels do not support kv_cache_dtype=fp8. Set kv_cache_dtype=int8."
        )
    # The keys of `_STORED_TYPES` are the cache classes that store unrounded numbers. `cache_class`
    # may be a subclass of one of these classes.
    unrounded_type = _first_superclass(cache_class, _STORED_TYPES)
    return _STORED_TYPES[unrounded_type][kv_cache_dtype]


def checked_cache_class(
    cache_class: type[KVCache],
    layers: Sequence[LayerSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> type[KVCache]:
    """Test the GPU kernels. Return `cache_class`, or the reference's class if a test fails.

    The test computes one attention layer of each kind with the kernels and with the reference
    implementation (plain torch). If the results differ, log a warning and return the class for the
    reference implementation.

    Args:
        cache_class: the class of the KV cache. If it is not a class for the GPU kernels, it is
            returned without a test.
        layers: the attention layers of the model.
        block_size: the number of tokens in one block.
        dtype: the data type of the model.
        device: the device of the cache.
    """
    if not issubclass(cache_class, gpu_attention.GpuKVCache) or device.type != "cuda":
        return cache_class
    for layer in _distinct_layers(cache_class, layers, block_size, dtype, device):
        reason = gpu_check.why_unusable(layer)
        if reason is not None:
            logger.warning(_NO_GPU_KERNELS, reason)
            return _first_superclass(cache_class, _REFERENCE_TYPES)
    return cache_class


def _first_superclass(
    cache_class: type[KVCache], candidates: Iterable[type[KVCache]]
) -> type[KVCache]:
    """Return the first of the `candidates` that is `cache_class` or one of its base classes."""
    for candidate in candidates:
        if issubclass(cache_class, candidate):
            return candidate
    raise AssertionError(f"{cache_class.__name__} inherits from none of the expected classes.")


def attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    layer: int,
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Store the keys and values of one layer in the cache, and compute the attention of the layer.

    The class of the cache selects the implementation: the CPU kernels, the GPU kernels, or the
    reference implementation (plain torch).

    Args:
        inputs: query [num_heads, num_tokens, key_dim], key [num_kv_heads, num_tokens, key_dim] and
            value [num_kv_heads, num_tokens, value_dim].
        layer: the index of the layer in the cache.
        cache: the KV cache. Mutated.
        batch: the metadata of the step: cache slots, block tables and sequence lengths.
        scale: the factor by which the scores are multiplied.
        sinks: the attention sinks, [num_heads]; None if the layer has no sinks. A sink is an
            additional score in the softmax that belongs to no token.

    Returns:
        [num_tokens, num_heads, value_dim] in the data type of the query.
    """
    if isinstance(cache, cpu_attention.CpuKVCache):
        return cpu_attention.attend(inputs, layer, cache, batch, scale=scale, sinks=sinks)
    if isinstance(cache, gpu_attention.GpuKVCache):
        return gpu_attention.attend(inputs, layer, cache, batch, scale=scale, sinks=sinks)
    # `reference.attend` does not write to the cache, so the keys and values must be stored first.
    _, key, value = inputs
    store_layer(key, value, layer, cache, batch)
    return reference.attend(inputs, layer, cache, batch, scale=scale, sinks=sinks)


def store_layer(
    key: Tensor, value: Tensor, layer: int, cache: KVCache, batch: AttentionBatch
) -> None:
    """Store the keys and values of a step's new tokens in the cache of one layer.

    Args:
        key: [num_kv_heads, num_tokens, key_dim].
        value: [num_kv_heads, num_tokens, value_dim].
        layer: the index of the layer in the cache.
        cache: the KV cache. Mutated.
        batch: the metadata of the step, which contains the place of each token in the cache.
    """
    if isinstance(cache, gpu_attention.GpuKVCache):
        gpu_attention.store_layer(key, value, layer, cache, batch)
    else:
        rows = batch.row_indices(cache.layers[layer].num_kv_heads)
        cache.store(layer, key.transpose(0, 1), value.transpose(0, 1), rows)


def attend_stored(  # noqa: PLR0913 - the arguments of `attend`, and `out`
    query: Tensor,
    layer: int,
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Compute the attention of a step whose keys and values are already in the cache.

    The cache must not be a CpuKVCache, because the CPU kernels always store the keys and values in
    the same call that computes the attention.

    Args:
        query: [num_heads, num_tokens, key_dim].
        layer: the index of the layer in the cache.
        cache: the KV cache, which contains the keys and values of the step.
        batch: the metadata of the step. The step must have at least one sequence.
        scale: the factor by which the scores are multiplied.
        sinks: the attention sinks, [num_heads]; None if the layer has no sinks.
        out: [num_tokens, num_heads, value_dim]. Mutated.
    """
    if isinstance(cache, gpu_attention.GpuKVCache):
        gpu_attention.attend_stored(query, layer, cache, batch, scale=scale, sinks=sinks, out=out)
        return
    # If the key and the value are None, the reference implementation reads all keys and values from
    # the cache.
    inputs = (query, None, None)
    out.copy_(reference.attend(inputs, layer, cache, batch, scale=scale, sinks=sinks))


def uses_gpu_kernels(cache: KVCache) -> bool:
    """Return whether GPU kernels compute the attention for this KV cache."""
    return isinstance(cache, gpu_attention.GpuKVCache)


def step_layout(cache: KVCache) -> StepLayout | None:
    """Return the `StepLayout` of the model that uses a KV cache; None without GPU kernels."""
    return gpu_attention.step_layout(cache) if isinstance(cache, gpu_attention.GpuKVCache) else None


def use_fastest_backends(cache: KVCache) -> int:
    """Let the cache use the attention libraries that are faster than the project's GPU kernels.

    For each kind of layer, a library can be selected in each of three situations: decodes, prompts
    with cached tokens, and prompts without cached tokens. Do nothing if no GPU kernels are used, or
    if the cache stores 8-bit numbers, which the libraries cannot read.

    Args:
        cache: the KV cache of a model. Mutated.

    Returns:
        The number of pairs (kind of layer, situation) for which a library is used.
    """
    if not isinstance(cache, gpu_attention.GpuKVCache):
        return 0
    if isinstance(cache, ScaledKVCache):
        logger.info("Attention libraries are not measured, because they do not read 8-bit caches.")
        return 0
    cache.backends = _fastest_backends(
        _distinct_layers(type(cache), cache.layers, cache.block_size, cache.dtype, cache.device)
    )
    return len(cache.backends)


@functools.cache
def _fastest_backends(layers: tuple[TrialLayer, ...]) -> ChosenBackends:
    """Call `fastest_backends`, and cache the result for later calls with the same layers."""
    return fastest_backends(layers, supported_backends())


def _distinct_layers(
    cache_class: type[gpu_attention.GpuKVCache],
    layers: Sequence[LayerSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[TrialLayer, ...]:
    """Return one layer of each kind. Most layers of a model have equal properties.

    `TrialLayer` documents the arguments.
    """
    return tuple(
        TrialLayer(cache_class, spec, block_size, dtype, device) for spec in dict.fromkeys(layers)
    )


def attention_name(cache_class: type[KVCache]) -> str:
    """Return the name of the attention implementation that belongs to a KV cache class."""
    return next(_NAMES[base] for base in cache_class.__mro__ if base in _NAMES)


def gpu_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why the GPU kernels cannot be used; None if they can be used.

    The reason is a clause without a final period.

    Args:
        dtype: the data type of keys and values.
        device: a GPU.
    """
    if dtype not in gpu_attention.DTYPES:
        name = str(dtype).removeprefix("torch.")
        return (
            f"the keys and values are {name}, but the kernels support only float32, bfloat16 and "
            "float16"
        )
    if find_spec("triton") is None:
        return (
            "the package triton is not installed; torch's builds for CUDA install it automatically"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return (
            f"the GPU has compute capability {_version(capability)}, but the kernels need at least "
            f"{_version(_MIN_CAPABILITY)}"
        )
    return None


def _version(capability: tuple[int, int]) -> str:
    """Return a compute capability as text. Example: (8, 6) gives "8.6"."""
    return ".".join(map(str, capability))
