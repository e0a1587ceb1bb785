# SPDX-License-Identifier: Apache-2.0
"""The jobs in a worker: their inputs go to the engine a slice at a time, job after job in turn.

    waiting inputs --(slices, in turn)--> engine --(results)--> one outcome when a job is complete

Tokenising a thousand texts takes longer than a step of the engine. In slices it holds nobody up,
and a job of one text is next in turn however many texts another has left.
"""

import collections
import itertools
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from nereid_backend.errors import (
    CapacityError,
    EngineError,
    NereidError,
    RequestError,
    is_lost_device,
)
from nereid_backend.pooling.pooling_items import PoolingItem, PoolingResult
from nereid_backend.serving.pooling.jobs import Job, Outcome, Value

# One slice: so many inputs of a job, of so many characters together (a token for a token id).
_SLICE_INPUTS = 256
_SLICE_CHARACTERS = 2**16
_SLICES_AHEAD = 2  # of one job in the engine
_TURN_S = 0.01  # time for preparing before the engine computes again
_ELEMENT = re.compile(r"^input (\d+): ")
_KINDS = {float: "score", dict: "sparse"}

log = logging.getLogger("nereid")


class Engine(Protocol):
    """What this module needs of a PoolingEngine."""

    def add(self, request_id: str, items: Sequence[PoolingItem]) -> object:
        """Take inputs; RequestError or CapacityError."""

    def abort(self, request_id: str) -> None:
        """Forget a request."""

    def step(self) -> Sequence[PoolingResult]:
        """Compute a batch."""

    def has_work(self) -> bool:
        """Whether a step would do anything."""


class _Progress:
    """One job: what is left to hand over, and what has come back.

    Attributes:
        num_given: inputs that the engine has been given.
        slices: first input of each slice in the engine -> results that are still to come.
        values: of each input, None until it comes.
    """

    def __init__(self, request_id: str, job: Job) -> None:
        self.request_id = request_id
        self.job = job
        self.num_given = 0
        self.slices: dict[int, int] = {}
        self.num_left = len(job.inputs)
        self.values: list[Value | None] = [None] * len(job.inputs)
        self.num_tokens = [0] * len(job.inputs)

    @property
    def wants_a_turn(self) -> bool:
        """Whether inputs are left and the engine should have more of them."""
        return self.num_given < len(self.values) and len(self.slices) < _SLICES_AHEAD

    def slice_id(self, first: int) -> str:
        """The engine's name of the slice that begins with this input."""
        return f"{self.request_id}:{first}"

    def next_slice(self) -> list[PoolingItem]:
        """The next inputs. Mutates: this, as if the engine had taken them."""
        items: list[PoolingItem] = []
        size = 0
        for name, value in itertools.islice(self.job.inputs, self.num_given, None):
            items.append(_item(name, value, self.job.options))
            size += sum(map(len, value)) if name == "pair" else len(value)
            if len(items) == _SLICE_INPUTS or size >= _SLICE_CHARACTERS:
                break
        self.slices[self.num_given] = len(items)
        self.num_given += len(items)
        return items

    def take(self, first: int, result: PoolingResult) -> None:
        """Note the result of one input of the slice that begins with `first`."""
        index = first + result.index
        self.values[index] = result.value
        self.num_tokens[index] = result.num_tokens
        self.num_left -= 1
        self.slices[first] -= 1
        if not self.slices[first]:
            del self.slices[first]

    def outcome(self) -> Outcome:
        """All results together."""
        values = [value for value in self.values if value is not None]
        kind = self.job.options.get("kind") or _kind_of(values[0])
        return Outcome.from_values(kind, values, self.num_tokens)

    def blame(self, error: NereidError, first: int) -> str:
        """The engine's message about a slice, in the words of the whole job."""
        text = str(error)
        match = _ELEMENT.match(text)
        index = first + (int(match[1]) if match else 0)
        text = text[match.end() :] if match else text
        if not text.startswith(("input: ", "image: ")):
            return text  # it blames an option, or nothing
        text = text.removeprefix("input: ")
        where = f"element {index}: " if len(self.values) > 1 else ""
        return f"{self.job.field}: {where}{text}"


class Work:
    """All jobs of a worker.

    Args:
        engine: computes.
        send: how messages go to the stub.
    """

    def __init__(self, engine: Engine, send: Callable[[list[Any]], None]) -> None:
        self._engine = engine
        self._send = send
        self._jobs: dict[str, _Progress] = {}
        self._turns: collections.deque[_Progress] = collections.deque()

    @property
    def is_left(self) -> bool:
        """Whether `advance` would do anything."""
        return bool(self._turns) or self._engine.has_work()

    def add(self, request_id: str, job: Job) -> None:
        """Take a job, which has at least one input; its outcome or refusal is sent in time."""
        progress = _Progress(request_id, job)
        self._jobs[request_id] = progress
        self._turns.append(progress)

    def abort(self, request_id: str) -> None:
        """Forget a job; one that is unknown or complete is no error."""
        progress = self._jobs.pop(request_id, None)
        if progress is None:
            return
        if progress in self._turns:
            self._turns.remove(progress)
        for first in progress.slices:
            self._engine.abort(progress.slice_id(first))

    def advance(self) -> None:
        """Hand inputs over for a while, then compute one batch.

        Raises:
            EngineError: the device is lost; this process is of no more use.
        """
        deadline = time.monotonic() + _TURN_S
        while self._turns and time.monotonic() < deadline:
            progress = self._turns.popleft()
            self._hand_over(progress)
            if progress.wants_a_turn and progress.request_id in self._jobs:
                self._turns.append(progress)
        if self._engine.has_work():
            for result in self._engine.step():
                self._take(result)

    def _hand_over(self, progress: _Progress) -> None:
        first = progress.num_given
        try:
            items = progress.next_slice()
            self._engine.add(progress.slice_id(first), items)
        except RequestError as error:
            self._refuse(progress, RequestError(progress.blame(error, first)))
        except NereidError as error:
            self._refuse(progress, error)
        except Exception as error:
            # Whatever is wrong with this job, the others are not affected.
            log.exception("job %s could not be added", progress.request_id)
            self._refuse(progress, EngineError(f"{type(error).__name__}: {error}"))

    def _take(self, result: PoolingResult) -> None:
        request_id, _, first = result.request_id.rpartition(":")
        progress = self._jobs.get(request_id)
        if progress is None:
            return
        if result.error is not None:
            if is_lost_device(result.error):
                # Every later step would fail, too; the stub starts another process.
                raise EngineError(f"{result.error}; the device is lost")
            where = f"{progress.job.field}: element {int(first) + result.index}: "
            self._refuse(progress, EngineError(where + result.error))
            return
        wanted_a_turn = progress.wants_a_turn
        progress.take(int(first), result)
        if progress.wants_a_turn and not wanted_a_turn:
            self._turns.append(progress)
        if not progress.num_left:
            del self._jobs[request_id]
            self._send(["done", request_id, *progress.outcome().row()])

    def _refuse(self, progress: _Progress, error: NereidError) -> None:
        self.abort(progress.request_id)
        known = RequestError, CapacityError
        kind = next((k.__name__ for k in known if isinstance(error, k)), EngineError.__name__)
        self._send(["refused", progress.request_id, kind, str(error)])


def _item(name: str, value: Any, options: dict[str, Any]) -> PoolingItem:  # noqa: ANN401 - by name
    # msgpack has no tuples.
    values: dict[str, Any] = {name: tuple(value) if name == "pair" else value}
    return PoolingItem(**values, **options)


def _kind_of(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return "dense" if value.ndim == 1 else "multi_vector"
    return _KINDS[type(value)]
