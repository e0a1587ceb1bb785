# SPDX-License-Identifier: Apache-2.0
"""The common stub of the Triton models `embedding` and `rerank`.

execute (the server's thread)          --> jobs to the worker
loop    (one thread, owns the requests) <-- outcomes from the worker, cancellations from the server
                                       --> one response for each request

The model is not decoupled, so that clients can call it with /infer and with plain gRPC calls. But
`execute` does not wait: responses are sent later through each request's sender. Only the loop's
thread sends responses, because a stub of Triton server 2.51 crashes if several threads send.
"""

import collections
import contextlib
import itertools
import json
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from nereid_backend.errors import CapacityError, EngineError, NereidError
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving import tensors
from nereid_backend.serving.pooling.jobs import Job, Outcome
from nereid_backend.serving.pooling.pooling_settings import PoolingSettings, read_pooling_settings
from nereid_backend.serving.pooling.worker_client import JobDone, WorkerClient
from nereid_backend.serving.process.process_handle import EngineDiedError, Refusal

_POLL_S = 0.02
_CANCEL_CHECKS = 32  # in one round of the loop; each check costs a round trip to the server
# Smaller outputs are sent without checking the free shared memory.
_SMALL_BYTES = 64 * 1024
_POOL_STEP_BYTES = 1024 * 1024

