# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The cache write: keys and values of one step and layer, in one launch."""

import triton
import triton.language as tl


@triton.jit
def store_kernel(
    key, value, keys, values, slots,
    key_head_stride, key_token_stride, value_head_stride, value_token_stride,
    NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    KEY_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Copy HEADS heads of one token. Grid: (num_tokens, cdiv(NUM_KV_HEADS, HEADS)).

    A token whose slot is negative is skipped. Last dimensions are contiguous.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    is_head = heads < NUM_KV_HEADS
    cells = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    columns = tl.arange(0, KEY_PADDED)
    mask = is_head[:, None] & (columns < KEY_DIM)[None, :]
    source = key + token * key_token_stride + heads[:, None] * key_head_stride + columns[None, :]
    new = tl.load(source, mask=mask)
    tl.store(keys + cells[:, None] * KEY_DIM + columns[None, :], new, mask=mask)
    columns = tl.arange(0, VALUE_PADDED)
    mask = is_head[:, None] & (columns < VALUE_DIM)[None, :]
    source = (
        value + token * value_token_stride + heads[:, None] * value_head_stride + columns[None, :]
    )
    new = tl.load(source, mask=mask)
    tl.store(values + cells[:, None] * VALUE_DIM + columns[None, :], new, mask=mask)
