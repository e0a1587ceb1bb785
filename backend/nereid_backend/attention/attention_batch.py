# SPDX-License-Identifier: Apache-2.0
"""The attention metadata of one step: cache slots, block tables and sequence lengths.

The tokens of all sequences in a step are packed into one row. A decode is a sequence that adds one
token. The decodes come first, because they are computed together. A prefill is a sequence that adds
several tokens. The prefills follow, one after the other:

    tokens   a | b | c | d d d d d | e e e
             decodes     prefills
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nereid_backend.attention.kv_cache import gather_rows, store_rows
from nereid_backend.attention.layers import LayerWindow


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence that adds more than one token in a step.

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
    """The KV cache blocks that a group of decodes reads for one attention window.

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

    def visible(self, window: LayerWindow) -> VisibleBlocks:
        """Return the blocks that the decodes read for an attention window."""
        visible = self._visible.get(window)
        if visible is None:
            visible = self._visible[window] = self._compute_visible(window)
        return visible

    def rows(self, window: LayerWindow, num_heads: int) -> Tensor:
        """Return the cache rows that a layer with `num_heads` key heads reads."""
        rows = self._rows.get((window, num_heads))
        if rows is None:
            rows = self._rows[window, num_heads] = gather_rows(
                self.visible(window).blocks, num_heads
            )
        return rows

    def _compute_visible(self, window: LayerWindow) -> VisibleBlocks:
        """Return the blocks that the decodes read, and the bias for the positions in these blocks.

        Example: a block and the window have 4 tokens each. A decode with 11 tokens and the block
        table [8, 3, 6] attends to the positions 7 to 10. The blocks [3, 6] are read, which contain
        the positions 4 to 11. The bias is -inf for the positions 4, 5, 6 and 11.
        """
        size = self.block_size
        lens = self.lens[:, None]
        blocks = self.blocks
        limit = window.size if window.size is not None else window.chunk
        # For each decode, the first position to which it attends, [num_decodes, 1].
        first_positions = torch.zeros_like(lens)
        if not window.is_full:
            first_positions = _first_visible(lens - 1, window)
        # For each decode, the index of the first block that is read, [num_decodes, 1].
        first_blocks = torch.zeros_like(lens)
        # A window of `limit` tokens overlaps at most `max_blocks` blocks.
        max_blocks = blocks.shape[1] if limit is None else (limit + size - 2) // size + 1
        if max_blocks < blocks.shape[1]:
            first_blocks = torch.div(first_positions, size, rounding_mode="floor")
            columns = first_blocks + torch.arange(max_blocks, device=blocks.device)
            blocks = blocks.gather(1, columns.clamp_(max=blocks.shape[1] - 1))
        # For each token that is read, its position in the sequence, [num_decodes, n * block_size].
        positions = first_blocks * size + torch.arange(blocks.shape[1] * size, device=blocks.device)
        is_hidden = positions >= lens
        if not window.is_full:
            is_hidden |= positions < first_positions
        bias = torch.zeros(is_hidden.shape, device=blocks.device)
        bias.masked_fill_(is_hidden, float("-inf"))
        return VisibleBlocks(blocks, bias[:, None, None, :])


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
        device_rows: the same metadata in the form that the kernels of a device read. The first
            layer computes this form and stores it here.
        other_groups: the metadata for the other groups of layers (`LayerGroups`). It differs only
            in the slots and blocks. Empty if all layers form one group.
    """

    slots: Tensor
    num_decodes: int
    decodes: list[DecodeGroup]
    prefills: list[Prefill]
    block_size: int
    device_rows: object | None = None
    other_groups: "tuple[AttentionBatch, ...]" = ()
    _store_rows: dict[int, Tensor] = field(default_factory=dict)
    _prefill_masks: dict[tuple[int, LayerWindow], Tensor] = field(default_factory=dict)

    def store_rows(self, num_heads: int) -> Tensor:
        """Return the cache rows into which a layer writes the keys or values of this step.

        `num_heads` is the number of key heads of the layer.
        """
        rows = self._store_rows.get(num_heads)
        if rows is None:
            rows = self._store_rows[num_heads] = store_rows(self.slots, num_heads, self.block_size)
        return rows

    def prefill_mask(self, index: int, window: LayerWindow) -> Tensor:
        """Return the attention mask of the prefill `prefills[index]`.

        The mask is [num_new_tokens, seq_len] bool. Element [i, j] is True if the new token i
        attends to the token j of the sequence.
        """
        mask = self._prefill_masks.get((index, window))
        if mask is None:
            prefill = self.prefills[index]
            positions = torch.arange(prefill.seq_len, device=self.slots.device)
            queries = positions[prefill.num_cached :, None]
            mask = (positions <= queries) & (positions >= _first_visible(queries, window))
            self._prefill_masks[index, window] = mask
        return mask


def _first_visible(positions: Tensor, window: LayerWindow) -> Tensor:
    """Return the first position to which each token attends. `positions` are the tokens' positions.

    Example: with a window of 4 tokens, the positions [2, 9] give [0, 6].
    """
    first = torch.zeros_like(positions)
    if window.size is not None:
        first = (positions - (window.size - 1)).clamp_(min=0)
    if window.chunk is not None:
        first = torch.maximum(first, positions - positions % window.chunk)
    return first
