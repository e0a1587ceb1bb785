# SPDX-License-Identifier: Apache-2.0
"""Builds arrays with the metadata of a step for the GPU kernels, once for all layers.

The block tables of all sequences are one flat list of block numbers. Another list contains the
index at which the block table of each sequence starts. All values come from the CPU or from tensors
that are already on the GPU, so nothing is read back from the GPU. `StepLayout` adds the values from
the CPU to the arrays that a step uploads with one copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch, DecodeGroup, Prefill
from nereid_backend.attention.layers import LayerWindow
from nereid_backend.device_transfer import Integers, upload, upload_packed


@dataclass(slots=True)
class DecodeRows:
    """The metadata of a step's decodes, in any order.

    Attributes:
        count: the number of decodes.
        bounds: for each group, (number of sequences, largest number of tokens of a sequence). These
            numbers are on the CPU.
        table: [n] int64, the block numbers of all sequences.
        table_starts: [count] int64, the index in `table` of each sequence's first block.
        tokens: [count] int64, the index of each decode in the packed step.
        lens: [count] int64, the length of each sequence, including the new token.
        longest: [1] int64, the length of the longest sequence. It is set if the launches are
            captured into a CUDA graph, which is replayed for sequences of any length up to the
            bounds. None if the launches are only for this step.
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
        """Return float32 memory for the intermediate results of one layer.

        All layers use the same memory in turn.
        """
        memory = self._workspaces.get(shape)
        if memory is None:
            memory = torch.empty(math.prod(shape), dtype=torch.float32, device=self.lens.device)
            self._workspaces[shape] = memory
        return memory


@dataclass(slots=True)
class PrefillRows:
    """The metadata of a step's prefills.

    Attributes:
        prefills: the prefills of the AttentionBatch.
        table: [n] int64, the block numbers of all sequences.
        sequences: [num_sequences, 4] int64; see `triton_prefill.prefill_kernel`.
    """

    prefills: list[Prefill]
    table: Tensor
    sequences: Tensor
    _tiles: dict["Tiling", Tensor] = field(default_factory=dict)

    def tiles(self, tiling: "Tiling") -> Tensor:
        """Return the tiles of all prefills, [num_tiles, 2] int64; see `tile_rows`."""
        uploaded = self._tiles.get(tiling)
        if uploaded is None:
            prefills = [PrefillShape.of(prefill) for prefill in self.prefills]
            uploaded = upload(tile_rows(prefills, tiling), self.table.device)
            self._tiles[tiling] = uploaded
        return uploaded


@dataclass(slots=True)
class GpuBatch:
    """The metadata of one step in the form that the GPU kernels read.

    Attributes:
        decodes: the decodes; None if the step has none.
        prefills: the prefills; None if the step has none.
        shared: values that attention libraries compute once for all layers of the step.
    """

    decodes: DecodeRows | None
    prefills: PrefillRows | None
    shared: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: AttentionBatch) -> "GpuBatch":
        """Build the metadata of a step whose tensors are on the device already."""
        layout = StepLayout(())
        arrays = layout.arrays(
            [(group.blocks.shape[0], group.blocks.shape[1]) for group in batch.decodes],
            [PrefillShape.of(prefill) for prefill in batch.prefills],
        )
        return PackedRows(layout, upload_packed(arrays, batch.slots.device)).unpack(batch)


class Tiling(NamedTuple):
    """Describes how a layer divides the prefills of a step into tiles.

    Layers with the same window and the same kernel have equal tilings.

    Attributes:
        num_queries: the largest number of new tokens of a tile.
        window: the attention window of the layers.
    """

    num_queries: int
    window: LayerWindow


class PrefillShape(NamedTuple):
    """The sizes of one prefill, which are known on the CPU.

    Attributes:
        start: the index of the first new token in the packed row.
        num_new: the number of new tokens.
        num_cached: the number of cached tokens.
        num_blocks: the number of blocks of all tokens.
    """

    start: int
    num_new: int
    num_cached: int
    num_blocks: int

    @classmethod
    def of(cls, prefill: Prefill) -> "PrefillShape":
        """Return the sizes of a prefill."""
        num_new = prefill.end - prefill.start
        return cls(prefill.start, num_new, prefill.num_cached, prefill.blocks.numel())


