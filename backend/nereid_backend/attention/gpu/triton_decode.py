# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernels for decodes. A decode is a sequence with one new token in a step.

The keys of a long sequence are divided into splits. Different programs compute the splits in
parallel.
"""

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
def first_visible(
    length, window, chunk, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr
):
    """Return the first position to which the last token of a sequence attends.

    Also return the position at which the tile of this position begins. Example: the sequence has
    100 tokens, the window has 40 tokens, and a tile has 16 tokens. The results are 60 and 48.
    """
    first = length * 0  # the position 0 in the data type of `length`
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    if HAS_CHUNK:
        # In chunked attention, a token attends only to the tokens of the chunk that contains the
        # token.
        chunk_start = (length - 1) // chunk * chunk
        first = tl.maximum(first, chunk_start)
    tile_start = first // TILE * TILE
    return first, tile_start


@triton.jit
def captured_split_tokens(
    longest, window, chunk, max_splits,
    TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the number of tokens in one split of a sequence, for a launch in a CUDA graph.

    A split is a part of the keys of a sequence. There are at most max_splits splits, which
    different programs compute. longest points to the length of the longest sequence of the step.
    The length must be read from memory, because a graph always repeats the scalar arguments with
    which it was captured.

    If HAS_WINDOW is true, a token attends to the last `window` tokens, including itself. If
    HAS_CHUNK is true, the sequence is divided into chunks of `chunk` tokens, and a token attends
    only to its own chunk.

    Example: the length is 1000, a tile has 64 tokens, and there are at most 4 splits. Each split
    has 256 tokens.
    """
    length = tl.load(longest).to(tl.int32)
    # If the sequence is longer than the attention window or the chunk, only the last keys are read.
    # The first split begins at the start of a tile, so up to TILE additional keys are read.
    if HAS_WINDOW:
        length = tl.minimum(length, window + TILE)
    if HAS_CHUNK:
        length = tl.minimum(length, chunk + TILE)
    num_tiles = (length + TILE - 1) // TILE
    # A split has at least two tiles. With smaller splits, the overhead would be too large: the
    # program for each split also reads the query, and writes a result that must be combined with
    # the results of other splits.
    return tl.maximum((num_tiles + max_splits - 1) // max_splits, 2) * TILE


# The values of these arguments differ between layers and steps. By default, Triton compiles
# separate kernels for the value 1, for multiples of 16, and for all other values. do_not_specialize
# prevents these additional compilations.
@triton.jit(do_not_specialize=["window", "chunk", "split_tokens", "max_splits"])
def decode_kernel(  # noqa: PLR0915 - each input and output needs a statement
    query, keys, values, key_scales, value_scales, out, parts, weights_log, sinks,
    table, table_starts, tokens, lens, longest,
    query_head_stride, query_token_stride,
    scale, cap, window, chunk, split_tokens, max_splits,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr, MAIN_PADDED: tl.constexpr,
    REST: tl.constexpr, REST_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, FLOAT8: tl.constexpr,
    IS_SPLIT: tl.constexpr, READS_LONGEST: tl.constexpr,
):  # fmt: skip
    """Compute the attention of some query heads over one split of a sequence's keys.

    A program computes up to ROWS query heads, which share one key head. The grid is
    (num_sequences, NUM_KV_HEADS * cdiv(GROUP, ROWS), num_splits).

    The first split of a sequence begins with the first tile to which the token attends, so the keys
    before the window are not read. If READS_LONGEST is true, `captured_split_tokens` computes the
    number of tokens in each split. Otherwise, the number is split_tokens. If a split begins after
    the end of the sequence, its program returns immediately.

    If IS_SPLIT is false, the kernel writes the attention to out [num_tokens, num_heads, VALUE_DIM].
    If IS_SPLIT is true, the kernel writes two float32 tensors. parts [num_sequences, num_heads,
    max_splits, VALUE_DIM] contains the attention of each split. weights_log [num_sequences,
    num_heads, max_splits] contains the base-2 logarithm of the sum of the exponentials of each
    split's scores. reduce_kernel combines the splits and adds the sinks.
    """
    sequence = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lens + sequence).to(tl.int32)
    first, base = first_visible(length, window, chunk, TILE, HAS_WINDOW, HAS_CHUNK)
    if READS_LONGEST:
        split_tokens = captured_split_tokens(
            longest, window, chunk, max_splits, TILE, HAS_WINDOW, HAS_CHUNK
        )
    start = base + split * split_tokens
    if start >= length:
        return
    end = tl.minimum(start + split_tokens, length)
    num_groups: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(1) // num_groups
    members = tl.program_id(1) % num_groups * ROWS + tl.arange(0, ROWS)
    is_member = members < GROUP
    heads = kv_head * GROUP + members
    token = tl.load(tokens + sequence).to(tl.int64)
    rows = query + token * query_token_stride
    query_cells = heads.to(tl.int64) * query_head_stride
    query_tile = load_rows(rows, query_cells, is_member, 0, MAIN, MAIN_PADDED, 1, True)
    if not HAS_SCALES:
        query_tile = query_tile.to(keys.dtype.element_ty)
    query_rest = query_tile
    if REST > 0:
        query_rest = load_rows(rows, query_cells, is_member, MAIN, REST, REST_PADDED, 1, True)
        query_rest = query_rest.to(query_tile.dtype)
    blocks = table + tl.load(table_starts + sequence)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    key_positions = start + tl.arange(0, TILE)
    is_visible = (key_positions >= first) & (key_positions < end)
    numbers = block_numbers(blocks, key_positions, is_visible, BLOCK_SIZE)
    for position in tl.range(start, end, TILE):
        key_positions = position + tl.arange(0, TILE)
        is_visible = (key_positions >= first) & (key_positions < end)
        key_rows = cache_rows(numbers, key_positions, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        next_positions = key_positions + TILE
        numbers = block_numbers(blocks, next_positions, next_positions < end, BLOCK_SIZE)
        scores = tile_scores(
            query_tile, query_rest, keys, key_scales, key_rows, is_visible, scale, cap,
            KEY_DIM, MAIN, MAIN_PADDED, REST, REST_PADDED, True, HAS_CAP, HAS_SCALES, FLOAT8,
        )  # fmt: skip
        scores = tl.where(is_visible[None, :], scores, float("-inf"))
        value = load_rows(values, key_rows, is_visible, 0, VALUE_DIM, VALUE_PADDED, VALUE_DIM, True)
        top, total, acc = add_tile(
            top, total, acc, scores, value, value_scales, key_rows, is_visible,
            True, HAS_SCALES, FLOAT8, query_tile.dtype,
        )  # fmt: skip
    columns = tl.arange(0, VALUE_PADDED)
    mask = is_member[:, None] & (columns < VALUE_DIM)[None, :]
    num_heads: tl.constexpr = GROUP * NUM_KV_HEADS
    if IS_SPLIT:
        part_numbers = (sequence * num_heads + heads) * max_splits + split
        tl.store(weights_log + part_numbers, top + tl.log2(total), mask=is_member)
        offsets = part_numbers[:, None] * VALUE_DIM + columns[None, :]
        tl.store(parts + offsets, acc / total[:, None], mask=mask)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_member, other=0.0).to(tl.float32)
            total += tl.exp2(sink * LOG2E - top)
        offsets = (token * num_heads + heads)[:, None] * VALUE_DIM + columns[None, :]
        tl.store(out + offsets, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["window", "chunk", "split_tokens", "max_splits"])
