# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a GPU, in kernels that are written in the Triton language.

A layer needs at most four launches: the cache write, the decodes, the reduction of their parts, and
the prefills. Nothing here waits for the GPU. The grids are computed from sizes that are on
the CPU, and the metadata of a step is uploaded once for all layers, as a GpuBatch.

The kernels are imported when the first step runs, because they need the package triton. torch
installs this package on machines with a GPU.
"""

import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

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
    DecodeRows,
    GpuBatch,
    PackedRows,
    PrefillRows,
    StepLayout,
    Tiling,
)
from nereid_backend.attention.gpu.gpu_call import (
    AttentionCall,
    Float8,
    next_power_of_two,
    padded_size,
)
from nereid_backend.attention.gpu.tuning import Device, Tuning, table_of
from nereid_backend.attention.int8_cache import Int8KVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec, LayerWindow
from nereid_backend.attention.scaled_cache import ScaledKVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The largest number of parts of a sequence. With more parts, the reduction loses more time than
# decoding gains.
_MAX_SPLITS = 128
# The number of programs that a decode launch has for each multiprocessor, if there is enough work.
# With this number, the last programs end at about the same time.
_PROGRAMS_PER_PROCESSOR = 4
# A launch that a CUDA graph captures may have this many times the programs of a launch for one
# step. The graph also serves steps in which one sequence is much longer than the others.
_CAPTURED_FACTOR = 2
# A kernel launch in a CUDA graph splits each sequence into at least this number of parts. If a part
# is empty, the program for this part ends immediately.
_MIN_CAPTURED_SPLITS = 4
# Tests on a machine without a GPU simulate a GPU with this number of multiprocessors.
_SIMULATED_PROCESSORS = 4
# The kernels use the hardware's fused instructions, which round a product and a sum only once.
# Triton warns if this option is not set.
_FUSED: dict[str, Any] = {"enable_fp_fusion": True}
# The number of elements that each program of the cache write kernel copies.
_STORE_ELEMENTS = 4096
# The largest number of query heads that one program of the decode kernel computes.
_MAX_DECODE_ROWS = 64
# The number of parts that the reduction adds in one iteration.
_REDUCE_STEP = 16


class GpuKVCache(KVCache):
    """A KV cache that the GPU kernels read. Its layout is that of KVCache.

    One head's part of a block is contiguous, so a tile of keys consists of a few long reads.

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
    """Store the keys and values of one packed step in one layer, and return the attention.

    Args:
        inputs: query [num_heads, num_tokens, key_dim], key [num_kv_heads, num_tokens, key_dim] and
            value [num_kv_heads, num_tokens, value_dim].
        layer: the index of the layer in the cache, and its properties.
        cache: receives the keys and values. Mutated.
        batch: the metadata of the step.
        scale: the factor of the scores.
        sinks: the attention sinks, [num_heads]; None if the layer has none.

    Returns:
        [num_tokens, num_heads, value_dim] in the data type of the query.
    """
    query, key, value = inputs
    store_layer(key, value, layer, cache, batch)
    return attend_stored(query, (key, value), layer, cache, batch, scale=scale, sinks=sinks)


def store_layer(
    key: Tensor,
    value: Tensor,
    layer: tuple[int, LayerSpec],
    cache: GpuKVCache,
    batch: AttentionBatch,
) -> None:
    """Store the keys and values of one packed step in one layer; shapes as in `attend`.

    Mutates: cache.
    """
    key, value = _with_contiguous_rows(key), _with_contiguous_rows(value)
    with torch.cuda.device_of(key):  # type: ignore[no-untyped-call]
        store(key, value, _call(layer, cache, 1.0, None), batch.slots)


