# SPDX-License-Identifier: Apache-2.0
"""The attention metadata of one step: cache slots, block tables and sequence lengths.

The tokens of all sequences in a step are packed into one row. A decode is a sequence that adds one
token. The decodes come first, because they are computed together. A prefill is a sequence that adds
several tokens. The prefills follow, one after the other:

    tokens   a | b | c | d d d d d | e e e
             decodes     prefills
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nereid_backend.attention.kv_cache import gather_rows, row_indices
from nereid_backend.attention.layers import LayerWindow


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence that has more than one new token in a step.

    Attributes:
        start: the index of the first new token in the packed row.
        end: the index after the last new token.
        num_cached: the number of tokens of the sequence that precede the new tokens.
        blocks: [1, n] int64, the blocks of the sequence, up to the block of the last new token.
    """

    start: int
    end: int
    num_cached: int
    blocks: Tensor

    @property
    def seq_len(self) -> int:
        """The number of tokens in the sequence, including the new tokens."""
        return self.num_cached + self.end - self.start


@dataclass(frozen=True, slots=True)
class VisibleBlocks:
    """The KV cache blocks that are read for a group of decodes (sequences with one new token).

    Attributes:
        blocks: [num_decodes, n] int64, the block numbers. If a sequence has fewer than n blocks,
            the other elements may contain any block number.
        bias: [num_decodes, 1, 1, n * block_size] float32. It is 0 for each token to which the
            decode attends, and -inf for every other token.
    """

    blocks: Tensor
    bias: Tensor


@dataclass(slots=True)
class DecodeGroup:
    """A group of decodes whose sequences have similar lengths.

    The results of `visible` and `rows` are cached, because several layers have the same window.

    Attributes:
        tokens: [num_decodes] int64, the indices of the new tokens in the packed row. None means
            that the new tokens are the first tokens of the row.
        blocks: [num_decodes, n] int64, the block tables. The padding may contain any block number.
        lens: [num_decodes] int64, the lengths of the sequences, including the new token.
        block_size: the number of tokens in one block.
    """

    tokens: Tensor | None
    blocks: Tensor
    lens: Tensor
    block_size: int
    _visible: dict[LayerWindow, VisibleBlocks] = field(default_factory=dict)
    _rows: dict[tuple[LayerWindow, int], Tensor] = field(default_factory=dict)

    def token_indices(self) -> Tensor:
        """Return the indices of the new tokens in the packed row, [num_decodes] int64."""
        if self.tokens is None:
            return torch.arange(len(self.lens), device=self.lens.device)
        return self.tokens

    def visible(self, window: LayerWindow) -> VisibleBlocks:
        """Return the cache blocks that a layer with the attention window `window` reads."""
        visible = self._visible.get(window)
        if visible is None:
            visible = self._visible[window] = self._compute_visible(window)
        return visible

    def rows(self, window: LayerWindow, num_heads: int) -> Tensor:
        """Return the indices of the cache rows for a layer that has `num_heads` key heads."""
        rows = self._rows.get((window, num_heads))
        if rows is None:
            rows = self._rows[window, num_heads] = gather_rows(
                self.visible(window).blocks, num_heads
            )
        return rows

    def _compute_visible(self, window: LayerWindow) -> VisibleBlocks:
        """Return the blocks to read, and a bias that hides the tokens outside the attention window.

        A decode is a sequence with one new token, which attends to itself and to earlier tokens.

        Example: a block and the window have 4 tokens each. A decode with 11 tokens and the block
        table [8, 3, 6] attends to the positions 7 to 10. The blocks [3, 6] are read, which contain
        the positions 4 to 11. The bias is -inf for the positions 4, 5, 6 and 11, and 0 for others.
        """
        lens = self.lens[:, None]  # [num_decodes, 1], the lengths of the sequences
        first_visible = _first_visible(lens - 1, window)
        blocks, first_block_indices = self._blocks_in_window(first_visible, window)
        num_read_tokens = blocks.shape[1] * self.block_size
        offsets = torch.arange(num_read_tokens, device=blocks.device)
        # For each token in `blocks`, its position in the sequence, [num_decodes, num_read_tokens].
        positions = first_block_indices * self.block_size + offsets
        is_hidden = positions >= lens
        if not window.is_full:
            is_hidden |= positions < first_visible
        # The bias is the same for all heads, and each decode has only one query. Therefore, the
        # dimensions for heads and queries have size 1.
        bias = hiding_bias(is_hidden)[:, None, None, :]
        return VisibleBlocks(blocks, bias)

    def _blocks_in_window(
        self, first_visible: Tensor, window: LayerWindow
    ) -> tuple[Tensor, Tensor]:
        """Return the part of each decode's block table that overlaps the attention window.

        A decode is a sequence with one new token. Example: a block and the window have 4 tokens
        each. A decode with the block table [8, 3, 6] attends to the positions 7 to 10. The result
        is the blocks [3, 6] and the index 1, at which these blocks begin in the block table.

        Args:
            first_visible: [num_decodes, 1], the first position to which each decode attends.
            window: the attention window.

        Returns:
            The block numbers, [num_decodes, n], and the index of the first returned block in the
            block table of each decode, [num_decodes, 1].
        """
        table_width = self.blocks.shape[1]
        width = _max_blocks_in_window(window, self.block_size)
        if width is None or width >= table_width:
            return self.blocks, torch.zeros_like(first_visible)  # the whole block tables
        first_block_indices = first_visible // self.block_size
        # The columns to return from each decode's block table, [num_decodes, width].
        columns = first_block_indices + torch.arange(width, device=self.blocks.device)
        # If the window starts near the end of the block table, the last columns do not exist. Their
        # blocks would contain positions after the end of the sequence, which `_compute_visible`
        # hides. Therefore, any block can be returned for these columns.
        columns.clamp_(max=table_width - 1)
        return self.blocks.gather(1, columns), first_block_indices


