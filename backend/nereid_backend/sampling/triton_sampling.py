# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""From logits to a token, a row a program, without sorting.

A token's weight is its probability over the likeliest one's, a float32 from 0 to 1. What top_k and
top_p keep are the tokens whose weight is at least some threshold, and weights that are not negative
have the order of their bits: the threshold is searched among 2 ** 30 patterns by counting, three
patterns a pass, until one token is left between what is enough and what is too little.

Sums are of integers, each weight in 2 ** -40ths, so that they are exact and the same in any order:
a row's token depends on its own logits alone, and not on how a device adds.
"""

import triton
import triton.language as tl


@triton.jit
def load_logits(logits, columns, vocab_size):
    """Some logits of a row, float32; -inf behind its end."""
    is_token = columns < vocab_size
    return tl.load(logits + columns, mask=is_token, other=float("-inf")).to(tl.float32)


@triton.jit
def weight_bits(given, greatest, factor):
    """The bits of logits' weights; 0 for what is not a number."""
    weights = tl.exp2((given - greatest) * factor)
    return tl.where(given == given, weights, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def shares(bits):
    """Weights, by their bits, in 2 ** -40ths: int64, rounded down."""
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64) << 17
    return mantissa >> tl.minimum(127 - (bits >> 23), 63).to(tl.int64)


@triton.jit
def count_from(logits, greatest, factor, vocab_size, low, middle, high, TILE: tl.constexpr):
    """How many tokens have at least the bits of low, middle and high, and what these weigh.

    Returns three counts, int32, and three sums of shares, int64.
    """
    low_count = tl.zeros([TILE], tl.int32)
    middle_count = tl.zeros([TILE], tl.int32)
    high_count = tl.zeros([TILE], tl.int32)
    low_sum = tl.zeros([TILE], tl.int64)
    middle_sum = tl.zeros([TILE], tl.int64)
    high_sum = tl.zeros([TILE], tl.int64)
    for begin in tl.range(0, vocab_size, TILE, num_stages=3):
        given = load_logits(logits, begin + tl.arange(0, TILE), vocab_size)
        bits = weight_bits(given, greatest, factor)
        share = shares(bits)
        low_count += (bits >= low).to(tl.int32)
        middle_count += (bits >= middle).to(tl.int32)
        high_count += (bits >= high).to(tl.int32)
        low_sum += tl.where(bits >= low, share, 0)
        middle_sum += tl.where(bits >= middle, share, 0)
        high_sum += tl.where(bits >= high, share, 0)
    return (
        tl.sum(low_count, 0), tl.sum(middle_count, 0), tl.sum(high_count, 0),
        tl.sum(low_sum, 0), tl.sum(middle_sum, 0), tl.sum(high_sum, 0),
    )  # fmt: skip