class StepLayout:
    """Builds the arrays of a step that only the GPU kernels read.

    The arrays are uploaded together with the other arrays of the step.
    """

    def __init__(self, tilings: Sequence[Tiling]) -> None:
        """Store the tilings of a model's layers.

        Args:
            tilings: the tilings of a model's layers. Tiles for any other tiling are uploaded when
                they are needed.
        """
        self._tilings = tuple(dict.fromkeys(tilings))

    def arrays(
        self, decode_shapes: Sequence[tuple[int, int]], prefills: Sequence[PrefillShape]
    ) -> list[Integers]:
        """Return the arrays of a step that must be uploaded.

        If there are decodes, the first array is the index at which each decode's block table starts
        in the flat table of all decodes. Example: two groups of decodes have block tables of the
        shapes [2, 3] and [1, 8]. The block tables start at [0, 3, 6].

        If there are prefills, the next array is the description of the sequences (see
        `triton_prefill.prefill_kernel`), followed by the tiles for each tiling.

        Args:
            decode_shapes: the shape of the block table of each group of decodes.
            prefills: the prefills.
        """
        arrays = []
        if decode_shapes:
            arrays.append(_table_starts(decode_shapes))
        if prefills:
            arrays.append(_sequence_rows(prefills))
            arrays += [tile_rows(prefills, tiling) for tiling in self._tilings]
        return arrays

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        """The tilings whose tiles are uploaded together with the other arrays of a step."""
        return self._tilings


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The arrays of a step on the device, after the upload.

    Attributes:
        layout: the layout that created the arrays.
        tensors: the arrays of `StepLayout.arrays` on the device.
    """

    layout: StepLayout
    tensors: list[Tensor]

    def unpack(self, batch: AttentionBatch) -> GpuBatch:
        """Return the metadata of a step, built from the uploaded arrays.

        The tensors are in the order of `StepLayout.arrays`.
        """
        tensors = iter(self.tensors)
        decodes = None
        prefills = None
        if batch.num_decodes:
            decodes = _decodes(batch.decodes, batch.block_size, next(tensors))
        if batch.prefills:
            sequences = next(tensors)
            table = _concatenated([prefill.blocks for prefill in batch.prefills])
            tiles = {tiling: next(tensors) for tiling in self.layout.tilings}
            prefills = PrefillRows(batch.prefills, table, sequences, tiles)
        return GpuBatch(decodes, prefills)


def _table_starts(decode_shapes: Sequence[tuple[int, int]]) -> Integers:
    """Return where the block table of each decode starts in the flat table.

    The result is [num_decodes] int64.
    """
    starts: list[int] = []
    offset = 0
    for count, width in decode_shapes:
        starts += range(offset, offset + count * width, width)
        offset += count * width
    return np.array(starts, dtype=np.int64)


def _sequence_rows(prefills: Sequence[PrefillShape]) -> Integers:
    """Return one row with four numbers for each prefill, [num_prefills, 4] int64.

    The columns are the first new token, the numbers of new and cached tokens, and the index of the
    first block in the flat table of all prefills.
    """
    rows = []
    first_block = 0
    for prefill in prefills:
        rows.append((prefill.start, prefill.num_new, prefill.num_cached, first_block))
        first_block += prefill.num_blocks
    return np.array(rows, dtype=np.int64)


def tile_rows(prefills: Sequence[PrefillShape], tiling: Tiling) -> Integers:
    """Divide the new tokens of prefills into tiles, and return one row for each tile.

    The result is [num_tiles, 2] int64.

    The tokens of a tile belong to one sequence. Each row contains the index of the sequence and the
    index of the tile's first new token. Tiles that attend to the most keys come first, so that the
    programs that start last end soon.

    Example: a prefill of 40 new tokens after 100 cached tokens gives the rows [0, 32] and [0, 0] if
    a tile has 32 tokens.
    """
    tiles = [
        (_num_keys(prefill.num_cached + begin, tiling.window), number, begin)
        for number, prefill in enumerate(prefills)
        for begin in range(0, prefill.num_new, tiling.num_queries)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    rows = [value for _, number, begin in tiles for value in (number, begin)]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _decodes(groups: list[DecodeGroup], block_size: int, table_starts: Tensor) -> DecodeRows:
    """Build the metadata of a step's decodes.

    Args:
        groups: the groups of decodes. A group whose `tokens` are None contains all decodes, which
            are the first tokens of the step.
        block_size: tokens in one block.
        table_starts: [num_decodes] int64; see `DecodeRows`.
    """
    device = groups[0].lens.device
    tokens = [
        torch.arange(len(group.lens), device=device) if group.tokens is None else group.tokens
        for group in groups
    ]
    return DecodeRows(
        count=len(table_starts),
        bounds=[(group.blocks.shape[0], group.blocks.shape[1] * block_size) for group in groups],
        table=_concatenated([group.blocks for group in groups]),
        table_starts=table_starts,
        tokens=_concatenated(tokens),
        lens=_concatenated([group.lens for group in groups]),
    )


def _concatenated(tensors: list[Tensor]) -> Tensor:
    """Return the numbers of all tensors in one flat tensor."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _num_keys(position: int, window: LayerWindow) -> int:
    """Estimate how many keys the token at a position attends to."""
    return position if window.limit is None else min(position, window.limit)
