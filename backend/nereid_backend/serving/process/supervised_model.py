# SPDX-License-Identifier: Apache-2.0
"""The base class of the Triton models whose computations run in child processes.

execute (the server's thread)         --> new requests, messages to the child processes
loop    (one thread, owns requests)   <-- messages of the child processes
                                      --> responses to the server

Only the loop's thread sends responses, because a stub of Triton server 2.51 crashes if several
threads send. The loop also supervises the child processes. If a process dies or hangs, all requests
of this process end with an error, and the process is started again (supervised_process.py). While
no process runs, new requests are refused.
"""

import contextlib
import os
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from nereid_backend.errors import CapacityError, EngineError, NereidError
from nereid_backend.serving import triton_api
from nereid_backend.serving.process.channel import pack
from nereid_backend.serving.process.process_handle import ChildProcess, EngineDiedError
from nereid_backend.serving.process.supervised_process import SupervisedProcess
from nereid_backend.serving.triton_api import Tensors

# If Triton server is killed, its stub processes usually end by themselves within this number of
# seconds, and delete their shared memory.
_EXIT_GRACE_S = 5.0
# `nereid serve` reads the log, and restarts the server after a line that begins with this text.
_RESTART_PREFIX = "error: "

RequestT = TypeVar("RequestT")
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class _Received:
    """A child process, and either its new messages or the reason for its death.

    If the process has died, `death` is the reason, and there are no messages.
    """

    process: SupervisedProcess
    messages: list[list[Any]]
    death: EngineDiedError | None = None


class _Arrival(NamedTuple, Generic[RequestT]):
    """A request that the server's thread has accepted and queued for the loop's thread.

    `child` is the child process that got the message. If `process` has another child process when
    the loop takes the request, this child process has died.
    """

    request_id: str
    request: RequestT
    process: SupervisedProcess
    child: ChildProcess


