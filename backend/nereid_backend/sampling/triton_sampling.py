# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The sampling kernel in the Triton language. One program samples one row, without sorting it.

The weight of a token is its probability divided by the probability of the likeliest token. A weight
is a float32 number from 0 to 1. The filters top_k and top_p keep the tokens whose weights are at
least a threshold. The bit patterns of non-negative floats, read as integers, have the same order as
the floats. Therefore, the kernel searches for the threshold among 2 ** 30 bit patterns. Each pass
over the row compares the tokens with three bit patterns. The search ends when two thresholds are
found that differ by one token: the lower threshold keeps enough tokens, and the higher threshold
keeps too few.

Weights are added as integers in units of 2 ** -40, so the sums are exact and do not depend on the
order of the additions. The sampled token of a row therefore depends only on the logits of the row,
not on the order in which a device adds.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The bit pattern of the float32 number 1, which is the largest possible weight.
BITS_OF_ONE = tl.constexpr(0x3F800000)


@triton.jit
def load_logits(logits, columns, vocab_size):
    """Load the logits of some columns as float32. A column after the end of the row gives -inf."""
    is_token = columns < vocab_size
    return tl.load(logits + columns, mask=is_token, other=float("-inf")).to(tl.float32)


@triton.jit
def weight_bits(values, max_logit, factor):
    """Convert logits to weights, and return the weights' bit patterns. NaN gives the weight 0."""
    weights = tl.exp2((values - max_logit) * factor)
    return tl.where(values == values, weights, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def fixed_point(bits):
    """Convert weights from float32 bit patterns to fixed-point numbers.

    A fixed-point number is an int64 that counts units of 2 ** -40. The result is rounded down.
    Example: the weight 0.5 gives 2 ** 39.
    """
    # A float32 number stores the exponent plus 127, and the last 23 bits of the mantissa. The first
    # bit of the mantissa is always 1. This bit is not stored, so it is added here. The shifts turn
    # the weight into an integer. Example: the weight 1.0 becomes the integer 2 ** 40.
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64) << (40 - 23)
    return mantissa >> tl.minimum(127 - (bits >> 23), 63).to(tl.int64)


@triton.jit
def add_kept(count, total, bits, weights, threshold):
    """Count the tokens of a tile that a threshold keeps, and sum their weights.

    The threshold keeps the tokens whose weights are at least as large as the threshold. The
    function returns `count` and `total`, increased by the results.

    `count` and `total` contain the number of tokens and the sum of the weights in each column of
    the tile. `bits` are the bit patterns of the weights, and `weights` the fixed-point numbers.
    """
    is_kept = bits >= threshold
    return count + is_kept.to(tl.int32), total + tl.where(is_kept, weights, 0)


@triton.jit
def count_at_thresholds(
    logits, max_logit, factor, vocab_size, low, middle, high, TILE: tl.constexpr
):
    """Count the tokens whose weights are at least a threshold, and sum the weights of these tokens.

    There are three thresholds: `low`, `middle` and `high`. One pass over the row serves all three.
    The weight of a token is 2 ** ((logit - max_logit) * factor), a float32 number. A threshold is
    the bit pattern of a weight, read as an integer: a larger weight has a larger bit pattern. Every
    threshold must be at least 1, so that no column after the end of the vocabulary is counted.
    There, the weight is 0, and its bit pattern is 0.

    Returns:
        Three counts, int32, and three sums, int64. The unit of the sums is 2 ** -40, so the weight
        0.5 adds 2 ** 39.
    """
    low_count = tl.zeros([TILE], tl.int32)
    middle_count = tl.zeros([TILE], tl.int32)
    high_count = tl.zeros([TILE], tl.int32)
    low_sum = tl.zeros([TILE], tl.int64)
    middle_sum = tl.zeros([TILE], tl.int64)
    high_sum = tl.zeros([TILE], tl.int64)
    for begin in tl.range(0, vocab_size, TILE, num_stages=3):
        values = load_logits(logits, begin + tl.arange(0, TILE), vocab_size)
        bits = weight_bits(values, max_logit, factor)
        weights = fixed_point(bits)
        low_count, low_sum = add_kept(low_count, low_sum, bits, weights, low)
        middle_count, middle_sum = add_kept(middle_count, middle_sum, bits, weights, middle)
        high_count, high_sum = add_kept(high_count, high_sum, bits, weights, high)
    return (
        tl.sum(low_count, 0), tl.sum(middle_count, 0), tl.sum(high_count, 0),
        tl.sum(low_sum, 0), tl.sum(middle_sum, 0), tl.sum(high_sum, 0),
    )  # fmt: skip


