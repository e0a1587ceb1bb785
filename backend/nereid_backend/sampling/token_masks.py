# SPDX-License-Identifier: Apache-2.0
"""Token masks. A mask marks the tokens that a request may generate next.

A mask has one bit for each token of the vocabulary. A word contains 32 bits. A bit of 1 means that
the token is allowed. Guides fill their masks while the model computes. If filling takes long, other
threads fill the masks. Then the masks are applied to the logits of all positions at once.
"""

import logging
import math
import os
import time
from collections import abc
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from nereid_backend.core.grammar import Guide
from nereid_backend.core.sequence import Sequence
from nereid_backend.device_transfer import upload
from nereid_backend.errors import EngineError
from nereid_backend.grammar.vocabulary import TokenMask, TokenMasks, mask_width
from nereid_backend.sampling.draft_verification import Position

logger = logging.getLogger(__name__)

# Other threads fill the masks of a step only if one thread would need at least `_WORTH_A_THREAD_S`
# seconds. Otherwise, the engine's thread fills the masks after it has launched the forward pass. A
# GPU is still computing the forward pass at that time. On a CPU, other threads would compete for
# the Python interpreter, which would cost more time than they save.
_WORTH_A_THREAD_S = 5e-4

# The smallest number of sequences in one job for a thread. Starting a job takes about as long as
# filling a few masks.
_SEQUENCES_PER_JOB = 8
# The largest number of threads that fill token masks.
_MAX_THREADS = 4
# The weight of the newest step in the moving average `_seconds_per_mask`.
_NEWEST_WEIGHT = 0.2

# A table that converts the bytes of a mask. Each byte of a mask belongs to 8 logits. For each value
# of the byte, the table contains the 8 float32 numbers (0 or -inf) that are added to these logits.
# One item of the table contains 8 numbers, so numpy copies 8 numbers at once.
_BIAS_OF_BYTE = np.ascontiguousarray(
    np.where(
        np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
        np.float32(0),
        np.float32(-np.inf),
    )
).view("V32")[:, 0]


class MaskingGuide(Guide, Protocol):
    """The state of a request's grammar. The methods write token masks for the sampler."""

    def fill(self, row: TokenMask) -> bool:
        """Write the mask of the next token into `row`, [ceil(vocab_size / 32)] int32.

        Returns:
            False if every token is allowed. In this case, `row` is not written.
        """

    @staticmethod
    def fill_all(
        guides: "abc.Sequence[MaskingGuide]", rows: TokenMasks, places: abc.Sequence[int]
    ) -> list[bool]:
        """Fill the token masks of several guides of this class in one call.

        Args:
            guides: the guides.
            rows: the buffer of masks, [n, ceil(vocab_size / 32)] int32.
            places: for each guide, the index of its row in `rows`.

        Returns:
            The result of `fill` for each guide: False if every token is allowed.
        """

    def forced(self) -> list[int]:
        """Return the tokens that the grammar requires next, or [] if the grammar requires none."""


def guide_of(sequence: Sequence) -> MaskingGuide | None:
    """Return the guide of a request as a `MaskingGuide`; None if the request has no guide."""
    return cast(MaskingGuide | None, sequence.guide)


@dataclass(slots=True)
class StepMasks:
    """The token masks of one step.

    Attributes:
        by_position: maps the index of a position to the mask of the position. Every token is
            allowed at positions without an entry.
        errors: the reasons for the guides that failed. The key of a reason is the index of the
            request's first position.
        seconds: the CPU time in seconds that was used to fill the masks.
    """

    by_position: dict[int, TokenMask] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def of_slice(self, rows: slice) -> dict[int, TokenMask]:
        """Return the masks of the positions from `rows.start` to `rows.stop` - 1.

        The key of a mask is the index of its position minus `rows.start`. Example: the positions 3
        and 9 have masks. The slice 8:12 gives the mask of position 9 with the key 1.
        """
        return {
            index - rows.start: mask
            for index, mask in self.by_position.items()
            if rows.start <= index < rows.stop
        }


