# SPDX-License-Identifier: Apache-2.0
"""What the Triton models `embedding` and `rerank` have in common: their stub.

execute (the server's thread)      --> jobs to the worker
loop    (one thread, owns them)    <-- outcomes from the worker, cancels from the server
                                   --> one response for each request

The model is not decoupled, so that /infer and plain gRPC calls reach it, yet `execute` does not
wait: responses are sent later, through each request's sender. All of them are sent by the loop,
because a stub of server 2.51 that sends from several threads crashes.
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
from nereid_backend.serving.pooling.worker_client import Done, WorkerClient
from nereid_backend.serving.process.process_handle import EngineDiedError, Refusal

_POLL_S = 0.02
_CANCEL_CHECKS = 32  # in one turn of the loop
_SMALL_BYTES = 64 * 1024
_POOL_STEP_BYTES = 1024 * 1024

Tensors = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that the worker has, or one to be answered without it."""

    sender: Any
    returns_info: bool


class PoolingStub(ABC):
    """One Triton model whose work is done by a worker process."""

    kind: str
    """Middle of the settings' names: "embedding" or "rerank"."""
    tasks: tuple[str, ...]
    """What the checkpoint may be for."""

    @abstractmethod
    def read(self, request: Any) -> Job | None:  # noqa: ANN401 - the server's own type
        """The request's inputs; None where it has none, which is right if it asks for `info`.

        Raises:
            RequestError: which input is wrong, and why.
        """

    @abstractmethod
    def write(self, outcome: Outcome) -> Tensors:
        """The outputs for an outcome."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the worker and wait until its model is loaded; without a checkpoint, do nothing."""
        self._ids = itertools.count(1)
        self._arrivals: queue.SimpleQueue[tuple[str, _Waiting]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, Tensors | Exception]] = queue.SimpleQueue()
        self._waiting: dict[str, _Waiting] = {}
        self._watched: collections.deque[str] = collections.deque()
        self._worker: WorkerClient | None = None
        self._outage = ""  # why requests are refused
        self._stopping = threading.Event()
        try:
            self._settings = read_pooling_settings(self.kind, args)
            self._load()
        except NereidError as error:
            raise tensors.load_error(error) from error
        self._loop_thread = threading.Thread(target=self._loop, name=f"{self.kind}-loop")
        self._loop_thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to the worker; its response is sent by the loop."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except NereidError as error:
                self._answers.put((sender, error))
            except Exception as error:  # noqa: BLE001 - the request ends here and must be answered
                tensors.log.exception("request failed in %s", self.kind)
                self._answers.put((sender, error))

    def finalize(self) -> None:
        """End what is running, then the worker."""
        self._stopping.set()
        self._loop_thread.join()
        if self._worker is not None:
            self._worker.stop()

    def _load(self) -> None:
        config = self._settings.config
        if config is None:
            return
        worker = WorkerClient(config, tensors.progress)
        try:
            worker.start(self._settings.serving.start_timeout_s)
        except NereidError as error:
            prefix = self._settings.variable.removesuffix("MODEL")
            raise EngineError(
                f"{self.kind}: {error} (settings of this model are variables {prefix}*)"
            ) from error
        task = worker.info["task"]
        if task not in self.tasks:
            worker.stop()
            raise EngineError(
                f"{self._settings.variable}: {config.model} is a model for the task {task!r}; "
                f"the model {self.kind!r} needs one for {' or '.join(self.tasks)}"
            )
        self._worker = worker

    def _accept(self, request: Any, sender: Any) -> None:  # noqa: ANN401 - the server's own types
        worker = self._worker
        waiting = _Waiting(sender, bool(tensors.optional_bool(request, names.RETURN_INFO)))
        if worker is None:
            if not waiting.returns_info:
                raise CapacityError(_not_configured(self.kind, self._settings))
            self._answers.put((sender, self._info(waiting)))
            return
        if self._outage:
            raise CapacityError(self._outage)
        limit = self._settings.serving.max_requests
        if len(self._waiting) + self._arrivals.qsize() >= limit:
            raise CapacityError(
                f"{limit} requests are in the model, which is the limit "
                f"({self.kind}_max_requests); try again later"
            )
        job = self.read(request)
        if job is None or not job.inputs:
            outputs = {} if job is None else self.write_nothing()
            self._answers.put((sender, outputs | self._info(waiting)))
            return
        request_id = str(next(self._ids))
        # Queued before the worker knows of it, so that the loop has it when the outcome comes.
        self._arrivals.put((request_id, waiting))
        worker.submit(request_id, job)

    @abstractmethod
    def write_nothing(self) -> Tensors:
        """The outputs for a request with an empty list of inputs."""

    # From here on: the loop's thread only.

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except EngineDiedError as error:
                self._restart(error)
            except Exception as error:  # noqa: BLE001 - without this loop nothing is answered
                tensors.log.exception("the loop of %s failed", self.kind)
                self._recover(f"{self.kind} failed: {type(error).__name__}: {error}")
        self._end_all(EngineError("the server is shutting down"))

    def _recover(self, problem: str) -> None:
        """A defect: what is in flight ends, and the loop goes on; else this process ends."""
        try:
            for request_id in self._waiting:
                if self._worker is not None:
                    self._worker.abort(request_id)
            self._end_all(EngineError(problem))
        except Exception:  # noqa: BLE001 - as above
            tensors.log.exception(
                "%s; its process ends, for the server to be started again", problem
            )
            os._exit(1)

    def _turn(self) -> None:
        answers: list[Done | Refusal] = []
        if self._worker is None:
            self._stopping.wait(_POLL_S)
        else:
            answers = self._worker.receive(_POLL_S)
            limit_s = self._settings.serving.hang_timeout_s
            self._worker.kill_if_hanging(limit_s, is_working=bool(self._waiting))
        self._adopt()
        self._answer_rest()
        for answer in answers:
            waiting = self._waiting.pop(answer.request_id, None)
            if waiting is None:
                continue
            _send(waiting.sender, self._reply(answer, waiting))
        self._drop_cancelled()

    def _reply(self, answer: Done | Refusal, waiting: _Waiting) -> Tensors | Exception:
        if isinstance(answer, Refusal):
            return answer.error
        try:
            return self.write(answer.outcome) | self._info(waiting)
        except Exception as error:  # noqa: BLE001 - the request ends here and must be answered
            tensors.log.exception("an outcome could not be written in %s", self.kind)
            return error

    def _adopt(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                request_id, waiting = self._arrivals.get_nowait()
                self._waiting[request_id] = waiting
                self._watched.append(request_id)

    def _answer_rest(self) -> None:
        """Send what needs no worker: refusals, and replies to requests without inputs."""
        with contextlib.suppress(queue.Empty):
            while True:
                _send(*self._answers.get_nowait())

    def _drop_cancelled(self) -> None:
        """Look at some requests, for each look is a message to the server."""
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
        if not waiting.returns_info:
            return {}
        if self._worker is None:
            reason = _not_configured(self.kind, self._settings)
            return {names.INFO: tensors.strings(json.dumps({"task": "none", "reason": reason}))}
        name = self._settings.serving.served_model_name
        info = self._worker.info | {"name": name or PurePath(self._worker.info["model"]).name}
        return {names.INFO: tensors.strings(json.dumps(info))}

    def _end_all(self, error: NereidError) -> None:
        self._adopt()
        self._answer_rest()
        for waiting in self._waiting.values():
            _send(waiting.sender, error)
        self._waiting.clear()

    def _restart(self, error: EngineDiedError) -> None:
        """The worker has died: end its requests with the reason, then start another."""
        self._outage = "the worker is being started again; try again in a few seconds"
        tensors.log.error("%s: %s", self.kind, error)
        worker, serving = self._worker, self._settings.serving
        assert worker is not None  # who else could have died
        for attempt in range(1, serving.max_restarts + 1):
            self._end_all(error)
            tensors.progress(f"{self.kind}: {error}; starting it again (attempt {attempt})")
            try:
                worker.start(serving.start_timeout_s, self._answer_rest)
            except NereidError as failure:
                tensors.log.error("%s: the worker did not start again: %s", self.kind, failure)
                continue
            self._end_all(error)
            self._outage = ""
            return
        self._outage = (
            f"the worker did not start again in {serving.max_restarts} attempts (max_restarts), "
            f"after: {error}; restart the server"
        )
        tensors.progress(f"error: {self.kind}: {self._outage}")
        while not self._stopping.wait(_POLL_S):
            self._end_all(error)


def _send(sender: Any, answer: Tensors | Exception) -> None:  # noqa: ANN401 - the server's own type
    """Answer a request, which must end: a server of 2.51 takes no second answer, not an error."""
    if not isinstance(answer, Exception) and not _fits(answer):
        answer = CapacityError(
            "there is no room for the answer in the machine's shared memory (/dev/shm is full); "
            "try again later"
        )
    if isinstance(answer, Exception):
        reply = tensors.error_response(answer)
    else:
        reply = tensors.response(answer)
    try:
        tensors.send(sender, reply, final=True)
    except Exception:  # noqa: BLE001 - this request would hang for ever
        tensors.log.exception(
            "an answer could not be handed to the server; this process ends, for the server to be "
            "started again"
        )
        os._exit(1)


def _fits(outputs: Tensors) -> bool:
    """Whether outputs fit into what is left of shared memory; small ones are not looked at."""
    size = sum(
        sum(map(len, array)) if array.dtype == object else array.nbytes
        for array in outputs.values()
    )
    if size < _SMALL_BYTES:
        return True
    try:
        left = os.statvfs("/dev/shm")
    except OSError:
        return True
    # The stub's pool grows by a MiB at a time, and holds the answer beside what is in it.
    return left.f_bavail * left.f_frsize > 2 * size + _POOL_STEP_BYTES


def _not_configured(kind: str, settings: PoolingSettings) -> str:
    return (
        f"no checkpoint is served as {kind!r}; set {settings.variable} to the folder of one and "
        "start the server again"
    )


def is_given(request: Any, name: str) -> bool:  # noqa: ANN401 - the server's own type
    """Whether an optional input was sent, be it empty."""
    return pb_utils.get_input_tensor_by_name(request, name) is not None
