# SPDX-License-Identifier: Apache-2.0
"""Token masks. A mask marks the tokens that a request may generate next.

A mask has one bit for each token of the vocabulary. A word contains 32 bits. A bit of 1 means that
the token is allowed. Guides fill their masks while the model computes. If filling takes long, other
threads fill the masks. Then the masks are applied to the logits of all positions at once
(apply_masks.py).
"""

import logging
import math
import os
import time
from collections import abc
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, cast

import numpy as np

from nereid_backend.core.grammar import Guide
from nereid_backend.core.sequence import Sequence
from nereid_backend.errors import EngineError, RequestError
from nereid_backend.grammar.vocabulary import TokenMask, TokenMasks, mask_width
from nereid_backend.sampling.draft_verification import Position

logger = logging.getLogger(__name__)

# Other threads fill the masks of a step only if one thread would need at least `_WORTH_A_THREAD_S`
# seconds. Otherwise, the engine's thread launches the forward pass, and then fills the masks while
# the GPU computes. If the model runs on a CPU, other threads would compete with the engine's thread
# for the Python interpreter. For little work, this would cost more time than it saves.
_WORTH_A_THREAD_S = 5e-4

# The smallest number of sequences in one job for a thread. Starting a job takes about as long as
# filling a few masks.
_SEQUENCES_PER_JOB = 8
# The largest number of threads that fill token masks.
_MAX_THREADS = 4
# The weight of the newest step in the moving average `_seconds_per_mask`.
_NEWEST_WEIGHT = 0.2


class MaskingGuide(Guide, Protocol):
    """The state of a request's grammar. The methods write token masks for the sampler."""

    def fork(self) -> Self:
        """Return an independent copy of this object. The copy has the same state."""

    def fill(self, row: TokenMask) -> bool:
        """Write the mask of the next token into `row`, [ceil(vocab_size / 32)] int32.

        Returns:
            False if every token is allowed. In this case, `row` is not written.
        """

    @classmethod
    def fill_all(
        cls, guides: abc.Sequence[Self], rows: TokenMasks, row_indices: abc.Sequence[int]
    ) -> list[bool]:
        """Write the masks of the next tokens for several guides.

        One call for several guides is faster than one call of `fill` for each guide.

        Args:
            guides: the guides. All guides are instances of this class.
            rows: the buffer of masks, [n, ceil(vocab_size / 32)] int32. Mutated.
            row_indices: for each guide, the index of its row in `rows`.

        Returns:
            For each guide, False if every token is allowed. The row of such a guide is not written.
        """

    def forced(self) -> list[int]:
        """Return the tokens that the grammar requires next, or [] if the grammar requires none."""


def guide_of(sequence: Sequence) -> MaskingGuide | None:
    """Return `sequence.guide`; None if the request has neither a grammar nor a thinking budget."""
    return cast(MaskingGuide | None, sequence.guide)


