# SPDX-License-Identifier: Apache-2.0
"""The metadata of a step in the form that the GPU kernels read, built once for all layers.

The block tables of all sequences are one flat list of block numbers. Another list contains the
index at which the block table of each sequence starts. All values come from the CPU or from tensors
that are on the GPU already, so nothing is read back from the GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch, DecodeGroup, Prefill
from nereid_backend.attention.layers import LayerWindow


@dataclass(slots=True)
class DecodeRows:
    """The decodes of a step, in any order.

    Attributes:
        count: the number of decodes.
        bounds: for each group, (number of sequences, largest number of tokens of a sequence). The
            CPU knows these numbers.
        table: [n] int64, the block numbers of all sequences.
        table_starts: [count] int64, the index in `table` of each sequence's first block.
        tokens: [count] int64, the index of each decode in the packed step.
        lens: [count] int64, the length of each sequence, including the new token.
        longest: [1] int64, the length of the longest sequence, if the launches are captured for
            sequences of any length up to the bounds; None if they are only for this step.
    """

    count: int
    bounds: list[tuple[int, int]]
    table: Tensor
    table_starts: Tensor
    tokens: Tensor
    lens: Tensor
    longest: Tensor | None = None
    _workspaces: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def workspace(self, shape: tuple[int, ...]) -> Tensor:
        """Return float32 memory for intermediate results.

        All layers use the same memory in turn.
        """
        memory = self._workspaces.get(shape)
        if memory is None:
            memory = torch.empty(math.prod(shape), dtype=torch.float32, device=self.lens.device)
            self._workspaces[shape] = memory
        return memory


@dataclass(slots=True)
class PrefillRows:
    """The prefills of a step.

    Attributes:
        prefills: the prefills of the AttentionBatch.
        table: [n] int64, the block numbers of all sequences.
        sequences: [num_sequences, 4] int64; see `triton_prefill.prefill_kernel`.
    """

    prefills: list[Prefill]
    table: Tensor
    sequences: Tensor
    _tiles: dict[tuple[int, LayerWindow], Tensor] = field(default_factory=dict)

    def tiles(self, num_queries: int, window: LayerWindow) -> Tensor:
        """Return the new tokens in tiles of at most `num_queries` tokens, [num_tiles, 2] int64.

        The tokens of a tile belong to one sequence. Each row is the index of the sequence and the
        first new token of the tile. Tiles that attend to the most keys come first, so that the last
        programs to start are short.
        """
        uploaded = self._tiles.get((num_queries, window))
        if uploaded is None:
            tiles = [
                (_num_keys(prefill.num_cached + begin, window), number, begin)
                for number, prefill in enumerate(self.prefills)
                for begin in range(0, prefill.end - prefill.start, num_queries)
            ]
            tiles.sort(key=lambda tile: -tile[0])
            rows = [value for _, number, begin in tiles for value in (number, begin)]
            uploaded = upload(rows, self.table.device).view(-1, 2)
            self._tiles[num_queries, window] = uploaded
        return uploaded


@dataclass(slots=True)
class GpuBatch:
    """A step as the GPU kernels read it.

    Attributes:
        decodes: the decodes; None if the step has none.
        prefills: the prefills; None if the step has none.
    """

    decodes: DecodeRows | None
    prefills: PrefillRows | None

    @classmethod
    def of(cls, batch: AttentionBatch) -> "GpuBatch":
        """Build the metadata of a step."""
        decodes = _decodes(batch.decodes, batch.block_size) if batch.num_decodes else None
        return cls(decodes, _prefills(batch.prefills) if batch.prefills else None)


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """Return integers as an int64 tensor on the device, without waiting for the device."""
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        # A copy from pinned memory is only queued. With other memory, the CPU may have to wait.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _decodes(groups: list[DecodeGroup], block_size: int) -> DecodeRows:
    """Build the metadata of decodes."""
    starts: list[int] = []
    bounds: list[tuple[int, int]] = []
    offset = 0
    for group in groups:
        count, width = group.blocks.shape
        starts += range(offset, offset + count * width, width)
        bounds.append((count, width * block_size))
        offset += count * width
    device = groups[0].lens.device
    tokens = [
        torch.arange(len(group.lens), device=device) if group.tokens is None else group.tokens
        for group in groups
    ]
    return DecodeRows(
        count=len(starts),
        bounds=bounds,
        table=_concatenated([group.blocks for group in groups]),
        table_starts=upload(starts, device),
        tokens=_concatenated(tokens),
        lens=_concatenated([group.lens for group in groups]),
    )


def _prefills(prefills: list[Prefill]) -> PrefillRows:
    """Build the metadata of prefills."""
    rows: list[int] = []
    offset = 0
    for prefill in prefills:
        rows += (prefill.start, prefill.end - prefill.start, prefill.num_cached, offset)
        offset += prefill.blocks.numel()
    table = _concatenated([prefill.blocks for prefill in prefills])
    return PrefillRows(prefills, table, upload(rows, table.device).view(-1, 4))


def _concatenated(tensors: list[Tensor]) -> Tensor:
    """Return all numbers of some tensors as one flat tensor."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _num_keys(position: int, window: LayerWindow) -> int:
    """Return about how many keys a token at a position attends to."""
    return position if window.limit is None else min(position, window.limit)