class Job(Protocol):
    """A job that fills some token masks, either in another thread or when `result` is called."""

    def result(self) -> StepMasks:
        """Wait until the masks are filled, and return the masks."""


@dataclass(frozen=True, slots=True)
class _FillJob:
    """Fills the masks of some sequences when `result` is called.

    Attributes:
        groups: one list for each sequence. The list contains the indices of its positions.
        positions: all positions of the step.
        buffer: [n, ceil(vocab_size / 32)] int32, the memory for the masks of the step.
        rows: maps the index of a position to the row of `buffer` that contains the mask.
    """

    groups: abc.Sequence[abc.Sequence[int]]
    positions: abc.Sequence[Position]
    buffer: TokenMasks
    rows: dict[int, int]

    def result(self) -> StepMasks:
        """Fill and return the masks.

        The first position of a sequence follows its last known token, and the other positions
        follow draft tokens (guesses). The masks of the first positions are filled together for all
        sequences. The masks of the other positions are then filled for one sequence at a time.
        """
        masks = StepMasks()
        started = time.thread_time()
        for guide_class, indices in self._first_positions_by_class().items():
            try:
                self._fill_first(guide_class, indices, masks)
            except Exception:  # noqa: BLE001 - `_fill_alone` reports the error
                # A guide has failed. Fill the masks one by one to find this guide. Some masks have
                # been filled already; they are filled a second time.
                for index in indices:
                    self._fill_alone(guide_class, index, masks)
        for group in self.groups:
            has_drafts = len(group) > 1
            has_failed = group[0] in masks.errors
            if has_drafts and not has_failed:
                self._fill_drafts(group, masks)
        masks.seconds = time.thread_time() - started
        return masks

    def _first_positions_by_class(self) -> dict[type[MaskingGuide], list[int]]:
        """Group the first positions of all sequences by the classes of their guides.

        Each class fills the masks of all its guides in one call (see MaskingGuide.fill_all).
        """
        first_positions: dict[type[MaskingGuide], list[int]] = {}
        for group in self.groups:
            guide = guide_of(self.positions[group[0]].sequence)
            assert guide is not None
            first_positions.setdefault(type(guide), []).append(group[0])
        return first_positions

    def _fill_first(
        self, guide_class: type[MaskingGuide], indices: abc.Sequence[int], masks: StepMasks
    ) -> None:
        """Fill the mask of the first position of several sequences in one call.

        Args:
            guide_class: the class of the guides at these positions.
            indices: the indices of the positions.
            masks: the result. Mutated. Positions at which every token is allowed get no entry.
        """
        guides = [cast(MaskingGuide, self.positions[index].sequence.guide) for index in indices]
        rows = [self.rows[index] for index in indices]
        are_limited = guide_class.fill_all(guides, self.buffer, rows)
        for index, row, is_limited in zip(indices, rows, are_limited, strict=True):
            if is_limited:
                masks.by_position[index] = self.buffer[row]

    def _fill_alone(self, guide_class: type[MaskingGuide], index: int, masks: StepMasks) -> None:
        """Fill the mask of one position, or store the error if the guide fails."""
        try:
            self._fill_first(guide_class, [index], masks)
        except Exception as error:  # noqa: BLE001
            # The grammar library may raise any exception. Only the request with this grammar ends
            # with an error.
            self._store_error(index, error, masks)

    def _fill_drafts(self, group: abc.Sequence[int], masks: StepMasks) -> None:
        """Fill the masks of all positions of one sequence except the first position.

        Each of these positions follows a draft token, which is a guess for the next token. Stop at
        the first draft token that the grammar does not allow. The mask of the position before this
        token forbids the token, so the tokens that are sampled at later positions are discarded.
        """
        first_index, *draft_indices = group
        sequence = self.positions[first_index].sequence
        try:
            # Advance a copy of the guide, because the draft tokens may be rejected.
            guide = cast(MaskingGuide, cast(Guide, sequence.guide).fork())
            for index in draft_indices:
                draft_token = self.positions[index].drafts[-1]
                if not _accepts(guide, draft_token, sequence):
                    return
                mask = self.buffer[self.rows[index]]
                is_limited = guide.fill(mask)
                if is_limited:
                    masks.by_position[index] = mask
        except Exception as error:  # noqa: BLE001
            # The grammar library may raise any exception. Only the request with this grammar ends
            # with an error.
            self._store_error(first_index, error, masks)

    def _store_error(self, index: int, error: Exception, masks: StepMasks) -> None:
        """Log the error of a guide, and store it in `masks.errors[index]`."""
        request_id = self.positions[index].sequence.request_id
        logger.error("The grammar of request %s failed.", request_id, exc_info=error)
        masks.errors[index] = f"The grammar of the request failed: {type(error).__name__}: {error}"


