# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Functions that several attention kernels call: cache reads, scores and the running softmax.

Scores are multiplied by log2(e), so that the kernels can compute powers of 2 instead of powers of
e. The hardware has an instruction only for powers of 2.
"""

import triton
import triton.language as tl

# log2(e). The scores are multiplied by this factor, because the kernels compute 2**x instead of
# e**x.
LOG2E = tl.constexpr(1.4426950408889634)

# The possible values of the kernel argument `FLOAT8`. `gpu_call.Float8` defines the same values.
FLOAT8_NONE = tl.constexpr(0)
FLOAT8_DEVICE = tl.constexpr(1)
FLOAT8_BITS = tl.constexpr(2)

# `convert_tile` moves the bits of an e4m3 number to a float16 number without changing the exponent.
# The bias of the exponent is 7 in e4m3 and 15 in float16, so the result is the number divided by
# 2**8. The scaling factors are multiplied by 2**8 to compensate for this.
SHIFTED_BITS_FACTOR = tl.constexpr(256.0)


@triton.jit
def block_numbers(table, key_positions, is_read, BLOCK_SIZE: tl.constexpr):
    """Return, for each given position, the number of the block that contains the position.

    table points to the block table of the sequence. key_positions [n] contains positions in the
    sequence. If is_read is false for a position, nothing is read, and the result is 0.

    The kernels call this function for a tile one iteration before they load the keys and values of
    the tile. The addresses of the keys and values are then known early, so the tile can be loaded
    while the kernel still computes the products of the previous tile.
    """
    return tl.load(table + key_positions // BLOCK_SIZE, mask=is_read, other=0).to(tl.int32)


@triton.jit
def cache_rows(blocks, key_positions, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """For each token, return the index of the cache row with the token's vector for one head.

    The cache is viewed as a matrix of rows, [..., dim]. key_positions [n] contains the positions of
    the tokens, and blocks [n] contains the numbers of their blocks.
    """
    return (blocks.to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_SIZE + key_positions % BLOCK_SIZE


@triton.jit
def load_rows(
    base, rows, is_read, START: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    STRIDE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Load WIDTH columns of some rows of a matrix, beginning with the column START.

    The result is [n, PADDED]. PADDED is WIDTH, rounded up to a power of two, because Triton
    supports only such sizes. The additional columns contain zeros. Example: the columns 128 to 191
    have START = 128, WIDTH = 64 and PADDED = 64.

    base points to the matrix, and STRIDE is the distance between two of its rows. rows [n] contains
    the indices of the rows. If IS_MASKED is true, rows for which is_read is false are not read, and
    the result contains zeros for these rows.
    """
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None] * STRIDE + (START + columns)[None, :]
    # These conditions are evaluated by the compiler. A load without a mask is the fastest.
    if IS_MASKED:
        mask = is_read[:, None]
        if WIDTH < PADDED:
            mask = mask & (columns < WIDTH)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif WIDTH < PADDED:
        tile = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_scales(scales, key_rows, is_read, IS_MASKED: tl.constexpr, FLOAT8: tl.constexpr):
    """Load the scaling factor of each given cache row (a vector of 8-bit numbers), [n] float32.

    key_rows [n] contains the indices of the rows. If IS_MASKED is true, the factor is 0 for rows
    for which is_read is false. The product of the factor and the result of `convert_tile` is the
    restored number. Therefore, the factor includes SHIFTED_BITS_FACTOR if FLOAT8 is FLOAT8_BITS.
    """
    if IS_MASKED:
        factors = tl.load(scales + key_rows, mask=is_read, other=0.0)
    else:
        factors = tl.load(scales + key_rows)
    if FLOAT8 == FLOAT8_BITS:
        factors *= SHIFTED_BITS_FACTOR
    return factors


@triton.jit
def convert_tile(tile, dtype: tl.constexpr, FLOAT8: tl.constexpr):
    """Convert a tile of keys or values to the data type of the matrix products.

    FLOAT8 selects the conversion:

    - FLOAT8_NONE: the tile contains no 8-bit floating point numbers.
    - FLOAT8_DEVICE: the tile contains the bytes of e4m3 numbers (an 8-bit floating point format),
      and the GPU has an instruction that converts them.
    - FLOAT8_BITS: the bits of each e4m3 number are shifted to their places in a float16 number. The
      result is the number divided by SHIFTED_BITS_FACTOR. An e4m3 NaN would give a finite number,
      but the cache contains none.
    """
    if FLOAT8 == FLOAT8_NONE:
        result = tile.to(dtype)
    elif FLOAT8 == FLOAT8_DEVICE:
        result = tile.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        # e4m3 has the sign in bit 7, and float16 in bit 15. The lowest exponent bit is bit 3 in
        # e4m3 and bit 10 in float16.
        wide = tile.to(tl.int16)
        sign = (wide & 0x80) << 8
        exponent_and_mantissa = (wide & 0x7F) << 7
        result = (sign | exponent_and_mantissa).to(tl.float16, bitcast=True).to(dtype)
    return result