@dataclass(slots=True)
class AttentionBatch:
    """The attention metadata of one step. All layers read this metadata.

    Attributes:
        slots: [num_tokens] int64, the cache slot of each token. The keys and values of the token
            are stored in this slot.
        num_decodes: the number of decodes, which are the first tokens of the row.
        decodes: the decodes in groups of similar length. The block tables of a group are padded to
            the same length.
        prefills: the prefills, in the order of their tokens in the row.
        block_size: the number of tokens in one block.
        kernel_metadata: the same metadata in the form that the kernels of a device read. The first
            layer computes this form and stores it here.
        other_groups: the metadata for the other groups of layers (`LayerGroups`). It differs only
            in the slots and blocks. Empty if all layers form one group.
    """

    slots: Tensor
    num_decodes: int
    decodes: list[DecodeGroup]
    prefills: list[Prefill]
    block_size: int
    kernel_metadata: object | None = None
    other_groups: "tuple[AttentionBatch, ...]" = ()
    _row_indices: dict[int, Tensor] = field(default_factory=dict)
    _prefill_masks: dict[tuple[int, LayerWindow], Tensor] = field(default_factory=dict)

    def row_indices(self, num_heads: int) -> Tensor:
        """Return the indices of the cache rows in which this step's keys or values are stored.

        A row of the cache is one vector. `num_heads` is the number of key heads of the layer.
        """
        rows = self._row_indices.get(num_heads)
        if rows is None:
            rows = self._row_indices[num_heads] = row_indices(
                self.slots, num_heads, self.block_size
            )
        return rows

    def prefill_mask(self, index: int, window: LayerWindow) -> Tensor:
        """Return the attention mask of the prefill `prefills[index]`.

        A prefill is a sequence with several new tokens. The earlier tokens are in the cache.

        The mask is [num_new_tokens, seq_len] bool. Element [i, j] is True if the new token i
        attends to the token j of the sequence. The mask is cached, because several layers have the
        same window.
        """
        mask = self._prefill_masks.get((index, window))
        if mask is None:
            prefill = self.prefills[index]
            positions = torch.arange(prefill.seq_len, device=self.slots.device)
            # The new tokens follow the cached tokens. The mask has one row for each new token.
            new_positions = positions[prefill.num_cached :, None]
            is_past_or_self = positions <= new_positions
            is_in_window = positions >= _first_visible(new_positions, window)
            mask = is_past_or_self & is_in_window
            self._prefill_masks[index, window] = mask
        return mask


def hiding_bias(is_hidden: Tensor) -> Tensor:
    """Return the float32 bias that hides keys from attention: -inf for hidden keys, otherwise 0.

    Example: [True, False] gives [-inf, 0]. If the bias is added to the scores, hidden keys get the
    weight 0.
    """
    bias = torch.zeros(is_hidden.shape, device=is_hidden.device)
    return bias.masked_fill_(is_hidden, float("-inf"))


def _first_visible(positions: Tensor, window: LayerWindow) -> Tensor:
    """For the token at each position, return the first position to which this token attends.

    With a sliding window, a token attends to the last `size` tokens, including itself. With chunks,
    a token attends only to tokens of its own chunk. Examples for the positions [2, 9]: a sliding
    window of 4 tokens gives [0, 6], and chunks of 5 tokens give [0, 5].
    """
    first = torch.zeros_like(positions)
    if window.size is not None:
        first = (positions - (window.size - 1)).clamp_(min=0)
    if window.chunk is not None:
        chunk_starts = positions - positions % window.chunk
        first = torch.maximum(first, chunk_starts)
    return first


def _max_blocks_in_window(window: LayerWindow, block_size: int) -> int | None:
    """Return the largest number of blocks that an attention window can overlap.

    The result is None if each token attends to all earlier tokens. Example: blocks and the window
    have 4 tokens each. A window that starts at the last token of a block overlaps 2 blocks.
    """
    if window.limit is None:
        return None
    return 1 + math.ceil((window.limit - 1) / block_size)
