# SPDX-License-Identifier: Apache-2.0
"""The common part of the Triton models that compute in a child process.

execute (the server's thread)         --> new requests, messages to the child process
loop    (one thread, owns requests)   <-- messages of the child process
                                      --> responses to the server

Only the loop's thread sends responses, because a stub of Triton server 2.51 crashes if several
threads send. The loop also supervises the child process. If the process dies or hangs, all requests
end with an error, new requests are refused, and the process is started again.
"""

import contextlib
import os
import queue
import threading
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from nereid_backend.errors import CapacityError, EngineError, NereidError
from nereid_backend.serving import tensors
from nereid_backend.serving.process.channel import pack
from nereid_backend.serving.process.process_handle import (
    ChildProcess,
    ChildProgram,
    EngineDiedError,
)
from nereid_backend.serving.tensors import Tensors

_OUTAGE_POLL_S = 0.05

RequestT = TypeVar("RequestT")


class SupervisedModel(ABC, Generic[RequestT]):
    """A Triton model whose computations run in a child process.

    A subclass implements the abstract methods, and calls `start_child` and `start_loop` in its
    `initialize`. The server's thread calls `accept`. Only the loop's thread calls the other
    abstract methods.

    Attributes:
        title: the name of the model in messages, such as "executor".
        log_prefix: the beginning of log lines about the child process, such as "embedding: ".
        child: the child process that was started last; None if the model needs no child process.
        requests: the requests without a final response, by the id that the child process knows.
            Only the loop's thread may use them.
        num_deaths: the number of times that the child process has died or could not be started.
            The subclass sets it to 0 when the process has proved to work.
        outage: the reason why every request is refused; empty while the child process runs.
    """

    title: str
    log_prefix = ""

    def __init__(self) -> None:
        self.child: ChildProcess | None = None
        self.requests: dict[str, RequestT] = {}
        self.num_deaths = 0
        self.outage = ""
        self._arrivals: queue.SimpleQueue[tuple[str, RequestT]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, Tensors | Exception]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._loop_thread = threading.Thread(target=self._loop, name=f"{self.title}-loop")

    # The subclass implements these methods.

    @abstractmethod
    def accept(self, request: Any, sender: Any) -> None:  # noqa: ANN401 - the server's own types
        """Read a request, then call `add_request` or `respond_later`.

        Call `add_request` if the child process must handle the request. If the response is already
        known, call `respond_later`.

        Raises:
            NereidError: the request is refused.
        """

    @abstractmethod
    def handle(self, kind: str, values: list[Any]) -> None:
        """Handle the message [kind, *values] of the child process."""

    @abstractmethod
    def serve(self) -> float:
        """Do periodic work, such as cancelling requests. Return the seconds until the next call."""

    @abstractmethod
    def end(self, request: RequestT, error: NereidError) -> None:
        """Remove a request from `requests`, and send `error` as its last response."""

    @abstractmethod
    def restart_message(self) -> str:
        """Return the reason for which requests are refused while the child process restarts."""

    @abstractmethod
    def failure_message(self, error: NereidError) -> str:
        """Return the error message for requests after all restarts of the process have failed."""

    def on_restart(self) -> None:
        """Record that the child process has been restarted."""

    def publish_metrics(self) -> None:
        """Publish the model's metrics, if it has any."""

    # The interface of a Triton model, except for `initialize`.

    def execute(self, requests: list[Any]) -> None:
        """Accept or refuse each request. The loop sends the responses."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                if self.outage:
                    raise CapacityError(self.outage)
                self.accept(request, sender)
            except Exception as error:  # noqa: BLE001 - the request ends here and needs a response
                if not isinstance(error, NereidError):
                    tensors.log.exception(
                        "request %s failed in the %s", request.request_id(), self.title
                    )
                self.respond_later(sender, error)

    def finalize(self) -> None:
        """End all requests, then the child process."""
        self._stopping.set()
        self._loop_thread.join()
        if self.child is not None:
            self.child.stop()

    # The subclass calls these methods.

    def start_child(self, program: ChildProgram) -> ChildProcess:
        """Start the child process, wait until its model is loaded, and return the process.

        Raises:
            EngineError: loading failed or took too long. The message gives the reason.
        """
        self._program = program
        self.child = ChildProcess.start(program, tensors.progress)
        return self.child

    def start_loop(self) -> None:
        """Start the thread that serves the requests."""
        self._loop_thread.start()

    def add_request(self, request_id: str, request: RequestT, message: list[Any]) -> None:
        """Pass an accepted request to the loop, and `message` to the child process.

        If the child process has just died, the loop ends the request with all other requests.

        Raises:
            RequestError: the message cannot be packed; see channel.pack. The request is not added.
        """
        packed = pack(message)
        # Add the request to the queue before the message is sent. Otherwise, the loop could receive
        # the answer of the child process before it receives the request.
        self._arrivals.put((request_id, request))
        if self.child is not None:
            self.child.send_packed(packed)

    @property
    def num_requests(self) -> int:
        """The number of requests without a final response. Any thread may read this property."""
        return len(self.requests) + self._arrivals.qsize()

    def respond_later(self, sender: Any, result: Tensors | Exception) -> None:  # noqa: ANN401
        """Queue a final response that needs no child process. The loop sends the response."""
        self._results.put((sender, result))

    def respond(self, sender: Any, result: Tensors | Exception) -> None:  # noqa: ANN401
        """Send a final response: output tensors or an error.

        If sending fails, the process exits, and Triton server starts it again. Triton server 2.51
        accepts no second response, not even an error, so the request would otherwise never end.
        """
        if isinstance(result, Exception):
            reply = tensors.error_response(result)
        else:
            reply = tensors.response(result)
        try:
            tensors.send(sender, reply, final=True)
        except Exception:  # noqa: BLE001 - the process ends here
            tensors.log.exception(
                "a response could not be sent, so the process exits and must be restarted"
            )
            os._exit(1)

    def send(self, message: list[Any]) -> None:
        """Send a message to the child process. If the process has died, the message is dropped."""
        if self.child is not None:
            self.child.send(message)

    # Only the loop's thread calls the methods below.

    def _loop(self) -> None:
        """Receive messages and serve the requests, until `finalize` is called."""
        wait_s = 0.0
        while not self._stopping.is_set():
            try:
                messages = self._receive(wait_s)
                self._take_arrivals()
                for kind, *values in messages:
                    if kind == "progress":
                        tensors.progress(*values)
                    else:
                        self.handle(kind, values)
                wait_s = self.serve()
                self.publish_metrics()
            except EngineDiedError as error:
                self._restart(error)
            except Exception as error:  # noqa: BLE001 - the thread that sends responses would end
                tensors.log.exception("the loop of the %s failed", self.title)
                self._recover(f"the {self.title} failed: {type(error).__name__}: {error}")
        self.end_all(EngineError("the server is shutting down"))

    def _receive(self, timeout_s: float) -> list[list[Any]]:
        """Return the new messages of the child process; [] if there is no child process."""
        if self.child is None:
            self._stopping.wait(timeout_s)
            return []
        return self.child.receive(timeout_s, is_working=bool(self.requests))

    def _take_arrivals(self) -> None:
        """Take the requests and the results that the server's thread has queued."""
        with contextlib.suppress(queue.Empty):
            while True:
                request_id, request = self._arrivals.get_nowait()
                self.requests[request_id] = request
        with contextlib.suppress(queue.Empty):
            while True:
                self.respond(*self._results.get_nowait())

    def _recover(self, problem: str) -> None:
        """End all requests after an unexpected error, so that the loop can continue.

        If a request cannot be ended, the process exits, and Triton server starts it again.
        """
        try:
            self.end_all(EngineError(problem))
        except Exception:  # noqa: BLE001 - the process ends here
            tensors.log.exception(
                "%s. Its requests cannot be ended, so the process exits and must be restarted",
                problem,
            )
            os._exit(1)

    def end_all(self, error: NereidError) -> None:
        """End all requests with `error`, including requests that have just arrived."""
        self._take_arrivals()
        for request in list(self.requests.values()):
            self.end(request, error)

    def _restart(self, error: EngineDiedError) -> None:
        """End all requests after the death of the child process, then start a new child process.

        After too many unsuccessful restarts, refuse every request until the server is restarted.
        """
        assert self.child is not None  # only a child process raises EngineDiedError
        self.outage = self.restart_message()
        tensors.log.error("%s%s", self.log_prefix, error)
        limit = self._program.max_restarts.value
        while self.num_deaths < limit:
            self.num_deaths += 1
            self._end_during_outage(error)
            tensors.progress(
                f"restarting the {self._program.title} (attempt {self.num_deaths} of {limit}), "
                f"because {error}"
            )
            if self._replace_child(error):
                # Requests that arrived shortly before the loop noticed the death of the process
                # were sent to the old process. These requests end, too.
                self.end_all(error)
                self.outage = ""
                self.on_restart()
                return
        self._refuse_until_finalized(error)

    def _replace_child(self, error: EngineDiedError) -> bool:
        """Stop the child process and start a new one. Return whether the new process is ready."""
        assert self.child is not None
        try:
            self.child.stop()
            self.child = ChildProcess.start(
                self._program, tensors.progress, lambda: self._end_during_outage(error)
            )
        except (NereidError, OSError) as failure:
            tensors.log.error(
                "%sthe %s could not be restarted: %s",
                self.log_prefix,
                self._program.name,
                failure,
            )
            return False
        return True

    def _refuse_until_finalized(self, error: EngineDiedError) -> None:
        """Refuse every request until `finalize` is called."""
        self.outage = self.failure_message(error)
        tensors.progress(f"error: {self.log_prefix}{self.outage}")
        while not self._stopping.is_set():
            self._end_during_outage(error)
            self._stopping.wait(_OUTAGE_POLL_S)

    def _end_during_outage(self, error: EngineDiedError) -> None:
        """End the requests that have arrived since the child process died.

        The metrics are published, too.
        """
        self.end_all(error)
        self.publish_metrics()
