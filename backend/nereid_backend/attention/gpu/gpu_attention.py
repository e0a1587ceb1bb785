# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a GPU with kernels in the Triton language, which read blocks where they are.

A layer is at most four launches: the cache write, the decodes, their parts' reduction, and the
prefills. Nothing here waits for the device: grids come from bounds that the host knows, and what
the kernels must know of a step is laid out once, for all layers, in `GpuBatch`.

The kernels are imported when the first step runs, because they need the `triton` package, which
torch brings along on machines with a GPU.
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
# Parts of one sequence; more make the reduction slower than they make decoding faster.
_MAX_SPLITS = 128
# Programs of a decode launch for each multiprocessor, where there is so much to do: enough for the
# last ones to end together.
_PROGRAMS_PER_PROCESSOR = 4
# Tests on a machine without a GPU stand for a small one.
_FEW_PROCESSORS = 4
# A product and a sum in one rounding, as the hardware has it; to leave it open is a warning.
_FUSED: dict[str, Any] = {"enable_fp_fusion": True}
# Elements of one program of the cache write.
_STORE_ELEMENTS = 4096


class GpuKVCache(KVCache):
    """A KV cache that the kernels serve; laid out like any other.

    A head's part of a block is contiguous, so that a tile of keys is a few long reads.
    """


class GpuInt8KVCache(Int8KVCache, GpuKVCache):
    """The same as 8-bit integers, each vector with its factor; see `Int8KVCache`."""


class GpuFloat8KVCache(Float8KVCache, GpuKVCache):
    """The same as 8-bit floating point, each vector with its factor; see `Float8KVCache`."""


class Float8(enum.IntEnum):
    """How kernels make other numbers of 8-bit floating point; a constant of theirs."""

    NONE = 0
    """It is none: numbers as they are, or integers."""
    DEVICE = 1
    """By the device's own instructions, from compute capability 8.9 on."""
    BITS = 2
    """By moving bits."""


@dataclass(frozen=True, slots=True)
class Step:
    """One attention call.

    Attributes:
        spec: what the layer needs.
        keys: the layer's cache, [num_blocks + 1, num_kv_heads, block_size, key_dim].
        values: likewise.
        scale: factor on the scores.
        sinks: [num_heads], or None.
        scales: of keys and values of 8 bits, each [num_blocks + 1, num_kv_heads, block_size]
            float32; None: they are numbers as they are.
        float8: what to do about keys and values that are e4m3, kept as bytes.
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
    """Store one packed step's keys and values in one layer, then attend.

    Args:
        inputs: query [num_heads, num_tokens, key_dim], key [num_kv_heads, num_tokens, key_dim] and
            value [num_kv_heads, num_tokens, value_dim], the last dimension contiguous or not.
        layer: its number in the cache, and what it needs.
        cache: gets the keys and values. Mutated.
        batch: where everything is.
        scale: factor on the scores.
        sinks: [num_heads], or None.

    Returns:
        [num_tokens, num_heads, value_dim] in the query's dtype.
    """
    query, key, value = (_rows(tensor) for tensor in inputs)
    number, spec = layer
    step = Step(spec, cache.keys[number], cache.values[number], scale, sinks, *_kept(cache, number))
    out = query.new_empty(query.shape[1], spec.num_heads, spec.value_dim)
    # Kernels go to the current device, which need not be the cache's.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        _launch(query, key, value, step, batch, out)
    return out


def _launch(
    query: Tensor, key: Tensor, value: Tensor, step: Step, batch: AttentionBatch, out: Tensor
) -> None:
    store(key, value, step, batch.slots)
    rows, device = gpu_batch(batch), device_of(query.device)
    dim = max(step.spec.key_dim, step.spec.value_dim)
    if rows.decodes is not None:
        tuning = device.tuning("decode", dim, step.keys.itemsize)
        decode(query, step, rows.decodes, out, tuning)
    if rows.prefills is not None:
        tuning = device.tuning("prefill", dim, step.keys.itemsize)
        prefill(query, step, rows.prefills, out, tuning)


def gpu_batch(batch: AttentionBatch) -> GpuBatch:
    """What the kernels must know of a step; made for its first layer, and kept."""
    found = batch.device_rows
    if not isinstance(found, GpuBatch):
        found = batch.device_rows = GpuBatch.of(batch)
    return found


def store(key: Tensor, value: Tensor, step: Step, slots: Tensor) -> None:
    """Write a step's keys and values into one layer's cache.

    Shapes: key [num_kv_heads, num_tokens, key_dim] and value likewise, last dimension contiguous;
    slots [num_tokens] int64, negative ones are skipped.
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
    """Attention of the tokens that are alone in their sequence's step.

    Shapes: query [num_heads, num_tokens, key_dim], out [num_tokens, num_heads, value_dim].
    Mutates: out, in the decodes' rows.
    """
    from nereid_backend.attention.gpu.triton_decode import decode_kernel, reduce_kernel

    spec = step.spec
    group = spec.num_heads // spec.num_kv_heads
    # Heads of a large group go side by side in one program: their keys are then read once.
    height = max(tuning.rows, min(64, _power(group)))
    parts_of_heads = spec.num_kv_heads * -(-group // height)
    split_tokens, num_splits = split(rows, spec.span, parts_of_heads, tuning.tile, query.device)
    is_split = num_splits > 1
    parts, logs = out, out
    if is_split:
        shape = (rows.count, spec.num_heads, num_splits)
        parts, logs = rows.workspace((*shape, spec.value_dim)), rows.workspace(shape)
    window, chunk = spec.span.window or 0, spec.span.chunk or 0
    # A pointer must be there where there are no sinks, too; nothing is read through it.
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
            STEP=16,
            **shared,
            num_warps=2,
            **_FUSED,
        )


