# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a GPU, computed by kernels in the Triton language.

A layer needs at most four launches: the cache write, the decodes, the reduction of the decodes'
splits, and the prefills. This module never waits for the GPU. The grids are computed from sizes
that are on the CPU. The metadata of a step is uploaded once for all layers; see `GpuBatch`.
"""

import functools
from types import MappingProxyType

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.gpu.backends.attention_backend import (
    ChosenBackends,
    LayerInputs,
    Situation,
)
from nereid_backend.attention.gpu.gpu_batch import (
    GpuBatch,
    PackedRows,
    StepLayout,
)
from nereid_backend.attention.gpu.gpu_call import (
    AttentionCall,
    Float8,
    float8_of,
)
from nereid_backend.attention.gpu.kernel_launches import decode, prefill, prefill_tiling, store
from nereid_backend.attention.gpu.tuning import Device, Tuning, table_of
from nereid_backend.attention.int8_cache import Int8KVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.scaled_cache import ScaledKVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GpuKVCache(KVCache):
    """A KV cache for the GPU kernels. It has the same layout as KVCache.

    The keys of one head in a block are contiguous, so a kernel needs only a few long reads to load
    a tile of keys.

    Attributes:
        backends: the attention libraries that replace the kernels; see fastest_backend.py.
    """

    backends: ChosenBackends = MappingProxyType({})


class GpuInt8KVCache(Int8KVCache, GpuKVCache):
    """A GpuKVCache of 8-bit integers; see `Int8KVCache`."""


class GpuFloat8KVCache(Float8KVCache, GpuKVCache):
    """A GpuKVCache of 8-bit floating point numbers; see `Float8KVCache`."""


def attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    layer: int,
    cache: GpuKVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the keys and values of one layer in the cache, and compute the attention of the layer.

    Args:
        inputs: query [num_heads, num_tokens, key_dim], key [num_kv_heads, num_tokens, key_dim] and
            value [num_kv_heads, num_tokens, value_dim].
        layer: the index of the layer in the cache.
        cache: the KV cache, into which the keys and values are stored. Mutated.
        batch: the metadata of the step.
        scale: the factor by which the scores are multiplied.
        sinks: the attention sinks, [num_heads]; None if the layer has no sinks.

    Returns:
        [num_tokens, num_heads, value_dim] in the data type of the query.
    """
    query, key, value = inputs
    store_layer(key, value, layer, cache, batch)
    # The kernels read the keys and values from the cache. Some attention libraries cannot read the
    # cache, and compute the attention of whole prompts from the new keys and values.
    new_keys_and_values = (key, value)
    return attend_stored(
        query, layer, cache, batch, scale=scale, sinks=sinks, new=new_keys_and_values
    )


def store_layer(
    key: Tensor,
    value: Tensor,
    layer: int,
    cache: GpuKVCache,
    batch: AttentionBatch,
) -> None:
    """Store the keys and values of a step's new tokens in the cache of one layer.

    Args:
        key: [num_kv_heads, num_tokens, key_dim].
        value: [num_kv_heads, num_tokens, value_dim].
        layer: the index of the layer in the cache.
        cache: the KV cache. Mutated.
        batch: the metadata of the step. Only `slots` is used, the place of each token in the cache.
    """
    key, value = _with_contiguous_rows(key), _with_contiguous_rows(value)
    call = _attention_call(cache, layer)  # `store` needs no scale and no sinks.
    with torch.cuda.device_of(key):  # type: ignore[no-untyped-call]
        store(key, value, call, batch.slots)


