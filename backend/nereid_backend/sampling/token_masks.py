# SPDX-License-Identifier: Apache-2.0
"""Token masks, which mark the tokens that a request may generate next.

A mask has one bit for each token of the vocabulary, 32 bits in a word. A bit of 1 means that the
token is allowed. Guides fill their masks while the model computes. If filling takes long, other
threads fill the masks. Then the masks are applied to the logits of all positions at once.
"""

import logging
import os
import time
from collections import abc
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.core.grammar import Guide
from nereid_backend.core.sequence import Sequence
from nereid_backend.device_transfer import upload
from nereid_backend.errors import EngineError
from nereid_backend.sampling.draft_verification import Position

Words = NDArray[np.int32]

logger = logging.getLogger(__name__)

# If filling all masks of a step takes less than this time, no thread is started. The masks are then
# filled after the forward pass is launched. On a GPU, the model is still computing at that time. On
# a CPU, a second thread that competes for the Python interpreter would cost more time than it
# saves.
_WORTH_A_THREAD_S = 5e-4

# Each job fills the masks of at least this many requests, because starting a job costs about as
# much time as filling a few masks.
_REQUESTS_PER_JOB = 8

# One byte of a mask belongs to 8 logits. For each value of the byte, the table contains the 8
# float32 numbers (0 or -inf) that are added to the logits. numpy copies 8 numbers at once as one
# item.
_BIAS_OF_BYTE = np.ascontiguousarray(
    np.where(
        np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
        np.float32(0),
        np.float32(-np.inf),
    )
).view("V32")[:, 0]


class MaskingGuide(Guide, Protocol):
    """A guide with the additional methods that the sampler needs."""

    def fill(self, row: Words) -> bool:
        """Write the mask of the next token into `row`, [ceil(vocab_size / 32)] int32.

        Returns:
            False if every token is allowed. In this case, `row` is not written.
        """

    @staticmethod
    def fill_all(
        guides: "abc.Sequence[MaskingGuide]", rows: Words, places: abc.Sequence[int]
    ) -> list[bool]:
        """Fill the masks of several guides of this class.

        Args:
            guides: the guides.
            rows: the buffer of masks, [n, ceil(vocab_size / 32)] int32.
            places: the index in `rows` of the row of each guide.

        Returns:
            The result of `fill` for each guide.
        """

    def forced(self) -> list[int]:
        """Return the next tokens that have no alternative; empty if several tokens are allowed."""


