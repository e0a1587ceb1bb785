# SPDX-License-Identifier: Apache-2.0
"""Masks: which tokens a position may take, one bit each, 32 to a word, bit 1 = allowed.

What a guide allows is filled in while the model computes, by helper threads where that takes long,
and laid over the logits of all positions at once.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.core.grammar import Guide
from nereid_backend.core.request import Request
from nereid_backend.device_transfer import upload
from nereid_backend.errors import EngineError
from nereid_backend.sampling.draft_verification import Position

Words = NDArray[np.int32]

logger = logging.getLogger(__name__)

# Masks that take less than this in all are filled behind the forward pass: on a CPU a thread that
# contends for the interpreter costs more, and on a GPU the model computes on anyway.
_WORTH_A_THREAD_S = 5e-4

# A thread takes at least so many requests: handing over costs about as much as filling a few masks.
_REQUESTS_PER_JOB = 8

# What each byte of a mask adds to its 8 logits, as [256] items of 8 float32, which numpy copies
# whole.
_BIAS_OF_BYTE = np.ascontiguousarray(
    np.where(
        np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
        np.float32(0),
        np.float32(-np.inf),
    )
).view("V32")[:, 0]


class MaskingGuide(Guide, Protocol):
    """What the sampler asks of a guide beside what the core does."""

    def fill(self, row: Words) -> bool:
        """Write what is allowed next; row is [ceil(vocab_size / 32)] int32.

        Returns:
            False if nothing is limited here; the row was not written then.
        """

    @staticmethod
    def fill_all(
        guides: "Sequence[MaskingGuide]", rows: Words, places: Sequence[int]
    ) -> list[bool]:
        """What fill does, for guides of this class and the rows at as many places."""

    def forced(self) -> list[int]:
        """Tokens that are the only ones possible from here on; empty if there is a choice."""


def guide_of(request: Request) -> MaskingGuide | None:
    """A request's guide, as the sampler knows it."""
    return cast(MaskingGuide | None, request.guide)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """What guides say about a step's positions.

    Attributes:
        words: by index of the position, what it may take; others are free.
        errors: by index of a request's first position, why its guide gave no answer.
        seconds: CPU time that filling took.
    """

    words: dict[int, Words] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


class Job(Protocol):
    """Masks that are being filled, or will be when they are asked for."""

    def result(self) -> StepMasks:
        """Wait for them."""


class _Rows(NamedTuple):
    """Where masks are written: [n, words] int32, and which row each position has."""

    buffer: Words
    places: dict[int, int]


class _Deferred(NamedTuple):
    work: Callable[[], StepMasks]

    def result(self) -> StepMasks:
        return self.work()


class MaskFiller:
    """Asks guides for masks, in threads of its own where that takes long."""

    def __init__(self) -> None:
        workers = min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="nereid-masks")
        self._max_jobs = workers
        self._buffer: Words = np.zeros((0, 0), np.int32)
        # A running mean of what lately was needed for one mask.
        self._seconds_per_mask = 1e-3

    def start(self, positions: Sequence[Position], vocab_size: int) -> Sequence[Job]:
        """Begin with the masks of some positions; `join` waits for them.

        Masks live in one buffer, which the next start overwrites.
        """
        guided = [i for i, position in enumerate(positions) if position.request.guide is not None]
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
        """Wait for what `start` began."""
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


def with_masks(logits: Tensor, words: Sequence[Words | None]) -> Tensor:
    """Logits with the tokens that are not allowed put out of reach.

    Args:
        logits: [n, vocab_size] float32, finite or minus infinity. Not changed.
        words: what each row may take; None is everything.

    Returns:
        New logits, also where nothing is limited.
    """
    rows = [i for i, row in enumerate(words) if row is not None]
    if not rows:
        return logits.clone()
    packed = np.concatenate([row for row in words if row is not None]).reshape(len(rows), -1)
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        # Adding is free of branches, so that it takes as long for any mask: several times faster
        # than to select.
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


def pack(token_ids: Sequence[int], vocab_size: int) -> Words:
    """A mask that allows these tokens: [ceil(vocab_size / 32)] int32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _by_request(guided: Sequence[int], positions: Sequence[Position]) -> list[list[int]]:
    """Indices of positions, those of one request together: its first has no guesses before it."""
    groups: list[list[int]] = []
    for index in guided:
        if positions[index].guessed:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _fill(groups: Sequence[Sequence[int]], positions: Sequence[Position], rows: _Rows) -> StepMasks:
    masks = StepMasks()
    started = time.thread_time()
    of_class: dict[type[MaskingGuide], list[int]] = {}
    for first, *_ in groups:
        guide = guide_of(positions[first].request)
        assert guide is not None
        of_class.setdefault(type(guide), []).append(first)
    for kind, indices in of_class.items():
        try:
            _fill_first(kind, indices, positions, rows, masks)
        except Exception:  # noqa: BLE001 - told below, of the one that fails
            # To fill a row again does no harm.
            for index in indices:
                _fill_alone(kind, index, positions, rows, masks)
    for group in groups:
        if len(group) > 1 and group[0] not in masks.errors:
            _fill_guessed(group, positions, rows, masks)
    return replace(masks, seconds=time.thread_time() - started)


def _fill_first(
    kind: type[MaskingGuide],
    indices: Sequence[int],
    positions: Sequence[Position],
    rows: _Rows,
    masks: StepMasks,
) -> None:
    """Fill the masks of positions that have no guesses before them. Mutates: rows, masks."""
    guides = [cast(MaskingGuide, positions[index].request.guide) for index in indices]
    places = [rows.places[index] for index in indices]
    is_limited = kind.fill_all(guides, rows.buffer, places)
    for index, place, limited in zip(indices, places, is_limited, strict=True):
        if limited:
            masks.words[index] = rows.buffer[place]


def _fill_alone(
    kind: type[MaskingGuide],
    index: int,
    positions: Sequence[Position],
    rows: _Rows,
    masks: StepMasks,
) -> None:
    try:
        _fill_first(kind, [index], positions, rows, masks)
    except Exception as error:
        logger.exception("the guide of request %s failed", positions[index].request.request_id)
        masks.errors[index] = _failure(error)


def _fill_guessed(
    group: Sequence[int], positions: Sequence[Position], rows: _Rows, masks: StepMasks
) -> None:
    """Fill the masks behind one request's guesses, as far as these are allowed.

    Behind a guess that is not allowed nothing is needed: the mask before it keeps it from being
    chosen, so that what comes after it is not looked at.
    """
    request = positions[group[0]].request
    try:
        ahead = cast(MaskingGuide, cast(Guide, request.guide).fork())
        for index in group[1:]:
            guess = positions[index].guessed[-1]
            if guess in request.stop_token_ids:
                return
            try:
                ahead.accept([guess])
            except EngineError:
                return
            row = rows.buffer[rows.places[index]]
            if ahead.fill(row):
                masks.words[index] = row
    except Exception as error:
        logger.exception("the guide of request %s failed", request.request_id)
        masks.errors[group[0]] = _failure(error)


def _failure(error: Exception) -> str:
    return f"its grammar failed: {type(error).__name__}: {error}"