def prefill(query: Tensor, step: Step, rows: PrefillRows, out: Tensor, tuning: Tuning) -> None:
    """Attention of the sequences that get several tokens, all in one launch.

    Shapes: query [num_heads, num_tokens, key_dim], out [num_tokens, num_heads, value_dim].
    Mutates: out, in the prefills' rows.
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
    """How sequences are cut, by bounds on their lengths: (tokens of a part, most parts).

    Parts are as long as they can be while there are programs enough to keep the device busy: each
    part more is another read of the query and another row for the reduction.
    """
    limit = min((n for n in (span.window, span.chunk) if n is not None), default=None)
    lens = [(count, n if limit is None else min(n, limit + tile)) for count, n in rows.bounds]
    longest = max(n for _, n in lens)
    total = sum(count * n for count, n in lens) * parts_of_heads
    programs = _PROGRAMS_PER_PROCESSOR * num_processors(device)
    wanted = max(-(-total // programs), -(-longest // _MAX_SPLITS), 2 * tile)
    # A power of two times the tile: few different launches, so that graphs can be shared.
    split_tokens = tile * _power(-(-wanted // tile), least=1)
    return split_tokens, -(-longest // split_tokens)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return _FEW_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def device_of(device: torch.device) -> Device:
    """What kernels are cut for on a GPU."""
    if device.type != "cuda":
        return Device({})
    generation, _ = torch.cuda.get_device_capability(device)
    return Device(table_of(torch.cuda.get_device_name(device)), generation)


def _kept(cache: GpuKVCache, number: int) -> tuple[tuple[Tensor, Tensor] | None, Float8]:
    """A layer's scales, if it has any, and how its numbers are kept; as `Step` has them."""
    if not isinstance(cache, ScaledKVCache):
        return None, Float8.NONE
    is_float8 = isinstance(cache, Float8KVCache)
    float8 = float8_of(cache.device) if is_float8 else Float8.NONE
    return (cache.key_scales[number], cache.value_scales[number]), float8


@functools.cache
def float8_of(device: torch.device) -> Float8:
    """How kernels there make other numbers of 8-bit floating point."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return Float8.DEVICE
    return Float8.BITS


def _cache(step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and their scales; where there are none, pointers that nothing goes through."""
    return step.keys, step.values, *(step.scales or (step.keys, step.values))


def _rows(tensor: Tensor) -> Tensor:
    """The same values with the last dimension contiguous, as the kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _power(size: int, least: int = 16) -> int:
    """The next power of two, at least what matrix products take."""
    return max(least, 1 << (size - 1).bit_length())


def _factors(step: Step) -> tuple[float, float]:
    """The kernels' scale and cap; see `triton_common.tile_scores`."""
    softcap = step.spec.softcap
    if softcap is None:
        return step.scale * _LOG2E, 0.0
    return step.scale / softcap, softcap * _LOG2E


def _sizes(step: Step) -> dict[str, int]:
    """The sizes of a layer's cache, and how a key is cut in two; constants of the kernels."""
    key_dim = step.spec.key_dim
    main = 1 << (key_dim.bit_length() - 1)
    # Below two products' smallest size, padding one costs no more than a second one.
    if main == key_dim or key_dim <= 32:
        main, rest = key_dim, 0
    else:
        rest = key_dim - main
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
    return {"HAS_WINDOW": span.window is not None, "HAS_CHUNK": span.chunk is not None}
