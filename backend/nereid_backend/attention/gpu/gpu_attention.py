# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a GPU, in kernels that are written in the Triton language.

A layer needs at most four launches: the cache write, the decodes, the reduction of their parts, and
the prefills. Nothing here waits for the GPU. The grids follow from sizes that the CPU knows, and
the metadata of a step is uploaded once for all layers, as a GpuBatch.

The kernels are imported when the first step runs, because they need the package triton. torch
installs this package on machines with a GPU.
"""

import enum
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.gpu.gpu_batch import DecodeRows, GpuBatch, PrefillRows
from nereid_backend.attention.gpu.tuning import Device, Tuning, table_of
from nereid_backend.attention.int8_cache import Int8KVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec, Span
from nereid_backend.attention.scaled_cache import ScaledKVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LOG2E = math.log2(math.e)
# The largest number of parts of a sequence. More parts make the reduction slower than they make
# decoding faster.
_MAX_SPLITS = 128
# The number of programs that a decode launch has for each multiprocessor, if there is enough work.
# With this number, the last programs end at about the same time.
_PROGRAMS_PER_PROCESSOR = 4
# Tests on a machine without a GPU simulate a GPU with this number of multiprocessors.
_SIMULATED_PROCESSORS = 4
# Products and sums use one rounding, as the hardware's fused instructions do. Triton warns if this
# option is not set.
_FUSED: dict[str, Any] = {"enable_fp_fusion": True}
# The number of elements that one program of the cache write copies.
_STORE_ELEMENTS = 4096
# The largest number of query heads that one program of the decode kernel computes.
_MAX_DECODE_ROWS = 64
# The number of parts that one iteration of the reduction adds.
_REDUCE_STEP = 16
# Keys up to this size are padded, because a second matrix product would cost more.
_MAX_PADDED_KEY = 32


class GpuKVCache(KVCache):
    """A KV cache that the GPU kernels read. Its layout is that of KVCache.

    One head's part of a block is contiguous, so a tile of keys consists of a few long reads.
    """


class GpuInt8KVCache(Int8KVCache, GpuKVCache):
    """A GpuKVCache of 8-bit integers; see `Int8KVCache`."""


class GpuFloat8KVCache(Float8KVCache, GpuKVCache):
    """A GpuKVCache of 8-bit floating point numbers; see `Float8KVCache`."""


class Float8(enum.IntEnum):
    """The way in which the kernels convert 8-bit floating point numbers, a constant in them."""

    NONE = 0
    """The cache contains other numbers: floating point numbers of the model, or integers."""
    DEVICE = 1
    """With instructions of the GPU, which exist from compute capability 8.9 on."""
    BITS = 2
    """By shifting bits."""


@dataclass(frozen=True, slots=True)
class Step:
    """The arguments of one attention call.

    Attributes:
        spec: the properties of the layer.
        keys: the keys of the layer, [num_blocks + 1, num_kv_heads, block_size, key_dim].
        values: the values of the layer, with value_dim.
        scale: the factor of the scores.
        sinks: the attention sinks, [num_heads]; None if the layer has none.
        scales: the factors of keys and values of 8 bits, each [num_blocks + 1, num_kv_heads,
            block_size] float32; None if keys and values are not scaled.
        float8: how keys and values are converted if they are e4m3, stored as bytes.
    """

    spec: LayerSpec
    keys: Tensor
    values: Tensor
    scale: float
    sinks: Tensor | None
    scales: tuple[Tensor, Tensor] | None = None
    float8: Float8 = Float8.NONE


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
    query, key, value = (_rows(tensor) for tensor in inputs)
    number, spec = layer
    scales, float8 = _number_format(cache, number)
    step = Step(spec, cache.keys[number], cache.values[number], scale, sinks, scales, float8)
    out = query.new_empty(query.shape[1], spec.num_heads, spec.value_dim)
    # Triton launches kernels on the current device, which may differ from the device of the cache.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        _launch(query, key, value, step, batch, out)
    return out


def _launch(
    query: Tensor, key: Tensor, value: Tensor, step: Step, batch: AttentionBatch, out: Tensor
) -> None:
    """Launch the kernels of one layer."""
    store(key, value, step, batch.slots)
    rows = gpu_batch(batch)
    device = device_of(query.device)
    dim = max(step.spec.key_dim, step.spec.value_dim)
    if rows.decodes is not None:
        tuning = device.tuning("decode", dim, step.keys.itemsize)
        decode(query, step, rows.decodes, out, tuning)
    if rows.prefills is not None:
        tuning = device.tuning("prefill", dim, step.keys.itemsize)
        prefill(query, step, rows.prefills, out, tuning)


def gpu_batch(batch: AttentionBatch) -> GpuBatch:
    """Return the metadata of a step for the kernels. It is built once and cached in the batch."""
    rows = batch.device_rows
    if not isinstance(rows, GpuBatch):
        rows = batch.device_rows = GpuBatch.of(batch)
    return rows


def store(key: Tensor, value: Tensor, step: Step, slots: Tensor) -> None:
    """Write the keys and values of a step into the cache of one layer.

    Args:
        key: [num_kv_heads, num_tokens, key_dim], the last dimension contiguous.
        value: [num_kv_heads, num_tokens, value_dim], the last dimension contiguous.
        step: the layer's cache.
        slots: [num_tokens] int64. Tokens with a negative slot are not written.

    Mutates: the cache.
    """
    from nereid_backend.attention.gpu.triton_store import store_kernel

    num_kv_heads, num_tokens, key_dim = key.shape
    value_dim = value.shape[2]
    padded = _power(max(key_dim, value_dim))
    heads = min(_power(num_kv_heads), max(1, _STORE_ELEMENTS // padded))
    if num_tokens == 0:
        return
    store_kernel[(num_tokens, -(-num_kv_heads // heads))](
        *(key, value, *_cache(step), slots),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        NUM_KV_HEADS=num_kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=step.values.shape[2],
        HEADS=heads,
        KEY_PADDED=_power(key_dim),
        VALUE_PADDED=_power(value_dim),
        HAS_SCALES=step.scales is not None,
        IS_FLOAT8=step.float8 is not Float8.NONE,
        num_warps=4,
        **_FUSED,
    )


def decode(query: Tensor, step: Step, rows: DecodeRows, out: Tensor, tuning: Tuning) -> None:
    """Compute the attention of decodes.

    Args:
        query: [num_heads, num_tokens, key_dim].
        step: the arguments of the attention call.
        rows: the decodes of the step.
        out: [num_tokens, num_heads, value_dim]. The rows of the decodes are written.
        tuning: the tile sizes of the kernel.

    Mutates: out.
    """
    from nereid_backend.attention.gpu.triton_decode import decode_kernel, reduce_kernel

    spec = step.spec
    group = spec.num_heads // spec.num_kv_heads
    # One program computes all heads of a large group, so that their keys are read only once.
    height = max(tuning.rows, min(_MAX_DECODE_ROWS, _power(group)))
    parts_of_heads = spec.num_kv_heads * -(-group // height)
    split_tokens, num_splits = split(rows, spec.span, parts_of_heads, tuning.tile, query.device)
    is_split = num_splits > 1
    # Without parts, the kernel needs two pointers that it does not use.
    parts = out
    logs = out
    if is_split:
        shape = (rows.count, spec.num_heads, num_splits)
        parts = rows.workspace((*shape, spec.value_dim))
        logs = rows.workspace(shape)
    window = spec.span.window or 0
    chunk = spec.span.chunk or 0
    # Without sinks, the kernel still needs a pointer, but does not read through it.
    sinks = out if step.sinks is None else step.sinks
    shared: dict[str, Any] = {
        "VALUE_DIM": spec.value_dim,
        "VALUE_PADDED": _power(spec.value_dim),
        "TILE": tuning.tile,
        **_span_flags(spec.span),
        "HAS_SINKS": step.sinks is not None,
    }
    decode_kernel[(rows.count, parts_of_heads, num_splits)](
        *(query, *_cache(step), out, parts, logs, sinks),
        *(rows.table, rows.table_starts, rows.tokens, rows.lens),
        *(query.stride(0), query.stride(1), *_factors(step), window, chunk),
        *(split_tokens, num_splits),
        GROUP=group,
        ROWS=height,
        IS_SPLIT=is_split,
        HAS_SCALES=step.scales is not None,
        FLOAT8=int(step.float8),
        **_sizes(step),
        **shared,
        HAS_CAP=spec.softcap is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **_FUSED,
    )
    if is_split:
        reduce_kernel[(rows.count, spec.num_heads)](
            *(out, parts, logs, sinks, rows.tokens, rows.lens),
            *(window, chunk, split_tokens, num_splits),
            NUM_HEADS=spec.num_heads,
            SPLITS_PADDED=_MAX_SPLITS,
            STEP=_REDUCE_STEP,
            **shared,
            num_warps=2,
            **_FUSED,
        )


def prefill(query: Tensor, step: Step, rows: PrefillRows, out: Tensor, tuning: Tuning) -> None:
    """Compute the attention of all prefills of a step in one launch.

    Args:
        query: [num_heads, num_tokens, key_dim].
        step: the arguments of the attention call.
        rows: the prefills of the step.
        out: [num_tokens, num_heads, value_dim]. The rows of the prefills are written.
        tuning: the tile sizes of the kernel.

    Mutates: out.
    """
    from nereid_backend.attention.gpu.triton_prefill import prefill_kernel

    spec = step.spec
    group = spec.num_heads // spec.num_kv_heads
    heads = min(group, tuning.rows)
    tiles = rows.tiles(tuning.rows // heads, spec.span)
    num_parts = spec.num_kv_heads * -(-group // heads)
    prefill_kernel[(tiles.shape[0] * num_parts,)](
        *(query, *_cache(step), out, out if step.sinks is None else step.sinks),
        *(rows.table, rows.sequences, tiles),
        *(query.stride(0), query.stride(1), *_factors(step)),
        *(spec.span.window or 0, spec.span.chunk or 0),
        GROUP=group,
        ROWS=tuning.rows,
        HEADS=heads,
        TILE=tuning.tile,
        VALUE_DIM=spec.value_dim,
        VALUE_PADDED=_power(spec.value_dim),
        **_sizes(step),
        **_span_flags(spec.span),
        HAS_CAP=spec.softcap is not None,
        HAS_SINKS=step.sinks is not None,
        HAS_SCALES=step.scales is not None,
        FLOAT8=int(step.float8),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **_FUSED,
    )


def split(
    rows: DecodeRows, span: Span, parts_of_heads: int, tile: int, device: torch.device
) -> tuple[int, int]:
    """Return the number of tokens in a part of a sequence, and the number of parts.

    Parts are as long as possible while there are enough programs to keep the GPU busy, because each
    further part reads the query again and adds a row to the reduction.

    Args:
        rows: the decodes. Only the bounds of their lengths are used.
        span: the attention window of the layer.
        parts_of_heads: the number of programs for each part of a sequence.
        tile: the number of keys in a tile.
        device: the device of the step.
    """
    limits = [limit for limit in (span.window, span.chunk) if limit is not None]
    limit = min(limits, default=None)
    lens = [
        (count, length if limit is None else min(length, limit + tile))
        for count, length in rows.bounds
    ]
    longest = max(length for _, length in lens)
    total = sum(count * length for count, length in lens) * parts_of_heads
    programs = _PROGRAMS_PER_PROCESSOR * num_processors(device)
    min_tokens = max(-(-total // programs), -(-longest // _MAX_SPLITS), 2 * tile)
    # A power of two times the tile gives few different launches, so that steps can share graphs.
    split_tokens = tile * _power(-(-min_tokens // tile), least=1)
    return split_tokens, -(-longest // split_tokens)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return _SIMULATED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return the tile sizes that were measured on a GPU, and its generation."""
    if device.type != "cuda":
        return Device({})
    generation, _ = torch.cuda.get_device_capability(device)
    return Device(table_of(torch.cuda.get_device_name(device)), generation)


