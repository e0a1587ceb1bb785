# SPDX-License-Identifier: Apache-2.0
"""Launches the kernels that are written in the Triton language.

Each function imports its kernel when it is called, because importing the kernels requires the
package triton. This package is installed only together with torch for GPUs.
"""

from typing import Any

from torch import Tensor

from nereid_backend.attention.gpu import decode_splits
from nereid_backend.attention.gpu.gpu_batch import DecodeRows, PrefillRows, Tiling
from nereid_backend.attention.gpu.gpu_call import AttentionCall, Float8, divide_up, padded_size
from nereid_backend.attention.gpu.tuning import Tuning
from nereid_backend.attention.layers import LayerSpec

# If this option is set, the kernels use fused multiply-add instructions, which round only the sum
# and not the product. Triton logs a warning if the option is not set.
_FUSED_MULTIPLY_ADD: dict[str, Any] = {"enable_fp_fusion": True}
# The number of elements that each program of the kernel `store` copies.
_STORE_ELEMENTS = 4096
# The largest number of query heads that one program of the decode kernel computes.
_MAX_DECODE_ROWS = 64
# The number of splits that the reduction kernel combines in one iteration.
_REDUCE_STEP = 16
# If the argument `split_tokens` has this value, the kernels compute the number themselves.
_KERNEL_COMPUTES_SPLIT_TOKENS = 0


def store(key: Tensor, value: Tensor, call: AttentionCall, slots: Tensor) -> None:
    """Write the keys and values of a step into the cache of one layer.

    Args:
        key: [num_kv_heads, num_tokens, key_dim]. The last dimension must be contiguous.
        value: [num_kv_heads, num_tokens, value_dim]. The last dimension must be contiguous.
        call: the attention call. Only its cache is used.
        slots: [num_tokens] int64, the place of each token in the cache. A token with a negative
            slot is not written.

    Mutates: the cache.
    """
    # The package triton is installed only for GPUs. The kernel is imported here, so that this
    # module can be imported without triton.
    from nereid_backend.attention.gpu.triton_store import store_kernel

    num_kv_heads, num_tokens, key_dim = key.shape
    if num_tokens == 0:
        return
    value_dim = value.shape[2]
    # Each program of the kernel stores several heads of one token, but at most `_STORE_ELEMENTS`
    # numbers.
    elements_per_head = padded_size(max(key_dim, value_dim))
    max_heads = max(1, _STORE_ELEMENTS // elements_per_head)
    heads_per_program = min(padded_size(num_kv_heads), max_heads)
    programs_per_token = divide_up(num_kv_heads, heads_per_program)
    head_and_token_strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
    store_kernel[(num_tokens, programs_per_token)](
        key,
        value,
        *call.cache_tensors,  # keys, values, and the scales of 8-bit keys and 8-bit values
        slots,
        *head_and_token_strides,
        NUM_KV_HEADS=num_kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=call.values.shape[2],
        HEADS_PER_PROGRAM=heads_per_program,
        KEY_PADDED=padded_size(key_dim),
        VALUE_PADDED=padded_size(value_dim),
        HAS_SCALES=call.scales is not None,
        IS_FLOAT8=call.float8 is not Float8.NONE,
        num_warps=4,  # 128 threads for each program
        **_FUSED_MULTIPLY_ADD,  # lets the compiler use fused multiply-add instructions
    )


def decode(
    query: Tensor, call: AttentionCall, rows: DecodeRows, out: Tensor, tuning: Tuning
) -> None:
    """Compute the attention of the step's decodes.

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
    # One program computes up to `num_rows` query heads that share a key head, so that the keys are
    # read only once for these heads.
    num_rows = max(tuning.rows, min(_MAX_DECODE_ROWS, padded_size(call.group_size)))
    num_programs = spec.num_kv_heads * divide_up(call.group_size, num_rows)
    split_tokens, num_splits = _split_arguments(rows, spec, num_programs, tuning.tile)
    is_split = num_splits > 1
    # Triton needs a valid pointer even for an argument that the kernel does not read. Therefore,
    # the tensor `out` is passed in place of each unused argument. `parts` and `weights_log` are not
    # used if sequences are not divided. `sinks` is not used if the layer has no sinks.
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
        **_FUSED_MULTIPLY_ADD,
    )
    if is_split:
        reduce_kernel[(rows.count, spec.num_heads)](
            *(out, parts, weights_log, sinks, rows.tokens, rows.lens, longest),
            *split_arguments,
            NUM_HEADS=spec.num_heads,
            SPLITS_PADDED=decode_splits.MAX_SPLITS,
            STEP=_REDUCE_STEP,
            **shared,
            num_warps=2,
            **_FUSED_MULTIPLY_ADD,
        )


def _split_arguments(
    rows: DecodeRows, spec: LayerSpec, programs_per_split: int, tile: int
) -> tuple[int, int]:
    """Return the kernel arguments `split_tokens` and `num_splits` for the decodes of a step.

    A split is a part of a sequence's keys, which one program computes. `split_tokens` is the number
    of tokens in a split, and `num_splits` is the number of splits of the longest sequence.

    A CUDA graph is replayed in steps with sequences of other lengths, but with the same arguments.
    If the launch is captured into a graph, `split_tokens` is therefore
    `_KERNEL_COMPUTES_SPLIT_TOKENS` (0). In each step, the kernels then compute the number of tokens
    in a split from `num_splits` and from the length of the longest sequence.

    Args:
        rows: the decodes (sequences with one new token).
        spec: the properties of the layer.
        programs_per_split: the number of programs for one split of one sequence. Each of these
            programs computes different heads.
        tile: the number of keys that a program processes at once.
    """
    window, device = spec.window, rows.lens.device
    # The tensor `longest`, from which the kernels read the length of the longest sequence, exists
    # only for launches in a CUDA graph.
    is_captured = rows.longest is not None
    if is_captured:
        num_splits = decode_splits.captured_splits(rows, window, programs_per_split, tile, device)
        return _KERNEL_COMPUTES_SPLIT_TOKENS, num_splits
    return decode_splits.split_size_and_count(rows, window, programs_per_split, tile, device)


def prefill(
    query: Tensor, call: AttentionCall, rows: PrefillRows, out: Tensor, tuning: Tuning
) -> None:
    """Compute the attention of all prefills of a step with one kernel launch.

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
    tiles = rows.tiles(prefill_tiling(spec, tuning))
    # A program computes several query heads that share a key head, so that the keys are read only
    # once.
    heads_per_program = min(call.group_size, tuning.rows)
    programs_per_tile = spec.num_kv_heads * divide_up(call.group_size, heads_per_program)
    # Triton needs a valid pointer for the sinks even if the kernel does not read them.
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
        HEADS=heads_per_program,
        TILE=tuning.tile,
        HAS_CAP=spec.softcap is not None,
        HAS_SINKS=call.sinks is not None,
        **call.cache_constants(),
        **call.value_constants(),
        **call.window_constants(),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **_FUSED_MULTIPLY_ADD,
    )


def prefill_tiling(spec: LayerSpec, tuning: Tuning) -> Tiling:
    """Return the tiling by which a layer divides the prefills of a step into tiles.

    A row of a tile belongs to one token and one head. Example: a tile has 128 rows, and 4 query
    heads share a key head. Then a tile has 32 tokens.
    """
    group_size = spec.num_heads // spec.num_kv_heads
    heads_per_tile = min(group_size, tuning.rows)
    return Tiling(num_queries=tuning.rows // heads_per_tile, window=spec.window)