class SupervisedModel(ABC, Generic[RequestT]):
    """A Triton model whose computations run in child processes.

    A subclass implements the abstract methods, sets `processes`, and calls `start_loop` in its
    `initialize`. The server's thread calls `accept`. Only the loop's thread calls the other
    abstract methods.

    Attributes:
        title: the name of the model in messages, such as "executor".
        log_prefix: the beginning of log lines about the model, such as "embedding: ".
        processes: the child processes, by their index; empty if the model needs no child process.
        requests: the requests that have no final response yet. The key is the id of the request in
            the child process. Only the loop's thread may use this attribute, and only the method
            `remove` may remove a request.
    """

    title: str
    log_prefix = ""

    def __init__(self) -> None:
        """Initialise the state of a model without requests. `start_loop` starts the thread."""
        self.processes: list[SupervisedProcess] = []
        self.requests: dict[str, RequestT] = {}
        # Maps the id of each request in `requests` to the process that computes the request.
        self._owners: dict[str, SupervisedProcess] = {}
        # The server's thread puts new requests into this queue. The loop's thread takes them.
        self._arrivals: queue.SimpleQueue[_Arrival[RequestT]] = queue.SimpleQueue()
        # Each item is a pair: the sender of a request, and a response that needs no child process,
        # such as an error. The server's thread puts the pairs into this queue. The loop's thread
        # sends each response through its sender.
        self._results: queue.SimpleQueue[tuple[Any, Tensors | Exception]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._server_pid = os.getppid()  # Triton server has started this process.
        self._loop_thread = threading.Thread(target=self._loop, name=f"{self.title}-loop")

    @property
    def child(self) -> ChildProcess | None:
        """The first child process; None if the model needs no child process."""
        return self.processes[0].child if self.processes else None

    @property
    def outage(self) -> str:
        """The reason why every request is refused; "" if at least one child process runs."""
        if not self.processes or any(process.is_running for process in self.processes):
            return ""
        if all(process.has_given_up for process in self.processes):
            error = self.processes[0].error
            assert error is not None, "only a process that has died gives up"
            return self.failure_message(error)
        return self.restart_message()

    # The subclass implements these methods.

    @abstractmethod
    def accept(self, request: Any, sender: Any) -> None:  # noqa: ANN401 - the server's own types
        """Read a request, and call `add_request` or `respond_later`.

        Call `add_request` if the child process must handle the request. If the response is already
        known, call `respond_later`.

        Raises:
            NereidError: the request is refused.
        """

    @abstractmethod
    def handle(self, process: SupervisedProcess, kind: str, values: list[Any]) -> None:
        """Handle the message [kind, *values] from a child process."""

    @abstractmethod
    def do_periodic_work(self) -> float:
        """Do periodic work, and return the number of seconds until the next call is needed.

        For example, end the requests that clients have cancelled. The loop's thread calls this
        method after it has handled the new messages.
        """

    @abstractmethod
    def end(self, request: RequestT, error: NereidError) -> None:
        """End a request: call `remove`, and send `error` as the last response to the client."""

    @abstractmethod
    def restart_message(self) -> str:
        """Return the message that clients get while all child processes restart."""

    @abstractmethod
    def failure_message(self, error: NereidError) -> str:
        """Return the message that clients get after all restarts have failed.

        Args:
            error: the reason of the last death.
        """

    def on_death(self, process: SupervisedProcess, error: NereidError) -> None:
        """Record the death of a child process whose requests have been answered with `error`."""

    def on_restart(self, process: SupervisedProcess) -> None:
        """Record that a child process has been restarted. It has not received a request yet."""

    def publish_metrics(self) -> None:
        """If the model has metrics, publish the metrics."""

    # The methods below are called by Triton server. The subclass implements `initialize`.

    def execute(self, requests: list[Any]) -> None:
        """Accept or refuse each request. This thread does not send responses.

        The subclass accepts a request by `accept`. If the request is refused, queue the error, so
        that the loop's thread sends the error to the client.
        """
        for request in requests:
            sender = request.get_response_sender()
            try:
                if self.outage:
                    raise CapacityError(self.outage)
                self.accept(request, sender)
            except NereidError as error:
                self.respond_later(sender, error)
            except Exception as error:  # noqa: BLE001 - the request ends here and needs a response
                triton_api.log.exception(
                    "request %s failed in the %s", request.request_id(), self.title
                )
                self.respond_later(sender, error)

    def finalize(self) -> None:
        """End all requests, and stop the child processes."""
        self._stopping.set()
        self._loop_thread.join()
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(SupervisedProcess.stop, self.processes):
                pass

    # The subclass calls these methods.

    def start_loop(self) -> None:
        """Start the thread that serves the requests."""
        self._loop_thread.start()

    def add_request(
        self, request_id: str, request: RequestT, message: list[Any], index: int = 0
    ) -> None:
        """Pass an accepted request to the loop's thread, and send `message` to a child process.

        Triton server calls this method in its own thread. If the child process has just died, the
        loop ends the request.

        Args:
            request_id: the id of the request in the child process.
            request: the request.
            message: the message.
            index: the number of the child process.

        Raises:
            RequestError: the message contains a value that msgpack cannot pack, such as an integer
                of more than 64 bits. The request is not added.
        """
        packed = pack(message)
        process = self.processes[index]
        child = process.child
        # Queue the request before the message is sent. Otherwise, the answer of the child process
        # could arrive before the request is in the queue. If the child process is replaced while
        # the request is in the queue, the loop finds that `process.child` is no longer `child`, and
        # ends the request.
        self._arrivals.put(_Arrival(request_id, request, process, child))
        child.send_packed(packed)

    def remove(self, request_id: str) -> RequestT | None:
        """Remove a request from `requests`, and return the request.

        If the id is unknown, return None.
        """
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._owners.pop(request_id).num_requests -= 1
        return request

    def owner(self, request_id: str) -> SupervisedProcess:
        """Return the process that computes the request with the id `request_id`."""
        return self._owners[request_id]

    @property
    def num_requests(self) -> int:
        """The number of requests that have no final response. Any thread may read this number."""
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
            reply = triton_api.error_response(result)
        else:
            reply = triton_api.response(result)
        try:
            triton_api.send(sender, reply, final=True)
        except Exception:  # noqa: BLE001 - the process ends here
            triton_api.log.exception(
                "a response could not be sent, so the process exits and must be restarted"
            )
            os._exit(1)

    # Only the loop's thread calls the methods below.

    def _loop(self) -> None:
        """Call `_run_round` until `finalize` is called. Then end all requests."""
        wait_s = 0.0
        while not self._stopping.is_set():
            try:
                wait_s = self._run_round(wait_s)
            except Exception as error:  # noqa: BLE001 - the thread that sends responses would end
                triton_api.log.exception("the loop of the %s failed", self.title)
                self._recover(f"the {self.title} failed: {type(error).__name__}: {error}")
        self.end_all(EngineError("the server is shutting down"))

    def _run_round(self, wait_s: float) -> float:
        """Do one round of the loop: handle the new messages and requests, and do periodic work.

        `wait_s` is the longest time to wait for the first message. Return its value for the next
        round.
        """
        self._use_restarted_processes()
        received = self._receive(wait_s)
        self._exit_if_server_was_killed()
        # A received message can belong to a request that has just arrived. Therefore take the new
        # requests first, and handle the messages afterwards.
        self._take_arrivals()
        for result in received:
            for kind, *values in result.messages:
                if kind == "progress":
                    triton_api.progress(*values)
                else:
                    self.handle(result.process, kind, values)
        # Handle the deaths after all messages. A request to load an adapter, for example, waits for
        # an answer from each process. Answers that have already arrived must be recorded before the
        # death of another process is handled.
        for result in received:
            if result.death is not None:
                self._handle_death(result.process, result.death)
        next_wait_s = self.do_periodic_work()
        self.publish_metrics()
        return next_wait_s

    def _exit_if_server_was_killed(self) -> None:
        """End this process if Triton server no longer runs.

        Otherwise, the next update of a metric would wait forever for an answer of the server. It
        would hold Python's lock (GIL) meanwhile, so that no other thread could end this process.
        """
        if os.getppid() != self._server_pid:
            time.sleep(_EXIT_GRACE_S)
            os._exit(1)

    def _receive(self, timeout_s: float) -> list[_Received]:
        """Receive messages from all running processes, and return one result for each process.

        Wait at most `timeout_s` seconds for the first message. If no process runs, wait for
        `timeout_s` seconds or until the server stops, and return [].
        """
        running = [process for process in self.processes if process.is_running]
        if len(running) == 1:
            return [self._receive_from(running[0], timeout_s)]
        if running:
            poll = select.poll()
            for process in running:
                poll.register(process.child, select.POLLIN)
            poll.poll(timeout_s * 1000)
        else:
            self._stopping.wait(timeout_s)
        return [self._receive_from(process, 0.0) for process in running]

    def _receive_from(self, process: SupervisedProcess, timeout_s: float) -> _Received:
        """Wait at most `timeout_s` seconds for messages of a process, and return the messages."""
        try:
            messages = process.child.receive(timeout_s, is_working=process.num_requests > 0)
        except EngineDiedError as error:
            return _Received(process, messages=[], death=error)
        return _Received(process, messages)

    def _take_arrivals(self) -> None:
        """Process the requests and the responses that a thread of the Triton server has queued.

        If a request was sent to a child process that has died since then, end the request.
        """
        for arrival in drain(self._arrivals):
            process = arrival.process
            self.requests[arrival.request_id] = arrival.request
            self._owners[arrival.request_id] = process
            process.num_requests += 1
            has_died = not process.is_running or process.child is not arrival.child
            if has_died:
                # `process.error` is the reason of the last death. A restart does not remove it.
                assert process.error is not None, "a process that has died has no error"
                self.end(arrival.request, process.error)
        for sender, result in drain(self._results):
            self.respond(sender, result)

    def _recover(self, problem: str) -> None:
        """End all requests after an unexpected error, so that the loop can continue.

        If a request cannot be ended, the process exits, and Triton server starts it again.
        """
        try:
            self.end_all(EngineError(problem))
        except Exception:  # noqa: BLE001 - the process ends here
            triton_api.log.exception(
                "%s. Its requests cannot be ended, so the process exits and must be restarted",
                problem,
            )
            os._exit(1)

    def end_all(self, error: NereidError) -> None:
        """Answer all requests with `error`, including requests that have just arrived."""
        self._take_arrivals()
        for request in list(self.requests.values()):
            self.end(request, error)

    def _handle_death(self, process: SupervisedProcess, error: EngineDiedError) -> None:
        """End the requests of a process that has died, and restart the process."""
        process.restart(error)
        for request_id, request in list(self.requests.items()):
            if self._owners[request_id] is process:
                self.end(request, error)
        self.on_death(process, error)

    def _use_restarted_processes(self) -> None:
        """Use each process whose restart has succeeded, and log each restart that has failed."""
        for process in self.processes:
            if not process.has_restart_ended:
                continue
            process.finish_restart()
            if process.has_given_up:
                self._report_failed_restart(process)
                continue
            # The messages that `on_restart` sends must reach the process before the first request.
            # The server's thread sends requests as soon as `is_running` is true.
            self.on_restart(process)
            process.is_running = True

    def _report_failed_restart(self, process: SupervisedProcess) -> None:
        """Log that a process will not be restarted again.

        If no process of the model is left, `nereid serve` restarts the server.
        """
        if all(other.has_given_up for other in self.processes):
            # `nereid serve` recognises the line by its prefix. `outage` is the error message that
            # clients get from now on. It contains the reason.
            triton_api.progress(f"{_RESTART_PREFIX}{self.log_prefix}{self.outage}")
        else:
            triton_api.progress(
                f"the {process.title} is not restarted again. The server continues with fewer "
                f"processes, until it is restarted. The last reason was: {process.error}"
            )


def drain(items: "queue.SimpleQueue[ItemT]") -> Iterator[ItemT]:
    """Remove and yield items until the queue is empty. Do not wait for further items."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield items.get_nowait()
