# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What the attention kernels in the Triton language share: a tile of scores, and its softmax.

Scores are kept in base 2 (times log2 e), because the hardware's exponential is one of 2.
"""

import triton
import triton.language as tl


@triton.jit
def key_cells(
    table, places, is_real, head,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Where tokens of a sequence lie in one head of the cache, as rows of it seen as [..., dim].

    table points at the sequence's block numbers; places [n] are positions in the sequence, of which
    those that are not is_real are not looked up where IS_MASKED.
    """
    if IS_MASKED:
        block = tl.load(table + places // BLOCK_SIZE, mask=is_real, other=0).to(tl.int64)
    else:
        block = tl.load(table + places // BLOCK_SIZE).to(tl.int64)
    return (block * NUM_KV_HEADS + head) * BLOCK_SIZE + places % BLOCK_SIZE


@triton.jit
def load_rows(
    base, rows, is_real, START: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    STRIDE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Columns START to START + WIDTH of some rows, [n, PADDED]: zero behind WIDTH.

    Rows that are not is_real are zero where IS_MASKED says that there may be such.
    """
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None] * STRIDE + (START + columns)[None, :]
    if IS_MASKED:
        if WIDTH == PADDED:
            tile = tl.load(pointers, mask=is_real[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=is_real[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif WIDTH == PADDED:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def load_scales(scales, cells, is_real, IS_MASKED: tl.constexpr, FLOAT8: tl.constexpr):
    """The factors of some rows of a cache of 8 bits, [n] float32, for what `numbers` makes."""
    if IS_MASKED:
        found = tl.load(scales + cells, mask=is_real, other=0.0)
    else:
        found = tl.load(scales + cells)
    if FLOAT8 == 2:
        found *= 256.0
    return found


@triton.jit
def numbers(tile, dtype: tl.constexpr, FLOAT8: tl.constexpr):
    """A tile of a cache as numbers of another type. FLOAT8 is a `gpu.Float8`.

    Bits of an e4m3 number moved to where float16 has its exponent and mantissa are a 256th of it,
    below its normal numbers, too; the factors make up for that. The patterns that are not a number
    are never written.
    """
    if FLOAT8 == 0:
        found = tile.to(dtype)
    elif FLOAT8 == 1:
        found = tile.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        wide = tile.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        found = bits.to(tl.float16, bitcast=True).to(dtype)
    return found


@triton.jit
def tile_scores(
    query, query_rest, keys, key_scales, cells, is_real, scale, cap,
    KEY_DIM: tl.constexpr, MAIN: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
    REST_PADDED: tl.constexpr, IS_MASKED: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, [rows, n] float32 in base 2.

    A head whose size is no power of two is cut in two parts (192 is 128 and 64), so that products
    are not padded to the next power: MAIN columns padded to DIM, then REST of them, or none. With a
    cap, scale is the scores' scale over the softcap, and cap is the softcap in base 2. Keys of
    8 bits come with a factor each, by which the scores are multiplied.
    """
    key = load_rows(keys, cells, is_real, 0, MAIN, DIM, KEY_DIM, IS_MASKED)
    scores = tl.dot(query, tl.trans(numbers(key, query.dtype, FLOAT8)), input_precision="ieee")
    if REST > 0:
        rest = load_rows(keys, cells, is_real, DIM, REST, REST_PADDED, KEY_DIM, IS_MASKED)
        rest = numbers(rest, query.dtype, FLOAT8)
        scores = tl.dot(query_rest, tl.trans(rest), scores, input_precision="ieee")
    if HAS_SCALES:
        scores *= load_scales(key_scales, cells, is_real, IS_MASKED, FLOAT8)[None, :]
    scores *= scale
    if HAS_CAP:
        # tanh, by an exponential that overflows to the right answer.
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores)))
    return scores


@triton.jit
def add_tile(
    top, total, acc, scores, value, value_scales, cells, is_real,
    IS_MASKED: tl.constexpr, HAS_SCALES: tl.constexpr, FLOAT8: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Take a tile into a running softmax.

    top [rows] is the greatest score so far, total [rows] the sum of powers above it and acc
    [rows, dim] the weighted values. A row that has seen nothing yet has top -inf, total 0. Values
    of 8 bits come with a factor each, by which the weights are multiplied. Products are of
    numbers of dtype.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    if HAS_SCALES:
        weights *= load_scales(value_scales, cells, is_real, IS_MASKED, FLOAT8)[None, :]
    value = numbers(value, dtype, FLOAT8)
    acc = tl.dot(weights.to(dtype), value, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc
