# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernel that writes the keys and values of one step into the cache of one layer."""

import triton
import triton.language as tl

# Adding 1.5 * 2**23 to a float32 number, and then subtracting 1.5 * 2**23, rounds the number to the
# nearest integer. A number halfway between two integers is rounded to the even integer.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def nearest_integers(numbers):
    """Round float32 numbers to integers, and return the integers as float32 numbers.

    Example: 2.4 gives 2, and 2.5 gives 2.
    """
    return numbers + ROUNDING - ROUNDING


@triton.jit
def to_float8_bytes(scaled):
    """Convert float32 numbers to the number format e4m3, and return the results as bytes.

    Each number must be at least -448 and at most 448, because e4m3 contains no finite numbers
    outside these limits. An e4m3 number has a sign bit, 4 exponent bits and 3 mantissa bits.
    Examples: 1.0 gives the byte 0x38, and -1.0 gives 0xB8. If two e4m3 numbers are equally near,
    the number whose last bit is 0 is returned.

    GPUs with the compute capability 8.9 or higher have an instruction for this conversion. The
    instruction is not used, because a cache write converts only few numbers, and this code works on
    all GPUs.
    """
    # float32 has 23 mantissa bits, and e4m3 has 3 mantissa bits.
    DROPPED_BITS: tl.constexpr = 20
    # The largest value of the dropped bits that is less than half of the lowest kept bit. Numbers
    # with such dropped bits are rounded down.
    BELOW_HALF: tl.constexpr = (1 << (DROPPED_BITS - 1)) - 1
    # The bias of the exponent is 127 in float32 and 7 in e4m3. In e4m3, the exponent begins at bit
    # 3.
    BIAS_DIFFERENCE: tl.constexpr = (127 - 7) << 3
    # The bits of the float32 number 2**-6, which is the smallest normal e4m3 number.
    SMALLEST_NORMAL: tl.constexpr = (127 - 6) << 23
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Round normal numbers to the nearest e4m3 number. The addition carries into the kept bits if
    # the dropped bits are more than half of the lowest kept bit. If the dropped bits are exactly
    # half, it carries only if the lowest kept bit is 1, so that the result is even.
    lowest_kept_bit = (magnitude >> DROPPED_BITS) & 1
    kept_bits = (magnitude + BELOW_HALF + lowest_kept_bit) >> DROPPED_BITS
    normal = kept_bits - BIAS_DIFFERENCE
    # e4m3 represents numbers below 2**-6 as multiples of 2**-9.
    subnormal = nearest_integers(tl.abs(scaled) * 512.0).to(tl.int32)
    nearest = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    return (nearest | sign).to(tl.uint8)


@triton.jit
def round_heads(heads, IS_FLOAT8: tl.constexpr):
    """Round keys or values to 8-bit numbers. The numbers of one head share a scaling factor.

    heads [n, dim] contains the vectors of n heads. The function returns the 8-bit numbers [n, dim],
    and the factors [n] that restore them. The numbers of each head are scaled so that the largest
    absolute number is 448 for e4m3 numbers, or 127 for integers. Example for integers: [1.0, -2.0]
    gives [64, -127] and the factor 2 / 127. If a number of a head is not finite, the factor is NaN,
    so that the error is noticed in the answer.
    """
    LIMIT: tl.constexpr = 448.0 if IS_FLOAT8 else 127.0
    # If all numbers of a head are almost 0, the scaling factor would be infinite. Therefore, these
    # numbers are not scaled, and they are stored as 0.
    ALMOST_ZERO: tl.constexpr = 1e-35
    wide = heads.to(tl.float32)
    is_finite = tl.abs(wide) < float("inf")  # This comparison is false for NaN, too.
    wide = tl.where(is_finite, wide, 0.0)
    largest = tl.max(tl.abs(wide), 1)
    has_only_finite_numbers = tl.min(is_finite.to(tl.int32), 1) == 1
    restoring_factors = tl.where(has_only_finite_numbers, largest / LIMIT, float("nan"))
    scaling_factors = LIMIT / tl.where(largest > ALMOST_ZERO, largest, 1.0)
    scaled = wide * scaling_factors[:, None]
    if IS_FLOAT8:
        rounded = to_float8_bytes(tl.clamp(scaled, -LIMIT, LIMIT))
    else:
        rounded = nearest_integers(scaled).to(tl.int8)
    return rounded, restoring_factors


