# SPDX-License-Identifier: Apache-2.0
"""Steps of decodes as captured graphs: one launch in place of a thousand.

A step in which every request adds one token runs the same kernels as the one before, only with
other numbers. So it is captured once with its numbers in tensors that stay where they are, and
replayed from then on: the step's numbers are copied into these tensors, the graph runs, and its
logits are copied out.

A graph serves all steps of one shape: so many rows, block tables so wide. A step takes the next
larger shape, and its surplus rows are padding that computes something finite and touches nobody:

    row       0    1    2  |  3
    token     a    b    c  |  0
    slot      17   40   3  |  -1     the cache write skips it
    length    9    1    4  |  1      one token
    blocks    ...          |  null   the block that stays zero
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch, Decodes
from nereid_backend.attention.gpu.gpu_attention import gpu_batch
from nereid_backend.paths.cuda_capture import Capture, NoRoomError, Replay
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.paths.step_batch import StepBatch

logger = logging.getLogger(__name__)

Run = Callable[[StepBatch], Tensor]

# A step of more rows has enough to do for launching it to be hidden.
_MOST_ROWS = 512
# Least tokens that tables are wide: shorter sequences share their graphs.
_LEAST_TOKENS = 512
# Graphs that are kept. Each takes some megabytes besides the memory that all share.
_MOST_GRAPHS = 64
# A step is run as it is until its shape has come so often. A capture takes as long as a few steps.
_PATIENCE = 1
# Of the spread of the logits. A replay repeats the very kernels, so only sums whose order is open
# may differ; a wrong number somewhere gives 0.1 and more.
_TOLERANCE = 0.03
_COMPARED_ROWS = 16
# Integers of 8 bytes in a cache line.
_ALIGNED = 64 // 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What steps must have in common to be replays of one graph.

    Attributes:
        rows: tokens.
        width: blocks in a row of the block table.
        skew: how far the longest sequence stands out; see `bounds`.
    """

    rows: int
    width: int
    skew: int

    def bounds(self, block_size: int) -> list[tuple[int, int]]:
        """By which attention cuts sequences into parts: (sequences, most tokens of each).

        Parts follow from the longest sequence and the sum of all. With equal lengths the sum is
        rows times the longest; 4 ** skew times less than that otherwise.
        """
        longest = self.width * block_size
        others = max(block_size, longest >> 2 * self.skew)
        return [(1, longest), (self.rows - 1, others)] if self.rows > 1 else [(1, longest)]