Tensors = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request without a response.

    Attributes:
        sender: the server's response sender.
        returns_info: whether the response contains the output `info`.
    """

    sender: Any
    returns_info: bool


class PoolingStub(ABC):
    """A Triton model whose computations run in a worker process."""

    kind: str
    """The name of the Triton model, "embedding" or "rerank". Its settings begin with this name."""
    tasks: tuple[str, ...]
    """The tasks of the checkpoints that this model can serve."""

    @abstractmethod
    def read_job(self, request: Any) -> Job | None:  # noqa: ANN401 - the server's own type
        """Return the job in `request`, or None if the request has no inputs and asks for `info`.

        Raises:
            RequestError: an input is missing or wrong.
        """

    @abstractmethod
    def build_outputs(self, outcome: Outcome) -> Tensors:
        """Return the output tensors of a finished job."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the worker process and wait until its model is loaded.

        Without a checkpoint no process is started, and every request is refused.
        """
        self._ids = itertools.count(1)
        self._arrivals: queue.SimpleQueue[tuple[str, _Waiting]] = queue.SimpleQueue()
        self._ready_responses: queue.SimpleQueue[tuple[Any, Tensors | Exception]] = (
            queue.SimpleQueue()
        )
        self._waiting: dict[str, _Waiting] = {}
        self._watched: collections.deque[str] = collections.deque()
        self._worker: WorkerClient | None = None
        self._outage = ""  # why every request is refused; empty while the worker runs
        self._stopping = threading.Event()
        try:
            self._settings = read_pooling_settings(self.kind, args)
            self._load()
        except NereidError as error:
            raise tensors.load_error(error) from error
        self._loop_thread = threading.Thread(target=self._loop, name=f"{self.kind}-loop")
        self._loop_thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Send each request to the worker. The loop sends the responses."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except NereidError as error:
                self._ready_responses.put((sender, error))
            except Exception as error:  # noqa: BLE001 - the request ends here and needs a response
                tensors.log.exception("a request failed in the model %s", self.kind)
                self._ready_responses.put((sender, error))

    def finalize(self) -> None:
        """End all requests, then the worker process."""
        self._stopping.set()
        self._loop_thread.join()
        if self._worker is not None:
            self._worker.stop()

    def _load(self) -> None:
        """Start the worker process, and check that its checkpoint has a suitable task."""
        config = self._settings.config
        if config is None:
            return
        worker = WorkerClient(config, tensors.progress)
        try:
            worker.start(self._settings.serving.start_timeout_s)
        except NereidError as error:
            prefix = self._settings.variable.removesuffix("MODEL")
            raise EngineError(
                f"{self.kind}: {error} (The variables of this model begin with {prefix}.)"
            ) from error
        task = worker.info["task"]
        if task not in self.tasks:
            worker.stop()
            raise EngineError(
                f"{self._settings.variable}: the checkpoint {config.model} has the task {task!r}, "
                f"but the model {self.kind!r} needs a checkpoint for {' or '.join(self.tasks)}."
            )
        self._worker = worker

    def _accept(self, request: Any, sender: Any) -> None:  # noqa: ANN401 - the server's own types
        worker = self._worker
        waiting = _Waiting(sender, bool(tensors.optional_bool(request, names.RETURN_INFO)))
        if worker is None:
            if not waiting.returns_info:
                raise CapacityError(_not_configured(self.kind, self._settings))
            self._ready_responses.put((sender, self._info(waiting)))
            return
        if self._outage:
            raise CapacityError(self._outage)
        limit = self._settings.serving.max_requests
        if len(self._waiting) + self._arrivals.qsize() >= limit:
            raise CapacityError(
                f"the model has {limit} requests, which is the limit ({self.kind}_max_requests). "
                "Try again later."
            )
        job = self.read_job(request)
        if job is None or not job.inputs:
            outputs = {} if job is None else self.empty_outputs()
            self._ready_responses.put((sender, outputs | self._info(waiting)))
            return
        request_id = str(next(self._ids))
        # Queue the request before the worker receives the job, so that the loop knows the request
        # when its outcome arrives.
        self._arrivals.put((request_id, waiting))
        worker.submit(request_id, job)

    @abstractmethod
    def empty_outputs(self) -> Tensors:
        """Return the output tensors of a request with an empty list of inputs."""

    # Only the loop's thread calls the methods below.

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                self._run_once()
            except EngineDiedError as error:
                self._restart(error)
            except Exception as error:  # noqa: BLE001 - without this loop no request gets a response
                tensors.log.exception("the loop of the model %s failed", self.kind)
                self._recover(f"the model {self.kind} failed: {type(error).__name__}: {error}")
        self._end_all(EngineError("the server is shutting down"))

    def _recover(self, problem: str) -> None:
        """End all requests after an unexpected error, so that the loop can continue.

        If that fails, too, the process exits, and Triton server starts it again.
        """
        try:
            for request_id in self._waiting:
                if self._worker is not None:
                    self._worker.abort(request_id)
            self._end_all(EngineError(problem))
        except Exception:  # noqa: BLE001 - as above
            tensors.log.exception(
                "%s. Its requests cannot be ended, so the process exits and must be restarted",
                problem,
            )
            os._exit(1)

    def _run_once(self) -> None:
        """Receive messages of the worker, send responses, and drop cancelled requests."""
        messages: list[JobDone | Refusal] = []
        if self._worker is None:
            self._stopping.wait(_POLL_S)
        else:
            messages = self._worker.receive(_POLL_S)
            limit_s = self._settings.serving.hang_timeout_s
            self._worker.kill_if_hanging(limit_s, is_working=bool(self._waiting))
        self._add_arrivals()
        self._send_ready_responses()
        for message in messages:
            waiting = self._waiting.pop(message.request_id, None)
            if waiting is not None:
                _send(waiting.sender, self._build_response(message, waiting))
        self._drop_cancelled()

    def _build_response(self, message: JobDone | Refusal, waiting: _Waiting) -> Tensors | Exception:
        """Return the output tensors of a request, or its error."""
        if isinstance(message, Refusal):
            return message.error
        try:
            return self.build_outputs(message.outcome) | self._info(waiting)
        except Exception as error:  # noqa: BLE001 - the request ends here and needs a response
            tensors.log.exception("the outputs of a request failed in the model %s", self.kind)
            return error

    def _add_arrivals(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                request_id, waiting = self._arrivals.get_nowait()
                self._waiting[request_id] = waiting
                self._watched.append(request_id)

    def _send_ready_responses(self) -> None:
        """Send the responses that need no worker: refusals and responses without inputs."""
        with contextlib.suppress(queue.Empty):
            while True:
                _send(*self._ready_responses.get_nowait())

    def _drop_cancelled(self) -> None:
        """Check some requests for cancellation, and drop the cancelled ones."""
        for _ in range(min(len(self._watched), _CANCEL_CHECKS)):
            request_id = self._watched.popleft()
            waiting = self._waiting.get(request_id)
            if waiting is None:
                continue
            if not waiting.sender.is_cancelled():
                self._watched.append(request_id)
                continue
            if self._worker is not None:
                self._worker.abort(request_id)
            del self._waiting[request_id]
            _send(waiting.sender, EngineError("the request was cancelled"))

    def _info(self, waiting: _Waiting) -> Tensors:
        """Return the output `info` with a description of the model, if the request asks for it."""
        if not waiting.returns_info:
            return {}
        if self._worker is None:
            reason = _not_configured(self.kind, self._settings)
            return {names.INFO: tensors.strings(json.dumps({"task": "none", "reason": reason}))}
        name = self._settings.serving.served_model_name
        info = self._worker.info | {"name": name or PurePath(self._worker.info["model"]).name}
        return {names.INFO: tensors.strings(json.dumps(info))}

    def _end_all(self, error: NereidError) -> None:
        self._add_arrivals()
        self._send_ready_responses()
        for waiting in self._waiting.values():
            _send(waiting.sender, error)
        self._waiting.clear()

    def _restart(self, error: EngineDiedError) -> None:
        """End all requests after the death of the worker process, and start a new one.

        After max_restarts unsuccessful restarts, every request is refused until the server is
        restarted.
        """
        self._outage = "the worker process is restarting. Try again in a few seconds."
        tensors.log.error("%s: %s", self.kind, error)
        worker = self._worker
        serving = self._settings.serving
        assert worker is not None  # only a worker raises EngineDiedError
        for attempt in range(1, serving.max_restarts + 1):
            self._end_all(error)
            tensors.progress(
                f"restarting the worker of the model {self.kind} (attempt {attempt} of "
                f"{serving.max_restarts}), because {error}"
            )
            try:
                worker.start(serving.start_timeout_s, self._send_ready_responses)
            except NereidError as failure:
                tensors.log.error("%s: the worker could not be restarted: %s", self.kind, failure)
                continue
            self._end_all(error)
            self._outage = ""
            return
        self._outage = (
            f"the worker process could not be restarted in {serving.max_restarts} attempts "
            f"(max_restarts). Restart the server. The last reason was: {error}"
        )
        tensors.progress(f"error: {self.kind}: {self._outage}")
        while not self._stopping.wait(_POLL_S):
            self._end_all(error)


def _send(sender: Any, result: Tensors | Exception) -> None:  # noqa: ANN401 - the server's own type
    """Send the one response of a request: its outputs or an error.

    If sending fails, the process exits. Triton server 2.51 accepts no second response, not even an
    error, so the request would otherwise never end.
    """
    if not isinstance(result, Exception) and not _fits_shared_memory(result):
        result = CapacityError(
            "the response does not fit into the free shared memory of the machine, because "
            "/dev/shm is full. Try again later."
        )
    if isinstance(result, Exception):
        reply = tensors.error_response(result)
    else:
        reply = tensors.response(result)
    try:
        tensors.send(sender, reply, final=True)
    except Exception:  # noqa: BLE001 - the request would never end
        tensors.log.exception(
            "a response could not be sent, so the process exits and must be restarted"
        )
        os._exit(1)


def _fits_shared_memory(outputs: Tensors) -> bool:
    """Return whether output tensors fit into the free shared memory. Small ones always do."""
    size = sum(
        sum(map(len, array)) if array.dtype == object else array.nbytes
        for array in outputs.values()
    )
    if size < _SMALL_BYTES:
        return True
    try:
        shared_memory = os.statvfs("/dev/shm")
    except OSError:
        return True
    free_bytes = shared_memory.f_bavail * shared_memory.f_frsize
    # The stub's memory pool grows by steps of 1 MiB. While it grows, it needs space for the old
    # content and for the response.
    return free_bytes > 2 * size + _POOL_STEP_BYTES


def _not_configured(kind: str, settings: PoolingSettings) -> str:
    return (
        f"no checkpoint is served as {kind!r}. Set {settings.variable} to the folder of a "
        "checkpoint and restart the server."
    )


def has_tensor(request: Any, name: str) -> bool:  # noqa: ANN401 - the server's own type
    """Return whether the request has the optional input `name`, even if it is empty."""
    return pb_utils.get_input_tensor_by_name(request, name) is not None
