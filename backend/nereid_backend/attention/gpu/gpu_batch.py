# SPDX-License-Identifier: Apache-2.0
"""What the GPU kernels must know of a step, laid out on the device once for all layers.

Block tables are one flat row of block numbers; each sequence knows where its own begin. Everything
comes from what the host knows or from tensors that are on the device already: nothing is read back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch, Decodes, Prefill
from nereid_backend.attention.layers import Span


@dataclass(slots=True)
class DecodeRows:
    """The decodes of a step, in any order.

    Attributes:
        count: how many.
        bounds: (sequences, most tokens of each), group by group; known to the host.
        table: [n] int64, block numbers.
        table_starts: [count] int64, where each sequence's begin.
        tokens: [count] int64, rows of the packed step.
        lens: [count] int64, tokens of each sequence, the new one included.
    """

    count: int
    bounds: list[tuple[int, int]]
    table: Tensor
    table_starts: Tensor
    tokens: Tensor
    lens: Tensor
    _workspaces: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def workspace(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for intermediate results, float32; layers use the same, one after the other."""
        found = self._workspaces.get(shape)
        if found is None:
            found = torch.empty(math.prod(shape), dtype=torch.float32, device=self.lens.device)
            self._workspaces[shape] = found
        return found


@dataclass(slots=True)
class PrefillRows:
    """The sequences of a step that get several tokens.

    Attributes:
        prefills: as the step has them.
        table: [n] int64, block numbers.
        sequences: [num_sequences, 4] int64; see `triton_prefill.prefill_kernel`.
    """

    prefills: list[Prefill]
    table: Tensor
    sequences: Tensor
    _tiles: dict[tuple[int, Span], Tensor] = field(default_factory=dict)

    def tiles(self, num_queries: int, span: Span) -> Tensor:
        """The step's tokens in tiles of at most num_queries of one sequence, [num_tiles, 2] int64.

        Tiles that look at most keys come first: what is left for the end is short.
        """
        found = self._tiles.get((num_queries, span))
        if found is None:
            tiles = [
                (_work(prefill.num_cached + begin, span), number, begin)
                for number, prefill in enumerate(self.prefills)
                for begin in range(0, prefill.end - prefill.start, num_queries)
            ]
            tiles.sort(key=lambda tile: -tile[0])
            rows = [value for _, number, begin in tiles for value in (number, begin)]
            found = upload(rows, self.table.device).view(-1, 2)
            self._tiles[num_queries, span] = found
        return found


@dataclass(slots=True)
class GpuBatch:
    """A step as the kernels read it; None where it has no such tokens."""

    decodes: DecodeRows | None
    prefills: PrefillRows | None

    @classmethod
    def of(cls, batch: AttentionBatch) -> "GpuBatch":
        """Lay out a step."""
        decodes = _decodes(batch.decodes, batch.block_size) if batch.num_decodes else None
        return cls(decodes, _prefills(batch.prefills) if batch.prefills else None)


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """Integers as an int64 tensor on the device, without waiting for it."""
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        # From pinned memory the copy is only queued; from other memory the host may wait.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _decodes(groups: list[Decodes], block_size: int) -> DecodeRows:
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
        table=_joined([group.blocks for group in groups]),
        table_starts=upload(starts, device),
        tokens=_joined(tokens),
        lens=_joined([group.lens for group in groups]),
    )


def _prefills(prefills: list[Prefill]) -> PrefillRows:
    rows: list[int] = []
    offset = 0
    for prefill in prefills:
        rows += (prefill.start, prefill.end - prefill.start, prefill.num_cached, offset)
        offset += prefill.blocks.numel()
    table = _joined([prefill.blocks for prefill in prefills])
    return PrefillRows(prefills, table, upload(rows, table.device).view(-1, 4))


def _joined(tensors: list[Tensor]) -> Tensor:
    """All of them as one flat row."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _work(position: int, span: Span) -> int:
    """About how many keys a token at a position looks at."""
    limits = [limit for limit in (span.window, span.chunk) if limit is not None]
    return min([position, *limits])