@triton.jit
def tile_scores(
    query, query_rest, keys, key_scales, key_rows, is_read, scale, cap,
    KEY_DIM: tl.constexpr, MAIN: tl.constexpr, MAIN_PADDED: tl.constexpr,
    REST: tl.constexpr, REST_PADDED: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SCALES: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Return the attention scores of a tile of keys, multiplied by log2(e).

    The factor log2(e) allows the softmax to use powers of 2. A long key is divided into two parts,
    because Triton requires that each part is padded to a power of two. Example: a key with 192
    columns is divided into 128 and 64 columns. Without this division, the key would be padded to
    256 columns.

    The arguments are:
        query: [rows, MAIN_PADDED], the first part of the queries.
        query_rest: [rows, REST_PADDED], the second part. It is not used if REST is 0.
        keys, key_scales: the keys of the layer in the cache, and their scaling factors.
        key_rows: [n], the cache rows of the keys.
        is_read: [n]. If IS_MASKED is true, rows for which is_read is false are not read.
        scale, cap: the results of `AttentionCall.score_factors`. The score is scale * product, or
            cap * tanh(scale * product) if HAS_CAP is true.
        KEY_DIM: the number of columns of a key.
        MAIN, MAIN_PADDED: the number of columns of the first part, without and with padding.
        REST, REST_PADDED: the same numbers for the second part; 0 if the key is not divided.
        HAS_SCALES: whether each score is multiplied by the scaling factor of its key.
        FLOAT8: the conversion of the keys; see `convert_tile`.
    """
    key = load_rows(
        keys, key_rows, is_read, START=0, WIDTH=MAIN, PADDED=MAIN_PADDED,
        STRIDE=KEY_DIM, IS_MASKED=IS_MASKED,
    )  # fmt: skip
    key = convert_tile(key, query.dtype, FLOAT8)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if REST > 0:
        key_rest = load_rows(
            keys, key_rows, is_read, START=MAIN, WIDTH=REST, PADDED=REST_PADDED,
            STRIDE=KEY_DIM, IS_MASKED=IS_MASKED,
        )  # fmt: skip
        key_rest = convert_tile(key_rest, query.dtype, FLOAT8)
        # Add the products of the second parts to the products of the first parts.
        scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision="ieee")
    if HAS_SCALES:
        scores *= load_scales(key_scales, key_rows, is_read, IS_MASKED, FLOAT8)[None, :]
    scores *= scale
    if HAS_CAP:
        # This formula equals cap * tanh(scores). It is correct even if the exponential overflows to
        # infinity: the result is then `cap`.
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores)))
    return scores


@triton.jit
def add_tile(
    top, total, acc, scores, value, value_scales, key_rows, is_read,
    IS_MASKED: tl.constexpr, HAS_SCALES: tl.constexpr, FLOAT8: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to a running softmax. Return the new values of `top`, `total` and `acc`.

    The running softmax consists of three tensors. top [rows] is the largest score of each query
    (row) so far. total [rows] is the sum of the powers 2^(score - top). acc [rows, dim] is the
    weighted sum of the values. Before the first key, top is -inf and total is 0.

    The other arguments are:
        scores: [rows, n], the score of each query for each key of the tile.
        value: [n, dim], the stored values of these keys.
        value_scales: the scaling factors of all stored values. If HAS_SCALES is true, each value of
            the tile must be multiplied by its factor.
        key_rows: [n], the indices of the factors of the tile in value_scales.
        is_read: [n]. If IS_MASKED is true, factors for which is_read is false are not read.
        FLOAT8: the conversion of the values; see `convert_tile`.
        dtype: the data type in which the weights and the values are multiplied.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    # If a query has attended to no key yet, new_top is -inf. For such a query, the base is 0,
    # because -inf minus -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    # `total` and `acc` were computed relative to `top`, the previous maximum. Multiplying by
    # `decay` makes them relative to `base`.
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    if HAS_SCALES:
        # Each value vector has a scale factor. Multiplying the attention weight of a vector by this
        # factor is faster than multiplying the whole vector.
        weights *= load_scales(value_scales, key_rows, is_read, IS_MASKED, FLOAT8)[None, :]
    value = convert_tile(value, dtype, FLOAT8)
    acc = tl.dot(weights.to(dtype), value, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc
