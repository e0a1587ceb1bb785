# SPDX-License-Identifier: Apache-2.0
"""What attention must know about one step: where each token's keys and values are.

A packed step is one row of tokens. Requests that add a single token come first, because they can be
computed together; chunks of several tokens follow, one after the other:

    tokens   a | b | c | d d d d d | e e e
             decodes     prefills
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nereid_backend.attention.kv_cache import gather_rows, store_rows
from nereid_backend.attention.layers import Span


@dataclass(frozen=True, slots=True)
class Prefill:
    """Several tokens of one request.

    Attributes:
        start: its first token's index in the packed row.
        end: the index after its last token.
        num_cached: tokens of the request that precede them.
        blocks: [1, n] int64, the request's blocks as far as these tokens reach.
    """

    start: int
    end: int
    num_cached: int
    blocks: Tensor

    @property
    def seq_len(self) -> int:
        """Length of the sequence up to and with these tokens."""
        return self.num_cached + self.end - self.start


@dataclass(frozen=True, slots=True)
class DecodeView:
    """Which blocks the decodes look at, for one span.

    Attributes:
        blocks: [num_decodes, n] int64; what is past a sequence's end is any block.
        bias: [num_decodes, 1, 1, n * block_size] float32, 0 where a token looks, else -inf.
    """

    blocks: Tensor
    bias: Tensor


@dataclass(slots=True)
class Decodes:
    """Requests that add a single token each and have about the same length.

    What is the same for every layer with one span is computed for the first, and kept.

    Attributes:
        tokens: [num_decodes] int64, their indices in the packed row; None: its first ones.
        blocks: [num_decodes, n] int64 block tables, padded with any block.
        lens: [num_decodes] int64 sequence lengths, the new token included.
        block_size: tokens in one block.
    """

    tokens: Tensor | None
    blocks: Tensor
    lens: Tensor
    block_size: int
    _views: dict[Span, DecodeView] = field(default_factory=dict)
    _rows: dict[tuple[Span, int], Tensor] = field(default_factory=dict)

    def view(self, span: Span) -> DecodeView:
        """What they look at."""
        view = self._views.get(span)
        if view is None:
            view = self._views[span] = self._make_view(span)
        return view

    def rows(self, span: Span, num_heads: int) -> Tensor:
        """The view's blocks as rows of the cache of layers with so many heads."""
        rows = self._rows.get((span, num_heads))
        if rows is None:
            rows = self._rows[span, num_heads] = gather_rows(self.view(span).blocks, num_heads)
        return rows

    def _make_view(self, span: Span) -> DecodeView:
        size, lens, blocks = self.block_size, self.lens[:, None], self.blocks
        limit = span.window if span.window is not None else span.chunk
        first = torch.zeros_like(lens)
        if not span.is_full:
            first = _first_seen(lens - 1, span)
        offset = torch.zeros_like(lens)
        # A window of w tokens touches at most this many blocks, wherever it starts.
        most = blocks.shape[1] if limit is None else (limit + size - 2) // size + 1
        if most < blocks.shape[1]:
            offset = torch.div(first, size, rounding_mode="floor")
            columns = offset + torch.arange(most, device=blocks.device)
            blocks = blocks.gather(1, columns.clamp_(max=blocks.shape[1] - 1))
        positions = offset * size + torch.arange(blocks.shape[1] * size, device=blocks.device)
        is_hidden = positions >= lens
        if not span.is_full:
            is_hidden |= positions < first
        bias = torch.zeros(is_hidden.shape, device=blocks.device)
        bias.masked_fill_(is_hidden, float("-inf"))
        return DecodeView(blocks, bias[:, None, None, :])


@dataclass(slots=True)
class AttentionBatch:
    """Metadata of one step, built once and read by every layer.

    Attributes:
        slots: [num_tokens] int64, where each token's key and value go.
        num_decodes: how many tokens at the row's start are decodes.
        decodes: these, in groups of similar length, because a group is padded to its longest.
        prefills: what follows the decodes, in order.
        block_size: tokens in one block.
        device_rows: the same as a device's kernels want it, kept here by their own code.
    """

    slots: Tensor
    num_decodes: int
    decodes: list[Decodes]
    prefills: list[Prefill]
    block_size: int
    device_rows: object | None = None
    _store_rows: dict[int, Tensor] = field(default_factory=dict)
    _prefill_masks: dict[tuple[int, Span], Tensor] = field(default_factory=dict)

    def store_rows(self, num_heads: int) -> Tensor:
        """Where the step's keys and values go in layers with so many heads."""
        rows = self._store_rows.get(num_heads)
        if rows is None:
            rows = self._store_rows[num_heads] = store_rows(self.slots, num_heads, self.block_size)
        return rows

    def prefill_mask(self, index: int, span: Span) -> Tensor:
        """Where the tokens of prefills[index] look: [num_tokens, seq_len] bool."""
        mask = self._prefill_masks.get((index, span))
        if mask is None:
            prefill = self.prefills[index]
            positions = torch.arange(prefill.seq_len, device=self.slots.device)
            queries = positions[prefill.num_cached :, None]
            mask = (positions <= queries) & (positions >= _first_seen(queries, span))
            self._prefill_masks[index, span] = mask
        return mask


def _first_seen(positions: Tensor, span: Span) -> Tensor:
    """The first position that a token at each of these positions sees."""
    first = torch.zeros_like(positions)
    if span.window is not None:
        first = (positions - (span.window - 1)).clamp_(min=0)
    if span.chunk is not None:
        first = torch.maximum(first, positions - positions % span.chunk)
    return first