@triton.jit
def search(
    logits, greatest, factor, vocab_size, low, count, total, wanted,
    BY_COUNT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The highest threshold that leaves wanted tokens, or wanted weight: not below low.

    count and total are what low leaves. Returns the threshold and what it leaves. Where low itself
    leaves too little, it is low.
    """
    # Low leaves enough, high does not; nothing weighs more than 1.
    high = tl.full([], 0x3F800001, tl.int32)
    too_few = tl.full([], 0, tl.int32)
    is_enough = count >= wanted if BY_COUNT else total >= wanted
    high = tl.where(is_enough, high, low + 1)
    while (high - low > 1) & (count - too_few > 1):
        # A third of the patterns is left at most; each pass takes at least one.
        step = (high - low + 3) // 4
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        counts_1, counts_2, counts_3, sums_1, sums_2, sums_3 = count_from(
            logits, greatest, factor, vocab_size, first, second, third, TILE
        )
        if BY_COUNT:
            is_1, is_2, is_3 = counts_1 >= wanted, counts_2 >= wanted, counts_3 >= wanted
        else:
            is_1, is_2, is_3 = sums_1 >= wanted, sums_2 >= wanted, sums_3 >= wanted
        too_few = tl.where(
            is_3, too_few, tl.where(is_2, counts_3, tl.where(is_1, counts_2, counts_1))
        )
        high = tl.where(is_3, high, tl.where(is_2, third, tl.where(is_1, second, first)))
        count = tl.where(is_3, counts_3, tl.where(is_2, counts_2, tl.where(is_1, counts_1, count)))
        total = tl.where(is_3, sums_3, tl.where(is_2, sums_2, tl.where(is_1, sums_1, total)))
        low = tl.where(is_3, third, tl.where(is_2, second, tl.where(is_1, first, low)))
    return low, count, total


@triton.jit
def pick(logits, greatest, factor, vocab_size, low, target, TILE: tl.constexpr):
    """The first token at which the weights from low on add up to more than target.

    target is below their sum. Such a token has a weight, so it is one of those.
    """
    begin = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int64)
    inside = before
    while (before + inside <= target) & (begin < vocab_size):
        before += inside
        given = load_logits(logits, begin + tl.arange(0, TILE), vocab_size)
        bits = weight_bits(given, greatest, factor)
        inside = tl.sum(tl.where(bits >= low, shares(bits), 0), 0)
        begin += TILE
    begin -= TILE
    given = load_logits(logits, begin + tl.arange(0, TILE), vocab_size)
    bits = weight_bits(given, greatest, factor)
    cumulated = before + tl.cumsum(tl.where(bits >= low, shares(bits), 0), 0)
    return begin + tl.sum((cumulated <= target).to(tl.int32), 0)


@triton.jit
def draw(
    logits, greatest, temperature, top_p, top_k, min_p, uniform, vocab_size, TILE: tl.constexpr
):
    """A token drawn after min_p, top_k and top_p; greatest is the row's, and finite."""
    factor = 1.4426950408889634 / temperature
    # A weight of 0 is never drawn, so leaving those out changes nothing.
    low = tl.maximum(min_p.to(tl.int32, bitcast=True), 1)
    count, _, _, total, _, _ = count_from(logits, greatest, factor, vocab_size, low, low, low, TILE)
    if (top_k > 0) & (top_k < vocab_size):
        low, count, total = search(
            logits, greatest, factor, vocab_size, low, count, total, top_k, True, TILE
        )
    if top_p < 1.0:
        # A token stays where those above it weigh less than this.
        share = top_p.to(tl.float64) * total.to(tl.float64)
        wanted = share.to(tl.int64)
        wanted = tl.maximum(wanted + (wanted.to(tl.float64) < share).to(tl.int64), 1)
        low, count, total = search(
            logits, greatest, factor, vocab_size, low, count, total, wanted, False, TILE
        )
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    return pick(logits, greatest, factor, vocab_size, low, target, TILE)


# A service has steps of one row, of multiples of 16 and of others: each would be compiled for.
@triton.jit(do_not_specialize=["num_rows"])
def sample_kernel(
    logits, raw, settings, token_ids, logprobs, is_left,
    logits_stride, raw_stride, vocab_size, num_rows,
    IS_RAW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Choose one row's token. Grid: (num_rows,).

    Shapes: logits and raw [num_rows, vocab_size], the last dimension contiguous; raw are the
    model's own, the same as logits where IS_RAW; settings [5, num_rows] float64: temperature (0 is
    greedy), top_p, top_k, min_p, uniform; token_ids int64, logprobs float32 and is_left uint8, each
    [num_rows]: see `gpu_sampling.choose`.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    raw += row * raw_stride
    top = tl.full([TILE], float("-inf"), tl.float32)
    place = tl.zeros([TILE], tl.int32)
    raw_top = top
    odd = tl.zeros([TILE], tl.int32)
    for begin in tl.range(0, vocab_size, TILE, num_stages=3):
        columns = begin + tl.arange(0, TILE)
        given = load_logits(logits, columns, vocab_size)
        place = tl.where(given > top, columns, place)
        top = tl.where(given > top, given, top)
        own = given
        if not IS_RAW:
            own = load_logits(raw, columns, vocab_size)
        raw_top = tl.where(own > raw_top, own, raw_top)
        odd |= ((own != own) | (own == float("inf"))).to(tl.int32)
    greatest = tl.max(top, 0)
    token = tl.min(tl.where(top == greatest, place, vocab_size), 0)
    raw_greatest = tl.max(raw_top, 0)
    # A row of nothing but -inf is no distribution either.
    is_finite = (tl.max(odd, 0) == 0) & (raw_greatest > float("-inf"))
    powers = tl.zeros([TILE], tl.float32)
    for begin in tl.range(0, vocab_size, TILE, num_stages=3):
        own = load_logits(raw, begin + tl.arange(0, TILE), vocab_size)
        powers += tl.exp(own - raw_greatest)
    temperature = tl.load(settings + row).to(tl.float32)
    if (temperature > 0.0) & is_finite & (greatest > float("-inf")):
        top_p = tl.load(settings + num_rows + row).to(tl.float32)
        top_k = tl.load(settings + 2 * num_rows + row).to(tl.int32)
        min_p = tl.load(settings + 3 * num_rows + row).to(tl.float32)
        uniform = tl.load(settings + 4 * num_rows + row)
        token = draw(logits, greatest, temperature, top_p, top_k, min_p, uniform, vocab_size, TILE)
    own = tl.load(raw + token).to(tl.float32)
    logprob = own - raw_greatest - tl.log(tl.sum(powers, 0))
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(is_finite, logprob, float("nan")))
    is_possible = tl.load(logits + token).to(tl.float32) > float("-inf")
    tl.store(is_left + row, is_possible.to(tl.uint8))
