# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a GPU, computed by kernels in the Triton language.

A layer needs at most four launches: the cache write, the decodes, the reduction of the decodes'
splits, and the prefills. This module never waits for the GPU. The grids are computed from sizes
that are on the CPU. The metadata of a step is uploaded once for all layers; see `GpuBatch`.
"""

import functools
from collections.abc import Sequence
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
from nereid_backend.attention.gpu.tuning import Device, table_of
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
    layer: tuple[int, LayerSpec],
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
        layer: the index of the layer in the cache, and the properties of the layer.
        cache: the KV cache, into which the keys and values are stored. Mutated.
        batch: the metadata of the step.
        scale: the factor by which the scores are multiplied.
        sinks: the attention sinks, [num_heads]; None if the layer has no sinks.

    Returns:
        [num_tokens, num_heads, value_dim] in the data type of the query.
    """
    query, key, value = inputs
    store_layer(key, value, layer, cache, batch)
    # Some attention libraries cannot read the cache. They compute the attention of prompts from the
    # key and the value of the new tokens.
    new = (key, value)
    return attend_stored(query, layer, cache, batch, scale=scale, sinks=sinks, new=new)


def store_layer(
    key: Tensor,
    value: Tensor,
    layer: tuple[int, LayerSpec],
    cache: GpuKVCache,
    batch: AttentionBatch,
) -> None:
    """Store the keys and values of a step's new tokens in the cache of one layer.

    Args:
        key: [num_kv_heads, num_tokens, key_dim].
        value: [num_kv_heads, num_tokens, value_dim].
        layer: the index of the layer in the cache, and the properties of the layer.
        cache: the KV cache. Mutated.
        batch: the metadata of the step. Only `slots` is used, the place of each token in the cache.
    """
    key, value = _with_contiguous_rows(key), _with_contiguous_rows(value)
    # `store` does not read `scale` and `sinks`, so their values have no effect.
    call = _attention_call(layer, cache, scale=1.0, sinks=None)
    with torch.cuda.device_of(key):  # type: ignore[no-untyped-call]
        store(key, value, call, batch.slots)


def attend_stored(  # noqa: PLR0913 - the arguments of `attend`, and `out`
    query: Tensor,
    layer: tuple[int, LayerSpec],
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
        layer: the index of the layer in the cache, and the properties of the layer.
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
    _, spec = layer
    if out is None:
        out = query.new_empty(query.shape[1], spec.num_heads, spec.value_dim)
    call = _attention_call(layer, cache, scale, sinks)
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
    layer: tuple[int, LayerSpec], cache: GpuKVCache, scale: float, sinks: Tensor | None
) -> AttentionCall:
    """Return the kernel arguments that depend on the layer, but not on the tokens of the step.

    `layer` is the index of the layer in the cache, and the properties of the layer. `scale` is the
    factor by which the scores are multiplied. `sinks` is [num_heads]; None if there are no sinks.
    """
    layer_index, spec = layer
    scales, float8 = number_format(cache, layer_index)
    keys, values = cache.keys[layer_index], cache.values[layer_index]
    return AttentionCall(spec, keys, values, scale, sinks, scales, float8)


def _launch_kernels(situation: Situation, inputs: LayerInputs, out: Tensor) -> None:
    """Compute the decodes or the prefills of a step with the project's kernels.

    Args:
        situation: DECODE selects the decodes (sequences with one new token). Any other value
            selects the prefills (sequences with several new tokens).
        inputs: the arguments of the layer, and the metadata of the step.
        out: [num_tokens, num_heads, value_dim]. Mutated.
    """
    call = inputs.call
    rows = inputs.rows
    is_decode = situation is Situation.DECODE
    kernel = "decode" if is_decode else "prefill"
    device = device_of(inputs.query.device)
    # The tile sizes that were fastest for this kernel in measurements on this GPU.
    tuning = device.tuning(kernel, _largest_dim(call.spec), call.keys.itemsize)
    if is_decode:
        assert rows.decodes is not None, "the situation applies only to steps with decodes"
        decode(inputs.query, call, rows.decodes, out, tuning)
    else:
        assert rows.prefills is not None, "the situation applies only to steps with prefills"
        prefill(inputs.query, call, rows.prefills, out, tuning)


def _largest_dim(spec: LayerSpec) -> int:
    """Return the key size or the value size, whichever is larger."""
    return max(spec.key_dim, spec.value_dim)


def step_layout(cache: GpuKVCache, layers: Sequence[LayerSpec]) -> StepLayout:
    """Return an object that describes how each layer of a model divides prefills into tiles.

    A prefill is a sequence with several new tokens in a step. A tile consists of some of these
    tokens, which one program of the prefill kernel computes.

    Args:
        cache: the KV cache of the model.
        layers: the attention layers of the model.
    """
    device = device_of(cache.device)
    tilings = []
    for keys, spec in zip(cache.keys, layers, strict=True):
        # `tuning` contains the tile sizes of the prefill kernel for this GPU.
        tuning = device.tuning("prefill", _largest_dim(spec), keys.itemsize)
        tilings.append(prefill_tiling(spec, tuning))
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


def number_format(cache: GpuKVCache, layer: int) -> tuple[tuple[Tensor, Tensor] | None, Float8]:
    """Return the factors and the method with which the kernels convert a layer's 8-bit numbers.

    Returns:
        First, the factors by which 8-bit keys are multiplied, and the factors by which 8-bit values
        are multiplied; None if the cache stores no 8-bit numbers. Second, the method by which the
        kernels convert 8-bit floating point numbers; `Float8.NONE` if the cache stores none.
    """
    if not isinstance(cache, ScaledKVCache):
        return None, Float8.NONE
    scales = (cache.key_scales[layer], cache.value_scales[layer])
    stores_float8 = isinstance(cache, Float8KVCache)  # otherwise, the cache stores 8-bit integers
    float8 = float8_of(cache.device) if stores_float8 else Float8.NONE
    return scales, float8


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, as the kernels require.

    Only a tensor that is not contiguous in this dimension is copied.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
