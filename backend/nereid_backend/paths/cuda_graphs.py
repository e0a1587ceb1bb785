# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of decode steps: one launch replaces the launches of all kernels.

A step in which every sequence adds one token runs the same kernels as the step before, with
different numbers. It is therefore captured once, with its inputs in tensors that keep their
addresses. Each later step copies its inputs into these tensors, replays the graph, and copies the
logits out.

A graph serves all steps of one shape: a number of rows and a width of the block tables. A step uses
the next larger shape. The surplus rows are padding, whose results are finite and are not used.
Example: a step of 3 sequences in a graph of 4 rows.

    row       0    1    2  |  3
    token     a    b    c  |  0
    slot      17   40   3  |  -1     the kernel that writes to the cache skips this row
    length    9    1    4  |  1      one token
    blocks    ...          |  null   the null block, whose content is zero
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch, DecodeGroup
from nereid_backend.attention.gpu.gpu_attention import gpu_batch
from nereid_backend.paths.cuda_capture import Capture, GraphMemoryError, Replay
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.paths.step_batch import StepBatch

logger = logging.getLogger(__name__)

Run = Callable[[StepBatch], Tensor]

# The largest number of rows of a graph. In larger steps, the GPU works longer than the launches
# take, so a graph saves nothing.
_MAX_ROWS = 512
# Block tables have at least the width of this many tokens, so that shorter sequences share graphs.
_MIN_TOKENS = 512
# The largest number of graphs. Each takes some megabytes in addition to the memory that all share.
_MAX_GRAPHS = 64
# This many steps of a shape run without a graph before one is captured. A capture takes as long as
# a few steps.
_PATIENCE = 1
# The largest accepted difference, relative to the spread of the logits. A replay runs the same
# kernels, so only the order of sums may differ. A wrong input causes a difference of at least 0.1.
_TOLERANCE = 0.03
# The number of rows that are compared at once.
_COMPARED_ROWS = 16
# The number of int64 values in 64 bytes, the alignment of tensors that kernels read.
_ALIGNED_VALUES = 64 // 8


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The sizes that all steps of one graph have in common.

    Attributes:
        rows: the number of tokens.
        width: the number of blocks in a row of the block table.
        skew: how much longer the longest sequence is than the average; see `bounds`.
    """

    rows: int
    width: int
    skew: int

    def bounds(self, block_size: int) -> list[tuple[int, int]]:
        """Return the lengths for which attention kernels divide sequences into parts.

        The kernels derive the parts from the longest length and the sum of all lengths. Each pair
        of the result is a number of sequences and their largest number of tokens. Without skew, all
        sequences may have the largest length. Otherwise all sequences except one are shorter by a
        factor of 4 ** skew. Example: 8 rows of 64 blocks of 16 tokens with skew 1 give [(1, 1024),
        (7, 256)].
        """
        longest = self.width * block_size
        others = max(block_size, longest >> 2 * self.skew)
        return [(1, longest), (self.rows - 1, others)] if self.rows > 1 else [(1, longest)]


class DecodeGraphs:
    """Captures and replays the decode steps of one path as CUDA graphs.

    Attributes:
        failure: the reason why steps are no longer replayed; None if they are.
        num_captures: the number of captured graphs.
        num_replays: the number of replayed steps.
    """

    def __init__(
        self,
        run: Run,
        capture: Capture,
        sizes: Sizes,
        device: torch.device,
        report: Callable[[str], None] = logger.warning,
        *,
        patience: int = _PATIENCE,
    ) -> None:
        """Start without graphs.

        Args:
            run: computes a packed step and returns its logits, [num_logits, vocab_size].
            capture: captures a graph; see `capture_on`.
            sizes: the sizes of the path.
            device: the device of the path.
            report: receives a line of text if steps are no longer replayed, or no more graphs are
                captured.
            patience: the number of steps of a shape that run without a graph before one is
                captured.
        """
        self._run = run
        self._capture = capture
        self._sizes = sizes
        self._device = device
        self._report = report
        self._patience = patience
        self._row_counts = row_counts(sizes.max_num_seqs)
        self._graphs: OrderedDict[GraphShape, tuple[StaticStep, Replay]] = OrderedDict()
        self._num_seen: dict[GraphShape, int] = {}
        self._logits: Tensor | None = None
        self._is_full = False
        self.failure: str | None = None
        self.num_captures = 0
        self.num_replays = 0

    def forward(self, batch: StepBatch) -> Tensor | None:
        """Replay a step and return its logits, [num_logits, vocab_size].

        The caller owns the returned tensor. Return None if the step cannot be replayed; the caller
        then runs it kernel by kernel.

        Mutates: the KV cache, unless the result is None.
        """
        shape = self.shape_of(batch)
        if shape is None or self.failure is not None:
            return None
        graph = self._graphs.get(shape) or self._try_capture(shape, batch)
        if graph is None or self._logits is None:
            return None
        self._graphs.move_to_end(shape)
        step, replay = graph
        step.fill(batch)
        replay()
        self.num_replays += 1
        # The next replay overwrites these logits, and may be queued before the caller reads them.
        return self._logits[: batch.num_logits].clone()

    def shape_of(self, batch: StepBatch) -> GraphShape | None:
        """Return the shape of the graph for a step.

        Return None if the step is not a decode step, if some tokens need no logits, or if it has
        too many rows.
        """
        attention = batch.attention
        num_decodes = attention.num_decodes
        is_decode_step = num_decodes > 0 and not attention.prefills
        if not is_decode_step or batch.num_logits != num_decodes:
            return None
        rows = next((rows for rows in self._row_counts if rows >= num_decodes), None)
        if rows is None:
            return None
        table_shapes = [tuple(group.blocks.shape) for group in attention.decodes]
        widest = max(width for _, width in table_shapes)
        num_blocks = sum(num_rows * width for num_rows, width in table_shapes)
        skew = int(math.log2(num_decodes * widest / num_blocks)) // 2
        return GraphShape(rows, self._graph_width(widest), skew)

    def _graph_width(self, num_blocks: int) -> int:
        """Return the width of the block table of a graph for sequences of up to `num_blocks`.

        The width is the next power of two, but it contains at least _MIN_TOKENS tokens, and not
        more than the longest possible sequence needs.
        """
        block_size = self._sizes.block_size
        min_width = -(-_MIN_TOKENS // block_size)
        max_width = -(-self._sizes.max_model_len // block_size)
        power_of_two = 1 << (num_blocks - 1).bit_length()
        return max(num_blocks, min(max(power_of_two, min_width), max_width))

    def _try_capture(
        self, shape: GraphShape, batch: StepBatch
    ) -> "tuple[StaticStep, Replay] | None":
        """Capture a graph for a step.

        Return None if the shape is too rare so far, if memory is short, or if the capture fails.
        """
        if self._is_full:
            return None
        self._num_seen[shape] = self._num_seen.get(shape, 0) + 1
        if self._num_seen[shape] <= self._patience:
            return None
        try:
            graph = self._make(shape, batch)
        except GraphMemoryError as error:
            self._is_full = True
            self._report(f"No more CUDA graphs are captured: {error}.")
            return None
        except Exception as error:  # noqa: BLE001
            # Boundary: a capture runs the model's code and can fail in any way. The step then runs
            # kernel by kernel.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.failure = reason
            self._graphs.clear()
            self._logits = None
            self._report(f"CUDA graphs are off, because a step could not be captured: {reason}")
            return None
        self._graphs[shape] = graph
        self.num_captures += 1
        while len(self._graphs) > _MAX_GRAPHS:
            dropped, _ = self._graphs.popitem(last=False)
            del self._num_seen[dropped]
        return graph

    def _make(self, shape: GraphShape, batch: StepBatch) -> "tuple[StaticStep, Replay]":
        """Capture a graph with the inputs of a step, and compare its logits with those of the step.

        Raises:
            GraphMemoryError: if too little memory is free.
            Exception: of any class, if the step cannot be captured.
        """
        step = StaticStep(shape, self._sizes.block_size, self._sizes.num_blocks, self._device)
        step.fill(batch)
        # This run also compiles kernels that are not compiled yet. It stores the same keys and
        # values as the replays.
        expected = self._run(step.batch())
        if self._logits is None:
            self._logits = expected.new_empty(self._row_counts[-1], expected.shape[1])
        logits = self._logits[: shape.rows]

        def work() -> None:
            logits.copy_(self._run(step.batch()))

        replay = self._capture(work)
        logits.zero_()
        replay()
        difference = _difference(logits[: batch.num_logits], expected[: batch.num_logits])
        if not difference <= _TOLERANCE:
            raise UnfitError(
                f"the logits of a replay differ from those of its step by {difference:.2g} of "
                f"their spread, but the limit is {_TOLERANCE:g}"
            )
        return step, replay


class StaticStep:
    """The inputs of a decode step, in tensors that keep their addresses."""

    def __init__(
        self, shape: GraphShape, block_size: int, null_block: int, device: torch.device
    ) -> None:
        """Create the inputs of a step that contains only padding.

        Args:
            shape: the shape of the graph.
            block_size: tokens in one block.
            null_block: the block whose content is always zero.
            device: where the tensors are created.
        """
        self._shape = shape
        self._block_size = block_size
        self._null_block = null_block
        # The token, position, slot and length of a padding row. `_numbers` is [4, rows].
        self._padding = torch.tensor([[0], [0], [-1], [1]], device=device)
        # Each row of `_numbers` starts at an aligned address, because Triton compiles a second
        # kernel for unaligned pointers.
        num_aligned = -(-shape.rows // _ALIGNED_VALUES) * _ALIGNED_VALUES
        self._numbers = self._padding.repeat(1, num_aligned)[:, : shape.rows]
        self._table = torch.full((shape.rows, shape.width), null_block, device=device)
        self._index = torch.arange(shape.rows, device=device)
        # This uploads the layout of the batch, which is not possible during a capture.
        self._rows = gpu_batch(self._attention())
        assert self._rows.decodes is not None
        self._rows.decodes.bounds = shape.bounds(block_size)

    def fill(self, batch: StepBatch) -> None:
        """Copy the inputs of a step into the tensors, and fill the other rows with padding."""
        count = batch.num_logits
        tokens, positions, slots, lens = self._numbers
        self._numbers[:, count:] = self._padding
        self._table.fill_(self._null_block)
        tokens[:count].copy_(batch.input_ids[0])
        positions[:count].copy_(batch.position_ids[0])
        slots[:count].copy_(batch.attention.slots)
        for group in batch.attention.decodes:
            columns = self._table[:, : group.blocks.shape[1]]
            if group.tokens is None:
                lens[:count].copy_(group.lens)
                columns[:count].copy_(group.blocks)
            else:
                lens.index_copy_(0, group.tokens, group.lens)
                columns.index_copy_(0, group.tokens, group.blocks)

    def batch(self) -> StepBatch:
        """Return the inputs for one run, without the results that an earlier run cached."""
        tokens, positions, _, _ = self._numbers
        attention = self._attention()
        assert self._rows.decodes is not None
        # Without workspaces of earlier runs, intermediate results use the memory that graphs share.
        decodes = replace(self._rows.decodes, _workspaces={})
        attention.device_rows = replace(self._rows, decodes=decodes)
        return StepBatch(tokens[None], positions[None], attention, self._index, self._shape.rows)

    def _attention(self) -> AttentionBatch:
        """Return the attention batch, which reads from the tensors of this step."""
        _, _, slots, lens = self._numbers
        decodes = DecodeGroup(None, self._table, lens, self._block_size)
        return AttentionBatch(slots, self._shape.rows, [decodes], [], self._block_size)


def row_counts(max_rows: int) -> list[int]:
    """Return the numbers of rows for which graphs are captured: 1, 2, 4, 8, 16, 24, 32 and so on.

    The distance is 8 up to 64 rows. Above, it is a quarter of the largest power of two that is not
    greater than the number. Above 24 rows, padding is then at most a quarter of the
    rows. In smaller steps it can be more, but they spend more time on reading weights than on
    multiplying them.

    Args:
        max_rows: the largest number of rows of a step.
    """
    counts = [1, 2, 4, 8]
    while counts[-1] < min(max_rows, _MAX_ROWS):
        last = counts[-1]
        counts.append(last + max(8, (1 << (last.bit_length() - 1)) // 4))
    # Keep the smallest number that is not below `max_rows`, and all smaller ones.
    return [count for i, count in enumerate(counts) if i == 0 or counts[i - 1] < max_rows]


def _difference(replayed: Tensor, expected: Tensor) -> float:
    """Return the largest difference between the logits of two rows, relative to their spread.

    The difference of a row is the root mean square of the errors, divided by the standard deviation
    of the expected logits. Rows in which neither side is finite are ignored, because their
    sequences failed before. Return NaN if only one side of a row is finite.
    """
    worst = 0.0
    # The rows are compared in slices, because float32 copies of all rows would need much memory.
    replayed_parts = torch.split(replayed, _COMPARED_ROWS)
    expected_parts = torch.split(expected, _COMPARED_ROWS)
    for actual, expected_part in zip(replayed_parts, expected_parts, strict=True):
        is_finite = expected_part.isfinite().all(-1)
        if not torch.equal(is_finite, actual.isfinite().all(-1)):
            return math.nan
        if is_finite.any():
            actual_rows = actual[is_finite].float()
            expected_rows = expected_part[is_finite].float()
            errors = (actual_rows - expected_rows).square().mean(-1).sqrt() / expected_rows.std(-1)
            worst = max(worst, float(errors.max()))
    return worst