def attend_stored(  # noqa: PLR0913 - the arguments of `attend`, and `out`
    query: Tensor,
    layer: int,
    cache: GpuKVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sinks: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the attention of a step whose keys and values are already in the cache.

    Args:
        query: [num_heads, num_tokens, key_dim].
        layer: the index of the layer in the cache.
        cache: the cache, which contains the keys and values of the step.
        batch: the metadata of the step.
        scale: the factor by which the scores are multiplied.
        sinks: the attention sinks, [num_heads]; None if the layer has no sinks.
        new: the key [num_kv_heads, num_tokens, key_dim] and the value [num_kv_heads, num_tokens,
            value_dim] of the step; None if they are only in the cache.
        out: the tensor for the result. None creates a new tensor.

    Returns:
        [num_tokens, num_heads, value_dim] in the data type of the query.

    Mutates: out.
    """
    query = _with_contiguous_rows(query)
    spec = cache.layers[layer]
    if out is None:
        out = query.new_empty(query.shape[1], spec.num_heads, spec.value_dim)
    call = _attention_call(cache, layer, scale, sinks)
    inputs = LayerInputs(query, new, call, batch, gpu_batch(batch))
    # Triton launches kernels on the current device, so the device of the query must be the current
    # device.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        # The attention of the decodes (sequences with one new token) and the attention of the
        # prefills are computed separately.
        for situation in inputs.situations():
            # The library that computes the attention instead of the project's kernels, or None.
            backend = cache.backends.get((spec, situation))
            if backend is None:
                _launch_kernels(situation, inputs, out)
            else:
                backend.attend(situation, inputs, out)
    return out


def _attention_call(
    cache: GpuKVCache, layer: int, scale: float = 1.0, sinks: Tensor | None = None
) -> AttentionCall:
    """Return the kernel arguments that depend on the layer, but not on the tokens of the step.

    Args:
        cache: the KV cache.
        layer: the index of the layer in the cache.
        scale: the factor by which the scores are multiplied.
        sinks: the attention sinks, [num_heads]; None if the layer has no sinks.
    """
    keys, values = cache.keys[layer], cache.values[layer]
    scales = scales_of(cache, layer)
    return AttentionCall(
        cache.layers[layer], keys, values, scale, sinks, scales, float8_conversion(cache)
    )


def _launch_kernels(situation: Situation, inputs: LayerInputs, out: Tensor) -> None:
    """Compute the decodes or the prefills of a step with the project's kernels.

    Args:
        situation: DECODE selects the decodes (sequences with one new token). PROMPT and CHUNK
            select the prefills (sequences with several new tokens).
        inputs: the arguments of the layer, and the metadata of the step.
        out: [num_tokens, num_heads, value_dim]. Mutated.
    """
    query, call, rows = inputs.query, inputs.call, inputs.rows
    device = device_of(query.device)
    if situation is Situation.DECODE:
        assert rows.decodes is not None, "the situation applies only to steps with decodes"
        tuning = _tuning_of(device, "decode", call.spec, call.keys)
        decode(query, call, rows.decodes, out, tuning)
    else:
        assert rows.prefills is not None, "the situation applies only to steps with prefills"
        tuning = _tuning_of(device, "prefill", call.spec, call.keys)
        prefill(query, call, rows.prefills, out, tuning)


def _tuning_of(device: Device, kernel: str, spec: LayerSpec, keys: Tensor) -> Tuning:
    """Return the tile sizes that were fastest for a kernel and a layer in measurements on a GPU.

    Args:
        device: the GPU.
        kernel: "decode" or "prefill".
        spec: the properties of the layer.
        keys: the keys in the cache of the layer.
    """
    return device.tuning(kernel, max(spec.key_dim, spec.value_dim), keys.itemsize)


def step_layout(cache: GpuKVCache) -> StepLayout:
    """Return an object that describes how each layer of a model divides prefills into tiles.

    A prefill is a sequence with several new tokens in a step. A tile consists of some of these
    tokens, which one program of the prefill kernel computes. `cache` is the KV cache of the model.
    """
    device = device_of(cache.device)
    tilings = []
    for keys, spec in zip(cache.keys, cache.layers, strict=True):
        tilings.append(prefill_tiling(spec, _tuning_of(device, "prefill", spec, keys)))
    return StepLayout(tilings)  # removes duplicates, because many layers have equal tilings


def gpu_batch(batch: AttentionBatch) -> GpuBatch:
    """Return a step's metadata for GPU kernels. The first call for a step builds the metadata."""
    rows = batch.kernel_metadata
    if isinstance(rows, PackedRows):
        rows = batch.kernel_metadata = rows.unpack(batch)
    if not isinstance(rows, GpuBatch):
        rows = batch.kernel_metadata = GpuBatch.of(batch)
    return rows


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return a GPU's compute capability, and the tile sizes that were fastest in measurements."""
    if device.type != "cuda":
        return Device({})
    capability = torch.cuda.get_device_capability(device)
    return Device(table_of(torch.cuda.get_device_name(device)), capability)


def scales_of(cache: GpuKVCache, layer: int) -> tuple[Tensor, Tensor] | None:
    """Return the factors by which the stored keys and the stored values of a layer are multiplied.

    Return None if the cache stores no 8-bit numbers. Only such numbers have factors.
    """
    if isinstance(cache, ScaledKVCache):
        return cache.key_scales[layer], cache.value_scales[layer]
    return None


def float8_conversion(cache: GpuKVCache) -> Float8:
    """Return the method by which the kernels convert stored 8-bit floating point numbers.

    Return `Float8.NONE` if the cache stores no such numbers.
    """
    return float8_of(cache.device) if isinstance(cache, Float8KVCache) else Float8.NONE


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, as the kernels require.

    Only a tensor that is not contiguous in this dimension is copied.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
