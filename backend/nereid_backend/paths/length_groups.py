# SPDX-License-Identifier: Apache-2.0
"""Divides the decodes of a step into groups of similar lengths, to limit the padding."""

from typing import NamedTuple

import numpy as np

from nereid_backend.device_transfer import Integers

# All decodes of a step that have at most `_SHORT_BLOCKS` blocks are computed together and padded to
# the same number of blocks. Computing the padding takes less time than a second attention call.
_SHORT_BLOCKS = 16
# Longer decodes are computed together if padding multiplies the number of their blocks by at most
# `_MAX_PADDING_FACTOR`.
_MAX_PADDING_FACTOR = 2


class LengthGroup(NamedTuple):
    """A group of decodes with similar lengths. One call computes the attention of the whole group.

    Attributes:
        indices: the indices of these decodes among all decodes of the step. The value is a slice if
            all decodes of the step belong to this group.
        lens: [num_decodes] int64, the number of tokens to which each decode attends.
    """

    indices: Integers | slice
    lens: Integers


def group_by_length(lens: Integers, block_size: int) -> list[LengthGroup]:
    """Divide the decodes of a step into groups of sequences with similar lengths.

    A decode is a sequence that adds one token. In one group, each sequence reads as many blocks of
    the KV cache as the longest sequence; the surplus blocks are padding. Because of the groups,
    padding at most doubles the number of blocks that long sequences read.

    Example: with 16 tokens in a block, the lengths [20, 30, 9000] give the groups [0, 1] and [2],
    because 9000 tokens need many more blocks than 30.

    Args:
        lens: [num_decodes] int64, the number of tokens to which each sequence attends.
        block_size: the number of tokens in one block.
    """
    if not len(lens):
        return []
    num_blocks = (lens + block_size - 1) // block_size
    max_blocks = num_blocks.max()
    num_padded_blocks = len(lens) * max_blocks
    is_padding_small = num_padded_blocks <= _MAX_PADDING_FACTOR * num_blocks.sum()
    if max_blocks <= _SHORT_BLOCKS or is_padding_small:
        all_decodes = slice(len(lens))
        return [LengthGroup(all_decodes, lens)]
    # Each level becomes one group. The lowest level is 4, because `_SHORT_BLOCKS` is 2^4. This
    # level contains every decode with at most `_SHORT_BLOCKS` blocks. At a higher level n, each
    # decode has more than 2^(n-1) and at most 2^n blocks, so the longest decode has less than twice
    # as many blocks as the shortest decode. Example: decodes with 17 to 32 blocks have the level 5.
    levels = np.ceil(np.log2(num_blocks.clip(min=_SHORT_BLOCKS))).astype(np.int64)
    indices_of_groups = [np.flatnonzero(levels == level) for level in np.unique(levels)]
    return [LengthGroup(indices, lens[indices]) for indices in indices_of_groups]
