# SPDX-License-Identifier: Apache-2.0
"""Captures decode steps as CUDA graphs. A graph launches all kernels of a step at once.

If every sequence adds one token, a step runs the same kernels as the previous step, with different
inputs. Such a step is therefore captured once. The inputs of the step are in tensors whose
addresses do not change. Each later step copies its inputs into these tensors, replays the graph,
and copies the logits out.

A graph for n rows can replay every step of at most n rows, for sequences of any length. A step uses
the graph with the next larger number of rows. The surplus rows are padding, and the results of
these rows are finite and are not used. All graphs are captured when the model is loaded, so that no
step waits for a capture. Example: a step of 3 sequences in a graph of 4 rows.

    row       0    1    2  |  3
    token     a    b    c  |  0
    slot      17   40   3  |  -1     the kernel that writes to the cache skips this row
    length    9    1    4  |  1      one token
    blocks    ...          |  null   the null block, whose content is zero
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch, DecodeGroup
from nereid_backend.attention.gpu.gpu_attention import gpu_batch
from nereid_backend.errors import first_line
from nereid_backend.paths.cuda_graphs.cuda_capture import Capture, GraphMemoryError, Replay
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.paths.step_batch import StepBatch

logger = logging.getLogger(__name__)

Run = Callable[[StepBatch], Tensor]

# The largest number of sequences in a captured step. For more sequences, a graph saves no time,
# because the GPU needs longer to run the kernels than the CPU needs to launch them.
_MAX_ROWS = 512
# The smallest batch sizes are 1, 2, 4 and 8. After 8, each batch size is larger than the previous
# batch size by at least `_MIN_DISTANCE`.
_MIN_DISTANCE = 8
# The largest accepted error of the logits that a CUDA graph computes, relative to the standard
# deviation of the logits. The graph runs the same kernels as a step without a graph. Correct logits
# can therefore differ only by rounding, whereas a wrong input causes an error of at least 0.1.
_TOLERANCE = 0.03
# Logits are compared in slices of this number of rows, because a comparison of all rows at once
# would need much memory.
_COMPARED_ROWS = 16
# The number of int64 values in 64 bytes. Tensors that kernels read are aligned to 64 bytes.
_ALIGNED_VALUES = 64 // 8


class DecodeGraphs:
    """Captures decode steps as CUDA graphs, and replays the graphs.

    Attributes:
        failure: the reason why steps are no longer replayed; None if steps are replayed.
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
    ) -> None:
        """Create an object without graphs. The first step of each batch size captures a graph.

        Args:
            run: computes a packed step and returns its logits, [num_logits, vocab_size].
            capture: captures the GPU work of a function call as a CUDA graph.
            sizes: the sizes of the KV cache, and the limits of a step.
            device: the device on which the model runs.
            report: called with a line of text if steps are no longer replayed, or if no more graphs
                are captured.
        """
        self._run = run
        self._capture = capture
        self._sizes = sizes
        self._device = device
        self._report = report
        # The batch sizes (numbers of sequences) for which graphs are captured, in ascending order.
        self._batch_sizes = graph_batch_sizes(sizes.max_num_seqs)
        # Maps batch sizes to captured graphs. A batch size is missing until its graph has been
        # captured.
        self._graphs: dict[int, _DecodeGraph] = {}
        # The tensor into which all graphs write their logits, [largest batch size, vocab_size]. The
        # first capture creates the tensor.
        self._logits: Tensor | None = None
        # Whether further graphs can be captured. False after a capture has failed, or if too little
        # memory is free.
        self._can_capture = True
        # The reason why a capture has failed; None if no capture has failed.
        self.failure: str | None = None
        self.num_captures = 0
        self.num_replays = 0

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture a CUDA graph for each batch size, so that no later step waits for a capture.

        The largest graph comes first, because the smaller graphs can then use its memory.
        """
        for num_rows in reversed(self._batch_sizes):
            if num_rows not in self._graphs:
                self._try_capture(num_rows)

    def forward(self, batch: StepBatch) -> Tensor | None:
        """Compute a step by replaying a CUDA graph. Return the logits, [num_logits, vocab_size].

        If no graph of the right size exists, capture a graph first. The caller owns the returned
        tensor. Return None if the step cannot be replayed; the caller then launches the kernels of
        the step one by one.

        Mutates: the KV cache, unless the result is None.
        """
        num_rows = self.graph_size_for(batch)
        if num_rows is None:
            return None
        graph = self._graphs.get(num_rows) or self._try_capture(num_rows, batch)
        if graph is None:
            return None
        graph.step.fill(batch)
        graph.replay()
        self.num_replays += 1
        # The caller gets a copy of the logits. The next replay of a graph overwrites the original,
        # and may run before the caller has read the logits.
        return graph.logits[: batch.num_logits].clone()

    def graph_size_for(self, batch: StepBatch) -> int | None:
        """Return the batch size of the smallest CUDA graph that can compute a step.

        Return None if a graph cannot compute the step. This is the case if the step is not a decode
        step (one token for each sequence), if the step has too many sequences, or if the logits of
        some tokens are not needed.
        """
        num_decodes = batch.attention.num_decodes
        is_decode_step = num_decodes > 0 and not batch.attention.prefills
        if not is_decode_step or batch.num_logits != num_decodes:
            return None
        for num_rows in self._batch_sizes:  # in ascending order
            if num_rows >= num_decodes:
                return num_rows
        return None

    def _try_capture(self, num_rows: int, batch: StepBatch | None = None) -> "_DecodeGraph | None":
        """Capture a CUDA graph for `num_rows` sequences, and store the graph.

        Return None if too little memory is free, or if this capture or an earlier capture has
        failed. After a failed capture, no graph is used, so the kernels of decode steps are
        launched one by one. If only the memory is too small, the existing graphs are still used.

        Args:
            num_rows: the number of sequences.
            batch: the inputs of the captured step; None for a step of padding.
        """
        if not self._can_capture:
            return None
        try:
            graph = self._capture_and_check(num_rows, batch)
        except GraphMemoryError as error:
            self._can_capture = False
            self._report(f"No more CUDA graphs are captured: {error}.")
            return None
        except Exception as error:  # noqa: BLE001 - the model's code can raise any exception
            self._can_capture = False
            self.failure = first_line(error)
            self._graphs.clear()
            self._logits = None  # Free the tensor into which the graphs wrote their logits.
            self._report(
                f"CUDA graphs are off, because a step could not be captured: {self.failure}"
            )
            return None
        self._graphs[num_rows] = graph
        self.num_captures += 1
        return graph

    def _capture_and_check(self, num_rows: int, batch: StepBatch | None) -> "_DecodeGraph":
        """Capture a CUDA graph, check the logits that the graph computes, and return the graph.

        Args:
            num_rows: the number of rows of the graph, one for each sequence.
            batch: the inputs of a step; None if all rows are padding.

        Raises:
            GraphMemoryError: if too little memory is free.
            Exception: of any class, if the step cannot be captured.
        """
        step = StaticStep(num_rows, self._sizes, self._device)
        if batch is not None:
            step.fill(batch)
        # Run the step without a graph, to get the expected logits. This run also compiles kernels
        # that are not compiled yet. The replay of the graph repeats the step. This is harmless,
        # because the replay stores the same keys and values in the KV cache as this run.
        expected = self._run(step.batch())
        logits = self._logits_like(expected)

        def compute_step() -> None:
            logits.copy_(self._run(step.batch()))

        replay = self._capture(compute_step)
        logits.zero_()  # Only a replay can write the expected logits.
        replay()
        num_compared = num_rows if batch is None else batch.num_logits  # leave out the padding
        check_replay(logits[:num_compared], expected[:num_compared])
        return _DecodeGraph(step, replay, logits)

    def _logits_like(self, expected: Tensor) -> Tensor:
        """Return the tensor for a graph's logits. It has the shape and data type of `expected`.

        All graphs share the memory of these tensors.
        """
        if self._logits is None:
            self._logits = expected.new_empty(self._batch_sizes[-1], expected.shape[1])
        return self._logits[: len(expected)]


class _DecodeGraph(NamedTuple):
    """A captured CUDA graph.

    Attributes:
        step: the tensors from which the graph reads its inputs.
        replay: replays the graph.
        logits: the tensor into which the graph writes its logits, [rows, vocab_size]. All graphs
            share the memory of this tensor.
    """

    step: "StaticStep"
    replay: Replay
    logits: Tensor


class StaticStep:
    """The inputs of a decode step, in tensors whose addresses do not change."""

    def __init__(self, num_rows: int, sizes: Sizes, device: torch.device) -> None:
        """Create the input tensors of a decode step, filled with padding.

        A CUDA graph reads its inputs always from the same addresses. The inputs of each step are
        therefore copied into these tensors.

        Args:
            num_rows: the number of sequences, which is also the number of tokens.
            sizes: the sizes of the KV cache. Its blocks are numbered from 0, and the block with the
                number `num_blocks` is the null block, whose content is always zero.
            device: the device on which the tensors are created.
        """
        self._num_rows = num_rows
        self._block_size = sizes.block_size
        self._null_block = sizes.num_blocks
        # The token id, position, cache slot and length of a padding sequence, [4, 1]. Nothing is
        # stored for the slot -1.
        self._padding = torch.tensor([[0], [0], [-1], [1]], device=device)
        # The token ids, positions, cache slots and lengths of all sequences, [4, num_rows]. The
        # four tensors are the rows of `_inputs`, so they share its memory.
        self._inputs = _repeat_column(self._padding, num_rows)
        self._token_ids, self._positions, self._slots, self._lens = self._inputs
        # The block table of each sequence in the batch, [rows, max_blocks].
        max_blocks = math.ceil(sizes.max_model_len / sizes.block_size)
        self._table = torch.full((num_rows, max_blocks), self._null_block, device=device)
        # Each sequence has one new token, and the logits of each new token are needed.
        self._logits_index = torch.arange(num_rows, device=device)
        # The attention metadata for the GPU kernels, which refers to the tensors above. A graph
        # must not contain a copy from the CPU to the GPU. The creation of the metadata contains
        # such a copy, so create the metadata here, before any graph is captured.
        self._kernel_metadata = gpu_batch(self._attention_metadata())

    def fill(self, batch: StepBatch) -> None:
        """Copy a step's inputs into the tensors. Fill the remaining elements with padding.

        The step has at most as many tokens as this object has rows.
        """
        num_tokens = batch.num_logits  # A decode step needs the logits of each of its tokens.
        # `_token_ids`, `_positions`, `_slots` and `_lens` are the rows of `_inputs`, so this
        # assignment pads all four tensors.
        self._inputs[:, num_tokens:] = self._padding
        self._table.fill_(self._null_block)
        self._token_ids[:num_tokens].copy_(batch.input_ids[0])
        self._positions[:num_tokens].copy_(batch.position_ids[0])
        self._slots[:num_tokens].copy_(batch.attention.slots)
        # Sequences of similar lengths form a group. The block tables of a group have as many
        # columns as its longest sequence has blocks.
        for group in batch.attention.decodes:
            table = self._table[:, : group.blocks.shape[1]]
            rows = group.tokens  # Row i belongs to token i, because each sequence has one token.
            if rows is None:  # The group contains all sequences, in the order of the rows.
                self._lens[:num_tokens].copy_(group.lens)
                table[:num_tokens].copy_(group.blocks)
            else:
                self._lens.index_copy_(0, rows, group.lens)
                table.index_copy_(0, rows, group.blocks)

    def batch(self) -> StepBatch:
        """Return the inputs of one forward pass. The caller can capture the pass as a CUDA graph.

        The inputs are the tensors of this object. A replay of the captured run therefore reads the
        values that `fill` has copied into these tensors.
        """
        attention = self._attention_metadata()
        decodes = self._kernel_metadata.decodes
        assert decodes is not None, "each row is a decode (a sequence with one new token)"
        # This operation becomes part of the graph. Each replay therefore computes the length of the
        # longest sequence in the replayed step. The kernels read all other data about the sequences
        # from the tensors of this object.
        longest = self._lens.amax(0, keepdim=True)
        attention.kernel_metadata = replace(
            self._kernel_metadata, decodes=decodes.for_capture(longest)
        )
        return StepBatch(
            input_ids=self._token_ids[None],
            position_ids=self._positions[None],
            attention=attention,
            logits_index=self._logits_index,
            num_logits=self._num_rows,
        )

    def _attention_metadata(self) -> AttentionBatch:
        """Return attention metadata that refers to the tensors of this object."""
        # All decodes form one group. `tokens` is None, which means that decode i belongs to row i.
        decodes = DecodeGroup(
            tokens=None, blocks=self._table, lens=self._lens, block_size=self._block_size
        )
        return AttentionBatch(
            slots=self._slots,
            num_decodes=self._num_rows,
            decodes=[decodes],
            prefills=[],
            block_size=self._block_size,
        )


def _repeat_column(column: Tensor, count: int) -> Tensor:
    """Repeat a column [n, 1] `count` times, so that each row starts at an aligned address.

    Triton would compile a second kernel for unaligned addresses. Example: the column [[0], [-1]]
    and the count 3 give [[0, 0, 0], [-1, -1, -1]].
    """
    num_aligned = math.ceil(count / _ALIGNED_VALUES) * _ALIGNED_VALUES
    return column.repeat(1, num_aligned)[:, :count]


def graph_batch_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes for which CUDA graphs are captured.

    The sizes are 1, 2, 4, 8, 16, 24, ..., 64, 80, 96, 112, 128, 160, and so on. A step uses the
    graph with the next larger number of rows, and fills the rest with padding. Steps of more than
    24 rows have at most a quarter of padding. Smaller steps can have more padding, but they spend
    more time on reading weights than on multiplying them.

    Args:
        max_rows: the largest number of rows of a step.
    """
    largest_needed = min(max_rows, _MAX_ROWS)
    counts = [1]
    while counts[-1] < largest_needed:
        last = counts[-1]
        if last < _MIN_DISTANCE:
            distance = last
        else:
            # the largest power of two that is not greater than `last`
            power_of_two = 1 << (last.bit_length() - 1)
            distance = max(_MIN_DISTANCE, power_of_two // 4)
        counts.append(last + distance)
    return counts


def check_replay(replayed: Tensor, expected: Tensor) -> None:
    """Check that a CUDA graph computes the same logits as the step without a graph.

    Args:
        replayed: [n, vocab_size].
        expected: [n, vocab_size].

    Raises:
        UnfitError: if the logits differ.
    """
    difference = _difference(replayed, expected)
    # `not <=` also refuses NaN.
    if not difference <= _TOLERANCE:
        raise UnfitError(
            "the logits of a replayed CUDA graph differ from the logits of the same step without a "
            f"graph: the relative error is {difference:.2g}, but the limit is {_TOLERANCE:g}"
        )


def _difference(replayed: Tensor, expected: Tensor) -> float:
    """Compare two tensors of logits. Return the largest of the relative errors of all rows.

    The relative error of a row is the root mean square of the differences, divided by the standard
    deviation of the expected logits. Rows with NaN or infinity are ignored, because their sequences
    have already failed. If a row contains NaN or infinity in only one of the tensors, return NaN.
    """
    largest_error = 0.0
    # The rows are compared in slices, because float32 copies of all rows would need much memory.
    replayed_slices = torch.split(replayed, _COMPARED_ROWS)
    expected_slices = torch.split(expected, _COMPARED_ROWS)
    for replayed_slice, expected_slice in zip(replayed_slices, expected_slices, strict=True):
        is_finite = expected_slice.isfinite().all(-1)
        if not torch.equal(is_finite, replayed_slice.isfinite().all(-1)):
            return math.nan
        if not is_finite.any():
            continue
        replayed_rows = replayed_slice[is_finite].float()
        expected_rows = expected_slice[is_finite].float()
        row_differences = (replayed_rows - expected_rows).square().mean(-1).sqrt()
        row_errors = row_differences / expected_rows.std(-1)
        largest_error = max(largest_error, float(row_errors.max()))
    return largest_error