@triton.jit
def count_at_threshold(logits, max_logit, factor, vocab_size, threshold, TILE: tl.constexpr):
    """Count the tokens whose weights are not less than `threshold`, and sum their weights.

    `count_at_thresholds` documents the arguments and the units of the result.
    """
    count, _, _, total, _, _ = count_at_thresholds(
        logits, max_logit, factor, vocab_size, threshold, threshold, threshold, TILE
    )
    return count, total


@triton.jit
def search(
    logits, max_logit, factor, vocab_size, low, count, total, wanted,
    BY_COUNT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the highest weight threshold at which enough tokens remain. The search starts at `low`.

    A threshold is the bit pattern of a weight, and keeps the tokens whose weights are not smaller.
    If BY_COUNT is true (top_k), a threshold must keep at least `wanted` tokens. If BY_COUNT is
    false (top_p), the weights of the kept tokens must sum to at least `wanted`. Example with
    BY_COUNT: the weights are 1, 0.5 and 0.25, and `wanted` is 2. The threshold is a bit pattern
    above that of 0.25, and at most that of 0.5.

    `count` is the number of tokens that the threshold `low` keeps, and `total` is the sum of their
    weights. If `low` itself does not keep enough tokens, the result is `low`.

    Returns:
        The threshold, the number of tokens that the threshold keeps, and the sum of their weights.
    """
    # A threshold keeps the tokens whose weights are at least as large as the threshold. During the
    # search, the threshold `low` keeps enough tokens, and `count` is their number. The threshold
    # `high` keeps too few tokens, and `high_count` is their number. At first, `high` is above the
    # largest weight, so it keeps no token.
    high = tl.full([], BITS_OF_ONE + 1, tl.int32)
    high_count = tl.full([], 0, tl.int32)
    is_enough = count >= wanted if BY_COUNT else total >= wanted
    # If even `low` keeps too few tokens, there is nothing to search. Then `high` is set just above
    # `low`, so that the loop does not run.
    high = tl.where(is_enough, high, low + 1)
    while (high - low > 1) & (count - high_count > 1):
        # Three new thresholds divide the interval from `low` to `high` into four intervals of
        # nearly equal size. The search continues in one of these four intervals, so the interval
        # shrinks in every pass.
        step = (high - low + 3) // 4
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        count_1, count_2, count_3, sum_1, sum_2, sum_3 = count_at_thresholds(
            logits, max_logit, factor, vocab_size, first, second, third, TILE
        )
        if BY_COUNT:
            is_1, is_2, is_3 = count_1 >= wanted, count_2 >= wanted, count_3 >= wanted
        else:
            is_1, is_2, is_3 = sum_1 >= wanted, sum_2 >= wanted, sum_3 >= wanted
        # The thresholds are ordered: low, first, second, third, high. The highest threshold that
        # keeps enough tokens becomes `low`, and the next threshold in this order becomes `high`.
        high_count = of_highest_true(is_1, is_2, is_3, count_1, count_2, count_3, high_count)
        high = of_highest_true(is_1, is_2, is_3, first, second, third, high)
        count = of_highest_true(is_1, is_2, is_3, count, count_1, count_2, count_3)
        total = of_highest_true(is_1, is_2, is_3, total, sum_1, sum_2, sum_3)
        low = of_highest_true(is_1, is_2, is_3, low, first, second, third)
    return low, count, total


@triton.jit
def of_highest_true(is_1, is_2, is_3, value_0, value_1, value_2, value_3):
    """Return the value that belongs to the last true condition; value_0 if no condition is true.

    For example, return value_2 if is_2 is true and is_3 is false.
    """
    return tl.where(is_3, value_3, tl.where(is_2, value_2, tl.where(is_1, value_1, value_0)))


@triton.jit
def pick(logits, max_logit, factor, vocab_size, threshold, target, TILE: tl.constexpr):
    """Return the first token at which the cumulative weights exceed `target`.

    The weights are added in the order of the vocabulary. Weights below a threshold are left out.
    `threshold` is the bit pattern of this threshold. `target` is an integer in units of 2 ** -40.
    The sum of all weights that are not left out is larger than `target`.

    Example: the weights are 0.5, 0.1 and 1, the threshold is 0.25, and `target` is 0.7 * 2 ** 40.
    The cumulative weights are 0.5, 0.5 and 1.5, so the result is 2.
    """
    # Find the tile that contains the token. `begin` is the first column of the tile that was read
    # last. `tile_sum` is the sum of the weights in this tile, and `sum_before` is the sum of the
    # weights in all earlier tiles. At first, no tile has been read.
    begin = tl.full([], -TILE, tl.int32)
    sum_before = tl.full([], 0, tl.int64)
    tile_sum = sum_before
    while (sum_before + tile_sum <= target) & (begin + TILE < vocab_size):
        begin += TILE
        sum_before += tile_sum
        weights = kept_weights(logits, begin, max_logit, factor, vocab_size, threshold, TILE)
        tile_sum = tl.sum(weights, 0)
    # Read the last tile a second time, to find the column of the token in this tile.
    weights = kept_weights(logits, begin, max_logit, factor, vocab_size, threshold, TILE)
    cumulative = sum_before + tl.cumsum(weights, 0)
    return begin + tl.sum((cumulative <= target).to(tl.int32), 0)


@triton.jit
def kept_weights(logits, begin, max_logit, factor, vocab_size, low, TILE: tl.constexpr):
    """Return the weights of the tokens in the columns from `begin` to `begin` + TILE - 1.

    The weights are integers in units of 2 ** -40. A weight is 0 if its bit pattern is less than
    `low`. `low` must be at least 1, so that the weight after the end of the vocabulary is 0.
    """
    values = load_logits(logits, begin + tl.arange(0, TILE), vocab_size)
    bits = weight_bits(values, max_logit, factor)
    return tl.where(bits >= low, fixed_point(bits), 0)


@triton.jit
def rounded_up(number):
    """Round `number`, a non-negative float64, up to an integer. Return the integer as int64."""
    integer = number.to(tl.int64)
    return integer + (integer.to(tl.float64) < number).to(tl.int64)


@triton.jit
def sample_token(
    logits, max_logit, temperature, top_p, top_k, min_p, uniform, vocab_size, TILE: tl.constexpr
):
    """Apply min_p, top_k and top_p, and sample a token from the remaining tokens.

    The weight of a token is its probability divided by the probability of the likeliest token, a
    float32 number from 0 to 1. Each filter raises `threshold`, and removes the tokens with smaller
    weights. `threshold` is the bit pattern of a weight, read as an integer. A larger weight has a
    larger bit pattern.

    `count` is the number of remaining tokens. `total` is the sum of their weights, multiplied by
    2 ** 40 and stored as an integer.

    `max_logit` is the largest logit of the row. It must be finite. `uniform` is a random number in
    [0, 1). It selects a token from the cumulative weights of the remaining tokens.
    """
    factor = LOG2E / temperature
    # The largest weight is 1, so min_p removes the tokens whose weights are less than min_p.
    # Therefore, the threshold of min_p is the bit pattern of min_p itself. The smallest threshold
    # is 1, so a token with the weight 0 is never sampled.
    threshold = tl.maximum(min_p.to(tl.int32, bitcast=True), 1)
    count, total = count_at_threshold(logits, max_logit, factor, vocab_size, threshold, TILE)
    if (top_k > 0) & (top_k < vocab_size):
        threshold, count, total = search(
            logits, max_logit, factor, vocab_size, threshold, count, total, wanted=top_k,
            BY_COUNT=True, TILE=TILE,
        )  # fmt: skip
    if top_p < 1.0:
        # The weights of the tokens that top_p keeps must sum to at least this number.
        min_total = tl.maximum(rounded_up(top_p.to(tl.float64) * total.to(tl.float64)), 1)
        threshold, count, total = search(
            logits, max_logit, factor, vocab_size, threshold, count, total, wanted=min_total,
            BY_COUNT=False, TILE=TILE,
        )  # fmt: skip
    # Rounding may make the product equal to `total`, but `pick` needs a target less than `total`.
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    return pick(logits, max_logit, factor, vocab_size, threshold, target, TILE)


# The number of rows changes from step to step. By default, Triton compiles one kernel for the value
# 1, one for multiples of 16, and one for all other values. do_not_specialize prevents this.
@triton.jit(do_not_specialize=["num_rows"])
def sample_kernel(
    logits, raw, settings, token_ids, logprobs, has_allowed,
    logits_stride, raw_stride, vocab_size, num_rows,
    IS_RAW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sample the token of one row of logits. The grid is (num_rows,).

    `logits` and `raw` are [num_rows, vocab_size] with a contiguous last dimension. `raw` contains
    the model's own logits. If IS_RAW is true, `raw` is the same tensor as `logits`. `settings` is
    [5, num_rows] float64. Its rows contain the temperature, top_p, top_k, min_p and the random
    number. The temperature 0 selects the likeliest token.

    The kernel writes one element for each row to `token_ids` (int64), `logprobs` (float32) and
    `has_allowed` (uint8); see `gpu_sampling.sample`.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    raw += row * raw_stride
    # The first pass finds the largest logit. The token with this logit is the greedy token. Element
    # i of `column_max` is the largest logit of the tokens i, i + TILE, i + 2 * TILE and so on.
    column_max = tl.full([TILE], float("-inf"), tl.float32)
    columns_of_max = tl.zeros([TILE], tl.int32)
    raw_column_max = column_max
    is_invalid = tl.zeros([TILE], tl.int32)
    for begin in tl.range(0, vocab_size, TILE, num_stages=3):
        columns = begin + tl.arange(0, TILE)
        values = load_logits(logits, columns, vocab_size)
        columns_of_max = tl.where(values > column_max, columns, columns_of_max)
        column_max = tl.where(values > column_max, values, column_max)
        raw_values = values
        if not IS_RAW:
            raw_values = load_logits(raw, columns, vocab_size)
        raw_column_max = tl.where(raw_values > raw_column_max, raw_values, raw_column_max)
        is_invalid |= ((raw_values != raw_values) | (raw_values == float("inf"))).to(tl.int32)
    max_logit = tl.max(column_max, 0)
    token = tl.min(tl.where(column_max == max_logit, columns_of_max, vocab_size), 0)
    raw_max = tl.max(raw_column_max, 0)
    # The logits of a row are invalid if any logit is NaN or +inf, or if all logits are -inf.
    is_finite = (tl.max(is_invalid, 0) == 0) & (raw_max > float("-inf"))
    # The second pass sums the exponentials of the model's own logits. The log-probability is
    # computed from this sum.
    powers = tl.zeros([TILE], tl.float32)
    for begin in tl.range(0, vocab_size, TILE, num_stages=3):
        raw_values = load_logits(raw, begin + tl.arange(0, TILE), vocab_size)
        powers += tl.exp(raw_values - raw_max)
    temperature = tl.load(settings + row).to(tl.float32)
    if (temperature > 0.0) & is_finite & (max_logit > float("-inf")):
        top_p = tl.load(settings + num_rows + row).to(tl.float32)
        top_k = tl.load(settings + 2 * num_rows + row).to(tl.int32)
        min_p = tl.load(settings + 3 * num_rows + row).to(tl.float32)
        uniform = tl.load(settings + 4 * num_rows + row)
        token = sample_token(
            logits, max_logit, temperature, top_p, top_k, min_p, uniform, vocab_size, TILE
        )
    raw_values = tl.load(raw + token).to(tl.float32)
    logprob = raw_values - raw_max - tl.log(tl.sum(powers, 0))
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(is_finite, logprob, float("nan")))
    is_possible = tl.load(logits + token).to(tl.float32) > float("-inf")
    tl.store(has_allowed + row, is_possible.to(tl.uint8))