def reduce_kernel(
    out, parts, weights_log, sinks, tokens, lens, longest,
    window, chunk, split_tokens, max_splits,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
    READS_LONGEST: tl.constexpr,
):  # fmt: skip
    """Combine the results of the splits of one sequence. Write the attention of one head to `out`.

    A split is a part of the sequence's keys. For each split, `decode_kernel` has written the
    attention to the keys of the split (parts) and the logarithm of the split's total weight
    (weights_log). The result is the weighted mean of the parts.

    The grid is (num_sequences, NUM_HEADS). The first pass over weights_log computes the largest
    logarithm and the total weight. The second pass adds the weighted parts of STEP splits at a
    time.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lens + sequence).to(tl.int32)
    _, base = first_visible(length, window, chunk, TILE, HAS_WINDOW, HAS_CHUNK)
    if READS_LONGEST:
        split_tokens = captured_split_tokens(
            longest, window, chunk, max_splits, TILE, HAS_WINDOW, HAS_CHUNK
        )
    num_splits = (length - base + split_tokens - 1) // split_tokens
    first_part = (sequence * NUM_HEADS + head) * max_splits
    splits = tl.arange(0, SPLITS_PADDED)
    logs = tl.load(weights_log + first_part + splits, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(logs, 0)
    total = tl.sum(tl.exp2(logs - top), 0)
    columns = tl.arange(0, VALUE_PADDED)
    is_column = columns < VALUE_DIM
    acc = tl.zeros([VALUE_PADDED], tl.float32)
    for begin in tl.range(0, num_splits, STEP):
        step_splits = begin + tl.arange(0, STEP)
        is_split = step_splits < num_splits
        step_parts = first_part + step_splits
        step_logs = tl.load(weights_log + step_parts, mask=is_split, other=float("-inf"))
        step_weights = tl.exp2(step_logs - top)
        pointers = parts + step_parts[:, None] * VALUE_DIM + columns[None, :]
        tile = tl.load(pointers, mask=is_split[:, None] & is_column[None, :], other=0.0)
        acc += tl.sum(tile * step_weights[:, None], 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        total += tl.exp2(sink * LOG2E - top)
    token = tl.load(tokens + sequence).to(tl.int64)
    offsets = (token * NUM_HEADS + head) * VALUE_DIM + columns
    tl.store(out + offsets, (acc / total).to(out.dtype.element_ty), mask=is_column)
