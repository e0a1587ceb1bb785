# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Functions that several attention kernels call: cache reads, scores and the running softmax.

Scores are multiplied by log2(e), so that 2^score replaces e^score: the hardware has an instruction
for powers of 2, but none for powers of e.
"""

import triton
import triton.language as tl

# log2(e), the factor by which the scores are multiplied.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_numbers(table, places, is_read, BLOCK_SIZE: tl.constexpr):
    """Return the numbers of the blocks that contain some positions of a sequence.

    The kernels read the block numbers of a tile one iteration before they read its keys and values.
    If one iteration read the block numbers, the keys and the values, the copies of the next tile
    could not start before the products of this tile have ended: the addresses for the copies depend
    on block numbers that have not been read yet.

    table points at the sequence's block numbers. places [n] are positions in the sequence. If
    is_read is false for a position, nothing is read, and the block number of the position is 0.
    """
    return tl.load(table + places // BLOCK_SIZE, mask=is_read, other=0).to(tl.int32)


@triton.jit
def key_cells(blocks, places, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the cache rows that belong to some tokens of a sequence and to one key head.

    The cache is viewed as a matrix of rows, [..., dim].

    blocks [n] are the block numbers of the positions places [n].
    """
    return (blocks.to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_SIZE + places % BLOCK_SIZE


@triton.jit
def load_rows(
    base, rows, is_real, START: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    STRIDE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Load the columns from START to START + WIDTH of some rows of a matrix.

    The result is padded with zeros to [n, PADDED].

    With IS_MASKED, rows for which is_real is false are not read. In the result, these rows contain
    zeros.
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
    """Load the factors of some rows of an 8-bit cache, [n] float32.

    A factor times the number that `converted` returns is the restored number.
    """
    if IS_MASKED:
        factors = tl.load(scales + cells, mask=is_real, other=0.0)
    else:
        factors = tl.load(scales + cells)
    if FLOAT8 == 2:
        factors *= 256.0
    return factors


@triton.jit
def converted(tile, dtype: tl.constexpr, FLOAT8: tl.constexpr):
    """Convert a tile of an 8-bit or unrounded cache to the data type of the products.

    FLOAT8 is a value of `gpu_call.Float8`.

    With FLOAT8 == 2, the bits of an e4m3 number are shifted to the places of the exponent and the
    mantissa in float16. The result is 1/256 of the number, because the biases of the exponents (7
    and 15) differ by 8. `load_scales` multiplies the factors by 256 to correct this. NaN does not
    occur in the cache.
    """
    if FLOAT8 == 0:
        result = tile.to(dtype)
    elif FLOAT8 == 1:
        result = tile.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        wide = tile.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        result = bits.to(tl.float16, bitcast=True).to(dtype)
    return result


@triton.jit
def tile_scores(
    query, query_rest, keys, key_scales, cells, is_real, scale, cap,
    KEY_DIM: tl.constexpr, MAIN: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
    REST_PADDED: tl.constexpr, IS_MASKED: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Return the attention scores of a tile of keys, multiplied by log2(e).

    A key whose size is not a power of two is divided into MAIN columns, padded to DIM, and REST
    columns, padded to REST_PADDED. Example: 192 columns are divided into 128 and 64, because the
    products would otherwise be padded to 256. If the key is divided, MAIN is a power of two, so DIM
    equals MAIN. REST is 0 if the key is not divided.

    With HAS_CAP, `scale` is the scale of the scores divided by the softcap, and `cap` is the
    softcap times log2(e). With HAS_SCALES, each score is multiplied by the factor of its key.
    """
    key = load_rows(keys, cells, is_real, 0, MAIN, DIM, KEY_DIM, IS_MASKED)
    scores = tl.dot(query, tl.trans(converted(key, query.dtype, FLOAT8)), input_precision="ieee")
    if REST > 0:
        rest = load_rows(keys, cells, is_real, MAIN, REST, REST_PADDED, KEY_DIM, IS_MASKED)
        rest = converted(rest, query.dtype, FLOAT8)
        scores = tl.dot(query_rest, tl.trans(rest), scores, input_precision="ieee")
    if HAS_SCALES:
        scores *= load_scales(key_scales, cells, is_real, IS_MASKED, FLOAT8)[None, :]
    scores *= scale
    if HAS_CAP:
        # This is cap * tanh(scores). If the exponential overflows, the result is still correct.
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores)))
    return scores


@triton.jit
def add_tile(
    top, total, acc, scores, value, value_scales, cells, is_real,
    IS_MASKED: tl.constexpr, HAS_SCALES: tl.constexpr, FLOAT8: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to a running softmax, and return the new top, total and acc.

    top [rows] is the largest score so far, total [rows] the sum of the powers 2^(score - top), and
    acc [rows, dim] the weighted sum of the values. In a row without any token so far, top is -inf
    and total is 0. With HAS_SCALES, each weight is multiplied by the factor of its value. Matrix
    products use the data type `dtype`.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    # In a row without any token so far, new_top is -inf. The row gets the base 0 instead, because
    # the difference of two infinities would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    if HAS_SCALES:
        weights *= load_scales(value_scales, cells, is_real, IS_MASKED, FLOAT8)[None, :]
    value = converted(value, dtype, FLOAT8)
    acc = tl.dot(weights.to(dtype), value, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc
