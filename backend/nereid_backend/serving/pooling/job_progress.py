# SPDX-License-Identifier: Apache-2.0
"""Splits jobs into slices (groups of inputs), sends them to the engine, and collects the results.

    waiting inputs --(slices, in turn)--> engine --(results)--> one outcome when a job is complete

Tokenising a thousand texts takes longer than a step of the engine. The inputs of a job are
therefore sent to the engine in slices, and the jobs take turns. So a job with one text need not
wait until all texts of a large job are computed.
"""

import itertools
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nereid_backend.errors import (
    CapacityError,
    EngineError,
    NereidError,
    RequestError,
    is_lost_device,
)
from nereid_backend.pooling.pooling_items import PoolingItem, PoolingResult
from nereid_backend.serving.pooling.jobs import Job, Outcome, Value

# A slice is a group of inputs that are sent to the engine together. It ends when it has
# `_SLICE_INPUTS` inputs, or when their total size reaches `_SLICE_SIZE`. The size of a text is its
# number of characters, the size of an image is its number of bytes, and the size of a list of token
# ids is its length.
_SLICE_INPUTS = 256
_SLICE_SIZE = 2**16
# An image counts as at least `_MIN_IMAGE_SIZE` bytes, so a slice contains at most 8 images. This
# limit is needed because decoding one image takes up to half a second, even if the file is small.
_MIN_IMAGE_SIZE = _SLICE_SIZE // 8
# At most `_MAX_SLICES` slices of one job are in the engine at the same time.
_MAX_SLICES = 2
# The largest total size of a job's values in bytes. A response of gRPC has less than 2 GiB.
_MAX_VALUE_BYTES = 2**31 - 2**20
# Before each batch, inputs are sent to the engine for at most `_PREPARE_S` seconds.
_PREPARE_S = 0.01
# Matches an error message of the engine, see `_parse_engine_message`.
_ENGINE_MESSAGE = re.compile(r"(?:input (?P<index>\d+): )?(?P<problem>.*)", re.DOTALL)

log = logging.getLogger("nereid")


class Engine(Protocol):
    """The interface of an engine: the methods that a worker calls.

    PoolingEngine and the test engine have these methods.
    """

    @property
    def info(self) -> Any:  # noqa: ANN401 - any dataclass
        """A dataclass that describes the loaded model."""

    def add(self, request_id: str, items: Sequence[PoolingItem]) -> None:
        """Queue inputs. If the engine refuses them, raise a RequestError or a CapacityError."""

    def abort(self, request_id: str) -> None:
        """Remove the waiting inputs of a request."""

    def step(self) -> Sequence[PoolingResult]:
        """Compute one batch and return its results."""

    def has_work(self) -> bool:
        """Return whether inputs are queued."""


class _JobProgress:
    """The progress of one job: which inputs the engine has received, and their results so far.

    Attributes:
        request_id: the id of the job's request.
        job: the job.
        num_sent: the number of inputs that were sent to the engine.
        num_left_by_slice: one entry for each slice that is in the engine. The key is the index of
            the slice's first input. The value is the number of the slice's inputs that have no
            result yet.
        num_left: the number of the job's inputs that have no result yet.
        values: one value for each input; None until the input has a result.
        num_bytes: the size of all values so far, in bytes.
        num_tokens: one number of tokens for each input; 0 until the input has a result.
        offsets: one element for each input: the range of characters of each token (see
            PoolingResult.offsets); None if the input has no result yet, or if its result has no
            offsets.
        started: the time at which the step began that computed the job's first result, by
            time.monotonic(). None before the first result.
    """

    def __init__(self, request_id: str, job: Job) -> None:
        self.request_id = request_id
        self.job = job
        self.num_sent = 0
        self.num_left_by_slice: dict[int, int] = {}
        self.num_left = len(job.inputs)
        self.values: list[Value | None] = [None] * len(job.inputs)
        self.num_bytes = 0
        self.num_tokens = [0] * len(job.inputs)
        self.offsets: list[npt.NDArray[np.int32] | None] = [None] * len(job.inputs)
        self.started: float | None = None

    @property
    def can_send_slice(self) -> bool:
        """Whether the next group of inputs may be sent to the engine."""
        has_unsent_inputs = self.num_sent < len(self.job.inputs)
        return has_unsent_inputs and len(self.num_left_by_slice) < _MAX_SLICES

    def slice_id(self, first: int) -> str:
        """Return the id that the engine uses for a slice: a group of inputs of one job.

        `first` is the index of the slice's first input.
        """
        return f"{self.request_id}:{first}"

    def next_slice(self) -> list[PoolingItem]:
        """Return the next slice (a group of inputs), and record that these inputs are sent.

        A slice ends when the number of its inputs, or their total size, reaches a limit. Example:
        the first slice of a job with 300 short texts contains 256 texts, and the second slice
        contains 44 texts.
        """
        items: list[PoolingItem] = []
        # The total size of the slice's inputs, in characters, token ids or bytes of images.
        slice_size = 0
        first = self.num_sent  # the index of the slice's first input
        for name, value in itertools.islice(self.job.inputs, first, None):
            fields = self._item_fields(name, value)
            items.append(PoolingItem(**fields, **self.job.options))
            slice_size += _size_of_item(fields)
            if len(items) == _SLICE_INPUTS or slice_size >= _SLICE_SIZE:
                break
        # None of the inputs of this slice has a result yet.
        self.num_left_by_slice[first] = len(items)
        self.num_sent += len(items)
        return items

    def _item_fields(self, name: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 - see Job.inputs
        """Return the fields of the PoolingItem for one input of the job.

        An input is a pair of a name and a value (see Job.inputs):

            document, DOCUMENT                     {"pair": (the job's query, DOCUMENT)}
            pair, [QUERY, DOCUMENT]                {"pair": (QUERY, DOCUMENT)}
            part, {"text": TEXT, "image": IMAGE}   {"text": TEXT, "image": IMAGE}
            text or token_ids, VALUE               {name: VALUE}
        """
        match name:
            case "document":
                return {"pair": (self.job.query, value)}
            case "pair":
                # msgpack turns tuples into lists, but PoolingItem needs a tuple.
                return {"pair": tuple(value)}
            case "part":
                return dict(value)
            case _:
                return {name: value}

    def add_result(self, first: int, result: PoolingResult) -> None:
        """Store the result of an input. The index of this input is `first` + `result.index`."""
        index = first + result.index
        self.values[index] = result.value
        self.num_bytes += _num_value_bytes(result.value)
        self.num_tokens[index] = result.num_tokens
        self.offsets[index] = result.offsets
        self.num_left -= 1
        self.num_left_by_slice[first] -= 1
        if not self.num_left_by_slice[first]:  # The engine has computed the whole slice.
            del self.num_left_by_slice[first]

    def outcome(self) -> Outcome:
        """Return the outcome of the complete job."""
        # The job is complete, so no value is None.
        values = [value for value in self.values if value is not None]
        # The kind of the values, such as "dense". All values of a job have the same kind.
        kind = self.job.options.get("kind") or _kind_of(values[0])
        offsets = [offset for offset in self.offsets if offset is not None]
        return Outcome.from_values(kind, values, self.num_tokens, offsets)

    def job_message(self, error: NereidError, first: int) -> str:
        """Rewrite the engine's error message about a slice into a message about the whole job.

        A slice is a group of inputs. The engine's message begins with the index of the input in the
        slice, and with the name of a field. Examples for the slice that begins with the input
        `first` = 256 of a job in the tensor `texts`:

            input 3: input: the text is empty  ->  texts: element 259: the text is empty
            input 3: image: it is damaged      ->  texts: element 259: image: it is damaged
            input 3: task: it is unknown       ->  task: it is unknown

        If the job has only one input, the first message becomes "texts: the text is empty".
        """
        index_in_slice, problem = _parse_engine_message(str(error))
        is_about_an_input = problem.startswith(("input: ", "image: "))
        if not is_about_an_input:
            return problem  # The field is an option, which is the same for all inputs of the job.
        # The name of the tensor replaces the field "input". The field "image" is not replaced,
        # because a tensor can contain both texts and images.
        description = problem.removeprefix("input: ")
        if len(self.job.inputs) == 1:
            return f"{self.job.field}: {description}"
        return f"{self.job.field}: element {first + index_in_slice}: {description}"


class WorkerJobs:
    """Stores the incomplete jobs of a worker, and passes their inputs to the engine.

    Args:
        engine: computes the inputs.
        send: sends a message to the stub.
    """

    def __init__(self, engine: Engine, send: Callable[[list[Any]], None]) -> None:
        self._engine = engine
        self._send = send
        # The incomplete jobs, by request id. The next inputs for the engine come from the first job
        # in this dict for which `can_send_slice` is true.
        self._jobs: dict[str, _JobProgress] = {}

    @property
    def has_work(self) -> bool:
        """Whether `advance` has work to do."""
        return bool(self._jobs) or self._engine.has_work()

    def add(self, request_id: str, job: Job) -> None:
        """Add a job with at least one input. A later call of `advance` sends the outcome."""
        self._jobs[request_id] = _JobProgress(request_id, job)

    def abort(self, request_id: str) -> None:
        """Remove a job. Do nothing if the job is unknown or complete."""
        progress = self._jobs.pop(request_id, None)
        if progress is None:
            return
        for first in progress.num_left_by_slice:
            self._engine.abort(progress.slice_id(first))

    def advance(self) -> None:
        """Send inputs of all jobs to the engine for at most 10 ms. Then compute one batch.

        Inputs are sent in slices: groups of inputs of one job. The time limit prevents that the
        preparation of many inputs delays the computation.

        Raises:
            EngineError: the GPU is lost, so this process must end.
        """
        deadline = time.monotonic() + _PREPARE_S
        while time.monotonic() < deadline:
            progress = self._next_job()
            if progress is None:  # No job has inputs that may be sent now.
                break
            self._send_slice(progress)
        if self._engine.has_work():
            started = time.monotonic()
            for result in self._engine.step():
                self._add_result(result, started)

    def _next_job(self) -> _JobProgress | None:
        """Return the next job whose inputs can be sent to the engine; None if there is no such job.

        Mutates: `_jobs`. The returned job is moved to the end, so that each of the other jobs sends
        a slice before this job sends another slice.
        """
        for request_id, progress in self._jobs.items():
            if progress.can_send_slice:
                self._jobs[request_id] = self._jobs.pop(request_id)
                return progress
        return None

    def _send_slice(self, progress: _JobProgress) -> None:
        """Send the next inputs of a job to the engine. If an error occurs, refuse the whole job."""
        first = progress.num_sent
        try:
            items = progress.next_slice()
            self._engine.add(progress.slice_id(first), items)
        except RequestError as error:
            # The engine's message contains an index within this slice. `job_message` converts it to
            # an index within the whole job: "input 3" becomes "element 259".
            self._refuse(progress, RequestError(progress.job_message(error, first)))
        except NereidError as error:
            self._refuse(progress, error)
        except Exception as error:
            # Catch every exception, because an error of one job must not end the other jobs.
            log.exception("job %s could not be added", progress.request_id)
            self._refuse(progress, EngineError(f"{type(error).__name__}: {error}"))

    def _add_result(self, result: PoolingResult, started: float) -> None:
        """Store the result of one input. If the job is now complete, send the result of the job.

        If the result is an error, refuse the job. Also refuse the job if its values are too large
        for one response, because the vectors of all tokens could take all memory of the machine.

        Args:
            result: the result. Its `request_id` is the id of a slice (a group of inputs of a job).
            started: the time by time.monotonic() at which the engine began to compute the batch
                that contains the result.

        Raises:
            EngineError: the result has an error because the GPU is lost (`_refuse_result`).
        """
        job_id, first = _parse_slice_id(result.request_id)
        progress = self._jobs.get(job_id)
        if progress is None:
            return  # The job was aborted or refused.
        if result.error is not None:
            # `result.index` counts from the first input of the slice.
            index_in_job = first + result.index
            self._refuse_result(progress, index_in_job, result.error)
            return
        if progress.started is None:  # This is the first result of the job.
            progress.started = started
        progress.add_result(first, result)
        if progress.num_bytes > _MAX_VALUE_BYTES:
            self._refuse(progress, _too_large_error(progress.job.field))
            return
        if not progress.num_left:
            self._finish(progress)

    def _finish(self, progress: _JobProgress) -> None:
        """Remove a complete job, and send its outcome."""
        del self._jobs[progress.request_id]
        self._send(["done", progress.request_id, progress.started, *progress.outcome().row()])

    def _refuse_result(self, progress: _JobProgress, index: int, problem: str) -> None:
        """Refuse a whole job, because the computation of the input `index` has failed.

        Raises:
            EngineError: the computation has failed because the GPU is lost.
        """
        if is_lost_device(problem):
            # The device is lost, so every later computation would fail. Therefore this worker
            # process ends. The Triton model then starts a new worker process.
            raise EngineError(f"the device is lost: {problem}")
        where = f"{progress.job.field}: element {index}: "
        self._refuse(progress, EngineError(where + problem))

    def _refuse(self, progress: _JobProgress, error: NereidError) -> None:
        """Remove a job, and send `error` as the answer to the job."""
        self.abort(progress.request_id)
        kind = EngineError.__name__
        if isinstance(error, RequestError | CapacityError):
            kind = type(error).__name__
        self._send(["refused", progress.request_id, kind, str(error)])


def _parse_engine_message(message: str) -> tuple[int, str]:
    """Return the two parts of an error message of the engine: an index, and the problem.

    The index counts the inputs of a slice. Example: "input 3: image: it is damaged" returns (3,
    "image: it is damaged"). The message about a slice with one input contains no index. Then the
    index is 0.
    """
    match = _ENGINE_MESSAGE.fullmatch(message)
    assert match is not None, "the pattern matches every text"
    return int(match["index"] or 0), match["problem"]


def _parse_slice_id(slice_id: str) -> tuple[str, int]:
    """Return the two parts of `slice_id`: the request id, and the index of the first input.

    Example: "7:256" returns ("7", 256).
    """
    request_id, _, first = slice_id.rpartition(":")
    return request_id, int(first)


def _size_of_item(fields: Mapping[str, Any]) -> int:
    """Return the size of an input: its number of characters, token ids or image bytes.

    Example: {"pair": ("ab", "cde")} returns 5.
    """
    contents = fields["pair"] if "pair" in fields else fields.values()
    return sum(map(_size, contents))


def _size(content: str | bytes | list[int]) -> int:
    """Return the length of a text, an image file or a list of token ids.

    A small image file counts as `_MIN_IMAGE_SIZE` bytes, because decoding takes long even then.
    """
    return max(len(content), _MIN_IMAGE_SIZE) if isinstance(content, bytes) else len(content)


def _num_value_bytes(value: Value | None) -> int:
    """Return the number of bytes that a value takes in the response."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    return 8 * len(value) if isinstance(value, dict) else 4  # a dict: an id and a weight each


def _too_large_error(field: str) -> RequestError:
    """Return the error for a job whose values do not fit into one response."""
    return RequestError(
        f"{field}: the outputs of the request have more than {_MAX_VALUE_BYTES} bytes, which is "
        "the limit of a response. Send fewer or shorter inputs."
    )


def _kind_of(value: Value) -> str:
    """Return the kind of a result, such as "dense". `value` is the result for one input.

    Outcome.kind describes the kinds.
    """
    if isinstance(value, np.ndarray):
        return "dense" if value.ndim == 1 else "multi_vector"
    return "sparse" if isinstance(value, dict) else "score"