@triton.jit
def store_rows(
    source, cache, scales, rows, is_head, head_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, HAS_SCALES: tl.constexpr, IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    """Copy some heads of one token's key or value into the cache.

    The cache is viewed as a matrix, [..., DIM]. A row of this matrix contains one head of one
    token, and rows [n] contains the row of each copied head. source points to the first head, and
    head_stride is the distance between two heads. If is_head is false for a head, the head is not
    copied. PADDED is DIM rounded up to a power of two, because Triton supports only blocks of such
    sizes.

    If HAS_SCALES is true, the cache contains 8-bit numbers: 8-bit floating point numbers if
    IS_FLOAT8 is true, otherwise integers. `round_heads` converts each head to 8-bit numbers and one
    factor. scales contains one factor for each row of the cache.
    """
    columns = tl.arange(0, PADDED)
    mask = is_head[:, None] & (columns < DIM)[None, :]
    heads = tl.arange(0, rows.shape[0]).to(tl.int64)
    new = tl.load(source + heads[:, None] * head_stride + columns[None, :], mask=mask, other=0.0)
    pointers = cache + rows[:, None] * DIM + columns[None, :]
    if HAS_SCALES:
        rounded, factors = round_heads(new, IS_FLOAT8)
        tl.store(scales + rows, factors, mask=is_head)
        tl.store(pointers, rounded, mask=mask)
    else:
        tl.store(pointers, new, mask=mask)


@triton.jit
def store_kernel(
    new_keys, new_values, cached_keys, cached_values, key_scales, value_scales, slots,
    key_head_stride, key_token_stride, value_head_stride, value_token_stride,
    NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    KEY_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, HAS_SCALES: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    """Store some heads of one token's key and value in the cache.

    new_keys and new_values contain the vectors of the step's tokens; cached_keys and cached_values
    are the cache. The slot of a token is its place in the cache: the number of the block times
    BLOCK_SIZE, plus the place in the block. A token with a negative slot is not stored.

    A program stores up to HEADS_PER_PROGRAM heads of one token. The grid is
    (num_tokens, cdiv(NUM_KV_HEADS, HEADS_PER_PROGRAM)). The last dimensions of new_keys and
    new_values must be contiguous. KEY_PADDED and VALUE_PADDED are KEY_DIM and VALUE_DIM, rounded up
    to powers of two.

    If HAS_SCALES is true, the cache contains 8-bit numbers: 8-bit floating point numbers if
    IS_FLOAT8 is true, otherwise integers. key_scales and value_scales then contain one factor for
    each vector of the cache, by which the 8-bit numbers must be multiplied.
    """
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1).to(tl.int64) * HEADS_PER_PROGRAM
    heads = first_head + tl.arange(0, HEADS_PER_PROGRAM)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    is_head = heads < NUM_KV_HEADS
    block = slot // BLOCK_SIZE
    # A block contains all tokens of its first head, then all tokens of its second head, and so on.
    rows = (block * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    first_key = new_keys + token * key_token_stride + first_head * key_head_stride
    store_rows(
        first_key, cached_keys, key_scales, rows, is_head, key_head_stride,
        KEY_DIM, KEY_PADDED, HAS_SCALES, IS_FLOAT8,
    )  # fmt: skip
    first_value = new_values + token * value_token_stride + first_head * value_head_stride
    store_rows(
        first_value, cached_values, value_scales, rows, is_head, value_head_stride,
        VALUE_DIM, VALUE_PADDED, HAS_SCALES, IS_FLOAT8,
    )  # fmt: skip