@dataclass(slots=True)
class StepMasks:
    """The token masks of one step.

    Attributes:
        by_position: maps the index of a position to the mask of the position. Every token is
            allowed at positions without an entry.
        errors: one error message for each sequence whose grammar failed. The key is the index of
            the sequence's first position.
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
class _MaskFillJob:
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
        """Fill and return the token masks of all positions of this job's sequences.

        The first position of a sequence follows its last known token, and the other positions
        follow draft tokens (guesses for the next tokens). The masks of the first positions are
        filled together for all sequences. The masks of the other positions are then filled for one
        sequence at a time, because the guide must first accept the draft tokens.
        """
        masks = StepMasks()
        started = time.thread_time()
        for guide_class, indices in self._first_positions_by_class().items():
            self._fill_first_positions(guide_class, indices, masks)
        # Each group contains the indices of all positions of one sequence.
        for group in self.groups:
            has_drafts = len(group) > 1
            has_failed = group[0] in masks.errors
            if has_drafts and not has_failed:
                self._fill_drafts(group, masks)
        masks.seconds = time.thread_time() - started
        return masks

    def divided(self, max_jobs: int) -> "list[_MaskFillJob]":
        """Split this job into at most `max_jobs` jobs. Each job gets some of the sequences.

        Example: if max_jobs is 4, a job with 40 sequences is divided into 4 jobs of 10 sequences.
        """
        num_sequences = len(self.groups)
        num_jobs = max(1, min(max_jobs, num_sequences // _SEQUENCES_PER_JOB))
        size = math.ceil(num_sequences / num_jobs)
        return [
            replace(self, groups=self.groups[start : start + size])
            for start in range(0, num_sequences, size)
        ]

    def _first_positions_by_class(self) -> dict[type[MaskingGuide], list[int]]:
        """Group the sequences by guide class. Each sequence is represented by its first position.

        Each class fills the masks of all its guides in one call (see MaskingGuide.fill_all).
        """
        first_positions: dict[type[MaskingGuide], list[int]] = {}
        for group in self.groups:
            first_index = group[0]
            guide_class = type(self._guide_at(first_index))
            first_positions.setdefault(guide_class, []).append(first_index)
        return first_positions

    def _guide_at(self, index: int) -> MaskingGuide:
        """Return the guide (the state of the grammar) of the sequence at `positions[index]`."""
        return cast(MaskingGuide, self.positions[index].sequence.guide)

    def _fill_first_positions(
        self, guide_class: type[MaskingGuide], indices: abc.Sequence[int], masks: StepMasks
    ) -> None:
        """Fill the token masks of the first positions of several sequences.

        If the grammar of a sequence fails, store an error in `masks` instead of its mask.

        Args:
            guide_class: the class of the sequences' guides. A guide is the state of a grammar.
            indices: for each sequence, the index of its first position in `positions`.
            masks: the result. Mutated.
        """
        try:
            self._fill_together(guide_class, indices, masks)
        except Exception:  # noqa: BLE001 - `_fill_alone` reports the error
            # The grammar of one sequence has failed. Fill the masks one by one to find this
            # sequence. Masks that have been filled already are filled a second time.
            for index in indices:
                self._fill_alone(guide_class, index, masks)

    def _fill_together(
        self, guide_class: type[MaskingGuide], indices: abc.Sequence[int], masks: StepMasks
    ) -> None:
        """Fill the masks of the positions `indices`. Each position is the first of its sequence.

        Args:
            guide_class: the class of the guides at these positions.
            indices: the indices of the positions.
            masks: the result. Mutated. Positions at which every token is allowed get no entry.
        """
        guides = [self._guide_at(index) for index in indices]
        rows = [self.rows[index] for index in indices]
        are_limited = guide_class.fill_all(guides, self.buffer, rows)
        for index, row, is_limited in zip(indices, rows, are_limited, strict=True):
            if is_limited:
                masks.by_position[index] = self.buffer[row]

    def _fill_alone(self, guide_class: type[MaskingGuide], index: int, masks: StepMasks) -> None:
        """Write the token mask of one position. If the grammar fails, store an error instead."""
        try:
            self._fill_together(guide_class, [index], masks)
        except Exception as error:  # noqa: BLE001
            # The grammar library may raise any exception. Only the request with this grammar ends
            # with an error.
            self._store_error(index, error, masks)

    def _fill_drafts(self, group: abc.Sequence[int], masks: StepMasks) -> None:
        """Fill the token masks of one sequence for the positions that follow draft tokens.

        `group` contains the indices of all positions of the sequence. The first position follows no
        draft token, so its mask is filled elsewhere. If the grammar fails, the error is stored
        under the first position.
        """
        first_index, *draft_indices = group
        try:
            # The draft tokens may be rejected, so only a copy of the grammar's state is advanced.
            guide = self._guide_at(first_index).fork()
            self._fill_until_rejected(guide, draft_indices, masks)
        except Exception as error:  # noqa: BLE001
            # The grammar library may raise any exception. Only the request with this grammar gets
            # an error.
            self._store_error(first_index, error, masks)

    def _fill_until_rejected(
        self, guide: MaskingGuide, draft_indices: abc.Sequence[int], masks: StepMasks
    ) -> None:
        """Fill masks up to the first draft token (a guess for an output token) that is not allowed.

        The tokens that are sampled at later positions are discarded, so these positions need no
        masks. Example: two positions follow the draft tokens [5] and [5, 7]. If the grammar allows
        5 but then not 7, only the first of these positions gets a mask.

        Args:
            guide: the state of the grammar before the first draft token. Mutated.
            draft_indices: the indices of the positions. Each position follows one more draft token.
            masks: the result. Mutated.
        """
        for index in draft_indices:
            sequence, drafts = self.positions[index]
            newest_draft = drafts[-1]  # The guide has already accepted the earlier drafts.
            if not _try_accept(guide, newest_draft, sequence):
                return
            mask = self.buffer[self.rows[index]]
            is_limited = guide.fill(mask)
            if is_limited:
                masks.by_position[index] = mask

    def _store_error(self, index: int, error: Exception, masks: StepMasks) -> None:
        """Log an error of a grammar, and store its message in `masks.errors[index]`."""
        request_id = self.positions[index].sequence.request_id
        logger.error("The grammar of request %s failed.", request_id, exc_info=error)
        masks.errors[index] = f"The grammar of the request failed: {type(error).__name__}: {error}"


def _try_accept(guide: MaskingGuide, token: int, sequence: Sequence) -> bool:
    """Add `token` to the state of `guide`. Return False if the guide does not allow the token.

    A stop token ends the output, so the result is False for a stop token. Mutates: guide.
    """
    if token in sequence.stop_token_ids:
        return False
    try:
        guide.accept([token])
    except (EngineError, RequestError):
        # Ignore the error here. If the grammar is too slow for a draft token, checking the sampled
        # token raises the same RequestError again, and `read_sampled` handles it.
        return False
    return True


class MaskFiller:
    """Computes the token masks of each step. Long computations use several threads."""

    def __init__(self) -> None:
        self._max_jobs = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._max_jobs, thread_name_prefix="nereid-masks")
        self._buffer: TokenMasks = np.zeros((0, 0), np.int32)
        # The time that is needed to fill one mask, as a moving average in seconds.
        self._seconds_per_mask = 1e-3

    def start(self, positions: abc.Sequence[Position], vocab_size: int) -> abc.Sequence[Job]:
        """Start to fill the token masks of some positions. `join` waits for the masks.

        A mask marks the tokens that the grammar of a request allows at a position. Positions
        without a grammar get no mask. All masks are views of one buffer, which the next call of
        `start` overwrites.

        Returns:
            The jobs that fill the masks: either one job that runs when `join` calls `result`, or
            the futures of several threads. The list is empty if no position has a grammar.
        """
        # The guide of a sequence is the state of its grammar.
        guided = [i for i, position in enumerate(positions) if position.sequence.guide is not None]
        if not guided:
            return []
        self._extend_buffer(len(guided), mask_width(vocab_size))
        buffer_rows = {index: row for row, index in enumerate(guided)}
        job = _MaskFillJob(_by_sequence(guided, positions), positions, self._buffer, buffer_rows)
        expected_s = len(guided) * self._seconds_per_mask
        if expected_s < _WORTH_A_THREAD_S:
            return [job]  # `join` fills the masks in its own thread.
        # One thread would take too long, so several threads fill the masks.
        return [self._threads.submit(part.result) for part in job.divided(self._max_jobs)]

    def join(self, jobs: Iterable[Job]) -> StepMasks:
        """Wait for the jobs that `start` returned, and return the masks of the step.

        A job that does not run in another thread runs now. The call also updates the average time
        for one mask, by which `start` decides whether other threads fill the masks.
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
            newest = seconds / len(masks)
            self._seconds_per_mask += _NEWEST_WEIGHT * (newest - self._seconds_per_mask)
        return StepMasks(masks, errors, seconds)

    def _extend_buffer(self, num_masks: int, width: int) -> None:
        """Make the buffer large enough for `num_masks` masks of `width` words."""
        old_num_masks, old_width = self._buffer.shape
        if num_masks > old_num_masks or width != old_width:
            # At least double the buffer, so that it is seldom allocated again.
            self._buffer = np.zeros((max(num_masks, 2 * old_num_masks), width), np.int32)


def _by_sequence(guided: abc.Sequence[int], positions: abc.Sequence[Position]) -> list[list[int]]:
    """Group the indices in `guided` by sequence. Return one list of indices for each sequence.

    The first position of a sequence has no draft tokens. Example: four positions have 0, 1, 2 and 0
    draft tokens. The result is [[0, 1, 2], [3]].

    Args:
        guided: the indices of all positions whose sequences have a guide.
        positions: all positions of the step. The positions of a sequence are adjacent.
    """
    groups: list[list[int]] = []
    for index in guided:
        is_first_of_sequence = not positions[index].drafts
        if is_first_of_sequence:
            groups.append([index])
        else:
            groups[-1].append(index)
    return groups