def guide_of(sequence: Sequence) -> MaskingGuide | None:
    """Return the guide of a request as a `MaskingGuide`; None if the request has no guide."""
    return cast(MaskingGuide | None, sequence.guide)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The token masks of the positions of a step.

    Attributes:
        words: a mapping from the index of a position to its mask. Every token is allowed at
            positions without an entry.
        errors: a mapping from the index of the first position of a request to the reason why the
            request's guide failed.
        seconds: the CPU time in seconds that filling took.
    """

    words: dict[int, Words] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


class Job(Protocol):
    """Masks that a thread is filling, or that the call of `result` fills."""

    def result(self) -> StepMasks:
        """Return the masks when they are filled."""


class _Rows(NamedTuple):
    """The memory for the masks of a step.

    Attributes:
        buffer: [n, words] int32, one row for each mask.
        places: a mapping from the index of a position to the index of its row in `buffer`.
    """

    buffer: Words
    places: dict[int, int]


class _Deferred(NamedTuple):
    work: Callable[[], StepMasks]

    def result(self) -> StepMasks:
        return self.work()


class MaskFiller:
    """Fills the masks of guides. If filling takes long, several threads fill the masks."""

    def __init__(self) -> None:
        workers = min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="nereid-masks")
        self._max_jobs = workers
        self._buffer: Words = np.zeros((0, 0), np.int32)
        # A moving average of the seconds that one mask takes.
        self._seconds_per_mask = 1e-3

    def start(self, positions: abc.Sequence[Position], vocab_size: int) -> abc.Sequence[Job]:
        """Start to fill the masks of some positions. `join` waits for the masks.

        The masks are views of one buffer, which the next call overwrites.
        """
        guided = [i for i, position in enumerate(positions) if position.sequence.guide is not None]
        if not guided:
            return []
        width = -(-vocab_size // 32)
        if len(guided) > len(self._buffer) or self._buffer.shape[1] != width:
            self._buffer = np.zeros((max(len(guided), 2 * len(self._buffer)), width), np.int32)
        groups = _by_request(guided, positions)
        rows = _Rows(self._buffer, dict(zip(guided, range(len(guided)), strict=True)))
        if len(guided) * self._seconds_per_mask < _WORTH_A_THREAD_S:
            return [_Deferred(partial(_fill, groups, positions, rows))]
        num_jobs = max(1, min(self._max_jobs, len(groups) // _REQUESTS_PER_JOB))
        size = -(-len(groups) // num_jobs)
        return [
            self._threads.submit(_fill, groups[i : i + size], positions, rows)
            for i in range(0, len(groups), size)
        ]

    def join(self, jobs: Iterable[Job]) -> StepMasks:
        """Wait for the jobs that `start` returned and return their masks."""
        words: dict[int, Words] = {}
        errors: dict[int, str] = {}
        seconds = 0.0
        for job in jobs:
            part = job.result()
            words.update(part.words)
            errors.update(part.errors)
            seconds += part.seconds
        if words:
            self._seconds_per_mask += 0.2 * (seconds / len(words) - self._seconds_per_mask)
        return StepMasks(words, errors, seconds)


def with_masks(logits: Tensor, words: abc.Sequence[Words | None]) -> Tensor:
    """Return the logits with -inf for every token that is not allowed.

    Args:
        logits: [n, vocab_size] float32, finite or -inf. Not changed.
        words: the mask of each row; None allows every token.

    Returns:
        A new tensor, even if every token is allowed.
    """
    rows = [i for i, row in enumerate(words) if row is not None]
    if not rows:
        return logits.clone()
    packed = np.concatenate([row for row in words if row is not None]).reshape(len(rows), -1)
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        # Adding 0 or -inf has no branches. It takes the same time for any mask and is several times
        # faster than `masked_fill_`.
        bias = np.take(_BIAS_OF_BYTE, packed.view(np.uint8), mode="clip").view(np.float32)
        added = torch.from_numpy(bias[:, :vocab_size])
        if len(rows) == len(logits):
            return added.add_(logits)
        logits = logits.clone()
        for index, row in enumerate(rows):
            logits[row] += added[index]
        return logits
    device = logits.device
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    bits = (upload(packed, device)[:, :, None] >> shifts) & 1
    forbidden = bits.view(len(rows), -1)[:, :vocab_size] == 0
    limited = upload(np.array(rows), device)
    return logits.index_copy(0, limited, logits[limited].masked_fill_(forbidden, float("-inf")))


def pack(token_ids: abc.Sequence[int], vocab_size: int) -> Words:
    """Return a mask that allows only `token_ids`, [ceil(vocab_size / 32)] int32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _by_request(guided: abc.Sequence[int], positions: abc.Sequence[Position]) -> list[list[int]]:
    """Group the indices of positions by request.

    The first position of a request has no draft tokens. Example: positions with 0, 1, 2 and 0 draft
    tokens give the groups [[0, 1, 2], [3]].
    """
    groups: list[list[int]] = []
    for index in guided:
        if positions[index].drafts:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _fill(
    groups: abc.Sequence[abc.Sequence[int]], positions: abc.Sequence[Position], rows: _Rows
) -> StepMasks:
    masks = StepMasks()
    started = time.thread_time()
    of_class: dict[type[MaskingGuide], list[int]] = {}
    for first, *_ in groups:
        guide = guide_of(positions[first].sequence)
        assert guide is not None
        of_class.setdefault(type(guide), []).append(first)
    for kind, indices in of_class.items():
        try:
            _fill_first(kind, indices, positions, rows, masks)
        except Exception:  # noqa: BLE001 - the loop below reports the guide that fails
            # Fill the masks one by one to find the guide that fails. A row may be filled twice.
            for index in indices:
                _fill_alone(kind, index, positions, rows, masks)
    for group in groups:
        if len(group) > 1 and group[0] not in masks.errors:
            _fill_drafts(group, positions, rows, masks)
    return replace(masks, seconds=time.thread_time() - started)


def _fill_first(
    kind: type[MaskingGuide],
    indices: abc.Sequence[int],
    positions: abc.Sequence[Position],
    rows: _Rows,
    masks: StepMasks,
) -> None:
    """Fill the masks of positions without draft tokens. Mutates: rows, masks."""
    guides = [cast(MaskingGuide, positions[index].sequence.guide) for index in indices]
    places = [rows.places[index] for index in indices]
    is_limited = kind.fill_all(guides, rows.buffer, places)
    for index, place, limited in zip(indices, places, is_limited, strict=True):
        if limited:
            masks.words[index] = rows.buffer[place]


def _fill_alone(
    kind: type[MaskingGuide],
    index: int,
    positions: abc.Sequence[Position],
    rows: _Rows,
    masks: StepMasks,
) -> None:
    try:
        _fill_first(kind, [index], positions, rows, masks)
    except Exception as error:
        logger.exception("The grammar of request %s failed.", positions[index].sequence.request_id)
        masks.errors[index] = _failure(error)


def _fill_drafts(
    group: abc.Sequence[int], positions: abc.Sequence[Position], rows: _Rows, masks: StepMasks
) -> None:
    """Fill the masks of the positions after the draft tokens of one request.

    Stop at the first draft token that the grammar does not allow. The mask before that token
    prevents sampling the token, so the positions after it are ignored.
    """
    sequence = positions[group[0]].sequence
    try:
        ahead = cast(MaskingGuide, cast(Guide, sequence.guide).fork())
        for index in group[1:]:
            guess = positions[index].drafts[-1]
            if guess in sequence.stop_token_ids:
                return
            try:
                ahead.accept([guess])
            except EngineError:
                return
            row = rows.buffer[rows.places[index]]
            if ahead.fill(row):
                masks.words[index] = row
    except Exception as error:
        logger.exception("The grammar of request %s failed.", sequence.request_id)
        masks.errors[group[0]] = _failure(error)


def _failure(error: Exception) -> str:
    return f"The grammar of the request failed: {type(error).__name__}: {error}"