def _accepts(guide: MaskingGuide, token: int, sequence: Sequence) -> bool:
    """Return whether a guide accepts `token`. If the guide accepts the token, advance the guide.

    A stop token ends the output, so the result is False for a stop token. Mutates: guide.
    """
    if token in sequence.stop_token_ids:
        return False
    try:
        guide.accept([token])
    except EngineError:
        return False
    return True


class MaskFiller:
    """Fills the token masks of each step. If filling takes long, several threads are used."""

    def __init__(self) -> None:
        self._max_jobs = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._max_jobs, thread_name_prefix="nereid-masks")
        self._buffer: TokenMasks = np.zeros((0, 0), np.int32)
        # The time that is needed to fill one mask, as a moving average in seconds.
        self._seconds_per_mask = 1e-3

    def start(self, positions: abc.Sequence[Position], vocab_size: int) -> abc.Sequence[Job]:
        """Start to fill the masks of some positions. `join` waits for the masks.

        A mask marks the tokens that the grammar of a request allows at a position.

        If filling takes long, the sequences are divided into jobs, and threads run the jobs.
        Example: on a machine with 4 CPUs, 40 sequences with a grammar are divided into 4 jobs of 10
        sequences. Otherwise, there is one job, which runs when `join` is called. All masks are
        views of one buffer. The next call of `start` overwrites the buffer.
        """
        guided = [i for i, position in enumerate(positions) if position.sequence.guide is not None]
        if not guided:
            return []
        self._extend_buffer(len(guided), mask_width(vocab_size))
        groups = _by_sequence(guided, positions)
        rows = {index: row for row, index in enumerate(guided)}
        expected_seconds = len(guided) * self._seconds_per_mask
        if expected_seconds < _WORTH_A_THREAD_S:
            return [_FillJob(groups, positions, self._buffer, rows)]
        num_jobs = max(1, min(self._max_jobs, len(groups) // _SEQUENCES_PER_JOB))
        sequences_per_job = math.ceil(len(groups) / num_jobs)
        jobs = [
            _FillJob(groups[start : start + sequences_per_job], positions, self._buffer, rows)
            for start in range(0, len(groups), sequences_per_job)
        ]
        return [self._threads.submit(job.result) for job in jobs]

    def join(self, jobs: Iterable[Job]) -> StepMasks:
        """Wait for the jobs that `start` returned, and return the masks of the step.

        Also update the average time for one mask. `start` uses this average to choose between one
        job and several threads.
        """
        masks: dict[int, TokenMask] = {}
        errors: dict[int, str] = {}
        seconds = 0.0
        for job in jobs:
            part = job.result()
            masks.update(part.by_position)
            errors.update(part.errors)
            seconds += part.seconds
        if masks:
            difference = seconds / len(masks) - self._seconds_per_mask
            self._seconds_per_mask += _NEWEST_WEIGHT * difference
        return StepMasks(masks, errors, seconds)

    def _extend_buffer(self, num_masks: int, width: int) -> None:
        """Make the buffer large enough for `num_masks` masks of `width` words."""
        old_num_masks, old_width = self._buffer.shape
        if num_masks > old_num_masks or width != old_width:
            # At least double the buffer, so that it is seldom allocated again.
            self._buffer = np.zeros((max(num_masks, 2 * old_num_masks), width), np.int32)


def with_masks(logits: Tensor, masks: abc.Mapping[int, TokenMask]) -> Tensor:
    """Return the logits. The logit of every token that is not allowed is replaced by -inf.

    A mask contains one bit for each token, and the bit 1 allows the token.

    Example: the logits are [[1.5, 0.2, 3.0]], and the mask of the row allows the tokens 0 and 2.
    The result is [[1.5, -inf, 3.0]].

    Args:
        logits: [n, vocab_size] float32, finite or -inf. Not changed.
        masks: maps the index of a row to the mask of the row. Every token is allowed in rows
            without an entry.

    Returns:
        A new tensor, even if every token is allowed.
    """
    if not masks:
        return logits.clone()
    rows = sorted(masks)
    packed = np.stack([masks[row] for row in rows])
    if logits.device.type == "cpu":
        return _with_masks_on_cpu(logits, rows, packed)
    return _with_masks_on_gpu(logits, rows, packed)


def _with_masks_on_cpu(logits: Tensor, rows: list[int], packed: TokenMasks) -> Tensor:
    """Compute the result of `with_masks` for logits on a CPU.

    0 or -inf is added to each logit. The addition takes the same time for any mask, because it has
    no branches. It is several times as fast as `masked_fill_`.

    Args:
        logits: [n, vocab_size] float32. Not changed.
        rows: the rows with a mask.
        packed: [len(rows), ceil(vocab_size / 32)] int32, the masks of `rows`.
    """
    vocab_size = logits.shape[1]
    # With mode="clip", numpy does not check the indices, which saves time. The mode does not change
    # the result, because each byte is a valid index into the table.
    padded_biases = np.take(_BIAS_OF_BYTE, packed.view(np.uint8), mode="clip").view(np.float32)
    biases = torch.from_numpy(padded_biases[:, :vocab_size])
    has_mask_in_every_row = len(rows) == len(logits)
    if has_mask_in_every_row:
        return biases.add_(logits)
    masked = logits.clone()
    for row, bias in zip(rows, biases, strict=True):
        masked[row] += bias
    return masked


def _with_masks_on_gpu(logits: Tensor, rows: list[int], packed: TokenMasks) -> Tensor:
    """Compute the result of `with_masks` for logits on a GPU.

    `_with_masks_on_cpu` documents the arguments.
    """
    device = logits.device
    vocab_size = logits.shape[1]
    # Each word of a mask contains the bits of 32 tokens.
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    bits = (upload(packed, device)[:, :, None] >> shifts) & 1
    is_forbidden = bits.view(len(rows), -1)[:, :vocab_size] == 0
    device_rows = upload(np.array(rows), device)
    masked_rows = logits[device_rows].masked_fill_(is_forbidden, float("-inf"))
    return logits.index_copy(0, device_rows, masked_rows)


def _by_sequence(guided: abc.Sequence[int], positions: abc.Sequence[Position]) -> list[list[int]]:
    """Group the indices of positions by sequence. Return one list for each sequence.

    The first position of a sequence has no draft tokens. Example: four positions have 0, 1, 2 and 0
    draft tokens. The result is [[0, 1, 2], [3]].

    Args:
        guided: the indices of all positions whose sequences have a guide.
        positions: all positions of the step. The positions of a sequence are adjacent.
    """
    groups: list[list[int]] = []
    for index in guided:
        if positions[index].drafts:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