class DecodeGraphs:
    """Captures and replays the steps of one path.

    Attributes:
        failure: why steps are no longer replayed; None: they are.
        num_captures: graphs that were made.
        num_replays: steps that were replays.
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
        """Capture nothing so far.

        Args:
            run: computes a packed step; logits [num_logits, vocab_size].
            capture: see `capture_on`.
            sizes: of the path.
            device: of the path.
            report: gets a line when steps are not replayed any more, or no more shapes are.
            patience: so many steps of a shape are run as they are before one is captured.
        """
        self._run = run
        self._capture = capture
        self._sizes = sizes
        self._device = device
        self._report = report
        self._patience = patience
        self._row_counts = row_counts(sizes.max_num_seqs)
        self._graphs: OrderedDict[Shape, tuple[StaticStep, Replay]] = OrderedDict()
        self._num_seen: dict[Shape, int] = {}
        self._logits: Tensor | None = None
        self._is_full = False
        self.failure: str | None = None
        self.num_captures = 0
        self.num_replays = 0

    def forward(self, batch: StepBatch) -> Tensor | None:
        """A step's logits, [num_logits, vocab_size], the caller's to keep; None: run it as it is.

        Mutates: the KV cache, as running the step does, unless it returns None.
        """
        shape = self.shape_of(batch)
        if shape is None or self.failure is not None:
            return None
        found = self._graphs.get(shape) or self._try_capture(shape, batch)
        if found is None or self._logits is None:
            return None
        self._graphs.move_to_end(shape)
        step, replay = found
        step.fill(batch)
        replay()
        self.num_replays += 1
        # The next replay writes there, and may be queued before anybody has read these.
        return self._logits[: batch.num_logits].clone()

    def shape_of(self, batch: StepBatch) -> Shape | None:
        """The shape that a step takes; None where it is not one of decodes that all want logits."""
        attention = batch.attention
        count = attention.num_decodes
        if attention.prefills or not count or batch.num_logits != count:
            return None
        rows = next((n for n in self._row_counts if n >= count), None)
        if rows is None:
            return None
        widths = [(group.blocks.shape[0], group.blocks.shape[1]) for group in attention.decodes]
        widest = max(width for _, width in widths)
        total = sum(number * width for number, width in widths)
        size = self._sizes.block_size
        width = max(1 << (widest - 1).bit_length(), -(-_LEAST_TOKENS // size))
        width = max(widest, min(width, -(-self._sizes.max_model_len // size)))
        return Shape(rows, width, int(math.log2(count * widest / total)) // 2)

    def _try_capture(self, shape: Shape, batch: StepBatch) -> "tuple[StaticStep, Replay] | None":
        if self._is_full:
            return None
        number = self._num_seen[shape] = self._num_seen.get(shape, 0) + 1
        if number <= self._patience:
            return None
        try:
            found = self._graphs[shape] = self._make(shape, batch)
        except NoRoomError as error:
            self._is_full = True
            self._report(f"no more steps are captured: {error}")
            return None
        except Exception as error:  # noqa: BLE001 - models' code fails to be captured in any way
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.failure = reason
            self._graphs.clear()
            self._logits = None
            self._report(f"steps are launched kernel by kernel: {reason}")
            return None
        self.num_captures += 1
        while len(self._graphs) > _MOST_GRAPHS:
            dropped, _ = self._graphs.popitem(last=False)
            del self._num_seen[dropped]
        return found

    def _make(self, shape: Shape, batch: StepBatch) -> "tuple[StaticStep, Replay]":
        """Capture a shape by a step that has it, and see that a replay computes the same.

        Raises:
            NoRoomError: too little memory is free.
            Exception: of any kind, where it cannot be captured.
        """
        step = StaticStep(shape, self._sizes.block_size, self._sizes.num_blocks, self._device)
        step.fill(batch)
        # Compiles what is not compiled, too. It stores the same keys and values as replays do.
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
            raise UnfitError(f"a replay differs from its step by {difference:.2g} of the logits")
        return step, replay


class StaticStep:
    """The numbers of a step of decodes, in tensors that stay where they are."""

    def __init__(
        self, shape: Shape, block_size: int, null_block: int, device: torch.device
    ) -> None:
        self._shape = shape
        self._block_size = block_size
        self._null_block = null_block
        # Tokens, positions, slots and lengths: [4, rows].
        self._padding = torch.tensor([[0], [0], [-1], [1]], device=device)
        # Each from an aligned address on: kernels are compiled anew for others.
        room = -(-shape.rows // _ALIGNED) * _ALIGNED
        self._numbers = self._padding.repeat(1, room)[:, : shape.rows]
        self._table = torch.full((shape.rows, shape.width), null_block, device=device)
        self._index = torch.arange(shape.rows, device=device)
        # Uploads what kernels must know of the layout, which a capture must not.
        self._rows = gpu_batch(self._attention())
        assert self._rows.decodes is not None
        self._rows.decodes.bounds = shape.bounds(block_size)

    def fill(self, batch: StepBatch) -> None:
        """Put a step's numbers in place, padding behind them. Nothing of earlier steps stays."""
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
        """The step, for one run: nothing in it was computed from earlier numbers."""
        tokens, positions, _, _ = self._numbers
        attention = self._attention()
        assert self._rows.decodes is not None
        # Memory for intermediate results is then a graph's own, which graphs share.
        decodes = replace(self._rows.decodes, _workspaces={})
        attention.device_rows = replace(self._rows, decodes=decodes)
        return StepBatch(tokens[None], positions[None], attention, self._index, self._shape.rows)

    def _attention(self) -> AttentionBatch:
        _, _, slots, lens = self._numbers
        decodes = Decodes(None, self._table, lens, self._block_size)
        return AttentionBatch(slots, self._shape.rows, [decodes], [], self._block_size)


def row_counts(most: int) -> list[int]:
    """The numbers of rows that graphs have, for steps of up to so many: 1 2 4 8 16 24 32 ...

    Steps of 8 up to 64, of a quarter of the power of two below from there on: padding is at most a
    quarter, and where it is that much a step reads weights longer than it multiplies.
    """
    counts = [1, 2, 4, 8]
    while counts[-1] < min(most, _MOST_ROWS):
        last = counts[-1]
        counts.append(last + max(8, (1 << (last.bit_length() - 1)) // 4))
    return [n for i, n in enumerate(counts) if i == 0 or counts[i - 1] < most]


def _difference(found: Tensor, expected: Tensor) -> float:
    """Root mean square over the logits' spread, of the worst row; NaN where only one is finite.

    Rows that are not finite in both say nothing: their request went wrong before.
    """
    worst = 0.0
    # In slices, lest numbers of 32 bits take memory that only graphs left free.
    parts = (torch.split(found, _COMPARED_ROWS), torch.split(expected, _COMPARED_ROWS))
    for ours, theirs in zip(*parts, strict=True):
        is_finite = theirs.isfinite().all(-1)
        if not torch.equal(is_finite, ours.isfinite().all(-1)):
            return math.nan
        if is_finite.any():
            ours, theirs = ours[is_finite].float(), theirs[is_finite].float()
            errors = (ours - theirs).square().mean(-1).sqrt() / theirs.std(-1)
            worst = max(worst, float(errors.max()))
    return worst
