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

from nereid_backend.core.guide import Guide
from nereid_backend.core.request import Request
from nereid_backend.errors import EngineError
from nereid_backend.execution.verify import Position

Words = NDArray[np.int32]

logger = logging.getLogger(__name__)

# Masks that take less than this in all are filled behind the forward pass: on a CPU a thread that
# contends for the interpreter costs more, and on a GPU the model computes on anyway.
_WORTH_A_THREAD_S = 5e-4

# A thread takes at least so many requests: handing over costs about as much as filling a few masks.
_REQUESTS_PER_JOB = 8

# [256, 8] float32: what each byte of a mask adds to its 8 logits.
_BIAS_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
)


class MaskingGuide(Guide, Protocol):
    """What the sampler asks of a guide beside what the core does."""

    def fill(self, row: Words) -> bool:
        """Write what is allowed next; row is [ceil(vocab_size / 32)] int32.

        Returns:
            False if nothing is limited here; the row was not written then.
        """

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
        rows = dict(zip(guided, self._buffer, strict=False))
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
    packed = np.stack([row for row in words if row is not None])
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        # Adding is free of branches, so that it takes as long for any mask: several times faster
        # than to select.
        bias = np.take(_BIAS_OF_BYTE, packed.view(np.uint8), axis=0, mode="clip")
        added = torch.from_numpy(bias.reshape(len(rows), -1)[:, :vocab_size])
        if len(rows) == len(logits):
            return logits + added
        logits = logits.clone()
        for index, row in enumerate(rows):
            logits[row] += added[index]
        return logits
    device = logits.device
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    bits = (torch.from_numpy(packed).to(device)[:, :, None] >> shifts) & 1
    forbidden = bits.view(len(rows), -1)[:, :vocab_size] == 0
    limited = torch.tensor(rows, device=device)
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


def _fill(
    groups: Sequence[Sequence[int]], positions: Sequence[Position], rows: dict[int, Words]
) -> StepMasks:
    masks = StepMasks()
    started = time.thread_time()
    for group in groups:
        request = positions[group[0]].request
        try:
            _fill_request(request, group, positions, rows, masks)
        except Exception as error:
            logger.exception("the guide of request %s failed", request.request_id)
            masks.errors[group[0]] = f"its grammar failed: {type(error).__name__}: {error}"
    return replace(masks, seconds=time.thread_time() - started)


def _fill_request(
    request: Request,
    group: Sequence[int],
    positions: Sequence[Position],
    rows: dict[int, Words],
    masks: StepMasks,
) -> None:
    """Fill the masks of one request's positions, as far as its guesses are allowed.

    Behind a guess that is not allowed nothing is needed: the mask before it keeps it from being
    chosen, so that what comes after it is not looked at.
    """
    guide = guide_of(request)
    assert guide is not None
    if guide.fill(rows[group[0]]):
        masks.words[group[0]] = rows[group[0]]
    if len(group) == 1:
        return
    ahead = cast(MaskingGuide, guide.fork())
    for index in group[1:]:
        guess = positions[index].guessed[-1]
        if guess in request.stop_token_ids:
            return
        try:
            ahead.accept([guess])
        except EngineError:
            return
        if ahead.fill(rows[index]):
            masks.words[index] = rows[index]