def _number_format(cache: GpuKVCache, number: int) -> tuple[tuple[Tensor, Tensor] | None, Float8]:
    """Return the scales and the number format of a layer, as `Step` contains them."""
    if not isinstance(cache, ScaledKVCache):
        return None, Float8.NONE
    is_float8 = isinstance(cache, Float8KVCache)
    float8 = float8_of(cache.device) if is_float8 else Float8.NONE
    return (cache.key_scales[number], cache.value_scales[number]), float8


@functools.cache
def float8_of(device: torch.device) -> Float8:
    """Return how the kernels convert 8-bit floating point numbers on a device."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return Float8.DEVICE
    return Float8.BITS


def _cache(step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of keys, values and their scales.

    Without scales, return keys and values twice. The kernels need pointers, but do not read them.
    """
    return step.keys, step.values, *(step.scales or (step.keys, step.values))


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, as the kernels need it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _power(size: int, least: int = 16) -> int:
    """Return the next power of two, at least `least`, the smallest size of a matrix product."""
    return max(least, 1 << (size - 1).bit_length())


def _factors(step: Step) -> tuple[float, float]:
    """Return the scale and the cap of the kernels; see `triton_common.tile_scores`."""
    softcap = step.spec.softcap
    if softcap is None:
        return step.scale * _LOG2E, 0.0
    return step.scale / softcap, softcap * _LOG2E


def _sizes(step: Step) -> dict[str, int]:
    """Return the sizes of a layer's cache, and how keys are divided in two, as kernel constants.

    Example: a key of 192 numbers is divided into 128 (MAIN) and 64 (REST).
    """
    key_dim = step.spec.key_dim
    main = 1 << (key_dim.bit_length() - 1)
    rest = key_dim - main
    if key_dim <= _MAX_PADDED_KEY:
        main = key_dim
        rest = 0
    return {
        "NUM_KV_HEADS": step.spec.num_kv_heads,
        "BLOCK_SIZE": step.values.shape[2],
        "KEY_DIM": key_dim,
        "MAIN": main,
        "DIM": _power(main),
        "REST": rest,
        "REST_PADDED": _power(rest) if rest else 0,
    }


def _span_flags(span: Span) -> dict[str, bool]:
    """Return the compile-time constants that describe an attention window."""
    return {"HAS_WINDOW": span.window is not None, "HAS_CHUNK": span.chunk is not None}
