# SPDX-License-Identifier: Apache-2.0
"""Builds the arrays that contain the metadata of a step for the GPU kernels.

The arrays are built once for all layers. The block tables of all sequences are concatenated to one
flat table. For each sequence, another array contains the index at which its block table starts. The
values come from the CPU, or from tensors that are already on the GPU, so nothing is read back from
the GPU. `StepLayout` returns the arrays that come from the CPU. They are uploaded together with the
other arrays of the step in one copy.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch, DecodeGroup, Prefill
from nereid_backend.attention.layers import LayerWindow
from nereid_backend.device_transfer import Integers, upload, upload_packed


@dataclass(slots=True)
class DecodeRows:
    """The metadata of the decodes of a step. The order of the decodes is arbitrary.

    Attributes:
        count: the number of decodes.
        bounds: one pair for each group of decodes: the number of sequences, and the largest number
            of tokens of a sequence. These numbers are on the CPU.
        table: [n] int64, the block numbers of all sequences.
        table_starts: [count] int64, the index of each sequence's first block in `table`.
        tokens: [count] int64, the index of each decode's token in the packed row.
        lens: [count] int64, the length of each sequence, including the new token.
        longest: [1] int64, the length of the longest sequence. It is set if the launches are
            captured into a CUDA graph. The graph is replayed for other sequences whose lengths are
            within the bounds. None if the launches are used only for this step.
    """

    count: int
    bounds: list[tuple[int, int]]
    table: Tensor
    table_starts: Tensor
    tokens: Tensor
    lens: Tensor
    longest: Tensor | None = None
    _workspaces: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def for_capture(self, longest: Tensor) -> "DecodeRows":
        """Return a copy of this metadata that can be used in a CUDA graph.

        The copy has no workspaces yet. The kernels therefore allocate their workspaces during the
        capture, in the memory that all graphs share. `longest` is [1] int64, the length of the
        longest sequence, which the graph computes itself.
        """
        return replace(self, longest=longest, _workspaces={})

    def workspace(self, shape: tuple[int, ...]) -> Tensor:
        """Return a float32 tensor for the intermediate results of one layer.

        All layers use the same tensor, one after the other.
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
        prefills: the prefills of the step.
        table: [n] int64, the block numbers of all sequences.
        sequences: [num_sequences, 4] int64; see `triton_prefill.prefill_kernel`.
    """

    prefills: list[Prefill]
    table: Tensor
    sequences: Tensor
    _tiles: dict["Tiling", Tensor] = field(default_factory=dict)

    def tiles(self, tiling: "Tiling") -> Tensor:
        """Return the tiles of all prefills, [num_tiles, 2] int64.

        A tile consists of some new tokens of one prefill. A row of the result contains the index of
        the prefill, and the index of the tile's first token among the new tokens of the prefill.
        """
        tiles = self._tiles.get(tiling)
        if tiles is None:
            prefills = [PrefillShape.of(prefill) for prefill in self.prefills]
            tiles = upload(tile_rows(prefills, tiling), self.table.device)
            self._tiles[tiling] = tiles
        return tiles


@dataclass(slots=True)
class GpuBatch:
    """The metadata of one step in the form that the GPU kernels read.

    Attributes:
        decodes: the decodes; None if the step has no decodes.
        prefills: the prefills; None if the step has no prefills.
        shared: values that attention libraries compute once for all layers of the step.
    """

    decodes: DecodeRows | None
    prefills: PrefillRows | None
    shared: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: AttentionBatch) -> "GpuBatch":
        """Build the metadata of a step. The tensors of `batch` must be on the device."""
        layout = StepLayout(tilings=())
        decode_shapes: list[tuple[int, int]] = []
        for group in batch.decodes:
            num_seqs, num_blocks = group.blocks.shape
            decode_shapes.append((num_seqs, num_blocks))
        prefill_shapes = [PrefillShape.of(prefill) for prefill in batch.prefills]
        arrays = layout.arrays(decode_shapes, prefill_shapes)
        tensors = upload_packed(arrays, batch.slots.device)
        return layout.packed_rows(tensors).unpack(batch)


class Tiling(NamedTuple):
    """Describes how a layer divides the prefills of a step into tiles.

    Layers with the same window and the same kernel have equal tilings.

    Attributes:
        num_queries: the largest number of new tokens in a tile.
        window: the attention window of the layers.
    """

    num_queries: int
    window: LayerWindow


class PrefillShape(NamedTuple):
    """The position and the size of one prefill, as Python integers.

    Attributes:
        start: the index of the first new token in the packed row.
        num_new: the number of new tokens.
        num_cached: the number of cached tokens.
        num_blocks: the number of blocks that contain the cached and the new tokens.
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
    """For each step, builds the arrays that only the GPU kernels read.

    The arrays are uploaded together with the other arrays of the step.
    """

    def __init__(self, tilings: Sequence[Tiling]) -> None:
        """Store the tilings of a model's layers.

        Args:
            tilings: the tilings of a model's layers. If another tiling is needed later, its tiles
                are uploaded separately.
        """
        self._tilings = tuple(dict.fromkeys(tilings))

    def arrays(
        self, decode_shapes: Sequence[tuple[int, int]], prefills: Sequence[PrefillShape]
    ) -> list[Integers]:
        """Return the arrays that must be copied to the GPU. The arrays contain a step's metadata.

        The order of the arrays is the order in which `packed_rows` reads them:

            1. the start of each decode's block table; empty if the step has no decodes
            2. the position and the sizes of each prefill
            3. the tiles of the prefills, one array for each of `tilings`

        A step without prefills has only the first array. A program of the prefill kernel computes a
        tile: some new tokens of one prefill.

        Args:
            decode_shapes: one pair for each group of decodes whose sequences have similar lengths:
                the number of decodes, and the number of blocks in each of their block tables.
            prefills: the prefills.
        """
        arrays = [_table_starts(decode_shapes)]
        if prefills:
            arrays.append(_prefill_positions_and_sizes(prefills))
            arrays += [tile_rows(prefills, tiling) for tiling in self._tilings]
        return arrays

    def packed_rows(self, tensors: Iterable[Tensor]) -> "PackedRows":
        """Return a PackedRows object whose attributes are the given arrays of a step.

        `tensors` contains copies of the arrays that `arrays` returned for this step, in the same
        order.
        """
        table_starts, *prefill_tensors = tensors
        if not prefill_tensors:
            return PackedRows(table_starts)
        sequences, *tiles = prefill_tensors
        return PackedRows(table_starts, sequences, dict(zip(self._tilings, tiles, strict=True)))


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The arrays that `StepLayout.arrays` returned for a step, copied to the device.

    Attributes:
        table_starts: the index at which the block table of each decode starts.
        sequences: the position and the sizes of each prefill; None if the step has no prefills.
        tiles: the tiles of the prefills for each tiling.
    """

    table_starts: Tensor
    sequences: Tensor | None = None
    tiles: dict[Tiling, Tensor] = field(default_factory=dict)

    def unpack(self, batch: AttentionBatch) -> GpuBatch:
        """Combine these arrays with the block tables and the sequence lengths of the same step.

        `batch` contains the block tables and the lengths. The result is the metadata that the GPU
        kernels read.
        """
        decodes = None
        if batch.num_decodes:
            decodes = _decode_rows(batch.decodes, batch.block_size, self.table_starts)
        prefills = None
        if self.sequences is not None:
            block_tables = _concatenated([prefill.blocks for prefill in batch.prefills])
            prefills = PrefillRows(batch.prefills, block_tables, self.sequences, self.tiles)
        return GpuBatch(decodes, prefills)


def _table_starts(decode_shapes: Sequence[tuple[int, int]]) -> Integers:
    """Return the index at which each decode's block table starts in the concatenated block tables.

    The result is [num_decodes] int64. A shape is (number of decodes, number of blocks in a table).
    Example: two groups of decodes have block tables of the shapes (2, 3) and (1, 8). The block
    tables start at [0, 3, 6].
    """
    starts: list[int] = []
    group_start = 0
    for num_decodes, width in decode_shapes:
        group_end = group_start + num_decodes * width
        starts += range(group_start, group_end, width)
        group_start = group_end
    return np.array(starts, dtype=np.int64)


def _prefill_positions_and_sizes(prefills: Sequence[PrefillShape]) -> Integers:
    """Return the position and the sizes of each prefill, as an int64 array [num_prefills, 4].

    The columns contain the index of the first new token, the number of new tokens, the number of
    cached tokens, and the index of the first block in the flat table of all prefills.
    """
    rows = []
    first_block = 0
    for prefill in prefills:
        rows.append((prefill.start, prefill.num_new, prefill.num_cached, first_block))
        first_block += prefill.num_blocks
    return np.array(rows, dtype=np.int64)


def tile_rows(prefills: Sequence[PrefillShape], tiling: Tiling) -> Integers:
    """Divide the new tokens of prefills into tiles, and return an array with one row per tile.

    The result is [num_tiles, 2] int64. All tokens of a tile belong to one sequence. A row contains
    the index of the sequence, and the index of the tile's first token among the new tokens of the
    sequence. Tiles that attend to many keys come first, so that the programs that start last take
    the least time.

    Example: there is one prefill with 100 cached and 40 new tokens, and a tile has 32 tokens. The
    rows are [0, 32] and [0, 0], because the tokens of the second tile attend to more keys.
    """
    tiles: list[tuple[int, int, int]] = []
    for sequence_index, prefill in enumerate(prefills):
        for first_token in range(0, prefill.num_new, tiling.num_queries):
            position = prefill.num_cached + first_token
            num_keys = _num_keys(position, tiling.window)
            tiles.append((num_keys, sequence_index, first_token))
    # Python's sort is stable: tiles with equal numbers of keys keep their order.
    tiles.sort(key=lambda tile: tile[0], reverse=True)
    rows = [(sequence_index, first_token) for _, sequence_index, first_token in tiles]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _decode_rows(groups: list[DecodeGroup], block_size: int, table_starts: Tensor) -> DecodeRows:
    """Concatenate the metadata of all groups of decodes (sequences with one new token).

    The decodes are grouped by length, because the block tables of a group are padded to the same
    length.

    Args:
        groups: the groups of decodes.
        block_size: the number of tokens in one block.
        table_starts: [num_decodes] int64, the index at which each decode's block table starts in
            the concatenated block tables.
    """
    shapes = [group.blocks.shape for group in groups]
    return DecodeRows(
        count=len(table_starts),
        bounds=[(num_seqs, num_blocks * block_size) for num_seqs, num_blocks in shapes],
        table=_concatenated([group.blocks for group in groups]),
        table_starts=table_starts,
        tokens=_concatenated([group.token_indices() for group in groups]),
        lens=_concatenated([group.lens for group in groups]),
    )


def _concatenated(tensors: list[Tensor]) -> Tensor:
    """Flatten the tensors, and concatenate them into one tensor."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _num_keys(position: int, window: LayerWindow) -> int:
    """Estimate the number of keys to which the token at `position` attends."""
    return position if window.limit is None else min(position, window.limit)
