# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel for prefills. A prefill is a sequence with several new tokens in a step."""

import triton
import triton.language as tl

from nereid_backend.attention.gpu.triton_common import (
    LOG2E,
    add_tile,
    block_numbers,
    cache_rows,
    load_rows,
    tile_scores,
)


@triton.jit
def add_keys(
    begin, end, top, total, acc, query_tile, query_rest, positions,
    keys, values, key_scales, value_scales, blocks, kv_head, first, length,
    scale, cap, window, chunk,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr, MAIN_PADDED: tl.constexpr,
    REST: tl.constexpr, REST_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr, FLOAT8: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys in [begin, end) to the running softmax of some queries. Return the new softmax.

    The arguments are:
        begin, end: positions in the sequence. begin is a multiple of TILE.
        top, total, acc: the running softmax; see `triton_common.add_tile`.
        query_tile, query_rest: the queries of the rows; see `triton_common.tile_scores`.
        positions: [rows], the position of each row's token in the sequence.
        keys, values, key_scales, value_scales: the cache of the layer.
        blocks: the block numbers of the sequence.
        kv_head: the key head of the rows.
        first, length: positions in the sequence. Keys outside [first, length) are not read, because
            no row attends to them.
        scale, cap: see `triton_common.tile_scores`.
        window, chunk: the limits of the attention window, in tokens.

    If IS_MASKED is false, every row must attend to all keys in [begin, end), and no mask is
    computed.
    """
    key_positions = begin + tl.arange(0, TILE)
    is_read = (key_positions >= first) & (key_positions < end)
    numbers = block_numbers(blocks, key_positions, is_read, BLOCK_SIZE)
    for position in tl.range(begin, end, TILE):
        key_positions = position + tl.arange(0, TILE)
        is_read = (key_positions >= first) & (key_positions < length)
        key_rows = cache_rows(numbers, key_positions, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        next_positions = key_positions + TILE
        numbers = block_numbers(blocks, next_positions, next_positions < end, BLOCK_SIZE)
        scores = tile_scores(
            query_tile, query_rest, keys, key_scales, key_rows, is_read, scale, cap,
            KEY_DIM, MAIN, MAIN_PADDED, REST, REST_PADDED, IS_MASKED, HAS_CAP, HAS_SCALES, FLOAT8,
        )  # fmt: skip
        if IS_MASKED:
            is_visible = key_positions[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_visible &= key_positions[None, :] > positions[:, None] - window
            if HAS_CHUNK:
                is_visible &= key_positions[None, :] >= (positions // chunk * chunk)[:, None]
            scores = tl.where(is_visible, scores, float("-inf"))
        value = load_rows(
            values, key_rows, is_read, 0, VALUE_DIM, VALUE_PADDED, VALUE_DIM, IS_MASKED
        )
        top, total, acc = add_tile(
            top, total, acc, scores, value, value_scales, key_rows, is_read,
            IS_MASKED, HAS_SCALES, FLOAT8, query_tile.dtype,
        )  # fmt: skip
    return top, total, acc


@triton.jit(do_not_specialize=["window", "chunk"])
def prefill_kernel(  # noqa: PLR0915 - each input and output needs a statement
    query, keys, values, key_scales, value_scales, out, sinks,
    table, sequences, tiles,
    query_head_stride, query_token_stride,
    scale, cap, window, chunk,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr, MAIN_PADDED: tl.constexpr,
    REST: tl.constexpr, REST_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one tile of new tokens for some query heads.

    A tile has ROWS // HEADS tokens. A program computes up to HEADS query heads of one tile. These
    heads share one key head, so the keys are read only once. Row `token * HEADS + head` belongs to
    one token and one head.

    The grid is (num_tiles * NUM_KV_HEADS * cdiv(GROUP, HEADS),). The programs of one tile are
    consecutive.

    sequences is [num_sequences, 4] int64. Its columns contain the index of the first new token in
    the packed row, the number of new tokens, the number of cached tokens, and the index of the
    first block in `table`. tiles is [num_tiles, 2] int64; see `gpu_batch.tile_rows`. out is
    [num_tokens, num_heads, VALUE_DIM].
    """
    num_groups: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    num_parts: tl.constexpr = NUM_KV_HEADS * num_groups
    num_queries: tl.constexpr = ROWS // HEADS
    tile = tl.program_id(0) // num_parts
    part = tl.program_id(0) % num_parts
    sequence = tl.load(tiles + tile * 2)
    begin = tl.load(tiles + tile * 2 + 1).to(tl.int32)
    first_token = tl.load(sequences + sequence * 4)
    num_new = tl.load(sequences + sequence * 4 + 1).to(tl.int32)
    num_cached = tl.load(sequences + sequence * 4 + 2).to(tl.int32)
    blocks = table + tl.load(sequences + sequence * 4 + 3)

    kv_head = part // num_groups
    rows = tl.arange(0, ROWS)
    members = part % num_groups * HEADS + rows % HEADS
    numbers = begin + rows // HEADS
    is_row = (rows < num_queries * HEADS) & (members < GROUP) & (numbers < num_new)
    heads = kv_head * GROUP + members
    tokens = first_token + numbers
    positions = num_cached + numbers
    query_cells = tokens * query_token_stride + heads.to(tl.int64) * query_head_stride
    query_tile = load_rows(query, query_cells, is_row, 0, MAIN, MAIN_PADDED, 1, True)
    if not HAS_SCALES:
        query_tile = query_tile.to(keys.dtype.element_ty)
    query_rest = query_tile
    if REST > 0:
        query_rest = load_rows(query, query_cells, is_row, MAIN, REST, REST_PADDED, 1, True)
        query_rest = query_rest.to(query_tile.dtype)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    # No query attends to a key outside [first, length). Every query attends to all keys in [low,
    # middle), so these keys need no mask. The keys in [middle, length) need a mask.
    oldest = num_cached + begin
    length = num_cached + tl.minimum(begin + num_queries, num_new)
    first = oldest * 0
    if HAS_WINDOW:
        first = tl.maximum(oldest - window + 1, 0)
    if HAS_CHUNK:
        first = tl.maximum(first, oldest // chunk * chunk)
    low = first // TILE * TILE
    middle = low
    if not (HAS_WINDOW or HAS_CHUNK):
        middle = (oldest + 1) // TILE * TILE
        top, total, acc = add_keys(
            low, middle, top, total, acc, query_tile, query_rest, positions,
            keys, values, key_scales, value_scales, blocks, kv_head, first, length,
            scale, cap, window, chunk,
            NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, MAIN, MAIN_PADDED, REST, REST_PADDED,
            VALUE_PADDED, TILE, HAS_WINDOW, HAS_CHUNK, HAS_CAP, HAS_SCALES, FLOAT8, False,
        )  # fmt: skip
    top, total, acc = add_keys(
        middle, length, top, total, acc, query_tile, query_rest, positions,
        keys, values, key_scales, value_scales, blocks, kv_head, first, length,
        scale, cap, window, chunk,
        NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, MAIN, MAIN_PADDED, REST, REST_PADDED,
        VALUE_PADDED, TILE, HAS_WINDOW, HAS_CHUNK, HAS_CAP, HAS_SCALES, FLOAT8, True,
    )  # fmt: skip

    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
        total += tl.exp2(sink * LOG2E - top)
    # A row that belongs to no token may have a total of 0. This total is replaced by 1, to avoid a
    # division by 0.
    total = tl.where(is_row, total, 1.0)
    columns = tl.arange(0, VALUE_PADDED)
    num_heads: tl.constexpr = GROUP * NUM_KV_HEADS
    offsets = (tokens * num_heads + heads)[:, None] * VALUE_DIM + columns[None, :]
    mask = is_row[:, None] & (columns < VALUE_DIM)[None, :]
    tl.store(out + offsets, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