def attend_stored(  # noqa: PLR0913 - as `attend`, and where the result is stored
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    layer: tuple[int, LayerSpec],
    cache: GpuKVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the attention of a step whose keys and values are already in the cache.

    Args:
        query: [num_heads, num_tokens, key_dim].
        new: the key and the value of the step, as in `attend`; None if only the cache contains
            them.
        layer: the index of the layer in the cache, and its properties.
        cache: the cache, which contains the keys and values of the step.
        batch: the metadata of the step.
        scale: the factor of the scores.
        sinks: the attention sinks, [num_heads]; None if the layer has none.
        out: the tensor for the result; by default, a new one.

    Returns:
        [num_tokens, num_heads, value_dim] in the data type of the query.

    Mutates: out.
    """
    query = _with_contiguous_rows(query)
    spec = layer[1]
    if out is None:
        out = query.new_empty(query.shape[1], spec.num_heads, spec.value_dim)
    call = _call(layer, cache, scale, sinks)
    inputs = LayerInputs(query, new, call, batch, gpu_batch(batch))
    # Triton launches kernels on the current device, which may differ from the device of the cache.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        for situation in inputs.situations():
            backend = cache.backends.get((spec, situation))
            if backend is None:
                _launch(situation, inputs, out)
            else:
                backend.attend(situation, inputs, out)
    return out


def _call(
    layer: tuple[int, LayerSpec], cache: GpuKVCache, scale: float, sinks: Tensor | None
) -> AttentionCall:
    """Return the arguments of an attention call; see `attend_stored`."""
    number, spec = layer
    scales, float8 = number_format(cache, number)
    return AttentionCall(
        spec, cache.keys[number], cache.values[number], scale, sinks, scales, float8
    )


def _launch(situation: Situation, inputs: LayerInputs, out: Tensor) -> None:
    """Compute the decodes or the prefills of a step with the project's kernels. Mutates: out."""
    call = inputs.call
    device = device_of(inputs.query.device)
    if situation is Situation.DECODE:
        assert inputs.rows.decodes is not None
        tuning = device.tuning("decode", _largest_dim(call.spec), call.keys.itemsize)
        decode(inputs.query, call, inputs.rows.decodes, out, tuning)
    else:
        assert inputs.rows.prefills is not None
        tuning = device.tuning("prefill", _largest_dim(call.spec), call.keys.itemsize)
        prefill(inputs.query, call, inputs.rows.prefills, out, tuning)


def _largest_dim(spec: LayerSpec) -> int:
    """Return the size of a key or of a value, whichever is larger."""
    return max(spec.key_dim, spec.value_dim)


def step_layout(cache: GpuKVCache, layers: Sequence[LayerSpec]) -> StepLayout:
    """Return the layout that adds the tiles of prefills to the uploads of a model's steps.

    Args:
        cache: the KV cache of the model.
        layers: the attention layers of the model.
    """
    device = device_of(cache.device)
    tilings = []
    for keys, spec in zip(cache.keys, layers, strict=True):
        tuning = device.tuning("prefill", _largest_dim(spec), keys.itemsize)
        tilings.append(_tiling(spec, tuning))
    return StepLayout(tilings)


def _tiling(spec: LayerSpec, tuning: Tuning) -> Tiling:
    """Return how the prefills of a step are divided into tiles for one layer."""
    heads = min(spec.num_heads // spec.num_kv_heads, tuning.rows)
    return Tiling(tuning.rows // heads, spec.window)


def gpu_batch(batch: AttentionBatch) -> GpuBatch:
    """Return the metadata of a step for the kernels. The result is cached in the batch."""
    rows = batch.device_rows
    if isinstance(rows, PackedRows):
        rows = batch.device_rows = rows.unpack(batch)
    if not isinstance(rows, GpuBatch):
        rows = batch.device_rows = GpuBatch.of(batch)
    return rows


def store(key: Tensor, value: Tensor, call: AttentionCall, slots: Tensor) -> None:
    """Write the keys and values of a step into the cache of one layer.

    Args:
        key: [num_kv_heads, num_tokens, key_dim], the last dimension contiguous.
        value: [num_kv_heads, num_tokens, value_dim], the last dimension contiguous.
        call: the attention call. Only its cache is used.
        slots: [num_tokens] int64. Tokens with a negative slot are not written.

    Mutates: the cache.
    """
    from nereid_backend.attention.gpu.triton_store import store_kernel

    num_kv_heads, num_tokens, key_dim = key.shape
    if num_tokens == 0:
        return
    value_dim = value.shape[2]
    max_heads = max(1, _STORE_ELEMENTS // padded_size(max(key_dim, value_dim)))
    heads_per_program = min(padded_size(num_kv_heads), max_heads)
    programs_per_token = -(-num_kv_heads // heads_per_program)
    head_and_token_strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
    store_kernel[(num_tokens, programs_per_token)](
        key,
        value,
        *call.cache_tensors,
        slots,
        *head_and_token_strides,
        NUM_KV_HEADS=num_kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=call.values.shape[2],
        HEADS=heads_per_program,
        KEY_PADDED=padded_size(key_dim),
        VALUE_PADDED=padded_size(value_dim),
        HAS_SCALES=call.scales is not None,
        IS_FLOAT8=call.float8 is not Float8.NONE,
        num_warps=4,
        **_FUSED,
    )


def decode(
    query: Tensor, call: AttentionCall, rows: DecodeRows, out: Tensor, tuning: Tuning
) -> None:
    """Compute the attention of decodes.

    Args:
        query: [num_heads, num_tokens, key_dim].
        call: the attention call.
        rows: the decodes of the step.
        out: [num_tokens, num_heads, value_dim]. The rows of the decodes are written.
        tuning: the tile sizes of the kernel.

    Mutates: out.
    """
    from nereid_backend.attention.gpu.triton_decode import decode_kernel, reduce_kernel

    spec = call.spec
    # One program computes all heads of a large group, so that their keys are read only once.
    num_rows = max(tuning.rows, min(_MAX_DECODE_ROWS, padded_size(call.group_size)))
    num_programs = spec.num_kv_heads * -(-call.group_size // num_rows)
    if rows.longest is None:
        split_tokens, num_splits = split(rows, spec.window, num_programs, tuning.tile, query.device)
    else:
        # The kernel derives the number of tokens in a part from the longest sequence of each step.
        split_tokens = 0
        num_splits = captured_splits(rows, spec.window, num_programs, tuning.tile, query.device)
    is_split = num_splits > 1
    # The kernel needs a valid pointer even for an argument that it does not read. It does not read
    # `parts` and `weights_log` if sequences are not divided, nor `sinks` if the layer has none.
    parts = out
    weights_log = out
    sinks = out if call.sinks is None else call.sinks
    if is_split:
        shape = (rows.count, spec.num_heads, num_splits)
        parts = rows.workspace((*shape, spec.value_dim))
        weights_log = rows.workspace(shape)
    split_arguments = (*call.window_limits, split_tokens, num_splits)
    shared: dict[str, Any] = {
        **call.value_constants(),
        **call.window_constants(),
        "TILE": tuning.tile,
        "HAS_SINKS": call.sinks is not None,
        "READS_LONGEST": rows.longest is not None,
    }
    longest = rows.lens if rows.longest is None else rows.longest
    decode_kernel[(rows.count, num_programs, num_splits)](
        *(query, *call.cache_tensors, out, parts, weights_log, sinks),
        *(rows.table, rows.table_starts, rows.tokens, rows.lens, longest),
        *(query.stride(0), query.stride(1), *call.score_factors),
        *split_arguments,
        GROUP=call.group_size,
        ROWS=num_rows,
        IS_SPLIT=is_split,
        HAS_CAP=spec.softcap is not None,
        **call.cache_constants(),
        **shared,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **_FUSED,
    )
    if is_split:
        reduce_kernel[(rows.count, spec.num_heads)](
            *(out, parts, weights_log, sinks, rows.tokens, rows.lens, longest),
            *split_arguments,
            NUM_HEADS=spec.num_heads,
            SPLITS_PADDED=_MAX_SPLITS,
            STEP=_REDUCE_STEP,
            **shared,
            num_warps=2,
            **_FUSED,
        )


def prefill(
    query: Tensor, call: AttentionCall, rows: PrefillRows, out: Tensor, tuning: Tuning
) -> None:
    """Compute the attention of all prefills of a step in one launch.

    Args:
        query: [num_heads, num_tokens, key_dim].
        call: the attention call.
        rows: the prefills of the step.
        out: [num_tokens, num_heads, value_dim]. The rows of the prefills are written.
        tuning: the tile sizes of the kernel.

    Mutates: out.
    """
    from nereid_backend.attention.gpu.triton_prefill import prefill_kernel

    spec = call.spec
    heads = min(call.group_size, tuning.rows)
    tiles = rows.tiles(_tiling(spec, tuning))
    programs_per_tile = spec.num_kv_heads * -(-call.group_size // heads)
    # The kernel needs a valid pointer even if it does not read the sinks.
    sinks = out if call.sinks is None else call.sinks
    query_strides = (query.stride(0), query.stride(1))
    prefill_kernel[(tiles.shape[0] * programs_per_tile,)](
        query,
        *call.cache_tensors,
        out,
        sinks,
        rows.table,
        rows.sequences,
        tiles,
        *query_strides,
        *call.score_factors,
        *call.window_limits,
        GROUP=call.group_size,
        ROWS=tuning.rows,
        HEADS=heads,
        TILE=tuning.tile,
        HAS_CAP=spec.softcap is not None,
        HAS_SINKS=call.sinks is not None,
        **call.cache_constants(),
        **call.value_constants(),
        **call.window_constants(),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **_FUSED,
    )


def split(
    rows: DecodeRows, window: LayerWindow, num_programs: int, tile: int, device: torch.device
) -> tuple[int, int]:
    """Return the number of tokens in a part of a sequence, and the number of parts.

    Parts are as long as possible while there are enough programs to keep the GPU busy, because each
    further part reads the query again and adds a row to the reduction.

    Args:
        rows: the decodes. Only the bounds of their lengths are used.
        window: the attention window of the layer.
        num_programs: the number of programs that compute one part of one sequence, each for other
            heads.
        tile: the number of keys in a tile.
        device: the device of the step.
    """
    limit = window.limit
    lens = [
        (count, length if limit is None else min(length, limit + tile))
        for count, length in rows.bounds
    ]
    longest = max(length for _, length in lens)
    total_tokens = sum(count * length for count, length in lens) * num_programs
    wanted_programs = _PROGRAMS_PER_PROCESSOR * num_processors(device)
    tokens_by_occupancy = -(-total_tokens // wanted_programs)
    tokens_by_max_splits = -(-longest // _MAX_SPLITS)
    min_tokens = max(tokens_by_occupancy, tokens_by_max_splits, 2 * tile)
    # The number is rounded up to a power of two times the tile size. Few different numbers then
    # occur, so that many steps can share a graph.
    split_tokens = tile * next_power_of_two(-(-min_tokens // tile))
    return split_tokens, -(-longest // split_tokens)


def captured_splits(
    rows: DecodeRows, window: LayerWindow, num_programs: int, tile: int, device: torch.device
) -> int:
    """Return the largest number of parts per sequence for a launch that a CUDA graph captures.

    The number depends only on values that are equal for all steps which replay the graph. The
    arguments are those of `split`.
    """
    longest = max(length for _, length in rows.bounds)
    if window.limit is not None:
        longest = min(longest, window.limit + tile)
    # A part has at least two tiles, as in `split`.
    max_splits_by_length = -(-longest // (2 * tile))
    wanted_programs = _CAPTURED_FACTOR * _PROGRAMS_PER_PROCESSOR * num_processors(device)
    splits_by_occupancy = -(-wanted_programs // (rows.count * num_programs))
    num_splits = max(splits_by_occupancy, _MIN_CAPTURED_SPLITS)
    return max(1, min(num_splits, max_splits_by_length, _MAX_SPLITS))


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return _SIMULATED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return the tile sizes that were measured on a GPU, and its compute capability."""
    if device.type != "cuda":
        return Device({})
    capability = torch.cuda.get_device_capability(device)
    return Device(table_of(torch.cuda.get_device_name(device)), capability)


def number_format(cache: GpuKVCache, layer: int) -> tuple[tuple[Tensor, Tensor] | None, Float8]:
    """Return the fields `scales` and `float8` of a layer's AttentionCall.

    Args:
        cache: the KV cache.
        layer: the index of the layer.
    """
    if not isinstance(cache, ScaledKVCache):
        return None, Float8.NONE
    is_float8 = isinstance(cache, Float8KVCache)
    float8 = float8_of(cache.device) if is_float8 else Float8.NONE
    return (cache.key_scales[layer], cache.value_scales[layer]), float8


@functools.cache
def float8_of(device: torch.device) -> Float8:
    """Return how the kernels convert 8-bit floating point numbers on a device.

    GPUs of compute capability 8.9 have instructions for these numbers, too. But Triton 3.6 cannot
    compile the conversion to bfloat16 for them.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return Float8.DEVICE
    return Float8.BITS


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, as the kernels need it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
