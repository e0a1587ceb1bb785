# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that writes the keys and values of one step into the cache of one layer."""

import triton
import triton.language as tl

# This is 1.5 * 2**23. If it is added to a float32 number and then subtracted, the number is rounded
# to the nearest integer. A number halfway between two integers is rounded to the even integer.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def float8_bits(scaled):
    """Round float32 numbers from -448 to 448 to e4m3 numbers, and return the e4m3 numbers as bytes.

    If two e4m3 numbers are equally near, the number whose last bit is 0 is returned. GPUs with the
    compute capability 8.9 or higher have an instruction for this conversion. The instruction is not
    used, because a cache write converts only few numbers, and this code works on all GPUs.
    """
    # float32 has 23 mantissa bits, and e4m3 has 3 mantissa bits.
    DROPPED_BITS: tl.constexpr = 20
    # One less than half the value of the lowest bit that is kept.
    BELOW_HALF: tl.constexpr = 0x7FFFF
    # The bias of the exponent is 127 in float32 and 7 in e4m3.
    BIAS_DIFFERENCE: tl.constexpr = 120 << 3
    # The bits of the float32 number 1/64, which is the smallest normal e4m3 number.
    SMALLEST_NORMAL: tl.constexpr = 0x3C800000
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    lowest_bit = (magnitude >> DROPPED_BITS) & 1
    rounded = ((magnitude + BELOW_HALF + lowest_bit) >> DROPPED_BITS) - BIAS_DIFFERENCE
    # e4m3 numbers below 1/64 are multiples of 1/512.
    small = tl.abs(scaled) * 512.0 + ROUNDING - ROUNDING
    nearest = tl.where(magnitude < SMALLEST_NORMAL, small.to(tl.int32), rounded)
    return (nearest | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_rows(
    source, cache, scales, rows, is_head, head_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, HAS_SCALES: tl.constexpr, IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    """Copy some heads of one token's key or value into the cache.

    The cache is viewed as a matrix, [..., DIM]. rows [n] contains the row of each head in this
    matrix. source points to the first head, and head_stride is the distance between two heads.
    If is_head is false for a head, the head is not copied.

    If HAS_SCALES is true, the numbers of each head are scaled, and then converted to integers up to
    127 or to 8-bit floating point numbers up to 448. The factor of the head is also stored. If a
    number of a head is not finite, the factor is NaN, so that the error is noticed in the answer.
    """
    columns = tl.arange(0, PADDED)
    mask = is_head[:, None] & (columns < DIM)[None, :]
    heads = tl.arange(0, rows.shape[0]).to(tl.int64)
    new = tl.load(source + heads[:, None] * head_stride + columns[None, :], mask=mask, other=0.0)
    if HAS_SCALES:
        limit: tl.constexpr = 448.0 if IS_FLOAT8 else 127.0
        wide = new.to(tl.float32)
        is_not_finite = (wide != wide) | (tl.abs(wide) == float("inf"))
        largest = tl.max(tl.abs(tl.where(is_not_finite, 0.0, wide)), 1)
        is_finite = tl.max(is_not_finite.to(tl.int32), 1) == 0
        tl.store(scales + rows, tl.where(is_finite, largest / limit, float("nan")), mask=is_head)
        # If all numbers of a head are almost 0, the factor would be infinite. Therefore, these
        # numbers are not scaled, and they are stored as 0.
        ALMOST_ZERO: tl.constexpr = 1e-35
        factor = limit / tl.where(largest > ALMOST_ZERO, largest, 1.0)
        scaled = tl.where(is_not_finite, 0.0, wide) * factor[:, None]
        if IS_FLOAT8:
            stored = float8_bits(tl.clamp(scaled, -limit, limit))
        else:
            stored = (scaled + ROUNDING - ROUNDING).to(tl.int8)
        tl.store(cache + rows[:, None] * DIM + columns[None, :], stored, mask=mask)
    else:
        tl.store(cache + rows[:, None] * DIM + columns[None, :], new, mask=mask)


@triton.jit
def store_kernel(
    key, value, keys, values, key_scales, value_scales, slots,
    key_head_stride, key_token_stride, value_head_stride, value_token_stride,
    NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    KEY_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, HAS_SCALES: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    """Store some heads of one token's key and value in the cache.

    A program stores up to HEADS heads of one token. The grid is
    (num_tokens, cdiv(NUM_KV_HEADS, HEADS)). A token with a negative slot is not stored. The last
    dimensions of key and value must be contiguous.
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * HEADS
    heads = first + tl.arange(0, HEADS)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    is_head = heads < NUM_KV_HEADS
    rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    store_rows(
        key + token * key_token_stride + first * key_head_stride, keys, key_scales, rows,
        is_head, key_head_stride, KEY_DIM, KEY_PADDED, HAS_SCALES, IS_FLOAT8,
    )  # fmt: skip
    store_rows(
        value + token * value_token_stride + first * value_head_stride, values, value_scales, rows,
        is_head, value_head_stride, VALUE_DIM, VALUE_PADDED, HAS_SCALES, IS_FLOAT8,
    )  # fmt: skip
